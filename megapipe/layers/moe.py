"""A mixture of experts: x + norm(experts(norm(x))), each token seen by the k experts that a router chooses.

Every rank routes its own t tokens. Their k t copies go to the ranks of their experts by an all-to-all over ep, then to
all ranks that share an expert (etp), and back the same way, summed over etp; each token then adds its k results, which
the router's weights have multiplied within the experts. Nothing is dropped. With balanced routing a rank's experts see
k t rows, times etp; those of the fullest rank `imbalance` times as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megapipe.config.layers import LayerConfig
from megapipe.layers.branch import Branch
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


@dataclass(frozen=True, eq=False)
class MoETable(Branch):
    """The branch of one transformer layer with a router, experts and perhaps shared experts, its norms included."""

    site = "has_mlp"
    recompute_modules = ("moe", "moe_act", "shared_experts")

    imbalance: float = 1.0  # rows that the experts of this rank see, over the mean of all ranks

    @property
    def num_experts(self) -> int:
        assert self.model.num_experts is not None
        return self.model.num_experts

    def num_rows(self, shape: RankShape) -> int:
        """Return the rows that a rank's tokens become, k for each unless a capacity limits or pads them."""
        rows, capacity = self.model.moe_router_topk * shape.own_tokens, expert_capacity(self.model, shape.own_tokens)
        if capacity is None:
            return rows
        most = self.num_experts * capacity
        return most if self.model.moe_pad_expert_input_to_capacity else min(rows, most)

    def arrived_rows(self, shape: RankShape) -> int:
        """Return the rows that reach a rank's experts from the ranks of its ep group."""
        return math.ceil(self.imbalance * self.num_rows(shape))
