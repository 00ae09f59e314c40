"""Activations that are offloaded, in bytes and seconds: which groups of layers, what stays away when, and what a copy hides behind.

Storages are counted one by one, since small ones stay on the device; `tests/model/test_offloaded_bytes.py` compares with those that travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.plan.activations import MASK_BYTES, NO_DOCUMENTS, Documents, LocalSizes, is_explicit
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.moves import Moment, Moves, StageGroups, Unit, host_pieces, plan_moves
from megapipe.schedule.partition import StageLayers

USUAL_UNITS_ON_DEVICE = (
    2  # at the peak of a step, of those that are moved: made and being copied, or used and coming back
)


@dataclass(frozen=True)
class Storage:
    """One storage that autograd keeps. element: bytes of one of its elements."""

    num_bytes: int
    element: int

    @property
    def elements(self) -> int:
        return self.num_bytes // self.element


def group_sizes(recompute: RecomputeConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of each group that a stage runs as one: those of a checkpoint, else one."""
    if recompute.recompute_granularity != "full" or recompute.recompute_method != "uniform":
        return (1,) * num_layers
    size = recompute.recompute_num_layers or 1
    return tuple(min(size, num_layers - start) for start in range(0, num_layers, size))


def stage_groups(plan: RunPlan, stage: int) -> StageGroups:
    """How many groups a stage has, and how many of them --cpu-offloading-num-layers moves."""
    return groups_of(plan.config, plan.partition.stages[stage])


def groups_of(config: Config, layers: StageLayers) -> StageGroups:
    """The same, of a stage with these layers."""
    count, sizes = config.offload.cpu_offloading_num_layers, group_sizes(config.recompute, layers.num_layers)
    num_moved = sum(sum(sizes[:group]) < count for group in range(len(sizes)))
    return StageGroups(len(sizes), num_moved, layers.has_head)


def row_moves(plan: RunPlan, num_microbatches: int, pp_rank: int) -> Moves:
    """What leaves and comes back when, in a step of this many microbatches."""
    stages = {stage: stage_groups(plan, stage) for stage in plan.placement.stages_of(pp_rank)}
    return plan_moves(plan.schedule(num_microbatches).rows[pp_rank], stages)


def layer_storages(
    model: ModelConfig, sizes: LocalSizes, modules: frozenset[str] = frozenset(), documents: Documents = NO_DOCUMENTS
) -> list[Storage]:
    """What `layer_activation_bytes` adds up, one by one; the first is the layer's input."""
    element, wide, own = sizes.element, sizes.wide, sizes.own_tokens
    per_norm = 2 if model.normalization == "LayerNorm" else 1
    kept_norms = 1 if {"mlp", "layernorm"} <= modules else 2
    found = [Storage(sizes.hidden_states, element)] * 2
    found += [Storage(own * wide, wide)] * (kept_norms * per_norm)
    found += [Storage(sizes.hidden_states, element)] * (0 if "layernorm" in modules else 2)
    found += [Storage(own * sizes.hidden * MASK_BYTES, MASK_BYTES)] * (2 if model.hidden_dropout > 0 else 0)
    found += _qkv(model, sizes, documents, repeats="core_attn" not in modules)
    if "core_attn" not in modules:
        found += _attention(model, sizes)
    if "mlp" not in modules:
        width = sizes.tokens * sizes.ffn * element
        if model.activation != "relu":
            found.append(Storage((2 if model.activation in GATED_ACTIVATIONS else 1) * width, element))
        if model.activation == "relu" or "activation" not in modules:
            found.append(Storage(width, element))
    return found


def _qkv(model: ModelConfig, sizes: LocalSizes, documents: Documents, repeats: bool) -> Iterator[Storage]:
    """One tensor; normed ones and their statistics; with a mask for each sequence k and v for each query head, and then q by itself."""
    element, wide = sizes.element, sizes.wide
    fused = sizes.attention != "sdpa" or not is_explicit(model)
    repeated = repeats and fused and documents.attention_mask and sizes.batch > 1 and sizes.heads > sizes.groups > 1
    if not repeated or model.qk_layernorm:
        yield Storage(sizes.query + 2 * sizes.key, element)
    if model.qk_layernorm:
        for heads in (sizes.heads, sizes.groups):
            yield from [Storage(sizes.tokens * heads * wide, wide)] * (2 if model.normalization == "LayerNorm" else 1)
        yield Storage(sizes.query, element)
        if not repeated:
            yield Storage(sizes.key, element)
    if repeated:
        yield from [Storage(sizes.query, element)] * (2 if model.qk_layernorm else 3)


def _attention(model: ModelConfig, sizes: LocalSizes) -> Iterator[Storage]:
    yield Storage(sizes.query, sizes.element)
    if sizes.attention != "sdpa" or not is_explicit(model):
        yield Storage(sizes.tokens * sizes.heads * sizes.wide, sizes.wide)
        return
    squares = sizes.batch * sizes.heads * sizes.seq * sizes.seq
    if sizes.heads > sizes.groups:
        yield Storage(sizes.query, sizes.element)  # q in the order of its batched GEMM
    yield from [Storage(squares * sizes.wide, sizes.wide)] * (1 if model.attn_logit_softcapping is None else 2)
    if model.attention_dropout > 0:
        yield Storage(squares * MASK_BYTES, MASK_BYTES)
        yield Storage(squares * sizes.element, sizes.element)
    elif sizes.element != sizes.wide:
        yield Storage(squares * sizes.element, sizes.element)


def group_storages(
    model: ModelConfig,
    sizes: LocalSizes,
    recompute: RecomputeConfig,
    num_layers: int,
    documents: Documents = NO_DOCUMENTS,
) -> list[list[Storage]]:
    """What each group of a stage keeps; the first is its input."""
    modules = frozenset(recompute.recompute_modules) if recompute.recompute_granularity == "selective" else frozenset()
    found = []
    for group, size in enumerate(group_sizes(recompute, num_layers)):
        is_block = recompute.recompute_method == "block"
        if recompute.recompute_granularity != "full" or (is_block and group >= (recompute.recompute_num_layers or 1)):
            found.append(layer_storages(model, sizes, modules, documents))
            continue
        checkpoint = [Storage(sizes.hidden_states, sizes.element)]
        if recompute.recompute_keep_attention:
            checkpoint += size * [
                Storage(sizes.query, sizes.element),
                Storage(sizes.tokens * sizes.heads * sizes.wide, sizes.wide),
            ]
        found.append(checkpoint)
    return found


@dataclass(frozen=True)
class GroupBytes:
    """Of one group of a stage: kept for the backward of a microbatch; of that moved, if its unit moves."""

    kept: int
    moved: int

    @property
    def host(self) -> int:
        """Of the host's buffer."""
        return sum(host_pieces(self.moved))


def stage_group_bytes(
    storages: Sequence[Sequence[Storage]], num_moved: int, min_elements: int, has_embedding: bool
) -> tuple[GroupBytes, ...]:
    """storages: of `group_storages`. has_embedding: else the first group's input is the stage's, which is held for its gradient."""
    found = []
    for group, kept in enumerate(storages):
        travel = kept if has_embedding or group else kept[1:]
        moved = [each.num_bytes for each in travel if each.elements >= min_elements] if group < num_moved else []
        found.append(GroupBytes(sum(each.num_bytes for each in kept), sum(moved)))
    return tuple(found)


@dataclass(frozen=True)
class Away:
    """A row's offloaded bytes. at: moment -> bytes in the host's memory alone while it lasts; host_bytes: of all host buffers together."""

    at: Mapping[Moment, int]
    host_bytes: int


def away_in_row(moves: Moves, groups: Mapping[int, Sequence[GroupBytes]]) -> Away:
    """groups: of each stage of the rank."""
    at: dict[Moment, int] = {}
    away = 0
    in_use: Counter[int] = Counter()
    most: Counter[int] = Counter()

    def of(unit: Unit) -> GroupBytes:
        return groups[unit.stage][unit.group]

    for index, moment in enumerate(moves.moments):
        for unit in moves.released.get(index, ()):
            away += of(unit).moved
        for unit in moves.loaded.get(index, ()):
            away -= of(unit).moved
            in_use[of(unit).host] -= 1
        at[moment] = away
        unit = Unit(moment.stage, moment.microbatch, moment.group)
        if unit in moves.moved and moment.op is Op.F:
            size = of(unit).host
            in_use[size] += 1
            most[size] = max(most[size], in_use[size])
    return Away(at, sum(count * size for size, count in most.items()))
