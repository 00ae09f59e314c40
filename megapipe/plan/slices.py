"""The cut of sequences into slices (--pipe-sp-splits), and the share that each slice has in the work of a stage.

With a causal mask a slice of positions [a, b) costs C(b) - C(a), where C(x) is the cost of a sequence of x tokens.
Costs are FLOPs: those of linears grow with the tokens, a backward has twice a forward's; fused attention's grow with
the visible keys, a backward has 2.5 times a forward's. So slices of equal forward costs would differ in their backward
costs; the cut is made for the sum of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec, ModelSpec
from megapipe.plan.layer_costs import gemm_flops, head_flops, replayed_flops
from megapipe.schedule.action import Op
from megapipe.schedule.partition import Partition
from megapipe.sharding.sequence import SequenceSlice

GEMM_PASSES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}  # of a forward's FLOPs
ATTENTION_PASSES = {Op.F: 1.0, Op.B: 2.5, Op.I: 2.5, Op.W: 0.0}

Cost = Callable[[int], float]  # of a sequence of so many tokens


def sequence_slices(
    model: ModelSpec, recompute: RecomputeConfig, seq: int, count: int, strategy: str, unit: int
) -> tuple[SequenceSlice, ...]:
    """Return `count` slices of a sequence, each a multiple of `unit` tokens, which divides seq and count x unit <= seq.

    strategy: as in --pipe-sp-strategy.
    """
    num_units, layers = seq // unit, (*model.layers, *(layer for _, layer in model.predictions))

    @cache
    def cost(units: int) -> float:
        tokens = units * unit
        if strategy == "average":
            return float(tokens)
        return sum(flops_of_length(layers, model, recompute, op)(tokens) for op in (Op.F, Op.B))

    ends = [0]
    for number in range(1, count):
        wanted, low, high = cost(num_units) * number / count, ends[-1] + 1, num_units - (count - number)
        while low < high:  # the first end at which the slices so far have their share
            middle = (low + high) // 2
            low, high = (middle + 1, high) if cost(middle) < wanted else (low, middle)
        is_nearer = low - 1 > ends[-1] and wanted - cost(low - 1) < cost(low) - wanted
        ends.append(low - is_nearer)
    places = tuple(units * unit for units in (*ends[1:], num_units))
    return tuple(SequenceSlice(places, number) for number in range(count))


def slice_shares(
    model: ModelSpec, partition: Partition, recompute: RecomputeConfig, slices: Iterable[SequenceSlice]
) -> dict[tuple[int, Op], tuple[float, ...]]:
    """Return the share of each slice in the F, B, I and W of every stage, by FLOPs; a message's is that of tokens."""
    slices, found = tuple(slices), dict[tuple[int, Op], tuple[float, ...]]()
    by_tokens = tuple(each.length / each.seq for each in slices)
    for stage, (first, end, _, has_head) in enumerate(partition.stages):
        for op in (Op.F, Op.B, Op.I, Op.W):
            layers = (*model.layers[first:end], *(layer for _, layer in model.predictions if has_head))
            cost = flops_of_length(layers, model if has_head else None, recompute, op)
            costs = [cost(each.stop) - cost(each.start) for each in slices]
            total = sum(costs)
            found[stage, op] = tuple(one / total for one in costs) if total else by_tokens
        found[stage, Op.SEND_F] = found[stage, Op.SEND_B] = by_tokens
    return found


def flops_of_length(layers: Iterable[LayerSpec], head: ModelSpec | None, recompute: RecomputeConfig, op: Op) -> Cost:
    """Return the FLOPs of an op of layers, and of a model's head, as a function of the length of a sequence."""
    counts, replays = Counter(layers), op in (Op.B, Op.I)

    def cost(tokens: int) -> float:
        total = 0.0 if head is None else GEMM_PASSES[op] * head_flops(head)
        for layer, count in counts.items():
            attention = layer.attention_flops(tokens, causal=True)
            of_layer = GEMM_PASSES[op] * gemm_flops(layer) + ATTENTION_PASSES[op] * attention
            if replays:
                of_layer += replayed_flops(layer, recompute, tokens, causal=True)
            total += count * of_layer
        return tokens * total

    return cost
