"""The load of experts that chance alone gives.

Every token draws topk experts one after another without replacement, each draw in proportion to the probabilities of
the experts that are left, as the topk largest of logits with Gumbel noise are distributed; tokens are independent of
each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from statistics import NormalDist

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
