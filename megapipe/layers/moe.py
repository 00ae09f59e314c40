"""The capacity of experts, and the type of their indices."""

from __future__ import annotations

import math
from typing import Any

from megapipe.config.layers import LayerConfig

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
