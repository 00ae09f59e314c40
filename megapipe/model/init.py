"""Initial weights that depend only on the seed, not on the grid, the dtype or the padding of the vocabulary.

A tensor is drawn in fp32 in blocks of rows, each from a separate CPU stream keyed by (seed, global name, block). A
rank draws the blocks that it needs, one at a time, and keeps its slice, so no rank ever holds all of a large tensor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from megapipe.sharding.boxes import Box, pieces
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.random import stream_key

BLOCK_ELEMENTS = 1 << 20


def draw(spec: ParamSpec, tp_rank: int, tp: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return this tp_rank's slice of the parameter's initial values, on the CPU."""
    local = torch.empty(spec.local_shape(tp_rank, tp), dtype=dtype)
    flat = local.view(-1)
    for piece in pieces(spec, tp_rank, tp):
        draw_box_into(flat[piece.start : piece.stop].view(piece.box.shape), spec, piece.box, seed)
    return local


@torch.no_grad()
def draw_box_into(target: Tensor, spec: ParamSpec, box: Box, seed: int) -> None:
    """Fill target [box.shape] with the initial values of this rectangle of the global tensor."""
    if spec.init.kind != "normal":
        target.fill_({"zeros": 0.0, "ones": 1.0}[spec.init.kind])
        return
    row_elements = spec.num_elements // spec.shape[0]
    block_rows = max(1, BLOCK_ELEMENTS // row_elements)
    first, stop = box.offset[0], box.offset[0] + box.shape[0]
    for block in range(first // block_rows, -(-stop // block_rows)):
        start = block * block_rows
        end = min(start + block_rows, stop)  # rows after the last one needed are not drawn
        stream = np.random.Generator(np.random.Philox(key=stream_key(f"init|{seed}|{spec.name}|{block}")))
        rows = torch.from_numpy(stream.standard_normal((end - start, *spec.shape[1:]), dtype=np.float32))
        rows = rows[max(first - start, 0) :][(slice(None), *box.slices[1:])]
        offset = max(start - first, 0)
        target[offset : offset + rows.shape[0]] = rows.mul_(spec.init.std)


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter in every submodule that holds it: a tied weight is in two."""
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            if parameter is old:
                setattr(owner, attribute, new)
