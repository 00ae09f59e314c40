"""Bytes that a stage keeps for its backwards: sums over the tables of its layers, for one microbatch on one rank.

Equal to what autograd saves, for every recompute option: `tests/model/test_planned_bytes.py` compares with the
storages that saved-tensor hooks see. The formula of Korthikanti et al. 2022 (arXiv:2205.05198) for the GPT block with
dropout, s b h (10 + 24 / t) bytes without core attention, is a special case and a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec, ModelSpec, layer_table
from megapipe.layers.table import Kept, RankShape, Table
from megapipe.schedule.partition import StageLayers


class LayerGroup(NamedTuple):
    """Consecutive layers that a stage runs as one: those of a checkpoint of full recompute, else one layer."""

    layers: tuple[LayerSpec, ...]
    is_checkpoint: bool


def layers_of(model: ModelSpec, stage: StageLayers) -> tuple[LayerSpec, ...]:
    """Return the layers of a stage."""
    return model.layers[stage.first_layer : stage.last_layer_exclusive]


def group_sizes(recompute: RecomputeConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers in each group of a stage."""
    if recompute.recompute_granularity != "full" or recompute.recompute_method != "uniform":
        return (1,) * num_layers
    size = recompute.recompute_num_layers or 1
    return tuple(min(size, num_layers - start) for start in range(0, num_layers, size))


def layer_groups(layers: Sequence[LayerSpec], recompute: RecomputeConfig) -> tuple[LayerGroup, ...]:
    """Return the groups of a stage. --recompute-method block recomputes its first N layers alone."""
    is_full, is_block = recompute.recompute_granularity == "full", recompute.recompute_method == "block"
    last_recomputed = (recompute.recompute_num_layers or 1) if is_block else len(layers)
    groups, start = [], 0
    for size in group_sizes(recompute, len(layers)):
        groups.append(LayerGroup(tuple(layers[start : start + size]), is_full and start < last_recomputed))
        start += size
    return tuple(groups)


@cache
def group_keeps(group: LayerGroup, shape: RankShape) -> tuple[Kept, ...]:
    """Return the tensors that a group keeps; the first is its input."""
    if not group.is_checkpoint:
        return tuple(tensor for layer in group.layers for tensor in layer_table(layer, shape).keeps)
    first = group.layers[0]
    checkpoint = Kept("checkpoints", shape.own_tokens * first.hidden_size, shape.element)
    return checkpoint, *(tensor for layer in group.layers for tensor in _kept_with_replay(layer, shape))


def stage_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> dict[str, int]:
    """Return the bytes that a stage keeps from F to B or I of one microbatch, its input included, by name."""
    total: Counter[str] = Counter()
    groups = layer_groups(layers_of(model, stage), shape.recompute)
    for group, count in Counter(groups).items():
        for what, size in _group_bytes(group, shape).items():
            total[what] += count * size
    if groups:
        is_replayed = any(group.is_checkpoint for group in groups) or shape.recomputes("core_attn")
        attentions = {layer.attention for group in groups for layer in group.layers}
        total["document masks"] = max(each.document_mask_bytes(shape, is_replayed) for each in attentions)
        if shape.documents.position_ids:
            total["rotary tables"] = max(each.rotary_table_bytes(shape) for each in attentions) * shape.batch
    for table in _end_tables(model, shape, stage):
        for what, size in bytes_by_name(table.keeps).items():
            total[what] += size
    return {what: size for what, size in total.items() if size}


def replay_bytes(layers: Sequence[LayerSpec], shape: RankShape) -> int:
    """Return the most that one replay in the backward of these layers recomputes and holds until its own backward is
    done.
    """
    whole = without_recompute(shape)
    if shape.recompute.recompute_granularity == "full":
        checkpoints = [group for group in layer_groups(layers, shape.recompute) if group.is_checkpoint]
        return max((_replayed(group, shape) for group in set(checkpoints)), default=0)
    if shape.recompute.recompute_granularity is None:
        return 0
    modules = shape.recompute.recompute_modules
    replays: list[tuple[str, ...]] = [(module,) for module in modules]
    if "layernorm" in modules and "mlp" in modules:  # one replay makes the norm's output and the MLP
        replays.append(("layernorm", "mlp"))
    shapes = [replace(shape, recompute=RecomputeConfig("selective", recompute_modules=replay)) for replay in replays]
    # branches of a layer are replayed one after the other
    branches = (
        whole_part.kept_bytes - part.kept_bytes
        for layer in set(layers)
        for each in shapes
        for whole_part, part in zip(layer_table(layer, whole).parts, layer_table(layer, each).parts, strict=True)
    )
    return max(branches, default=0)


def deferred_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers) -> int:
    """Return what a stage holds for one microbatch between I and W of a split backward: input and output gradient of
    each linear.

    Inputs that selective recompute drops are held as what they are computed from; those that a replay computes, which
    happens in I, as they are. Full recompute has ended before W.
    """
    layers = sum(
        count * layer_table(layer, shape).deferred_bytes for layer, count in Counter(layers_of(model, stage)).items()
    )
    return layers + sum(table.deferred_bytes for table in _end_tables(model, shape, stage))


@cache
def without_recompute(shape: RankShape) -> RankShape:
    """Return the shape of a run that keeps everything."""
    return replace(shape, recompute=RecomputeConfig())


def bytes_by_name(tensors: Iterable[Kept]) -> dict[str, int]:
    """Return the bytes of tensors, those of one name together."""
    total: Counter[str] = Counter()
    for tensor in tensors:
        total[tensor.name] += tensor.num_bytes
    return dict(total)


def _end_tables(model: ModelSpec, shape: RankShape, stage: StageLayers) -> list[Table]:
    """Return the tables of the embedding and of the head, where the stage has them."""
    return [model.embedding.table(shape)] * stage.has_embedding + [model.head.table(shape)] * stage.has_head


@cache
def _group_bytes(group: LayerGroup, shape: RankShape) -> dict[str, int]:
    return bytes_by_name(group_keeps(group, shape))


def _kept_with_replay(layer: LayerSpec, shape: RankShape) -> tuple[Kept, ...]:
    """Return what full recompute keeps of a layer besides the input of its checkpoint."""
    if not shape.recompute.recompute_keep_attention:
        return ()
    return tuple(tensor for tensor in layer_table(layer, without_recompute(shape)).keeps if tensor.with_replay)


def _replayed(group: LayerGroup, shape: RankShape) -> int:
    """Return what the replay of a checkpoint adds to what the checkpoint kept."""
    whole = sum(layer_table(layer, without_recompute(shape)).kept_bytes for layer in group.layers)
    return whole - sum(tensor.num_bytes for tensor in group_keeps(group, shape))
