"""`trace_layers`, `trace_embedding`, `trace_head` and `trace_parts`.

Layers of a stage, an end of the model, or the parts of one layer run forward and backward once on the meta device, with
the code of training, and every tensor that they keep, make and free is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.table import RankShape
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.parts import Part
from megapipe.trace.traced import Traced
from megapipe.trace.unit import TracedLayer, Unit


def trace_layers(layers: tuple[TracedLayer, ...], shape: RankShape) -> Traced:
    """Return what a microbatch keeps and makes in consecutive layers, in bytes on one rank. They run as one group, as
    those of one checkpoint of full recompute do.
    """
    return _of_batch(partial(_layers, layers), shape)


def trace_embedding(model: ResolvedModelConfig, shape: RankShape, frozen: frozenset[str] = frozenset()) -> Traced:
    """Return what a microbatch keeps and makes in the embedding. frozen: names of parameters that are not trained."""
    return _of_batch(partial(_end, model, StageLayers(0, 0, True, False), frozen, False, "p2p"), shape)


def trace_head(
    model: ResolvedModelConfig,
    shape: RankShape,
    frozen: frozenset[str] = frozenset(),
    is_fp8: bool = False,
    comm_type: str = "p2p",
) -> Traced:
    """Return what a microbatch keeps and makes in final norm, output layer, loss and multi-token prediction.

    frozen: names of parameters that are not trained. is_fp8, comm_type: of multi-token prediction, as of a
    `TracedLayer`.
    """
    count = model.num_layers
    return _of_batch(partial(_end, model, StageLayers(count, count, False, True), frozen, is_fp8, comm_type), shape)


@cache
def trace_parts(layer: TracedLayer, shape: RankShape) -> dict[Part, Traced]:
    """Return what a microbatch keeps and makes in each part of a layer (--overlap-moe-expert-parallel-comm). What
    passes between parts is counted by the one that keeps it.
    """
    return Unit(layer.config, StageLayers(0, 1, False, False), (layer,), shape).traced_parts()


def _of_batch(trace: Callable[[RankShape], Traced], shape: RankShape) -> Traced:
    """Return the trace of a shape, of more than two sequences from those of one and of two, where that can be."""
    for first in (1, 2):  # some masks and kernels of one sequence are others
        if shape.batch > first + 1:
            one, two = (trace(replace(shape, batch=count)) for count in (first, first + 1))
            if (found := one.at(two, shape.batch - first)) is not None:
                return found
    return trace(shape)


@cache
def _layers(layers: tuple[TracedLayer, ...], shape: RankShape) -> Traced:
    stage = StageLayers(0, len(layers), False, False)
    return Unit(layers[0].config, stage, layers, shape).traced()


@cache
def _end(
    model: ResolvedModelConfig,
    stage: StageLayers,
    frozen: frozenset[str],
    is_fp8: bool,
    comm_type: str,
    shape: RankShape,
) -> Traced:
    return Unit(model, stage, (), shape, is_fp8, comm_type, frozen).traced()
