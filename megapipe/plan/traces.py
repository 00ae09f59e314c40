"""The layers and ends of a plan as they are traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec, ModelSpec
from megapipe.layers.table import ALL_REDUCE, RankShape, ring_bytes
from megapipe.schedule.action import Op
from megapipe.trace.layers import trace_embedding, trace_head, trace_layers, trace_parts
from megapipe.trace.traced import ROWS, SIZES, STAGE, Message, Traced, TracedLayer

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


@cache
def traced_layer(layer: LayerSpec) -> TracedLayer:
    """Return a layer as it is traced."""
    return TracedLayer(layer.config, layer.is_fp8, layer.comm_type, layer.imbalance, tuple(sorted(layer.frozen)))


@cache
def layer_trace(layer: LayerSpec, shape: RankShape, has_levels: bool = True) -> Traced:
    """Return what one layer keeps and makes; in parts, each keeps its input besides.

    has_levels: as for `trace_layers`.
    """
    own = traced_layer(layer)
    whole = trace_layers((own,), replace(shape, in_parts=False), has_levels)
    if not shape.in_parts:
        return whole
    parts = trace_parts(own, shape, has_levels).values()
    kept = tuple(tensor for part in parts for tensor in part.kept)
    return replace(whole, kept=kept, waiting=sum(part.waiting for part in parts))


@cache
def joined_trace(layer: LayerSpec, shape: RankShape) -> Traced:
    """Return what one layer keeps, multiplies and sends, without levels, from the traces of its residual branches.

    Sizes, products and messages are those of `layer_trace`, while tensors that pass from one branch to the next have
    other names, and tables of documents' positions are not kept by parts. A branch is run once for all shapes that are
    alike for it: attention does not depend on how experts are divided, and each branch only on its own recompute.
    """
    if layer.branches == (layer,):
        return layer_trace(layer, shape, has_levels=False)
    traces = [layer_trace(branch, _shape_of_branch(branch, shape), has_levels=False) for branch in layer.branches]
    kept = [tensor for traced in traces for tensor in traced.kept]
    if shape.recompute.recompute_granularity == "full":  # keeps the input of the layer, but none between its branches
        kept = [*traces[0].kept, *(each for traced in traces[1:] for each in traced.kept if each.name != STAGE)]
    found: dict[str, Any] = {name: sum(getattr(traced, name) for traced in traces) for name in SIZES}
    for name in ROWS:  # a forward runs the branches in their order, a backward in the other
        ahead = [each for traced in traces for each in getattr(traced, name) if each.op is Op.F]
        back = [each for traced in reversed(traces) for each in getattr(traced, name) if each.op is not Op.F]
        found[name] = *ahead, *back
    return Traced(tuple(kept), **found)


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
        return trace_head(model.config, of_end(shape), model.frozen, has_levels=has_levels)
    last, whole = model.predictions[0], replace(shape, in_parts=False)  # alike, and never in parts
    return trace_head(model.config, whole, model.frozen, last.is_fp8, last.comm_type, has_levels)


@cache
def embedding_trace(model: ModelSpec, shape: RankShape) -> Traced:
    """Return what the embedding keeps and makes."""
    return trace_embedding(model.config, of_end(shape), model.frozen)


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
