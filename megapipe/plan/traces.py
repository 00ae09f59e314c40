"""The layers and ends of a plan as they are traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TypeVar

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.layers import LayerConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec, ModelSpec
from megapipe.layers.table import ALL_REDUCE, RankShape, ring_bytes
from megapipe.schedule.action import Op
from megapipe.schedule.parts import Part
from megapipe.trace.layers import trace_embedding, trace_head, trace_layers, trace_parts
from megapipe.trace.traced import STAGE, Message, Traced, TracedLayer, joined

Model = TypeVar("Model", LayerConfig, ResolvedModelConfig)
# elements whose sums over tp are of a few numbers: norms over the heads of all ranks, and tokens of each expert
OF_FEW_NUMBERS = ("heads", "router")
EXPERT_GROUPS = ("ep", "ep_nodes", "ep_places", "etp")  # over which rows of experts travel
CONTEXT_GROUPS = ("cp", "cp_a2a", "cp_p2p")  # over which keys, values, heads and positions travel


@cache
def with_recompute(shape: RankShape, recompute: RecomputeConfig) -> RankShape:
    """Return the shape with another recompute."""
    return replace(shape, recompute=recompute)


def without_recompute(shape: RankShape) -> RankShape:
    """Return the shape of a run that keeps everything."""
    return with_recompute(shape, RecomputeConfig())


@cache
def of_end(shape: RankShape) -> RankShape:
    """Return the shape without what concerns layers alone."""
    return replace(without_recompute(shape), ep=1, ep_inner=1, etp=1, in_parts=False)


@cache
def split(shape: RankShape) -> RankShape:
    """Return the shape with a backward split into I and W."""
    return replace(shape, splits_backward=True)


def _without_dispatcher(config: Model) -> Model:
    """Return a configuration whose experts, if any, are not traced, with the default dispatcher."""
    return replace(
        config, moe_token_dispatcher_type="alltoall", moe_combine_in_node=False, moe_flex_dispatcher_backend=None
    )


@cache
def traced_layer(layer: LayerSpec) -> TracedLayer:
    """Return a layer as it is traced."""
    config = layer.config if layer.num_experts else _without_dispatcher(layer.config)
    return TracedLayer(config, layer.is_fp8, layer.comm_type, layer.imbalance, tuple(sorted(layer.frozen)))


@cache
def layer_trace(layer: LayerSpec, shape: RankShape, has_levels: bool = True) -> Traced:
    """Return what one layer keeps, makes, multiplies and sends; in parts, each keeps its input besides.

    A layer with two residual branches is joined from their traces, each of which is run once for all shapes that are
    alike for it: attention does not depend on how experts are divided, and a branch only on its own recompute. Two
    kinds of levels are those of the whole layer: full recompute holds what both branches compute again, and a W starts
    before the last one of the branch behind it has ended. Tables of documents' positions are not kept by parts.
    has_levels: as for `trace_layers`.
    """
    whole_shape = replace(shape, in_parts=False)
    is_full = shape.recompute.recompute_granularity == "full"
    is_ahead = shape.recompute.recompute_in_bubbles
    if len(layer.branches) == 1 or is_ahead or (has_levels and (is_full or shape.splits_backward)):
        whole = trace_layers((traced_layer(layer),), whole_shape, has_levels)
    else:
        branches = ((branch, _shape_of_branch(branch, whole_shape)) for branch in layer.branches)
        whole = joined([layer_trace(branch, own, has_levels) for branch, own in branches], is_full)
    if not shape.in_parts or (len(layer.branches) == 1 and not layer.num_experts):  # attention alone is no part
        return whole
    parts = part_traces(layer, shape, has_levels).values()
    kept = tuple(tensor for part in parts for tensor in part.kept)
    return replace(whole, kept=kept, waiting=sum(part.waiting for part in parts))


@cache
def part_traces(layer: LayerSpec, shape: RankShape, has_levels: bool = True) -> dict[Part, Traced]:
    """Return what each part of a layer keeps and makes. has_levels: as for `trace_layers`."""
    if len(layer.branches) == 1:
        return trace_parts(traced_layer(layer), shape, has_levels)
    first, second = layer.branches
    attention = layer_trace(first, _shape_of_branch(first, shape), has_levels)
    parts = part_traces(second, replace(_shape_of_branch(second, shape), in_parts=True), has_levels)
    found = {part: traced.after(attention.output) for part, traced in parts.items()}
    # with norm and router of experts
    return found | {Part.ATTENTION: joined([attention, found[Part.ATTENTION]])}


def _shape_of_branch(branch: LayerSpec, shape: RankShape) -> RankShape:
    """Return the shape with what concerns this branch alone."""
    recompute = shape.recompute
    if recompute.recompute_granularity != "full":
        own = ("layernorm", *branch.recompute_modules)
        modules = tuple(name for name in own if shape.recomputes(name))
        recompute = RecomputeConfig("selective", recompute_modules=modules) if modules else RecomputeConfig()
    if not branch.num_experts:
        shape = replace(shape, ep=1, ep_inner=1, etp=1, in_parts=False)
    return with_recompute(shape, recompute)


@cache
def head_trace(model: ModelSpec, shape: RankShape, has_levels: bool = True) -> Traced:
    """Return what the head and the modules of multi-token prediction keep and make.

    has_levels: as for `trace_layers`.
    """
    if not model.predictions:
        return trace_head(_without_dispatcher(model.config), of_end(shape), model.frozen, has_levels=has_levels)
    last, whole = model.predictions[0], replace(shape, in_parts=False)  # alike, and never in parts
    return trace_head(model.config, whole, model.frozen, last.is_fp8, last.comm_type, has_levels)


@cache
def embedding_trace(model: ModelSpec, shape: RankShape) -> Traced:
    """Return what the embedding keeps and makes."""
    return trace_embedding(_without_dispatcher(model.config), of_end(shape), model.frozen)


def messages_over_tp(traced: Traced, shape: RankShape) -> list[Message]:
    """Return the messages over tp of hidden states, latents and shared keys. The loss's sums are left out, and others
    of a few numbers.
    """
    if shape.sequence_parallel:
        return [each for each in traced.messages if each.group == "tp" and each.operation != "all_reduce"]
    sums = (each for each in traced.messages if each.group == "tp" and each.name not in OF_FEW_NUMBERS)
    return [each for each in sums if each.name != STAGE or each.op is not Op.F]


def sent_bytes(message: Message, shape: RankShape) -> float:
    """Return the bytes that each rank sends in such messages; where ranks send unequally, the most that one does or
    receives.
    """
    if message.operation == "shift":
        return float(message.num_bytes)
    passes = ALL_REDUCE if message.operation == "all_reduce" else 1
    return passes * ring_bytes(message.num_bytes, group_size(shape, message.group))


def group_size(shape: RankShape, group: str) -> int:
    """Return the number of ranks of a kind of group."""
    return {
        "tp": shape.tp,
        "cp": shape.cp,
        "cp_a2a": shape.cp_inner,
        "cp_p2p": shape.cp // shape.cp_inner,
        "ep": shape.ep,
        "ep_places": shape.ep_inner,
        "ep_nodes": shape.ep // shape.ep_inner,
        "etp": shape.etp,
    }[group]
