"""Initial weights that depend on the seed and on nothing else: not on the grid, the dtype or the vocabulary's padding.

A tensor is drawn in blocks of whole rows, each a CPU stream of its own keyed by (seed, global name, block), in fp32. A rank draws the
blocks it needs, one at a time, and keeps its part: nobody holds the whole of a large tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from megapipe.sharding.boxes import Box, pieces
from megapipe.sharding.spec import ParamSpec

BLOCK_ELEMENTS = 1 << 20


def draw(spec: ParamSpec, tp_rank: int, tp: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This tp_rank's slice of the parameter's initial values, on the CPU."""
    local = torch.empty(spec.local_shape(tp_rank, tp), dtype=dtype)
    draw_into(local, spec, tp_rank, tp, seed)
    return local


def draw_into(local: Tensor, spec: ParamSpec, tp_rank: int, tp: int, seed: int) -> None:
    """As `draw`, into a contiguous tensor that is already there: any device and dtype, a view of a flat buffer, say."""
    flat = local.detach().view(-1)
    for piece in pieces(spec, tp_rank, tp):
        draw_box_into(flat[piece.start : piece.stop].view(piece.box.shape), spec, piece.box, seed)


def draw_box(spec: ParamSpec, box: Box, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The initial values of a rectangle of the global tensor, on the CPU."""
    values = torch.empty(box.shape, dtype=dtype)
    draw_box_into(values, spec, box, seed)
    return values


@torch.no_grad()
def draw_box_into(target: Tensor, spec: ParamSpec, box: Box, seed: int) -> None:
    """Fill target [box.shape] with the initial values of that rectangle of the global tensor."""
    if spec.init.kind != "normal":
        target.fill_({"zeros": 0.0, "ones": 1.0}[spec.init.kind])
        return
    row_elements = spec.num_elements // spec.shape[0]
    block_rows = max(1, BLOCK_ELEMENTS // row_elements)
    first, stop = box.offset[0], box.offset[0] + box.shape[0]
    for block in range(first // block_rows, -(-stop // block_rows)):
        start = block * block_rows
        end = min(start + block_rows, stop)  # rows after the last wanted one need not be drawn
        rows = torch.from_numpy(
            _stream(seed, spec.name, block).standard_normal((end - start, *spec.shape[1:]), dtype=np.float32)
        )
        rows = rows[max(first - start, 0) :][(slice(None), *box.slices[1:])]
        offset = max(start - first, 0)
        target[offset : offset + rows.shape[0]] = rows.mul_(spec.init.std)


def _stream(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.blake2b(f"init|{seed}|{name}|{block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def materialize_plain(
    stage: nn.Module,
    specs: Iterable[ParamSpec],
    tp_rank: int,
    tp: int,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give every meta parameter of a stage its memory and initial values, without flat buffers: for inference and tests.

    specs: at least those of the stage. Raises ValueError for a parameter without a spec or with another shape than its spec's.
    """
    by_name = {spec.name: spec for spec in specs}
    for name, parameter in list(stage.named_parameters()):
        spec = by_name.get(name)
        if spec is None or spec.local_shape(tp_rank, tp) != tuple(parameter.shape):
            shape = None if spec is None else spec.local_shape(tp_rank, tp)
            raise ValueError(f"parameter {name} has shape {tuple(parameter.shape)}, its ParamSpec gives {shape}")
        values = torch.empty(parameter.shape, device=device, dtype=dtype)
        draw_into(values, spec, tp_rank, tp, seed)
        replace_parameter(stage, parameter, nn.Parameter(values))


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever `old` stands: a tied weight stands in two submodules."""
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            if parameter is old:
                setattr(owner, attribute, new)
