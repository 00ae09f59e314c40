"""Bytes that a stage keeps for its backwards, and bytes that its actions make and free again: sums over the traces of
its layers and ends, for one microbatch on one rank.

The formula of Korthikanti et al. 2022 (arXiv:2205.05198) for the GPT block with dropout, s b h (10 + 24 / t) bytes
without core attention, is a special case and a test.

The backwards of the head and of the layers are walked in their order, each with what it makes less what was freed
before it, on top of all that the stage has kept. With alike layers the peak is in the head or in the last layer, unless
more waits for W than was kept. `dry_run` counts a whole rank with the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec, ModelSpec
from megapipe.layers.table import Kept, RankShape
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.plan.traces import (
    embedding_trace,
    head_trace,
    layer_trace,
    split,
    traced_layer,
    with_recompute,
    without_recompute,
)
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers
from megapipe.trace.layers import trace_layers
from megapipe.trace.traced import INPUT, STAGE, Traced


class LayerGroup(NamedTuple):
    """Consecutive layers that a stage runs as one: those of a checkpoint of full recompute, else one layer.

    recompute: the group's own (--recompute-memory-budget, --recompute-method block); None: the shape's.
    """

    layers: tuple[LayerSpec, ...]
    is_checkpoint: bool
    recompute: RecomputeConfig | None = None

    def shape(self, shape: RankShape, is_ahead: bool = False) -> RankShape:
        """Return the shape with the group's recompute. is_ahead: a RECOMPUTE runs it, if it is a checkpoint."""
        own = shape.recompute if self.recompute is None else self.recompute
        if is_ahead and self.is_checkpoint:
            own = replace(own, recompute_in_bubbles=True)
        return shape if own == shape.recompute else with_recompute(shape, own)


def layers_of(model: ModelSpec, stage: StageLayers) -> tuple[LayerSpec, ...]:
    """Return the layers of a stage."""
    return model.layers[stage.first_layer : stage.last_layer_exclusive]


def all_layers_of(model: ModelSpec, stage: StageLayers) -> tuple[LayerSpec, ...]:
    """Return the layers of a stage, with the head also those of the modules of multi-token prediction."""
    return (*layers_of(model, stage), *(model.predictions if stage.has_head else ()))


def fp8_weights(model: ModelSpec, shape: RankShape, stage: StageLayers) -> int:
    """Return the elements of the weights of a stage on one rank that multiply in 8 bits."""
    traces = [layer_trace(layer, without_recompute(shape), has_levels=False) for layer in layers_of(model, stage)]
    traces += [head_trace(model, shape, has_levels=False)] if stage.has_head else []
    products = (each for traced in traces for each in traced.products if each.op is Op.F and not each.again)
    return sum(each.num_weights for each in products if each.is_fp8)


def fp8_weight_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> int:
    """Return the bytes of the weights of a stage in 8 bits, and transposed, with their scales."""
    counts = Counter(layers_of(model, stage))
    whole = without_recompute(shape)
    layers = sum(count * layer_trace(layer, whole, has_levels=False).fp8_weights for layer, count in counts.items())
    return layers + (head_trace(model, shape, has_levels=False).fp8_weights if stage.has_head else 0)


def layers_with_recompute(
    model: ModelSpec, shape: RankShape, stage: StageLayers
) -> list[tuple[LayerSpec, RecomputeConfig]]:
    """Return all layers of a stage with the recompute of each."""
    layers, every = layers_of(model, stage), all_layers_of(model, stage)
    own = layer_recompute(layers, shape)
    return list(zip(every, (*own, *[shape.recompute.of_predictions] * (len(every) - len(own))), strict=True))


def stage_traces(model: ModelSpec, shape: RankShape, stage: StageLayers) -> list[Traced]:
    """Return the traces of a stage, group by group, and of its ends."""
    groups = layer_groups(layers_of(model, stage), shape)
    return [*(group_trace(group, shape) for group in groups), *end_traces(model, shape, stage)]


def reads_weights_in_w(model: ModelSpec, shape: RankShape, stage: StageLayers) -> bool:
    """Return True if a W of the stage reads weights, to compute again what the forward has not kept."""
    return any(traced.reads_weights for traced in stage_traces(model, split(shape), stage))


def group_sizes(recompute: RecomputeConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers in each group of a stage."""
    if recompute.recompute_granularity != "full" or recompute.recompute_method != "uniform":
        return (1,) * num_layers
    size = recompute.recompute_num_layers or 1
    return tuple(min(size, num_layers - start) for start in range(0, num_layers, size))


def layer_groups(layers: tuple[LayerSpec, ...], shape: RankShape) -> tuple[LayerGroup, ...]:
    """Return the groups of a stage. --recompute-method block recomputes its first N layers alone."""
    own, groups, start = layer_recompute(layers, shape), [], 0
    for size in group_sizes(shape.recompute, len(layers)):
        is_checkpoint = own[start].recompute_granularity == "full"
        recompute = None if own[start] == shape.recompute else own[start]
        groups.append(LayerGroup(layers[start : start + size], is_checkpoint, recompute))
        start += size
    return tuple(groups)


@cache
def group_trace(group: LayerGroup, shape: RankShape, has_levels: bool = True, is_ahead: bool = False) -> Traced:
    """Return what a group keeps and makes. has_levels: as for `trace_layers`; is_ahead: as for `LayerGroup.shape`."""
    own = group.shape(shape, is_ahead)
    if len(group.layers) == 1:
        return layer_trace(group.layers[0], own, has_levels)
    return trace_layers(tuple(map(traced_layer, group.layers)), own, has_levels)


def end_traces(model: ModelSpec, shape: RankShape, stage: StageLayers, has_levels: bool = True) -> list[Traced]:
    """Return the traces of the embedding and of the head, where the stage has them.

    has_levels: as for `trace_layers`.
    """
    embedding = [embedding_trace(model, shape)] if stage.has_embedding else []
    return [*embedding, head_trace(model, shape, has_levels)] if stage.has_head else embedding


def bytes_by_name(tensors: Iterable[Kept], others: str) -> Counter[str]:
    """Return the bytes of tensors by the element that makes them. others: the name of what no element makes."""
    total: Counter[str] = Counter()
    for tensor in tensors:
        total[others if tensor.name in (INPUT, STAGE) else tensor.name] += tensor.num_bytes
    return total


def stage_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> dict[str, int]:
    """Return the bytes that a stage keeps from F to B or I of one microbatch, its input included, by the element of a
    layer that makes them.
    """
    total: Counter[str] = Counter()
    masks, tables = Counter[Any](), Counter[Any]()  # one for each window, and for each kind of rotary positions

    def share(layers: Iterable[LayerSpec], traced: Traced) -> None:
        seen, rotated = _kinds_of_context(layers, shape)
        masks[seen] = max(masks[seen], traced.masks)
        tables[rotated] = max(tables[rotated], traced.rotary)

    for group, count in Counter(layer_groups(layers_of(model, stage), shape)).items():
        traced = group_trace(group, shape, has_levels=False)
        total.update({what: count * size for what, size in bytes_by_name(traced.kept, "inputs of layers").items()})
        share(group.layers, traced)
    if stage.has_embedding:
        total.update(bytes_by_name(embedding_trace(model, shape).kept, "embedding"))
    if stage.has_head:
        traced = head_trace(model, shape, has_levels=False)
        total.update(bytes_by_name(traced.kept, "head"))
        share(model.predictions[:1], traced)  # alike
    total["document masks"], total["rotary tables"] = masks.total(), tables.total()
    return {what: size for what, size in total.items() if size}


def _kinds_of_context(layers: Iterable[LayerSpec], shape: RankShape) -> tuple[Hashable, Hashable]:
    """Return what the masks, and the rotary tables, of these layers are made of."""
    held = [layer for layer in layers if layer.config.has_attention]
    return frozenset(each.visibility(shape) for each in held), frozenset(each.config.position_tables for each in held)


def shared_bytes(model: ModelSpec, slices: Sequence[RankShape], stage: StageLayers) -> Counter[Hashable]:
    """Return the bytes of the masks and rotary tables of a stage that a rank makes once, for all microbatches and for
    all of its stages, by what they are made of.

    slices: the slices of a microbatch, or a whole one alone.
    """
    found: Counter[Hashable] = Counter()
    kinds = dict.fromkeys(all_layers_of(model, stage))
    for index, shape in enumerate(map(without_recompute, slices)):
        for layer in kinds:
            traced = layer_trace(layer, shape, has_levels=False)
            seen, rotated = _kinds_of_context([layer], shape)
            found[index, seen] = max(found[index, seen], traced.shared_masks)
            found[index, rotated] = max(found[index, rotated], traced.shared_rotary)
    return found


def deferred_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> int:
    """Return what a stage holds for one microbatch between I and W: input and output gradient of each linear.

    Inputs that selective recompute drops are held as what they are computed from; those that a replay computes, which
    happens in I, as they are. Full recompute has ended before W.
    """
    shape = split(shape)
    counts = Counter(layer_groups(layers_of(model, stage), shape))
    layers = sum(count * group_trace(group, shape, has_levels=False).waiting for group, count in counts.items())
    return layers + sum(traced.waiting for traced in end_traces(model, shape, stage, has_levels=False))


def recompute_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> tuple[int, int]:
    """Return what a RECOMPUTE of a stage leaves for the backward, and the most that it makes and frees again."""
    ahead = most = 0
    for group in layer_groups(layers_of(model, stage), shape):
        traced = group_trace(group, shape, is_ahead=True)
        most = max(most, ahead + max((0, *traced.recompute)))
        ahead += traced.ahead
    return ahead, max(0, most - ahead)


def backward_peak(model: ModelSpec, shape: RankShape, stage: StageLayers, is_ahead: bool = False) -> tuple[int, int]:
    """Return the most that a stage's I where the shape splits the backward, else its B, makes and frees again: in the
    head and in the layers, each 0 or more. Not among them is the gradient that the stage has received, a message.
    is_ahead: after a RECOMPUTE, on top of what that has left.
    """
    in_head, level = head_backward(model, shape, stage)
    layers = layers_of(model, stage)
    in_layers = 0
    if not layers and stage.has_embedding:
        in_layers = max(0, level + embedding_trace(model, shape).peaks[1])
    for group, alike in groupby(reversed(layer_groups(layers, shape))):
        count, (peak, change) = len(list(alike)), group_backward(group, shape, is_ahead)
        in_layers = max(in_layers, level + peak, level + (count - 1) * change + peak)
        level += count * change
    return in_head, in_layers


def replay_bytes(layers: tuple[LayerSpec, ...], shape: RankShape) -> int:
    """Return the most that the backward of one of these layers computes again and holds."""
    groups = set(layer_groups(layers, shape))
    return max((group_trace(group, shape).replay for group in groups), default=0)


def head_backward(model: ModelSpec, shape: RankShape, stage: StageLayers) -> tuple[int, int]:
    """Return the peak of the backward of the head and of multi-token prediction, which comes before it, and what they
    leave to the layers less what they free; 0 without a head.
    """
    if not stage.has_head:
        return 0, 0
    traced = head_trace(model, shape)
    return traced.peaks[1], shape.hidden_bytes(model.config.hidden_size) + traced.waiting - traced.kept_bytes


def group_backward(group: LayerGroup, shape: RankShape, is_ahead: bool = False) -> tuple[int, int]:
    """Return the peak of a group's backward over what the stage has kept, the gradient of its output aside, and what is
    there more by its end: what waits for W, where the backward is split, less what the group kept. is_ahead: after a
    RECOMPUTE.
    """
    traced = group_trace(group, shape, is_ahead=is_ahead)
    return traced.peaks[1], traced.waiting - traced.kept_bytes - traced.ahead


def temporary_bytes(
    model: ModelSpec,
    shape: RankShape,
    stage: StageLayers,
    ops: Collection[Op] = (Op.B, Op.I, Op.W),
    is_ahead: bool = False,
) -> dict[Op, int]:
    """Return the most that B, I and W of a stage make and free again. ops: those that are asked for. is_ahead: after a
    RECOMPUTE, on top of what that has left.
    """
    whole, halves = replace(shape, splits_backward=False), split(shape)
    found = {}
    if Op.B in ops:
        found[Op.B] = max(backward_peak(model, whole, stage, is_ahead))
    if Op.I in ops:
        found[Op.I] = max(backward_peak(model, halves, stage, is_ahead))
    if Op.W in ops:
        found[Op.W] = max((traced.peaks[2] for traced in stage_traces(model, halves, stage)), default=0)
    return found
