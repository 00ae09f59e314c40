"""Small sets of parameters, sliced as the ranks of various grids hold them and saved from one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import CheckpointFolder, Retention, find_checkpoint
from megapipe.checkpoint.save import Extras, SaveReport, save_checkpoint
from megapipe.checkpoint.shard import TensorBox, tensor_box
from megapipe.comm.groups import Group
from megapipe.sharding.boxes import Box
from megapipe.sharding.buffers import layout_buffers, shard_pieces
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups

WORLD = Group.alone("world")
VOCABULARY = 13


def specs(padded: int) -> tuple[ParamSpec, ...]:
    """Return one parameter for each kind of slicing, with the vocabulary padded to `padded` rows."""
    return (
        ParamSpec("embedding", (padded, 6), "embedding", Fused(0), true_rows=VOCABULARY),
        ParamSpec("qkv", ((4 + 2 * 2) * 3, 6), 0, QueryGroups(4, 2, 3)),
        ParamSpec("qkv.bias", ((4 + 2 * 2) * 3,), 0, QueryGroups(4, 2, 3)),
        ParamSpec("gate_up", (16, 6), 0, Fused(0, 2)),
        ParamSpec("down", (6, 8), 0, Fused(1)),
        ParamSpec("norm", (6,), 0),
    )


@dataclass(frozen=True)
class Layout:
    """Grid of `tp` ranks with `shards` data-parallel shards each and a vocabulary padded to `padded` rows."""

    tp: int
    shards: int
    padded: int

    def held(self, wholes: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Iterator[tuple[bool, TensorBox]]:
        """Yield (primary, box) for all ranks. Values are copied from `wholes`, padding is NaN."""
        for tp_rank in range(self.tp):
            for layout in layout_buffers(specs(self.padded), tp_rank, self.tp, self.shards, 60):
                for bucket in layout.buckets:
                    for shard in range(self.shards):
                        for _, piece in shard_pieces(bucket, tp_rank, self.tp, *bucket.shard(shard, self.shards)):
                            whole = torch.full(piece.spec.shape, math.nan, dtype=dtype)
                            given = wholes[piece.spec.name]
                            whole[: given.shape[0]] = given
                            box = tensor_box("master", piece, whole[piece.box.slices].reshape(-1).clone())
                            if box is not None:
                                yield piece.owned, box


LAYOUTS = {
    f"tp{layout.tp}_shards{layout.shards}_vocabulary{layout.padded}": layout
    for layout in (
        Layout(1, 1, 13),
        Layout(1, 3, 16),
        Layout(2, 1, 14),
        Layout(2, 4, 16),
        Layout(4, 1, 16),
        Layout(4, 2, 20),
    )
}


def global_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Draw the unpadded values of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator, dtype=dtype) for spec in specs(VOCABULARY)}


def save_layout(root: Path, layout: Layout, wholes: dict[str, Tensor], step: int = 1, **options: object) -> SaveReport:
    """Save from one process what all ranks of the layout would save."""
    boxes = [box for primary, box in layout.held(wholes) if primary]
    extras = Extras({"training": {"step": step}}, "model:\n")
    return save_checkpoint(root, step, boxes, extras, WORLD, **options)  # type: ignore[arg-type]


def save_one(
    root: Path, step: int, values: Tensor | None = None, disk: Disk | None = None, keep_last: int | None = None
) -> SaveReport:
    """Save a checkpoint of one tensor `master/w`, whose values are the step number by default."""
    values = torch.full((5, 4), float(step)) if values is None else values
    box = TensorBox("master/w", tuple(values.shape), whole_box(values), values.reshape(-1))
    extras = Extras({"training": {"step": step}}, f"# step {step}\n")
    return save_checkpoint(root, step, [box], extras, WORLD, Retention(keep_last), disk)


def whole_box(values: Tensor) -> Box:
    return Box((0,) * values.dim(), tuple(values.shape))


def newest(root: Path) -> CheckpointFolder:
    found = find_checkpoint(root)
    assert found is not None
    return found
