"""Bytes that a backward makes and frees again while it runs: activation gradients, gathered sequences, replays,
weight gradients in fp32.

The peak is in the last layer of a stage, or in the head: what these free lowers the level for the layers before. So
the backwards of the head and of one layer are walked in their order, each with what it holds less what was freed
before it. For one microbatch on one rank, on top of all that the stage has kept. `dry_run` counts the same with the
real code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megapipe.layers.model import LayerSpec, ModelSpec, layer_table
from megapipe.layers.table import RankShape, Table
from megapipe.plan.activations import layers_of, replay_bytes
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers


class BackwardPeak(NamedTuple):
    """The most that a stage's B or I makes and frees again, in the head and in the layers, each 0 or more."""

    head: int
    layers: int


def backward_peak(
    model: ModelSpec, shape: RankShape, stage: StageLayers, kinds: Sequence[LayerSpec] | None = None
) -> BackwardPeak:
    """Return the peak of a stage's I where the shape splits the backward, else of its B.

    kinds: layers that may be the last one; those of the stage if None.
    """
    layers = layers_of(model, stage)
    held = freed = in_head = in_layers = 0
    if stage.has_head:
        table = model.head.table(shape)
        in_head, freed = _walk([table], 0, 0)
        held = table.left_bytes
    if stage.has_embedding and not layers:
        in_layers, _ = _walk([model.embedding.table(shape)], held, freed)
    for layer in dict.fromkeys(kinds or layers) if layers else ():
        more = held + _replayed(layers, shape) + _grown(layer, len(layers), shape)
        peak, _ = _walk(layer_table(layer, shape).parts, more, freed)
        in_layers = max(in_layers, peak)
    return BackwardPeak(in_head, in_layers)


def temporary_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> dict[Op, int]:
    """Return the most that B, I and W of a stage make and free again."""
    whole = replace(shape, splits_backward=False)
    return {
        Op.B: max(backward_peak(model, whole, stage)),
        Op.I: max(backward_peak(model, split(shape), stage)),
        Op.W: _weight_bytes(model, whole, stage),
    }


@cache
def split(shape: RankShape) -> RankShape:
    """Return the shape with a backward split into I and W."""
    return replace(shape, splits_backward=True)


def _walk(parts: Sequence[Table], held: int, freed: int) -> tuple[int, int]:
    """Walk the backward of some parts; held, freed: bytes at its start, relative to what the stage has kept.

    Returns the peak, 0 or more, and the bytes freed by the end.
    """
    peak = 0
    for part in reversed(parts):
        for backward in part.backwards:
            peak = max(peak, held + backward.held - freed)
            freed += backward.frees
        held += part.left_bytes
    return peak, freed


def _replayed(layers: Sequence[LayerSpec], shape: RankShape) -> int:
    """Return what full recompute has replayed for the backward of the last layer."""
    recompute = shape.recompute
    if recompute.recompute_granularity != "full":
        return 0
    if recompute.recompute_method == "block" and (recompute.recompute_num_layers or 1) < len(layers):
        return 0  # the last layer keeps everything, and is freed before another is replayed
    return replay_bytes(layers, shape)


def _grown(layer: LayerSpec, num_layers: int, shape: RankShape) -> int:
    """Return how far the first layer of a split backward may start above the last one: where more waits for W than
    was kept.
    """
    if not shape.splits_backward:
        return 0
    table = layer_table(layer, shape)
    return max(0, (num_layers - 1) * (table.deferred_bytes - table.kept_bytes))


def _weight_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> int:
    """Return what W makes: two gathered sequences, the next one's under the GEMM of this one, and a weight gradient."""
    tables = [model.head.table(shape)] if stage.has_head else []
    tables += [part for layer in set(layers_of(model, stage)) for part in layer_table(layer, shape).parts]
    largest = max((table.weight_gradient_bytes for table in tables), default=0)
    return 2 * shape.gathered_bytes(model.embedding.hidden) + largest
