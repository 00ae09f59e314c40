"""The choice of --recompute-memory-budget: what each layer of a stage recomputes.

A layer can keep everything, drop what --recompute-modules names, or be recomputed whole, with or without the results of
its attention. Of these choices, as points (bytes kept, FLOPs recomputed), only the lower convex hull matters; a step
along it saves bytes for FLOPs. The steps of all layers of a stage are taken in the order of bytes saved per FLOP, until
the stage keeps at most

    least + budget * (most - least)

bytes, `most` with everything kept and `least` with full recompute. A larger budget takes fewer of the same steps, so
that kept bytes and FLOPs are monotone in it. Before its last step the stage keeps more than that, with the fewest FLOPs
possible for what it keeps (the greedy solution of the fractional knapsack problem, Dantzig 1957): the FLOPs exceed the
least possible by less than those of one step of one layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import RankShape
from megapipe.plan.traces import layer_trace

ELEMENTWISE_FLOPS = 8.0  # for each element that a norm or an activation computes again; only orders steps without GEMMs
FULL = RecomputeConfig("full", "uniform", 1)
MOST_FUSED_CHANNELS = 256  # of a head; fused kernels with more may be missing


class Choice(NamedTuple):
    """One layer under one kind of recompute."""

    recompute: RecomputeConfig
    kept_bytes: int  # from F to B or I of one microbatch
    flops: float  # that the backward of one microbatch recomputes


@cache
def choices(layer: LayerSpec, shape: RankShape) -> tuple[Choice, ...]:
    """Return the lower convex hull of a layer's choices, from everything kept to the fewest bytes.

    shape: with any recompute, which is ignored.
    """
    whole = replace(shape, recompute=RecomputeConfig(), splits_backward=False)
    points = sorted((_choice(layer, whole, each) for each in _recomputes(layer, whole)), key=lambda c: c[1:])
    hull: list[Choice] = []  # from the fewest bytes upwards, FLOPs falling ever more slowly
    for point in points:
        if hull and point.flops >= hull[-1].flops:
            continue
        while len(hull) > 1 and _saved_per_flop(point, hull[-1]) < _saved_per_flop(hull[-1], hull[-2]):
            hull.pop()
        hull.append(point)
    return tuple(reversed(hull))


@cache
def layer_recompute(layers: tuple[LayerSpec, ...], shape: RankShape) -> tuple[RecomputeConfig, ...]:
    """Return the recompute of each layer of a stage: the budget's choice, or the shape's where it has no budget.

    --recompute-method block recomputes the first N layers alone. layers: of a whole stage, or with their own recompute.
    """
    own = [layer.recompute for layer in layers if layer.recompute is not None]
    if len(own) == len(layers):
        return tuple(own)
    budget = shape.recompute.recompute_memory_budget
    if budget is None:
        is_block = shape.recompute.recompute_granularity == "full" and shape.recompute.recompute_method == "block"
        replayed = min(shape.recompute.recompute_num_layers or 1, len(layers)) if is_block else len(layers)
        return (shape.recompute,) * replayed + (RecomputeConfig(),) * (len(layers) - replayed)
    of_layer = [choices(layer, replace(shape, recompute=RecomputeConfig(), splits_backward=False)) for layer in layers]
    steps = [
        (-_saved_per_flop(before, after), number, place)
        for number, hull in enumerate(of_layer)
        for place, (before, after) in enumerate(pairwise(hull), 1)
    ]
    kept, least = (sum(hull[end].kept_bytes for hull in of_layer) for end in (0, -1))
    most_wanted, at = least + budget * (kept - least), [0] * len(layers)
    for _, number, place in sorted(steps):
        if kept <= most_wanted:
            break
        kept += of_layer[number][place].kept_bytes - of_layer[number][place - 1].kept_bytes
        at[number] = place
    return tuple(hull[place].recompute for hull, place in zip(of_layer, at, strict=True))


def recompute_text(recompute: RecomputeConfig) -> str:
    """Return the recompute in a few words: 'no recompute', 'full recompute except for attention', or the modules."""
    if recompute.recompute_in_bubbles:
        return f"{recompute_text(replace(recompute, recompute_in_bubbles=False))}, replayed in bubbles"
    if recompute.recompute_memory_budget is not None:
        return f"recompute memory budget {recompute.recompute_memory_budget:.4g}"
    if recompute.recompute_granularity is None:
        return "no recompute"
    if recompute.recompute_granularity == "full":
        return "full recompute except for attention" if recompute.recompute_keep_attention else "full recompute"
    return "recompute " + "+".join(recompute.recompute_modules)


def _saved_per_flop(before: Choice, after: Choice) -> float:
    return (before.kept_bytes - after.kept_bytes) / (after.flops - before.flops)


def _recomputes(layer: LayerSpec, shape: RankShape) -> list[RecomputeConfig]:
    """Return the kinds of recompute that a layer can have."""
    is_own = shape.transformer_impl == "local"  # Transformer Engine keeps the inputs of its linears anyway
    cores, norms = [(), ("core_attn",)], ((), ("layernorm",)) if is_own else ((),)
    mlps: tuple[tuple[str, ...], ...] = ((), ("activation",), ("mlp",)) if is_own else ((), ("mlp",))
    if layer.num_experts:
        mlps = ((), ("moe_act",), ("moe",))
        if layer.config.moe_shared_expert_intermediate_size is not None:
            mlps += ("shared_experts",), ("moe_act", "shared_experts")
    keeps_results = False  # of a fused kernel, which a recompute of attention then uses
    if layer.config.has_attention and shape.attention_impl != "te":
        works = layer_trace(layer, shape, has_levels=False).attention
        keeps_results = all(work.kernel and work.head_size <= MOST_FUSED_CHANNELS for work in works)
    if "mla_up_proj" in layer.recompute_modules:
        cores += [("mla_up_proj", "core_attn"), *([("mla_up_proj",)] if keeps_results else [])]
    found = [RecomputeConfig(), FULL, *([replace(FULL, recompute_keep_attention=True)] if keeps_results else [])]
    found += [
        RecomputeConfig("selective", recompute_modules=modules)
        for each in product(cores, norms, mlps)
        if (modules := tuple(module for part in each for module in part))
        and not (layer.num_experts and {"layernorm", "shared_experts"} <= set(modules))  # a rule of the configuration
    ]
    return found


def _choice(layer: LayerSpec, whole: RankShape, recompute: RecomputeConfig) -> Choice:
    """Return a layer's bytes and FLOPs. whole: the shape without recompute."""
    shape, is_full = replace(whole, recompute=recompute), recompute.recompute_granularity == "full"
    traced, everything = (layer_trace(layer, each, has_levels=False) for each in (shape, whole))
    elements = sum(tensor.elements for tensor in everything.kept) - sum(tensor.elements for tensor in traced.kept)
    flops = ELEMENTWISE_FLOPS * elements
    flops += sum(product.flops for product in traced.products if product.again)
    flops += sum(work.flops for work in traced.attention if work.again)
    if layer.config.mixer is not None and (is_full or shape.recomputes("core_attn")):
        flops += layer.attention_flops(whole.whole_seq, causal=True) * whole.tokens / whole.tp
    return Choice(recompute, traced.kept_bytes, flops)
