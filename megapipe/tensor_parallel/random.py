"""Dropout masks and initial weights that depend on a key, not on the order of calls.

The key of a mask is (seed, step, global microbatch, layer, site, tp_rank if sharded, part of the sequence with several
cp ranks). So dropout is the same under every schedule and grid, and a recompute draws the same mask by calling again.

Initial weights depend only on the seed, not on the grid, the dtype or the padding of the vocabulary. A tensor is drawn
in fp32 in blocks of rows, each from a separate CPU stream keyed by (seed, global name, block). A rank draws the blocks
that it needs, one at a time, and keeps its slice, so no rank ever holds all of a large tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.errors import ConfigError
from megapipe.sharding.boxes import Box, pieces
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart
from megapipe.sharding.spec import ParamSpec

BLOCK_ELEMENTS = 1 << 20  # of initial weights
EMBEDDING_LAYER = -1
SITES = ("embedding", "attention_probs", "attention_output", "mlp_output")


def stream_key(name: str) -> int:
    """Return the 128-bit key of a named random stream: a hash that is the same on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")


@dataclass(frozen=True)
class DropoutKey:
    """The key of one microbatch's dropout. microbatch: its index in the step's *global* batch."""

    seed: int
    step: int
    microbatch: int
    part: SequencePart = WHOLE_SEQUENCE  # of its sequences
    keys_of: int | None = None  # attention_probs: the rank whose keys they belong to, where each has some of them

    def stream(self, layer: int, site: str, tp_rank: int | None) -> int:
        """Return the 128-bit key of the random stream of one site.

        layer: global index, -1 for the embedding. site: one of SITES. tp_rank: where the tensor is split over tp
        (attention_probs always, the others under sequence parallelism); None where all tp ranks need the same mask.
        Raises ValueError for an unknown site.
        """
        if site not in SITES:
            raise ValueError(f"no dropout site {site!r}; sites are {', '.join(SITES)}")
        rank = "all" if tp_rank is None else tp_rank
        place = f"dropout|{self.seed}|{self.step}|{self.microbatch}|{layer}|{site}|{rank}"
        if self.part.ranks > 1:
            place += f"|{self.part.rank} of {self.part.ranks}"
        if self.keys_of is not None:
            place += f"|keys of {self.keys_of}"
        return stream_key(place)


def keyed_mask(
    shape: tuple[int, ...] | torch.Size,
    p: float,
    key: DropoutKey,
    layer: int,
    site: str,
    tp_rank: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a bool mask of this rank's local shape, True where an element is kept (probability 1 - p, to 2^-32).

    CPU masks come from Philox4x64 under the full 128-bit key and are the same on every machine; other devices seed
    torch's generator with 64 bits of it, so their masks differ from the CPU's. Raises ConfigError for p outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ConfigError(f"a dropout probability of {p} is outside [0, 1)")
    stream, size, device = key.stream(layer, site, tp_rank), int(np.prod(shape)), torch.device(device)
    num_words = max(-(-size // 2), 1)
    if device.type == "cpu":
        words = torch.from_numpy(np.random.Philox(key=stream).random_raw(num_words).view(np.int64))
    else:
        generator = None
        if device.type != "meta":  # meta tensors have no values, and there is no generator for them
            generator = torch.Generator(device)
            generator.manual_seed(stream & (2**63 - 1))
        words = torch.empty(num_words, dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)
    # each 64-bit word gives two draws, uniform over [-2^31, 2^31): an element is dropped below the p-quantile
    return (words.view(torch.int32)[:size] >= round(p * 2**32) - 2**31).view(shape)


def keyed_dropout(
    x: Tensor, p: float, key: DropoutKey | None, layer: int, site: str, tp_rank: int | None = None
) -> Tensor:
    """Return x times its mask over 1 - p; x itself if p = 0 or without a key. x: any local shape.

    Saves the bool mask, 1 byte per element (drawing it again would take longer than the rest of the backward).
    Raises ConfigError for p outside [0, 1), ValueError for an unknown site.
    """
    if p == 0.0 or key is None:
        return x
    return dropped(x, keyed_mask(x.shape, p, key, layer, site, tp_rank, x.device), 1.0 / (1.0 - p))


def dropped(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return x times mask times scale; saves the mask."""
    return _Dropout.apply(x, mask, scale)  # type: ignore[no-any-return]


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return (x * mask).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None


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
