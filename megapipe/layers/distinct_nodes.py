"""The number of nodes that a token's experts lie on, if experts are equally likely. Experts are divided in order.

Of a token that chooses groups first, these are equally likely, and so are the experts of the chosen ones. Forced
balance chooses k consecutive experts for each token.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import comb, gcd

from megapipe.config.layers import LayerConfig


def num_pairs(model: LayerConfig, tokens: int, num_nodes: int) -> int:
    """Return the number of pairs (token, node) of a rank's tokens: expected at balanced routing and rounded, or exact
    under --moe-router-force-load-balancing on the first rank of tp.
    """
    assert model.num_experts is not None
    experts, topk, groups = model.num_experts, model.moe_router_topk, model.moe_router_num_groups or 1
    if model.moe_router_force_load_balancing:
        return forced_pairs(experts, topk, tokens, num_nodes)
    return round(tokens * expected_nodes(experts, topk, num_nodes, groups, model.moe_router_group_topk or groups))


@cache
def expected_nodes(experts: int, topk: int, num_nodes: int, groups: int = 1, taken: int = 1) -> float:
    """Return the mean number of nodes that have one of topk experts, which lie in `taken` of the groups.

    A node is missed if all topk experts are others of the taken groups: the mean over the choices of groups, counted by
    the number of the node's experts in them.
    """
    size, held, total = experts // groups, experts // num_nodes, 0.0
    choices = comb(taken * size, topk) * comb(groups, taken)
    for begin in range(0, experts, held):
        ways = Counter({(0, 0): 1})  # (groups taken, experts of the node in them) -> choices
        for first in range(0, experts, size):
            here = max(0, min(begin + held, first + size) - max(begin, first))
            ways += Counter({(count + 1, own + here): n for (count, own), n in ways.items() if count < taken})
        missed = sum(n * comb(taken * size - own, topk) for (count, own), n in ways.items() if count == taken)
        total += 1.0 - missed / choices
    return total


def forced_pairs(experts: int, topk: int, tokens: int, num_nodes: int) -> int:
    """Return the pairs of tokens 0, 1, ..., of which token x has experts k x to k x + k - 1, modulo their number."""
    held, period = experts // num_nodes, experts // gcd(experts, topk)
    nodes = [
        len({expert % experts // held for expert in range(topk * token, topk * (token + 1))}) for token in range(period)
    ]
    return tokens // period * sum(nodes) + sum(nodes[: tokens % period])
