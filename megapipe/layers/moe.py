"""A mixture of experts: x + norm(experts(norm(x))), each token seen by the k experts that a router chooses.

Every rank routes its own t tokens. Their k t copies go to the ranks of their experts by an all-to-all over ep, then to
all ranks that share an expert (etp), and back the same way, summed over etp; each token then weighs its k results.
Nothing is dropped. The table assumes balanced routing, by which a rank's experts see k t rows, times etp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.config.layers import LayerConfig
from megapipe.config.model import ACTIVATIONS
from megapipe.layers.linear import Linear, output_std
from megapipe.layers.mlp import DenseMLP, backward_tensors
from megapipe.layers.norm import Norm, branch_norms, residual_stream
from megapipe.layers.table import (
    MASK_BYTES,
    Backward,
    Gemm,
    Kept,
    Operation,
    RankShape,
    Table,
    ring_bytes,
    total_bytes,
)
from megapipe.sharding.spec import Experts, Fused, Init, ParamSpec

INDEX_BYTES = 8  # int64


def expert_capacity(model: LayerConfig, tokens: int) -> int | None:
    """Return the most rows that a rank with so many tokens sends to one expert; None without a limit.

    Megatron's rule: the mean of k rows a token times --moe-expert-capacity-factor, rounded up.
    """
    if model.moe_expert_capacity_factor is None:
        return None
    assert model.num_experts is not None
    return min(tokens, math.ceil(tokens * model.moe_router_topk / model.num_experts * model.moe_expert_capacity_factor))


@dataclass(frozen=True, eq=False)
class MoE:
    """The branch of one transformer layer with a router, experts and perhaps shared experts, its norms included."""

    model: LayerConfig

    @cached_property
    def norms(self) -> tuple[Norm | None, Norm | None]:
        """The norms of the branch's input and of its output."""
        return branch_norms(self.model, "pre_mlp_layernorm", "post_mlp_layernorm")

    @cached_property
    def shared(self) -> DenseMLP | None:
        """The shared experts: one MLP without norms."""
        width = self.model.moe_shared_expert_intermediate_size
        return None if width is None else DenseMLP(replace(self.model, ffn_hidden_size=width), is_fp8=False)

    @property
    def num_experts(self) -> int:
        assert self.model.num_experts is not None
        return self.model.num_experts

    @property
    def gates(self) -> int:
        """2 where an expert's first linear makes gate and up, else 1."""
        return 2 if ACTIVATIONS[self.model.activation].is_gated else 1

    def parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int = 1) -> Iterator[ParamSpec]:
        """Yield the parameters of layer number `layer`, in model order.

        weight1 [experts x gates x ffn, hidden] and weight2 [experts x ffn, hidden] are those of all experts, stacked;
        weight2 is the transpose of a linear's weight, so that both are cut by rows. With biases (--disable-bias-linear
        not given) there are a router's bias, bias1 [experts x gates x ffn] and bias2 [experts x hidden], cut alike.
        """
        model, hidden, name, count = self.model, self.model.hidden_size, f"{prefix}mlp", self.num_experts
        width, first, last = model.expert_ffn_size, Init("normal", model.init_method_std), output_std(model)
        has_bias = model.add_bias_linear
        before, after = self.norms
        yield from before.parameters(prefix, layer, sequence_parallel) if before is not None else ()
        shape = (count, hidden)
        yield ParamSpec(f"{name}.router.weight", shape, layer, init=first, partial_gradient=sequence_parallel)
        if has_bias:
            is_partial = sequence_parallel
            yield ParamSpec(f"{name}.router.bias", (count,), layer, weight_decay=False, partial_gradient=is_partial)
        inner, outer, experts = Experts(count, self.gates, etp), Experts(count, 1, etp), f"{name}.experts"
        rows, init = count * self.gates * width, Init("normal", last)
        yield ParamSpec(f"{experts}.weight1", (rows, hidden), layer, inner, first, matrix="outputs x inputs")
        yield ParamSpec(f"{experts}.weight2", (count * width, hidden), layer, outer, init, matrix="inputs x outputs")
        if has_bias:
            yield ParamSpec(f"{experts}.bias1", (rows,), layer, inner, weight_decay=False)
            yield ParamSpec(f"{experts}.bias2", (count * hidden,), layer, outer, weight_decay=False)
        if self.shared is not None:
            shared, name = self.shared.model.ffn_hidden_size, f"{name}.shared_experts"
            gates, std = self.gates, model.init_method_std
            fc1 = Linear(f"{name}.linear_fc1", gates * shared, hidden, Fused(0, gates), has_bias, std)
            yield from fc1.parameters(layer, sequence_parallel)
            fc2 = Linear(f"{name}.linear_fc2", hidden, shared, Fused(1), has_bias, last)
            yield from fc2.parameters(layer, sequence_parallel)
            if model.moe_shared_expert_gate:
                shape = (1, hidden)
                yield ParamSpec(f"{name}.gate_weight", shape, layer, init=first, partial_gradient=sequence_parallel)
        yield from after.parameters(prefix, layer, sequence_parallel) if after is not None else ()

    def states(self, prefix: str, layer: int) -> Iterator[ParamSpec]:
        """Yield the fp32 tensors that belong to the model but have no gradient: every rank holds them whole."""
        if self.model.moe_router_enable_expert_bias:
            yield ParamSpec(f"{prefix}mlp.router.expert_bias", (self.num_experts,), layer)

    def gemms(self, tp: int) -> tuple[Gemm, ...]:
        """Return the products that a token goes through, as linears on one of tp ranks: router, its k experts (as many
        wide ones), shared experts.
        """
        hidden, width = self.model.hidden_size, self.model.moe_router_topk * self.model.expert_ffn_size // tp
        routed = (
            Gemm(hidden, self.num_experts, True),
            Gemm(hidden, self.gates * width, True),
            Gemm(width, hidden, False),
        )
        return routed if self.shared is None else (*routed, *self.shared.gemms(tp))

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

    def row_bytes(self, shape: RankShape) -> int:
        """Return the bytes of these rows, at one end of an all-to-all."""
        return self.num_rows(shape) * self.model.hidden_size * shape.element

    def border_bytes(self, shape: RankShape) -> int:
        """Return the bytes that pass from part to part in a pair (--overlap-moe-expert-parallel-comm), for either half:
        rows at both ends of an all-to-all, weights of the rows, the residual stream and what the shared experts add.
        """
        streams = 2 * shape.hidden_bytes(self.model.hidden_size)
        return 2 * (2 * self.row_bytes(shape) + self.model.moe_router_topk * shape.own_tokens * shape.wide + streams)

    def sent_bytes(self, shape: RankShape) -> dict[str, tuple[float, float]]:
        """Return the bytes that a rank sends over 'ep' and 'etp' for one microbatch, in F and in the backward.

        Rows go to the experts and back, in either direction; before that, unless they are padded to the capacity, the
        number of rows of every expert.
        """
        is_padded = self.model.moe_pad_expert_input_to_capacity
        rows, counts = self.row_bytes(shape), 0 if is_padded else self.num_experts * INDEX_BYTES
        sent = {"ep": (rows, counts, shape.ep), "etp": (rows * shape.etp, counts * shape.etp, shape.etp)}
        return {
            name: (ring_bytes(2 * whole + number, size), ring_bytes(2 * whole, size))
            for name, (whole, number, size) in sent.items()
        }

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank at balanced routing."""
        size, topk, element, wide = self.model.hidden_size, self.model.moe_router_topk, shape.element, shape.wide
        tokens, hidden = shape.own_tokens, shape.hidden_bytes(self.model.hidden_size)
        rows, width = self.num_rows(shape), self.model.expert_ffn_size // shape.etp
        gathered, rows_bytes = rows * shape.etp, max(self.row_bytes(shape), topk * hidden)
        before, after = self.norms
        has_dropout = self.model.hidden_dropout > 0
        behind = hidden if has_dropout or after is not None else 0
        router = (
            Kept("router scores", tokens * self.num_experts, wide),
            Kept("router weights", topk * tokens, wide),
            Kept("routing", 2 * rows, INDEX_BYTES),
        )
        dispatched = (Kept("expert inputs", gathered * size, element),)
        inner_kept = (Kept("expert hidden", self.gates * gathered * width, element),)
        outputs_kept = (Kept("expert outputs", rows * size, element),)
        activated = (Kept("expert activation", gathered * width, element),)
        inner, outer = self.gates * gathered * width * element, gathered * size * element
        made = max(inner, int(backward_tensors(self.model) * gathered * width * element))
        # gradients of the linears' outputs, which wait for W: those of the shared experts from the start on
        shared = () if self.shared is None else tuple(self._shared_operations(shape))
        splits, waits, before_all = shape.splits_backward, 0, 0
        if splits:
            waits = inner + outer
        if splits and self.shared is not None:
            before_all = hidden + self.gates * shape.tokens * self.shared.gemms(shape.tp)[1].inputs * element
        behind, waits = behind + before_all, waits + before_all
        start = residual_stream(shape, size)
        if before is not None:
            start = before.operation(shape, backward=Backward(waits + hidden + before.gradient_bytes(shape)))
        masks = (Kept("dropout masks", tokens * size, MASK_BYTES),) if has_dropout else ()
        if shape.in_parts and self.shared is not None:  # the sum of both results is another part than the experts
            masks = (Kept("shared expert results", tokens * size, element), *masks)
        combine = Backward(behind + 3 * rows_bytes, total_bytes(outputs_kept))
        operations = (
            start,
            Operation("router", router, backward=Backward(waits + 3 * hidden)),
            Operation("dispatch", backward=Backward(waits + hidden + 2 * rows_bytes + outer)),
            Operation(
                "expert_fc1",
                dispatched,
                deferred_bytes=inner + outer,
                backward=Backward(behind + inner + 2 * outer + waits, 0 if splits else total_bytes(dispatched)),
            ),
            Operation("expert_activation", inner_kept, backward=Backward(behind + inner + made + waits)),
            Operation(
                "expert_fc2",
                activated,
                deferred_bytes=outer + gathered * width * element,
                backward=Backward(behind + outer + inner),
            ),
            Operation("combine", (*outputs_kept, *masks), backward=combine),
            *shared,
            *(() if after is None else (after.after_branch(shape, has_dropout),)),
        )
        return Table(operations, hidden + waits)

    def _shared_operations(self, shape: RankShape) -> Iterator[Operation]:
        """Yield the operations of the shared experts: those of a dense MLP, without its norms, dropout and input."""
        assert self.shared is not None
        for operation in self.shared.table(shape).operations:
            if operation.name in ("linear_fc1", "activation", "linear_fc2"):
                keeps = tuple(tensor for tensor in operation.keeps if tensor.name != "dropout masks")
                yield replace(operation, keeps=keeps)
        if self.model.moe_shared_expert_gate:
            size = shape.own_tokens * self.model.hidden_size
            yield Operation("shared_gate", (Kept("shared expert output", size, shape.element),))
