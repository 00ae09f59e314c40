"""`trace_layers`, `trace_embedding`, `trace_head` and `trace_parts`.

Layers of a stage, an end of the model, or the parts of one layer run forward and backward once on the meta device, with
the code of training, and every tensor that they keep, make and free is counted. torch is imported only for a run whose
result is not in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.table import RankShape
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.parts import Part
from megapipe.trace.store import user_store
from megapipe.trace.traced import Traced, TracedLayer

if TYPE_CHECKING:
    from megapipe.trace.unit import Unit

WHOLE = "whole"
Key = TypeVar("Key")


def trace_layers(layers: tuple[TracedLayer, ...], shape: RankShape, has_levels: bool = True) -> Traced:
    """Return what a microbatch keeps and makes in consecutive layers, in bytes on one rank. They run as one group, as
    those of one checkpoint of full recompute do.

    has_levels: False if nothing is asked of what is made and freed again. All else is known of many sequences from few,
    while levels are not where other sequences need another copy, or a loss another block.
    """
    stage = StageLayers(0, len(layers), False, False)
    trace = partial(_whole, layers[0].config, stage, layers)
    if len(layers) == 1:
        trace = partial(_of_experts, trace, layers[0], has_levels=has_levels)
    return _of_batch(trace, shape, has_levels)[WHOLE]


def trace_embedding(model: ResolvedModelConfig, shape: RankShape, frozen: frozenset[str] = frozenset()) -> Traced:
    """Return what a microbatch keeps and makes in the embedding. frozen: names of parameters that are not trained."""
    stage = StageLayers(0, 0, True, False)
    return _of_batch(partial(_whole, model, stage, (), frozen=_sorted(frozen)), shape)[WHOLE]


def trace_head(
    model: ResolvedModelConfig,
    shape: RankShape,
    frozen: frozenset[str] = frozenset(),
    is_fp8: bool = False,
    comm_type: str = "p2p",
    has_levels: bool = True,
) -> Traced:
    """Return what a microbatch keeps and makes in final norm, output layer, loss and multi-token prediction.

    frozen: names of parameters that are not trained. is_fp8, comm_type: of multi-token prediction, as of a
    `TracedLayer`. has_levels: as for `trace_layers`.
    """
    stage = StageLayers(model.num_layers, model.num_layers, False, True)
    trace = partial(_whole, model, stage, (), is_fp8=is_fp8, comm_type=comm_type, frozen=_sorted(frozen))
    return _of_batch(trace, shape, has_levels)[WHOLE]


def trace_parts(layer: TracedLayer, shape: RankShape, has_levels: bool = True) -> dict[Part, Traced]:
    """Return what a microbatch keeps and makes in each part of a layer (--overlap-moe-expert-parallel-comm). What
    passes between parts is counted by the one that keeps it. has_levels: as for `trace_layers`.
    """
    trace = partial(_of_experts, partial(_parts, layer), layer, has_levels=has_levels)
    return _of_batch(trace, shape, has_levels)


def _of_batch(
    trace: Callable[[RankShape], dict[Key, Traced]], shape: RankShape, has_levels: bool = True
) -> dict[Key, Traced]:
    """Return the traces of a shape, of more than two sequences from those of one and of two, where that can be."""
    for first in (1, 2):  # some masks and kernels of one sequence are others
        if shape.batch > first + 1:
            one, two = (trace(replace(shape, batch=count)) for count in (first, first + 1))
            found = {key: one[key].at(two[key], shape.batch - first, has_levels) for key in one}
            if None not in found.values():
                return cast(dict[Key, Traced], found)
    return trace(shape)


def _of_experts(
    trace: Callable[[RankShape], dict[Key, Traced]], layer: TracedLayer, shape: RankShape, has_levels: bool
) -> dict[Key, Traced]:
    """Return the traces of a layer, with many experts on a rank from those of two and of four."""
    every = (layer.config.num_experts or 0) if layer.config.has_mlp else 0
    held = every // shape.ep
    # groups of nodes have other sizes, and copies in 8 bits are of the rows of one expert
    if (
        shape.ep > 1
        and shape.ep_inner == 1
        and held > 4
        and held % 2 == every % 4 == 0
        and not (layer.is_fp8 and has_levels)
    ):
        two, four = (trace(replace(shape, ep=every // count)) for count in (2, 4))
        found = {key: two[key].at(four[key], held // 2 - 1, has_levels) for key in two}
        if None not in found.values():
            return cast(dict[Key, Traced], found)
    return trace(shape)


@cache
def _parts(layer: TracedLayer, shape: RankShape) -> dict[Part, Traced]:
    def run() -> dict[str, Any]:
        unit = _unit(layer.config, StageLayers(0, 1, False, False), (layer,), shape)
        return {part.name: traced.as_data() for part, traced in unit.traced_parts().items()}

    found = user_store().data(("parts", layer, shape), run)
    return {Part[name]: Traced.of_data(data) for name, data in found.items()}


@cache
def _whole(
    model: ResolvedModelConfig, stage: StageLayers, layers: tuple[TracedLayer, ...], shape: RankShape, **end: Any
) -> dict[str, Traced]:
    """Return the trace of a whole unit. end: arguments of `Unit` for an end of the model."""

    def run() -> dict[str, Any]:
        return _unit(model, stage, layers, shape, **end).traced().as_data()

    return {WHOLE: Traced.of_data(user_store().data((model, stage, layers, shape, sorted(end.items())), run))}


def _sorted(frozen: frozenset[str]) -> tuple[str, ...]:
    """Return names in an order that is the same in every process."""
    return tuple(sorted(frozen))


def _unit(*arguments: Any, **end: Any) -> Unit:
    from megapipe.trace.unit import Unit

    return Unit(*arguments, **end)
