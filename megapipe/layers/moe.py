"""A mixture of experts: x + norm(experts(norm(x))), each token seen by the k experts that a router chooses.

Every rank routes its own t tokens. Their k t copies go to the ranks of their experts by an all-to-all over ep, then to
all ranks that share an expert (etp), and back the same way, summed over etp; each token then adds its k results, which
the router's weights have multiplied within the experts. Nothing is dropped. With balanced routing a rank's experts see
k t rows, times etp; those of the fullest rank `imbalance` times as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megapipe.config.layers import LayerConfig
from megapipe.config.model import ACTIVATIONS
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.distinct_nodes import num_pairs
from megapipe.layers.linear import LinearTable, fp8_group_bytes, output_std
from megapipe.layers.mlp import MLPTable, backward_tensors
from megapipe.layers.norm import NormTable, branch_norms, residual_stream
from megapipe.layers.table import (
    MASK_BYTES,
    Backward,
    Gemm,
    Kept,
    Operation,
    RankShape,
    Table,
    replayed,
    ring_bytes,
    total_bytes,
)
from megapipe.sharding.spec import ExpertRows, Fused, Init, ParamSpec

INDEX_BYTES = 8  # int64
PAIR_BYTES = 4  # int32, of each of the k rows of a pair


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
class MoETable:
    """The branch of one transformer layer with a router, experts and perhaps shared experts, its norms included."""

    model: LayerConfig
    is_fp8: bool  # experts and shared experts multiply in 8 bits
    imbalance: float = 1.0  # rows that the experts of this rank see, over the mean of all ranks

    @cached_property
    def norms(self) -> tuple[NormTable | None, NormTable | None]:
        """The norms of the branch's input and of its output."""
        return branch_norms(self.model, "pre_mlp_layernorm", "post_mlp_layernorm")

    @cached_property
    def shared(self) -> MLPTable | None:
        """The shared experts: one MLP without norms."""
        width = self.model.moe_shared_expert_intermediate_size
        return None if width is None else MLPTable(replace(self.model, ffn_hidden_size=width), self.is_fp8)

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
        inner, outer, experts = ExpertRows(count, self.gates, etp), ExpertRows(count, 1, etp), f"{name}.experts"
        rows, init = count * self.gates * width, Init("normal", last)
        yield ParamSpec(f"{experts}.weight1", (rows, hidden), layer, inner, first, matrix="outputs x inputs")
        yield ParamSpec(f"{experts}.weight2", (count * width, hidden), layer, outer, init, matrix="inputs x outputs")
        if has_bias:
            yield ParamSpec(f"{experts}.bias1", (rows,), layer, inner, weight_decay=False)
            yield ParamSpec(f"{experts}.bias2", (count * hidden,), layer, outer, weight_decay=False)
        if self.shared is not None:
            shared, name = self.shared.model.ffn_hidden_size, f"{name}.shared_experts"
            gates, std = self.gates, model.init_method_std
            fc1 = LinearTable(f"{name}.linear_fc1", gates * shared, hidden, Fused(0, gates), has_bias, std)
            yield from fc1.parameters(layer, sequence_parallel)
            fc2 = LinearTable(f"{name}.linear_fc2", hidden, shared, Fused(1), has_bias, last)
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
            Gemm(hidden, self.gates * width, True, self.is_fp8),
            Gemm(width, hidden, False, self.is_fp8),
        )
        return routed if self.shared is None else (*routed, *self.shared.gemms(tp))

    def expert_gemms(self, etp: int) -> tuple[Gemm, Gemm]:
        """Return the two products of one expert on one of etp ranks."""
        hidden, width = self.model.hidden_size, self.model.expert_ffn_size // etp
        return Gemm(hidden, self.gates * width, True, self.is_fp8), Gemm(width, hidden, False, self.is_fp8)

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

    def row_bytes(self, shape: RankShape) -> int:
        """Return the bytes of a rank's own rows, at its end of an all-to-all."""
        return self.num_rows(shape) * self.model.hidden_size * shape.element

    def num_pairs(self, shape: RankShape) -> int:
        """Return the pairs (token, node) of a rank, where a token goes once to a node."""
        pairs = num_pairs(self.model, shape.own_tokens, shape.ep // shape.ep_inner)
        return min(pairs, self.num_rows(shape))

    def _sent_to_nodes(self, shape: RankShape) -> dict[str, tuple[float, float]]:
        """Return `sent_bytes` where a token goes once to a node: over 'ep_nodes' the rows of pairs, weights, and what
        comes back; before that the numbers of rows and pairs, and the k rows of every pair. Within the node all rows.
        """
        model, pairs, rows, nodes = self.model, self.num_pairs(shape), self.row_bytes(shape), shape.ep // shape.ep_inner
        counts, weights = self.num_experts * INDEX_BYTES, self.num_rows(shape) * shape.wide
        row = model.hidden_size * shape.element
        across = pairs * row + weights + (pairs * row if model.moe_combine_in_node else rows)
        lists, within = pairs * model.moe_router_topk * PAIR_BYTES + nodes * INDEX_BYTES, 2 * rows + weights
        sent = {
            "ep_nodes": (across, counts + lists, nodes),
            "ep_places": (within, counts, shape.ep_inner),
            "etp": (within * shape.etp, counts * shape.etp, shape.etp),
        }
        return {
            name: (ring_bytes(whole + number, size), ring_bytes(whole, size))
            for name, (whole, number, size) in sent.items()
        }

    def sent_bytes(self, shape: RankShape) -> dict[str, tuple[float, float]]:
        """Return the bytes that a rank sends over 'ep' and 'etp' for one microbatch, in F and in the backward.

        Rows go to the experts, with their weights, and back, in either direction; of the fullest rank, which sends back
        what it has received, the mean of both directions is given. Before that, unless they are padded
        to the capacity, the number of rows of every expert. Where a token goes once to a node: over 'ep_nodes' and
        'ep_places' instead of 'ep'.
        """
        if shape.has_levels:
            return self._sent_to_nodes(shape)
        is_padded = self.model.moe_pad_expert_input_to_capacity
        rows, counts = self.row_bytes(shape), 0 if is_padded else self.num_experts * INDEX_BYTES
        whole = (2 * rows + self.num_rows(shape) * shape.wide) * (1.0 + self.imbalance) / 2
        sent = {"ep": (whole, counts, shape.ep), "etp": (whole * shape.etp, counts * shape.etp, shape.etp)}
        return {
            name: (ring_bytes(moved + number, size), ring_bytes(moved, size))
            for name, (moved, number, size) in sent.items()
        }

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank at balanced routing.

        Recompute of the layer (`moe`) keeps its input and the routing. Recompute of the activation (`moe_act`) makes
        the second product's input from the first one's result; of `shared_experts` as that of an MLP.
        """
        if self.shared is not None and shape.recomputes("shared_experts"):
            shape = shape.without("layernorm")  # they keep the output of the norm before them
        hidden, splits = shape.hidden_bytes(self.model.hidden_size), shape.splits_backward
        before, after = self.norms
        has_dropout, redoes = self.model.hidden_dropout > 0, shape.recomputes("moe")
        masks = (Kept("dropout masks", shape.own_tokens * self.model.hidden_size, MASK_BYTES),) if has_dropout else ()
        redoes_norm = shape.recomputes("layernorm") and not redoes and before is not None
        norm_made = hidden if redoes_norm else 0
        operations, waits = [*self._routed_operations(shape, norm_made), *self._shared_operations(shape, norm_made)], 0
        if splits:  # gradients of the linears' outputs wait for W
            waits = sum(self._waiting_gradients(shape))
        routing: tuple[Kept, ...] = ()
        if redoes:
            routing, norm_again = self._routing(shape), hidden if shape.recomputes("layernorm") and before else 0
            operations = replayed(operations, hidden + norm_again)
            # inputs that the replay has made wait too; the norm's output, if it is kept, waits as such
            of_replay = sum(operation.deferred_bytes for operation in operations) - waits
            waits += of_replay - (0 if norm_again or self.shared is None else hidden) if splits else 0
        start = residual_stream(shape, self.model.hidden_size)
        if before is not None:
            backward = Backward(waits + hidden + before.gradient_bytes(shape))
            keeps_statistics = not (redoes and shape.recomputes("layernorm"))
            start = before.operation(shape, keeps_statistics=keeps_statistics, backward=backward)
        end = () if after is None else (after.after_branch(shape, self.model.scales_branches),)
        behind = Operation("residual sum", (*routing, *masks))
        weight_bytes = max(weight for weight, _ in self._fp8_bytes(shape))
        return Table((start, *operations, behind, *end), hidden + waits, weight_bytes)

    def _routing(self, shape: RankShape) -> tuple[Kept, ...]:
        """Return the experts of the tokens; the order of the rows and the row of each choice; the order of all ranks'
        rows and its inverse.
        """
        choices, rows = self.model.moe_router_topk * shape.own_tokens, self.num_rows(shape)
        arrived = self.arrived_rows(shape) * shape.etp
        drops = self.model.moe_expert_capacity_factor is not None  # with a last place for all dropped rows
        is_padded = self.model.moe_pad_expert_input_to_capacity
        counts = [choices, choices, (rows if is_padded else choices) + drops]
        counts += [arrived] * 2 * (shape.ep * shape.etp > 1)
        if shape.has_levels:  # rows of pairs; pairs of rows, and the orders on both sides of the rank between
            pairs, sums = self.num_pairs(shape), self.model.moe_combine_in_node
            counts += [pairs, *[rows] * 3, *[pairs * self.model.moe_router_topk] * sums]
        return tuple(Kept("routing", count, INDEX_BYTES, with_checkpoint=True) for count in counts)

    def _router_kept(self, shape: RankShape) -> tuple[Kept, ...]:
        """Return what the router keeps besides its input: logits or scores of all experts, those of the chosen ones."""
        model, tokens, topk = self.model, shape.own_tokens, self.model.moe_router_topk
        is_softmax, balances = model.moe_router_score_function == "softmax", bool(model.balance_losses)
        chooses_first = is_softmax and not model.moe_router_pre_softmax  # scores are logits
        has_z = bool(model.moe_z_loss_coeff)
        divides = not is_softmax and topk > 1 and model.moe_router_norm_topk_prob
        matrices = 1 + (balances and chooses_first) + (has_z and not chooses_first)
        vectors = divides + (balances and not is_softmax) + has_z
        counts = [shape.batch if name == "seq_aux_loss" else 1 for name in model.balance_losses]
        scores = [tokens * self.num_experts] * matrices + [tokens] * vectors
        scores += [count * self.num_experts for count in counts]
        return (
            *(Kept("router scores", count, shape.wide) for count in scores),
            *(Kept("router weights", topk * tokens, shape.wide),) * (chooses_first or divides),
            *self._routing(shape),
        )

    def _expert_bytes(self, shape: RankShape) -> tuple[int, int, int]:
        """Return the bytes of the experts' inputs, results of their first product, and results of the activation."""
        row_bytes, width = self.arrived_rows(shape) * shape.etp * shape.element, self.model.expert_ffn_size // shape.etp
        return row_bytes * self.model.hidden_size, row_bytes * self.gates * width, row_bytes * width

    def _fp8_bytes(self, shape: RankShape) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return what the experts' first and second products allocate in 8 bits, in weight and input gradients."""
        rows, held = self.arrived_rows(shape) * shape.etp, self.num_experts // shape.ep
        first, second = (fp8_group_bytes(gemm, rows, held, shape) for gemm in self.expert_gemms(shape.etp))
        return first, second

    def _waiting_gradients(self, shape: RankShape) -> tuple[int, int]:
        """Return the bytes of the gradients that wait for W: those of the experts, and those of the shared experts,
        which wait from the start on.
        """
        outer, inner, _ = self._expert_bytes(shape)
        if self.shared is None:
            return inner + outer, 0
        width = self.gates * shape.tokens * self.shared.gemms(shape.tp)[1].inputs * shape.element
        return inner + outer, shape.hidden_bytes(self.model.hidden_size) + width

    def _routed_operations(self, shape: RankShape, norm_made: int) -> Iterator[Operation]:
        """Yield the operations from the router to the sum of the results. norm_made: bytes of the norm's
        output that a backward recomputes.
        """
        size, topk, element = self.model.hidden_size, self.model.moe_router_topk, shape.element
        tokens, hidden, rows = shape.own_tokens, shape.hidden_bytes(size), self.num_rows(shape)
        outer, inner, activated = self._expert_bytes(shape)
        rows_bytes, splits = max(self.row_bytes(shape), topk * hidden), shape.splits_backward
        redoes_activation, arrived = shape.recomputes("moe_act"), self.arrived_rows(shape)
        # besides the gradient times the weights; or results in the weights' dtype, where that is wider
        weighed = shape.wide // element * activated if element < shape.wide else 0
        made = activated + max(inner, int(backward_tensors(self.model) * activated), weighed)
        after_all, waits = self._waiting_gradients(shape)[::-1] if splits else (0, 0)
        behind = after_all + (hidden if self.model.scales_branches or self.norms[1] is not None else 0)
        waits += after_all
        dispatched = (Kept("expert inputs", outer // element, element),)
        # a part keeps its input, of which `dispatched` is a copy
        received = [Kept("expert inputs", arrived * size, element)] if shape.in_parts else []
        if shape.in_parts and self.shared is not None and shape.recomputes("layernorm"):
            received.append(Kept("shared expert inputs", tokens * size, element))
        outputs_kept = [Kept("expert outputs", rows * size, element)] if shape.in_parts else []
        if shape.in_parts and self.shared is not None:  # the sum of both results is another part than the experts
            outputs_kept.append(Kept("shared expert results", tokens * size, element))
        again, modules = activated if redoes_activation else 0, ("moe",)
        # in 8 bits a weight gradient, which comes first, or an input gradient with its operands may take more
        (weight1, input1), (weight2, input2) = self._fp8_bytes(shape)
        freed = inner + (inner if splits else 0 if redoes_activation else activated)
        fc1, fc2 = max(2 * outer, outer + input1 - freed), max(inner, activated + input2)
        if not splits:
            fc1, fc2 = max(fc1, weight1 - freed), max(fc2, weight2)
        router = Backward(waits + 3 * hidden + norm_made)
        yield Operation("router", self._router_kept(shape), backward=router, recompute_modules=modules)
        yield Operation("dispatch", backward=Backward(waits + hidden + 2 * rows_bytes + outer))
        yield from self._weighted_inputs(shape, behind + waits) if self.model.moe_apply_probs_on_input else ()
        yield Operation(
            "expert_fc1",
            (*received, *dispatched),
            deferred_bytes=inner + outer,
            backward=Backward(behind + inner + fc1 + waits, 0 if splits else total_bytes(dispatched)),
            flops=2.0 * (inner // element) * size,
            recompute_modules=modules,
        )
        yield Operation(
            "expert_activation",
            (Kept("expert hidden", inner // element, element), Kept("row weights", arrived * shape.etp, shape.wide)),
            backward=Backward(behind + inner + made + waits),
        )
        yield Operation(
            "expert_fc2",
            () if redoes_activation else (Kept("expert activation", activated // element, element),),
            deferred_bytes=outer + (inner if redoes_activation else activated),
            backward=Backward(behind + outer + fc2 + again),
            flops=2.0 * (activated // element) * size,
            recompute_modules=modules,
        )
        combine = Backward(behind + 2 * rows_bytes, total_bytes(outputs_kept))
        yield Operation("combine", tuple(outputs_kept), backward=combine)

    def _weighted_inputs(self, shape: RankShape, held: int) -> Iterator[Operation]:
        """Yield the product of the experts' inputs and their weights. held: bytes held in its backward."""
        count, rows = self._expert_bytes(shape)[0] // shape.element, self.arrived_rows(shape) * shape.etp
        kept = Kept("expert inputs", count, shape.element), Kept("row weights", rows, shape.wide)
        # the gradients of both sides, and a product in the weights' dtype
        backward = Backward(held + count * (2 * shape.element + shape.wide), kept[0].num_bytes)
        yield Operation("expert_inputs", kept, backward=backward, recompute_modules=("moe",))

    def _shared_operations(self, shape: RankShape, norm_made: int) -> Iterator[Operation]:
        """Yield the operations of the shared experts: those of a dense MLP, without its norms, dropout and input."""
        if self.shared is None:
            return
        modules = {"mlp": shape.recomputes("shared_experts"), "activation": shape.recomputes("activation")}
        chosen = tuple(module for module, is_chosen in modules.items() if is_chosen)
        own = replace(shape, recompute=RecomputeConfig("selective" if chosen else None, recompute_modules=chosen))
        for operation in self.shared.table(own).operations:
            if operation.name in ("linear_fc1", "activation", "linear_fc2"):
                keeps = tuple(tensor for tensor in operation.keeps if tensor.name != "dropout masks")
                again = ("moe", "shared_experts") if operation.recompute_modules else ("moe",)
                backward = operation.backward
                if operation.name == "linear_fc1" and backward is not None:
                    backward = replace(backward, held=backward.held + norm_made)
                yield replace(operation, keeps=keeps, recompute_modules=again, backward=backward)
        if self.model.moe_shared_expert_gate:
            size = shape.own_tokens * self.model.hidden_size
            score = Kept("shared expert gate", shape.own_tokens, shape.element)
            yield Operation("shared_gate", (Kept("shared expert output", size, shape.element), score))
