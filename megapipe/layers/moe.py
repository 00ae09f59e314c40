"""A mixture of experts: x + norm(experts(norm(x))), each token seen by the k experts that a router chooses.

Every rank routes its own t tokens. Their k t copies go to the ranks of their experts by an all-to-all over ep, then to
all ranks that share an expert (etp), and back the same way, summed over etp; each token then adds its k results, which
the router's weights have multiplied within the experts. Nothing is dropped. With balanced routing a rank's experts see
k t rows, times etp; those of the fullest rank `imbalance` times as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapipe.config.layers import LayerConfig
from megapipe.config.model import ACTIVATIONS
from megapipe.layers.branch import Branch
from megapipe.layers.linear import LinearTable, output_std
from megapipe.layers.table import RankShape
from megapipe.sharding.spec import ExpertRows, Fused, Init, ParamSpec

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
    norm_names = ("pre_mlp_layernorm", "post_mlp_layernorm")
    recompute_modules = ("moe", "moe_act", "shared_experts")

    imbalance: float = 1.0  # rows that the experts of this rank see, over the mean of all ranks

    @property
    def num_experts(self) -> int:
        assert self.model.num_experts is not None
        return self.model.num_experts

    @property
    def gates(self) -> int:
        """2 where an expert's first linear makes gate and up, else 1."""
        return 2 if ACTIVATIONS[self.model.activation].is_gated else 1

    def own_parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int) -> Iterator[ParamSpec]:
        """Yield the parameters between the norms.

        weight1 [experts x gates x ffn, hidden] and weight2 [experts x ffn, hidden] are those of all experts, stacked;
        weight2 is the transpose of a linear's weight, so that both are cut by rows. With biases (--disable-bias-linear
        not given) there are a router's bias, bias1 [experts x gates x ffn] and bias2 [experts x hidden], cut alike.
        """
        model, hidden, name, count = self.model, self.model.hidden_size, f"{prefix}mlp", self.num_experts
        width, first, last = model.expert_ffn_size, Init("normal", model.init_method_std), output_std(model)
        has_bias = model.add_bias_linear
        shape = (count, hidden)
        yield ParamSpec(f"{name}.router.weight", shape, layer, init=first, partial_gradient=sequence_parallel)
        if has_bias:
            is_partial = sequence_parallel
            yield ParamSpec(f"{name}.router.bias", (count,), layer, weight_decay=False, partial_gradient=is_partial)
        inner, outer, experts = ExpertRows(count, self.gates, etp), ExpertRows(count, 1, etp), f"{name}.experts"
        rows, init = count * self.gates * width, Init("normal", last)
        yield ParamSpec(f"{experts}.weight1", (rows, hidden), layer, inner, first, matrix="outputs x inputs")
        yield ParamSpec(f"{experts}.weight2", (count * width, hidden), layer, outer, init, matrix="inputs x outputs")
        if has_bias:
            yield ParamSpec(f"{experts}.bias1", (rows,), layer, inner, weight_decay=False)
            yield ParamSpec(f"{experts}.bias2", (count * hidden,), layer, outer, weight_decay=False)
        shared = model.moe_shared_expert_intermediate_size
        if shared is not None:
            name, gates, std = f"{name}.shared_experts", self.gates, model.init_method_std
            fc1 = LinearTable(f"{name}.linear_fc1", gates * shared, hidden, Fused(0, gates), has_bias, std)
            yield from fc1.parameters(layer, sequence_parallel)
            fc2 = LinearTable(f"{name}.linear_fc2", hidden, shared, Fused(1), has_bias, last)
            yield from fc2.parameters(layer, sequence_parallel)
            if model.moe_shared_expert_gate:
                shape = (1, hidden)
                yield ParamSpec(f"{name}.gate_weight", shape, layer, init=first, partial_gradient=sequence_parallel)

    def states(self, prefix: str, layer: int) -> Iterator[ParamSpec]:
        """Yield the fp32 tensors that belong to the model but have no gradient: every rank holds them whole."""
        if self.model.moe_router_enable_expert_bias:
            yield ParamSpec(f"{prefix}mlp.router.expert_bias", (self.num_experts,), layer)

    @property
    def inactive_weights(self) -> int:
        """Weights of the experts that a token does not see."""
        idle, width, hidden = self.num_experts - self.model.moe_router_topk, self.model.expert_ffn_size, 0
        hidden = self.model.hidden_size
        biases = self.gates * width + hidden if self.model.add_bias_linear else 0
        return idle * ((self.gates + 1) * width * hidden + biases)

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
