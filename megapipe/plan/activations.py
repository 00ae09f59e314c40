"""Bytes that a stage keeps for its backwards, and bytes that a backward makes and frees again: sums over the tables of
its layers, for one microbatch on one rank.

Kept bytes equal what autograd saves, for every recompute option: `tests/model/test_planned_bytes.py` compares with the
storages that saved-tensor hooks see. The formula of Korthikanti et al. 2022 (arXiv:2205.05198) for the GPT block with
dropout, s b h (10 + 24 / t) bytes without core attention, is a special case and a test.

Temporaries are activation gradients, gathered sequences, replays and weight gradients in fp32. The backwards of the
head and of the layers are walked in their order, each with what it holds less what was freed before it, on top of all
that the stage has kept. With alike layers the peak is in the head or in the last layer, unless more waits for W than
was kept. `dry_run` counts the same with the real code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.attention import AttentionTable
from megapipe.layers.model import LayerSpec, ModelSpec, layer_table
from megapipe.layers.table import Gemm, Kept, RankShape, Table, total_bytes
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers


class LayerGroup(NamedTuple):
    """Consecutive layers that a stage runs as one: those of a checkpoint of full recompute, else one layer.

    recompute: the group's own (--recompute-memory-budget, --recompute-method block); None: the shape's.
    """

    layers: tuple[LayerSpec, ...]
    is_checkpoint: bool
    recompute: RecomputeConfig | None = None

    def shape(self, shape: RankShape) -> RankShape:
        """Return the shape with the group's recompute."""
        return shape if self.recompute is None else with_recompute(shape, self.recompute)


def layers_of(model: ModelSpec, stage: StageLayers) -> tuple[LayerSpec, ...]:
    """Return the layers of a stage."""
    return model.layers[stage.first_layer : stage.last_layer_exclusive]


def all_layers_of(model: ModelSpec, stage: StageLayers) -> tuple[LayerSpec, ...]:
    """Return the layers of a stage, with the head also those of the modules of multi-token prediction."""
    predictions = model.predictions if stage.has_head else ()
    return (*layers_of(model, stage), *(layer for _, layer in predictions))


def fp8_gemms(model: ModelSpec, shape: RankShape, stage: StageLayers) -> Iterator[Gemm]:
    """Yield the linears of a stage on one rank that multiply in 8 bits, with those of all experts."""
    yield from (each.gemm for each, _ in (model.predictions if stage.has_head else ()) if each.gemm.is_fp8)
    for layer in all_layers_of(model, stage):
        yield from layer.fp8_gemms(shape)


def layers_with_recompute(
    model: ModelSpec, shape: RankShape, stage: StageLayers
) -> list[tuple[LayerSpec, RecomputeConfig]]:
    """Return all layers of a stage with the recompute of each."""
    layers, every = layers_of(model, stage), all_layers_of(model, stage)
    own = layer_recompute(layers, shape)
    return list(zip(every, (*own, *[shape.recompute.of_predictions] * (len(every) - len(own))), strict=True))


def reads_weights_in_w(model: ModelSpec, shape: RankShape, stage: StageLayers) -> bool:
    """Return True if a W of the stage reads weights, to compute again what the forward has not kept."""
    layers = layers_with_recompute(model, shape, stage)
    tables = [layer_table(layer, with_recompute(shape, recompute)) for layer, recompute in layers]
    return any(table.reads_weights_in_w for table in (*tables, *end_tables(model, shape, stage)))


def prediction_groups(model: ModelSpec, shape: RankShape, stage: StageLayers) -> tuple[LayerGroup, ...]:
    """Return the layers of the modules of multi-token prediction as groups of their own; () on other stages."""
    recompute = shape.recompute.of_predictions
    is_full = recompute.recompute_granularity == "full"
    predictions = model.predictions if stage.has_head else ()
    return tuple(LayerGroup((layer,), is_full, recompute) for _, layer in predictions)


def end_tables(model: ModelSpec, shape: RankShape, stage: StageLayers) -> list[Table]:
    """Return the tables of the embedding and of the head, where the stage has them, and of multi-token prediction
    without its layers.
    """
    tables = [model.embedding.table(shape)] if stage.has_embedding else []
    if stage.has_head:
        tables.append(model.head.table(shape))
        for prediction, _ in model.predictions:
            tables += (prediction.projection_table(shape), prediction.head_table(shape))
    return tables


@cache
def with_recompute(shape: RankShape, recompute: RecomputeConfig) -> RankShape:
    """Return the shape with another recompute."""
    return replace(shape, recompute=recompute)


def without_recompute(shape: RankShape) -> RankShape:
    """Return the shape of a run that keeps everything."""
    return with_recompute(shape, RecomputeConfig())


@cache
def split(shape: RankShape) -> RankShape:
    """Return the shape with a backward split into I and W."""
    return replace(shape, splits_backward=True)


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
def group_keeps(group: LayerGroup, shape: RankShape) -> tuple[Kept, ...]:
    """Return the tensors that a group keeps; the first is its input."""
    shape = group.shape(shape)
    if not group.is_checkpoint:
        return tuple(tensor for layer in group.layers for tensor in layer_table(layer, shape).keeps)
    checkpoint = Kept("checkpoints", shape.own_tokens * group.layers[0].hidden_size, shape.element)
    kept = (tensor for layer in group.layers for tensor in layer_table(layer, without_recompute(shape)).keeps)
    return checkpoint, *(tensor for tensor in kept if tensor.outlives_replay(shape.recompute))


def bytes_by_name(tensors: Iterable[Kept]) -> Counter[str]:
    """Return the bytes of tensors, those of one name together."""
    total: Counter[str] = Counter()
    for tensor in tensors:
        total[tensor.name] += tensor.num_bytes
    return total


@cache
def _group_bytes(group: LayerGroup, shape: RankShape) -> Counter[str]:
    return bytes_by_name(group_keeps(group, shape))


def stage_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> dict[str, int]:
    """Return the bytes that a stage keeps from F to B or I of one microbatch, its input included, by name."""
    total: Counter[str] = Counter()
    groups = (*layer_groups(layers_of(model, stage), shape), *prediction_groups(model, shape, stage))
    for group, count in Counter(groups).items():
        total.update({what: count * size for what, size in _group_bytes(group, shape).items()})
    replays = (group.is_checkpoint or group.shape(shape).recomputes("core_attn", "mla_up_proj") for group in groups)
    is_replayed = any(replays)
    masks, tables = Counter[Any](), Counter[Any]()  # one for each window, and for each kind of rotary positions
    for each in attentions(model, stage):
        size = each.document_mask_bytes(shape, is_replayed)
        masks[each.visibility(shape)] = max(masks[each.visibility(shape)], size)
        tables[each.model.position_tables] = each.rotary_table_bytes(shape)
    total["document masks"] = masks.total()
    if shape.documents.position_ids:
        total["rotary tables"] = tables.total() * shape.batch
    for table in end_tables(model, shape, stage):
        total.update(bytes_by_name(table.keeps))
    return {what: size for what, size in total.items() if size}


def attentions(model: ModelSpec, stage: StageLayers) -> list[AttentionTable]:
    """Return the attentions of a stage's layers that differ."""
    kinds = dict.fromkeys(layer.attention for layer in all_layers_of(model, stage))
    return [attention for attention in kinds if attention is not None]


def shared_bytes(model: ModelSpec, slices: Sequence[RankShape], stage: StageLayers) -> Counter[Hashable]:
    """Return the bytes of the masks and rotary tables of a stage that a rank makes once, for all microbatches and for
    all of its stages, by what they are made of.

    slices: the slices of a microbatch, or a whole one alone.
    """
    found: Counter[Hashable] = Counter()
    for each in attentions(model, stage):
        for index, shape in enumerate(slices):
            kind = index, each.visibility(shape)
            found[kind] = max(found[kind], each.shared_mask_bytes(shape))
        if not slices[0].documents.position_ids:
            found[each.model.position_tables] = sum(each.rotary_table_bytes(shape) for shape in slices)
    return found


def replay_bytes(layers: tuple[LayerSpec, ...], shape: RankShape) -> int:
    """Return the most that one replay in the backward of these layers recomputes and holds until its end."""
    replays = (_group_replay(group, group.shape(shape)) for group in set(layer_groups(layers, shape)))
    return max(replays, default=0)


def _group_replay(group: LayerGroup, shape: RankShape) -> int:
    whole = without_recompute(shape)
    if group.is_checkpoint:  # what a replay adds to what the checkpoint kept
        kept = sum(layer_table(layer, whole).kept_bytes for layer in group.layers)
        return kept - total_bytes(group_keeps(group, shape))
    if shape.recompute.recompute_granularity != "selective":
        return 0
    modules = shape.recompute.recompute_modules
    replays: list[tuple[str, ...]] = [(module,) for module in modules]
    for pair in (("layernorm", "mlp"), ("layernorm", "moe"), ("mla_up_proj", "core_attn")):  # one replay makes both
        replays += [pair] if set(pair) <= set(modules) else []
    shapes = [replace(shape, recompute=RecomputeConfig("selective", recompute_modules=replay)) for replay in replays]
    # branches of a layer are replayed one after the other
    branches = (
        whole_part.kept_bytes - part.kept_bytes
        for layer in group.layers
        for each in shapes
        for whole_part, part in zip(layer_table(layer, whole).parts, layer_table(layer, each).parts, strict=True)
    )
    return max(branches, default=0)


def deferred_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> int:
    """Return what a stage holds for one microbatch between I and W: input and output gradient of each linear.

    Inputs that selective recompute drops are held as what they are computed from; those that a replay computes, which
    happens in I, as they are. Full recompute has ended before W.
    """
    counts = Counter((*layer_groups(layers_of(model, stage), shape), *prediction_groups(model, shape, stage)))
    layers = sum(count * group_waits(group, shape) for group, count in counts.items())
    return layers + sum(table.deferred_bytes for table in end_tables(model, shape, stage))


def group_waits(group: LayerGroup, shape: RankShape) -> int:
    """Return what a group holds for one microbatch between I and W."""
    return sum(layer_table(layer, group.shape(shape)).deferred_bytes for layer in group.layers)


def backward_peak(model: ModelSpec, shape: RankShape, stage: StageLayers) -> tuple[int, int]:
    """Return the most that a stage's I where the shape splits the backward, else its B, makes and frees again: in the
    head and in the layers, each 0 or more. Not among them is the gradient that the stage has received, a message.
    """
    in_head, level = head_backward(model, shape, stage)
    layers = layers_of(model, stage)
    in_layers = 0
    if not layers and stage.has_embedding:
        in_layers = max(0, level + walk_backward([model.embedding.table(shape)])[0])
    for group, alike in groupby(reversed(layer_groups(layers, shape))):
        count, (peak, change) = len(list(alike)), group_backward(group, shape)
        in_layers = max(in_layers, level + peak, level + (count - 1) * change + peak)
        level += count * change
    return in_head, in_layers


def head_backward(model: ModelSpec, shape: RankShape, stage: StageLayers) -> tuple[int, int]:
    """Return the peak of the backward of the head and of multi-token prediction, which comes before it, and what they
    leave to the layers less what they free; 0 without a head.
    """
    if not stage.has_head:
        return 0, 0
    peak = level = 0

    def walk(table: Table, left_bytes: int) -> None:
        nonlocal peak, level
        own_peak, freed = walk_backward([table])
        peak, level = max(peak, level + own_peak), level + left_bytes - freed

    # the gradients of both uses of hidden states, by the output layer and by the next module, become one
    merged, hidden = 0, shape.hidden_bytes(model.embedding.model.hidden_size)
    groups = prediction_groups(model, shape, stage)
    for (prediction, _), group in zip(reversed(model.predictions), reversed(groups), strict=True):
        after = prediction.head_table(shape)
        walk(after, after.left_bytes - merged)
        in_layer, change = group_backward(group, shape)
        peak, level = max(peak, level + in_layer), level + change
        before = prediction.projection_table(shape)
        walk(before, before.left_bytes - hidden)  # in place of the gradient of its output
        merged = hidden
    table = model.head.table(shape)
    walk(table, table.left_bytes - merged)
    return peak, level


@cache
def group_backward(group: LayerGroup, shape: RankShape) -> tuple[int, int]:
    """Return the peak of a group's backward over what the stage has kept, and what is there more by its end: what waits
    for W, where the backward is split, less what the group kept.

    The gradient of its output is there at its start. A checkpoint holds that, and what it kept, until the backward of
    all its layers is done.
    """
    shape = group.shape(shape)
    tables = [layer_table(layer, shape) for layer in reversed(group.layers)]
    kept, waits, peak = total_bytes(group_keeps(group, shape)), 0, 0
    held = total_bytes(tensor for table in tables for tensor in table.keeps) - kept
    for index, table in enumerate(tables):
        peak = max(peak, held + waits + walk_backward(table.parts)[0])
        waits += table.deferred_bytes if shape.splits_backward else 0
        kept_on = (tensor for tensor in table.keeps if group.is_checkpoint and tensor.outlives_replay(shape.recompute))
        held += total_bytes(kept_on) - table.kept_bytes
        if index == 0:
            held += shape.hidden_bytes(group.layers[0].hidden_size)
    return peak, waits - kept


def walk_backward(parts: Sequence[Table]) -> tuple[int, int]:
    """Return the peak of the backward of parts over what was there at its start, and the bytes freed by its end."""
    peak = held = freed = 0
    for part in reversed(parts):
        for backward in part.backwards:
            peak = max(peak, held + backward.held - freed)
            freed += backward.frees
        held += part.left_bytes
    return peak, freed


def temporary_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> dict[Op, int]:
    """Return the most that B, I and W of a stage make and free again."""
    whole = replace(shape, splits_backward=False)
    tables = end_tables(model, whole, stage._replace(has_embedding=False))
    tables += [part for layer in set(all_layers_of(model, stage)) for part in layer_table(layer, whole).parts]
    # W: two gathered sequences, the next one's under the GEMM of this one, and a weight gradient
    gathered = 2 * whole.gathered_bytes(model.layers[0].hidden_size)
    return {
        Op.B: max(backward_peak(model, whole, stage)),
        Op.I: max(backward_peak(model, split(shape), stage)),
        Op.W: gathered + max((table.weight_gradient_bytes for table in tables), default=0),
    }
