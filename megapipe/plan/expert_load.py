"""The load of experts: the rows of the fullest expert-parallel rank over the mean, and how much of it is chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from statistics import NormalDist

from megapipe.config.layers import expert_layers
from megapipe.config.model import ModelConfig
from megapipe.formatting import ranges_text
from megapipe.layers.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class ExpertLoad:
    """The load for which a plan gives memory and time.

    of_rank: rows of the fullest rank of every ep group over the mean, in all layers. of_layers: in its place the rows
    of each expert over the mean, by the number of the layer, as a run logs them (--moe-per-layer-logging).
    """

    of_rank: float = 1.0
    of_layers: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def problem(self, model: ModelConfig, ep: int) -> str:
        """Return why no run of the model can have this load, '' if one can. ep: the most that is considered."""
        layers, experts = expert_layers(model), model.num_experts or 0
        if not layers:
            return "the model has no experts; give --num-experts, or leave it out"
        if self.of_layers:
            logged = tuple(number for number, _ in self.of_layers)
            if logged != layers:
                return f"it has layers {ranges_text(logged)}, the model has experts in layers {ranges_text(layers)}"
            other = next((len(loads) for _, loads in self.of_layers if len(loads) != experts), None)
            return "" if other is None else f"it has {other} experts a layer, --num-experts is {experts}"
        most = most_imbalance(model, ep)
        if 1.0 <= self.of_rank <= most:
            return ""
        return (
            f"the fullest rank has 1 to {most:.4g} times the mean of rows, with {experts} experts of which a token "
            f"chooses {model.moe_router_topk}, on ep {ep}"
        )

    def of(self, model: ModelConfig, ep: int) -> tuple[tuple[int, float], ...]:
        """Return each layer with experts, and the rows of its fullest rank over the mean."""
        if not self.of_layers:
            imbalance = min(self.of_rank, most_imbalance(model, ep))
            return tuple((number, imbalance) for number in expert_layers(model))
        held = (model.num_experts or 0) // ep
        return tuple(
            (number, max(sum(loads[first : first + held]) / held for first in range(0, len(loads), held)))
            for number, loads in self.of_layers
        )


BALANCED = ExpertLoad()


def most_imbalance(model: ModelConfig, ep: int) -> float:
    """Return the most rows that one of ep ranks can get, over the mean: all that a token can send to its experts."""
    experts, topk = model.num_experts or 1, model.moe_router_topk
    most = min(ep, experts / topk)
    capacity = model.moe_expert_capacity_factor
    return most if capacity is None else max(1.0, min(most, capacity))


@cache
def with_load(model: ModelSpec, imbalance: tuple[tuple[int, float], ...]) -> ModelSpec:
    """Return the model whose experts see so many rows over the mean, by the number of the layer."""
    loads = dict(imbalance)

    @cache
    def loaded(layer: LayerSpec, of_layer: float) -> LayerSpec:  # alike layers are one object, as in `model_spec`
        return replace(layer, imbalance=of_layer) if layer.num_experts else layer

    layers = tuple(loaded(layer, loads.get(number, 1.0)) for number, layer in enumerate(model.layers))
    predictions = tuple(
        loaded(layer, loads.get(number, 1.0)) for number, layer in enumerate(model.predictions, len(layers))
    )
    return replace(model, layers=layers, predictions=predictions)


# The load that chance alone gives. Every token draws topk experts one after another without replacement, each draw in
# proportion to the probabilities of the experts that are left, as the topk largest of logits with Gumbel noise are
# distributed; tokens are independent of each other.
MOST_EXACT = 200_000  # terms that the exact sum may have


def expected_load(probabilities: Sequence[float], tokens: int, topk: int) -> tuple[float, float]:
    """Return the expected tokens of the fullest expert, and the mean over the experts.

    Exact where all loads can be enumerated. Else the loads are taken to be normal with their fixed sum, which for equal
    probabilities is exact in the limit of many tokens.
    """
    experts = len(probabilities)
    if experts == 1:
        return float(tokens), float(tokens)
    mean, states = tokens * topk / experts, math.comb(tokens * topk + experts - 1, experts - 1)
    if states * math.comb(experts, topk) * tokens <= MOST_EXACT and math.perm(experts, topk) <= MOST_EXACT:
        return _enumerated(probabilities, tokens, topk), mean
    chances = _chances(probabilities, topk) if len(set(probabilities)) > 1 else [topk / experts] * experts
    means = [tokens * chance for chance in chances]
    # the sum of all loads is fixed: what one expert has more, the others have less
    widths = [math.sqrt(tokens * chance * (1.0 - chance) * experts / (experts - 1)) or 1e-9 for chance in chances]
    normal, steps = NormalDist(), 400
    low, high = max(means), max(each + 8.0 * width for each, width in zip(means, widths, strict=True))
    low -= 8.0 * max(widths)
    grid = [low + (high - low) * (step + 0.5) / steps for step in range(steps)]
    below = (math.prod(normal.cdf((x - m) / w) for m, w in zip(means, widths, strict=True)) for x in grid)
    return min(float(tokens), low + (high - low) / steps * sum(1.0 - each for each in below)), mean


def _enumerated(probabilities: Sequence[float], tokens: int, topk: int) -> float:
    """Return the expected maximum over all loads that so many tokens can give."""
    chosen: dict[tuple[int, ...], float] = {}  # the probability of each set of experts
    for order in permutations(range(len(probabilities)), topk):
        chance, left = 1.0, sum(probabilities)
        for expert in order:
            chance *= probabilities[expert] / left if left else 0.0
            left -= probabilities[expert]
        key = tuple(sorted(order))
        chosen[key] = chosen.get(key, 0.0) + chance
    loads = {(0,) * len(probabilities): 1.0}
    for _ in range(tokens):
        after: dict[tuple[int, ...], float] = {}
        for load, chance in loads.items():
            for experts, of_set in chosen.items():
                key = tuple(count + (expert in experts) for expert, count in enumerate(load))
                after[key] = after.get(key, 0.0) + chance * of_set
        loads = after
    return sum(max(load) * chance for load, chance in loads.items())


def _chances(probabilities: Sequence[float], topk: int) -> list[float]:
    """Return the chance of each expert to be among the topk of a token.

    Draws without replacement are the order in which clocks ring whose rates are the probabilities: an expert is chosen
    if it rings at a time at which fewer than topk of the others have. Integrated over u = exp(-time), by midpoints.
    """
    experts, steps = len(probabilities), 200
    rates = [p * experts / sum(probabilities) for p in probabilities]
    found = dict.fromkeys(rates, 0.0)
    for u in ((step + 0.5) / steps for step in range(steps)):
        silent = [u**rate for rate in rates]
        for rate in found:
            others = list(silent)
            others.remove(u**rate)
            rang = [1.0, *[0.0] * (topk - 1)]  # chances that so many of the others have rung
            for q in others:
                for count in range(topk - 1, 0, -1):
                    rang[count] = rang[count] * q + rang[count - 1] * (1.0 - q)
                rang[0] *= q
            found[rate] += rate * u ** (rate - 1.0) * sum(rang) / steps
    total = sum(found[rate] for rate in rates)
    return [found[rate] * topk / total for rate in rates]
