"""A mixture of experts: x + norm(experts(norm(x))), each token seen by the k experts that a router chooses.

Every rank routes its own t tokens. Their k t copies go to the ranks of their experts by an all-to-all over ep, then to
all ranks that share an expert (etp), and back the same way, summed over etp; each token then adds its k results, which
the router's weights have multiplied within the experts. Nothing is dropped. With balanced routing a rank's experts see
k t rows, times etp; those of the fullest rank `imbalance` times as many.
"""

from __future__ import annotations

import math
from typing import Any

from megapipe.config.layers import LayerConfig
from megapipe.layers.table import RankShape

INDEX_BYTES = 8  # int64


def expert_capacity(model: LayerConfig, tokens: int) -> int | None:
    """Return the most rows that a rank with so many tokens sends to one expert; None without a limit.

    Megatron's rule: the mean of k rows a token times --moe-expert-capacity-factor, rounded up.
    """
    rows = rows_of_capacity(model, tokens)
    return None if rows is None else min(tokens, math.ceil(rows))


def rows_of_capacity(model: LayerConfig, tokens: Any) -> Any:
    """Return a capacity before it is rounded up. tokens: a number, or a tensor of one."""
    if model.moe_expert_capacity_factor is None:
        return None
    assert model.num_experts is not None
    return tokens * model.moe_router_topk / model.num_experts * model.moe_expert_capacity_factor


def arrived_rows(model: LayerConfig, shape: RankShape, imbalance: float) -> int:
    """Return the rows that reach a rank's experts from the ranks of its ep group: k for each token unless a capacity
    limits or pads them, times the imbalance.
    """
    rows, capacity = model.moe_router_topk * shape.own_tokens, expert_capacity(model, shape.own_tokens)
    if capacity is not None:
        assert model.num_experts is not None
        most = model.num_experts * capacity
        rows = most if model.moe_pad_expert_input_to_capacity else min(rows, most)
    return math.ceil(imbalance * rows)
