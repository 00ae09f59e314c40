"""`MoE`: a mixture of experts in place of a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538).

    router    [t, h] -> weights and numbers of the k experts of each token, both [t, k]
    dispatch  k copies of each token, in the order of experts, to the ranks of their experts (model/dispatch.py)
    experts   (weight x act(x W1^T)) W2 for the rows of each expert, whose weights travel with them
    combine   sum over j < k of result[j]; the order of its terms does not depend on the grid's ranks

t = s b / tp tokens: with tp every rank routes its slice of the sequence, with cp of its part of it. Padding of a
microbatch goes to no expert and counts in no load, loss or capacity; to it the experts add 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ACTIVATIONS as KINDS
from megapipe.dtypes import DTYPES
from megapipe.errors import ConfigError
from megapipe.layers.distinct_nodes import num_pairs
from megapipe.layers.moe import expert_capacity, rows_of_capacity
from megapipe.model.context import LayerContext, Unit
from megapipe.model.deep_ep import DeepRoutes
from megapipe.model.dispatch import KeptRouting, Routes, Routing, rows_by_expert
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.mlp import MLP
from megapipe.model.mlp import formulas as activation_formulas
from megapipe.model.node_dispatch import NodeRoutes
from megapipe.model.segments import (
    FIRST,
    NOTHING,
    Again,
    Element,
    Elements,
    Operator,
    Remade,
    Segment,
    again_if,
    input_recompute,
    run_branch,
    tensor_of,
)
from megapipe.tensor_parallel.gemms import Gemms, RowGroups, at_least_fp32
from megapipe.tensor_parallel.gradients import GradientSlot, InputRecompute, QueuedGradient, WeightQueue, add_to_grad

# of a branch: routing and rows; weights and rows; all three
ROWS, WEIGHTED, SENT = slice(-2, None), slice(-2, None), slice(-3, None)
OUTSIDE = LayerContext(None, None, False, None)  # of a router that is called on its own, not in training


class MoE(nn.Module):
    """Router, experts, perhaps shared experts: elements from [s, b, h] (a slice of s with sequence parallelism) to the
    same.

    Raises ConfigError for tp without sequence parallelism.
    """

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        model, tp = factory.config, factory.tp
        if tp.size > 1 and not factory.sequence_parallel:
            raise ConfigError(
                f"--num-experts with tensor parallel size {tp.size} needs --sequence-parallel: without it every tp "
                "rank would send the same tokens to the experts"
            )
        has_shared = model.moe_shared_expert_intermediate_size is not None
        self.recompute = factory.recompute
        if has_shared and "shared_experts" in factory.recompute:
            self.recompute -= {"layernorm"}  # shared experts that run again keep the output of the norm before them
        self.router = Router(model, tp, factory.experts.dp, factory.experts.cp)
        self.experts = ExpertWeights(layer, factory)
        self.groups = factory.experts
        self.copies_there = self.groups.deep_ep is not None  # not before tokens are sent
        self.places = Elements([Segment("places", Places(model), self._tokens)])
        self.by_expert = Elements([Segment("rows_by_expert", rows_by_expert, has_rows=True)])
        self.permuted = Elements([Segment("permuted", permuted, has_rows=True)])
        # by whether no row is dropped
        self.copies, self.sums = (
            {is_whole: Elements([Segment(name, kind(is_whole), has_rows=True)]) for is_whole in (False, True)}
            for name, kind in (("copies", Copies), ("sums", Sums))
        )
        self.shared_experts: SharedExperts | None = None
        if model.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(layer, factory, model.moe_shared_expert_intermediate_size)

    def elements(self, norm: Elements = NOTHING) -> Iterator[Element]:
        """Yield the elements of the branch. norm: those before the router.

        Within them a branch has the normalized tokens x [s, b, h], which shared experts see, or without any the shape
        of x, and what `route` returns.
        """
        if "moe" in self.recompute:
            with_norm = "layernorm" in self.recompute
            yield from () if with_norm else norm
            inner = Elements([*(norm if with_norm else ()), *self._elements()])
            yield Again(inner, kept=KeptRouting, give=lambda context, kept: replace(context, kept_routing=kept))
        else:
            yield from again_if("layernorm" in self.recompute, norm)
            yield from self._elements()

    def _elements(self) -> Iterator[Element]:
        shared = self.shared_experts

        def seen(x: Tensor | Remade) -> Tensor | Remade | torch.Size:
            return x if shared is not None else tensor_of(x).shape

        yield Operator("router", lambda context, x: (seen(x), *self.route(x, context)))
        yield Operator("dispatch", _sent if self.copies_there else _dispatched, SENT)
        if self.copies_there:
            yield from self.experts.elements
            yield Operator("combine", lambda context, routing, rows: routing.routes.combine(rows), ROWS)
        else:
            yield Operator("rows", self._by_expert, SENT)
            yield from self.experts.elements
            yield Operator("results", self._by_rank, ROWS)
            yield Operator("combine", lambda context, routing, rows: (routing, routing.routes.combine(rows)), ROWS)
            yield Operator("sums", self._sums, ROWS)
        if shared is None:
            # autograd forbids in-place operations, as the residual sum is one, on a view that a recomputed range makes
            view = torch.ops.aten._unsafe_view
            yield Operator("output", lambda context, shape, output: view(output, shape))
        else:
            yield Operator("shared_experts", lambda context, x: shared(x, context), FIRST)
            yield Segment("output", _sum_of_experts)

    def route(self, x: Tensor | Remade, context: LayerContext) -> tuple[Routing, Tensor, Tensor]:
        """Return the routing, and the weights [n] and rows [n, h] to dispatch. x: [s, b, h].

        Without capacities and padding n = k t. Exchanges the numbers of rows, and waits for them, unless all experts
        get as many. Where DeepEP sends tokens they are not copied yet: weights [t, k] and tokens [t, h].
        """
        weights, routing = self._decide(x, context)
        if self.copies_there:
            return routing, weights, tensor_of(x).flatten(0, -2)
        values = routing.order, routing.slots, weights, tensor_of(x)
        return routing, *run_branch(self.copies[self._is_whole(routing)], values, context)

    def _decide(self, value: Tensor | Remade, context: LayerContext) -> tuple[Tensor, Routing]:
        """Return the weights [t, k] and the routing, in a recompute that of the forward."""
        x, kept, router = tensor_of(value), context.kept_routing, self.router
        weights, chosen = router(x, context, input_recompute(value))
        if kept is not None and kept.is_reused:
            assert kept.routing is not None
            return weights, kept.routing
        padding = router.padding(context, len(chosen))
        capacity = router.capacity(chosen.shape[0], padding)
        load, kept_load, order, slots = run_branch(self.places, (chosen, weights.detach()), context)
        if self.copies_there:
            sent = chosen.masked_fill(slots >= kept_load.sum(), -1)
            routing = Routing(chosen, None, None, DeepRoutes.unsent(sent, router.num_experts, self.groups))
        else:
            routing = Routing(chosen, *self._routes(order, slots, kept_load, context))
        if context.dropout_key is not None:
            router.record(context.unit, load, capacity)
        if kept is not None:
            kept.routing = routing
        return weights, routing

    def _tokens(self, context: LayerContext, chosen: Tensor) -> tuple[Any, ...]:
        """Return the operands of `Places`: which tokens are padding, and the capacity."""
        padding = self.router.padding(context, len(chosen))
        return padding, self.router.capacity(chosen.shape[0], padding)

    def _by_expert(
        self, context: LayerContext, routing: Routing, weights: Tensor, rows: Tensor
    ) -> tuple[Routing, Tensor, Tensor]:
        """Return the routing, and the dispatched weights and rows of all ranks of etp, expert by expert."""
        routes = routing.routes
        assert isinstance(routes, Routes)
        weights, rows = routes.of_all(weights), routes.of_all(rows)
        if routes.order is not None:
            weights, rows = run_branch(self.permuted, (routes.order, routes.back, weights, rows), context)
        return routing, weights, rows

    def _by_rank(self, context: LayerContext, routing: Routing, results: Tensor) -> tuple[Routing, Tensor]:
        """Return the routing and the results of the dispatched rows. results: in the order of `_by_expert`."""
        routes = routing.routes
        assert isinstance(routes, Routes)
        if routes.order is not None:
            (results,) = run_branch(self.permuted, (routes.back, routes.order, results), context)
        return routing, routes.of_own(results)

    def _sums(self, context: LayerContext, routing: Routing, results: Tensor) -> Tensor:
        """Return the sums of each token's results [t, h]. results: [n, h], ordered as by `route`."""
        values = results, routing.order, routing.slots
        (sums,) = run_branch(self.sums[self._is_whole(routing)], values, context)
        return sums  # type: ignore[no-any-return]

    def _is_whole(self, routing: Routing) -> bool:
        """Return True if no row is dropped."""
        assert routing.order is not None and routing.slots is not None
        is_limited = self.router.model.moe_expert_capacity_factor is not None
        return not is_limited and routing.order.shape[0] == routing.slots.numel()

    def _routes(
        self, order: Tensor, slots: Tensor, load: Tensor, context: LayerContext
    ) -> tuple[Tensor, Tensor, Routes]:
        """Return the order of the rows to send, their slots and their routes. order: with rows that are not sent at the
        end. load: [experts], rows to send to each.
        """
        model = self.router.model
        if model.moe_pad_expert_input_to_capacity:
            capacity = expert_capacity(model, slots.shape[0])  # of a sequence without padding: the same on all ranks
            assert capacity is not None
            return order[:-1], slots, Routes.even(capacity, load.shape[0], self.groups, order.device)
        # a dry run has no values
        num_rows = slots.numel()
        if (capacity := expert_capacity(model, slots.shape[0])) is not None:
            num_rows = min(num_rows, capacity * load.shape[0])
        if self.groups.has_levels:
            node_routes = self._node_routes(slots, load, num_rows)
            return order[: sum(node_routes.sent)], slots, node_routes
        routes = Routes.of(load, num_rows, self.groups)
        if routes.arrived is not None:
            places = torch.arange(sum(routes.gathered), device=order.device)
            there, back = run_branch(self.by_expert, (places, routes.arrived), context)
            routes = replace(routes, order=there, back=back, arrived=None)
        return order[: sum(routes.sent)], slots, routes

    def _node_routes(self, slots: Tensor, load: Tensor, num_rows: int) -> NodeRoutes:
        """Return the routes of tokens that go once to a node. num_rows: in a dry run."""
        model, groups = self.router.model, self.groups
        if load.is_meta:
            pairs = min(num_pairs(model, slots.shape[0], groups.nodes.size), num_rows)
            return NodeRoutes.planned(load, num_rows, pairs, slots.shape[1], groups, model.moe_combine_in_node)
        return NodeRoutes.of_slots(load, slots, groups, model.moe_combine_in_node)


class SharedExperts(MLP):
    """An MLP that sees every token; its output is multiplied by sigmoid(x gate_weight^T) with a gate."""

    def __init__(self, layer: int, factory: LayerFactory, width: int) -> None:
        recompute = factory.recompute & {"activation"}  # it receives the output of the norm before it
        if "shared_experts" in factory.recompute:
            recompute = frozenset({"mlp"})
        super().__init__(layer, factory.of(replace(factory.config, ffn_hidden_size=width), recompute))
        self.inner = Elements(self.elements())
        self.gate_weight: nn.Parameter | None = None
        if factory.config.moe_shared_expert_gate:
            self.gate_weight = nn.Parameter(torch.empty(1, factory.config.hidden_size, device="meta"))

    def forward(self, x: Tensor | Remade, context: LayerContext) -> Tensor:
        """Return the result for x, [s, b, h] both."""
        (output,) = run_branch(self.inner, (x,), context)
        if self.gate_weight is None:
            return output  # type: ignore[no-any-return]
        tokens = tensor_of(x)
        return output * _linear(tokens, self.gate_weight, None, tokens.dtype, input_recompute(x)).sigmoid()


class Router(nn.Module):
    """The choice of k experts for each token, with the losses that balance it.

    Scores are in at least fp32. Ties go to the expert, or the group, of the smaller number. expert_bias: [experts]
    fp32, added to the scores for the choice alone (Wang et al. 2024, arXiv:2408.15664); changed after each step by
    train.step. loads: tokens of this rank for each expert, [experts] int64, by number of the microbatch in the
    global batch and of its slice; a replay writes the same again. dropped: rows above the capacity, likewise.
    loss_scale: factor on gradients, asked for in the backward.

    The losses of a microbatch in slices are those of the whole one: a slice's part of them depends on the tokens of all
    slices, which are known in its backward.
    """

    expert_bias: Tensor | None

    def __init__(self, model: LayerConfig, tp: Group, dp: Group | None = None, cp: Group | None = None) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.model, self.tp, self.num_experts = model, tp, model.num_experts
        self.dp = Group.alone("dp") if dp is None else dp
        self.cp = Group.alone("cp") if cp is None else cp
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.dtype = (
            None if model.moe_router_dtype is None else getattr(torch, DTYPES[model.moe_router_dtype].torch_name)
        )
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size, device="meta"))
        self.bias = nn.Parameter(torch.empty(model.num_experts, device="meta")) if model.add_bias_linear else None
        bias = torch.zeros(model.num_experts) if model.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias, persistent=False)
        self.measures = ("squares",) * bool(model.moe_z_loss_coeff) + ("counts", "sums") * bool(model.balance_losses)
        self.choice = {  # by whether losses are needed
            trains: Elements([Segment("router", Choice(model, self.measures * trains, tp.rank), self._operands)])
            for trains in (False, True)
        }
        self.loads: dict[Unit, Tensor] = {}
        self.dropped: dict[Unit, Tensor] = {}
        self.losses: dict[Unit, dict[str, Tensor]] = {}  # this rank's parts
        # of a microbatch by its slices: the tokens of each expert, and the sums of their shares
        self._slices: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._sums: dict[int, Tensor] = {}  # of `_global_counts` over the microbatches up to a number

    def clear(self) -> None:
        """Forget what the forwards of a step have recorded."""
        for kept in (self.loads, self.dropped, self.losses, self._slices, self._sums):
            kept.clear()

    def padding(self, context: LayerContext, num_tokens: int) -> Tensor | None:
        """Return [s, b], True for those of this rank's num_tokens = s b tokens that are padding; None if none is."""
        real = context.real
        return None if real is None else ~real.held(num_tokens // real.mask.shape[1], self.tp.rank)

    def capacity(self, num_tokens: int, padding: Tensor | None) -> int | Tensor | None:
        """Return the most rows that this rank sends to one expert, by the tokens that are not padding."""
        if padding is None:
            return expert_capacity(self.model, num_tokens)
        rows = rows_of_capacity(self.model, (~padding).sum(dtype=torch.float64))
        return None if rows is None else rows.ceil().long()

    def record(self, unit: Unit, load: Tensor, capacity: int | Tensor | None) -> None:
        """Keep what a forward in training has chosen. load: [experts]."""
        self.loads[unit] = load
        if capacity is not None:
            self.dropped[unit] = (load - capacity).clamp(min=0).sum()

    @torch.no_grad()
    def take(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the sums over the step's microbatches, and forget them: the load [experts], the dropped rows, and this
        rank's part of each loss with its coefficient.
        """
        loads = torch.stack(list(self.loads.values()) or [torch.zeros(self.num_experts, dtype=torch.int64)])
        losses: dict[str, Tensor] = {}
        for found in self.losses.values():
            for name, loss in found.items():
                losses[name] = losses[name] + loss if name in losses else loss
        dropped = sum(self.dropped.values(), loads.new_zeros(()))
        self.clear()
        return loads.sum(0), dropped, losses

    def forward(
        self, x: Tensor, context: LayerContext = OUTSIDE, again: InputRecompute | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return weights [t, k] in at least fp32 and experts [t, k] int64, t = s b, the best first. x: [s, b, h].

        With the context of a microbatch in training, the backward of the weights is also that of the router's losses.
        In a recompute the experts are those of its forward. again: how the backward makes x again, which is then not
        saved.
        """
        dtype = x.dtype if self.dtype is None else torch.promote_types(x.dtype, self.dtype)
        logits = _linear(x, self.weight, self.bias, dtype, again).to(at_least_fp32(dtype))
        trains = context.dropout_key is not None
        weights, chosen, *measured = run_branch(self.choice[trains], (logits,), context)
        if trains:
            losses = dict(self._losses(dict(zip(self.measures, measured, strict=True)), x.shape, context))
            for loss in losses.values():
                weights = _WithLoss.apply(weights, loss, self.loss_scale, context.loss_weight)
            self.losses[context.unit] = {name: loss.detach() for name, loss in losses.items()}
        return weights, chosen

    def _operands(self, context: LayerContext, logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the operands of `Choice`."""
        kept = context.kept_routing
        given = kept.routing.chosen if kept is not None and kept.is_reused and kept.routing is not None else None
        padding = self.padding(context, logits.shape[0] * logits.shape[1])
        chooses = given is None and not self.model.moe_router_force_load_balancing
        if chooses and self.model.has_sinkhorn and context.dropout_key is not None:
            given = balanced_choice(logits, self.model.moe_router_topk, padding)
        return given, self.expert_bias, padding

    def _losses(
        self, measured: dict[str, Tensor], shape: torch.Size, context: LayerContext
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the losses with their coefficients, by name.

        measured: what `Choice` has measured. shape: of the tokens, [s, b, ...].
        """
        model, batch, real, of_slice = self.model, shape[1], context.real, context.slice
        length: int | Tensor = shape[0] * self.tp.size * self.cp.size  # of each sequence
        if of_slice is not None:
            length = of_slice.place.seq
        tokens: int | Tensor = length * batch
        if real is not None:
            lengths = real.lengths.to(at_least_fp32(self.weight.dtype))
            length, tokens = lengths.clamp(min=1)[:, None], lengths.sum().clamp(min=1)
        if model.moe_z_loss_coeff:
            yield "z_loss", measured["squares"] * (model.moe_z_loss_coeff / tokens)
        if not model.balance_losses:
            return
        sums, counts = measured["sums"], measured["counts"]
        for group in (self.tp, self.cp):
            all_reduce(counts, group)
        microbatch = context.unit[0]
        if of_slice is None:
            yield from self._balance_losses(sums, counts, length, tokens, microbatch)
            return
        found = self._slices.setdefault(microbatch, {})
        found[of_slice.place.number] = counts, sums.detach()

        def of_all(sums: Tensor) -> dict[str, Tensor]:
            counts = torch.stack([each for each, _ in found.values()]).sum(0)
            return dict(self._balance_losses(sums, counts, length, tokens, microbatch))

        is_last, values = of_slice.place.stop == of_slice.place.seq, dict[str, Tensor]()
        if is_last:
            values = of_all(torch.stack([each for _, each in found.values()]).sum(0))
        later = _SumInBackward.apply(sums, of_all)
        for name in model.balance_losses:
            yield name, later + values.get(name, 0.0)
            later = later.detach()

    def _balance_losses(
        self, sums: Tensor, counts: Tensor, length: int | Tensor, tokens: int | Tensor, microbatch: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the balance losses of a microbatch by name, or the parts of them that its slices have.

        sums: of the shares, of all tokens or of a slice's. counts: tokens of each expert. Both [b, experts]. length: of
        each sequence; tokens: of all.
        """
        for name, coefficient in self.model.balance_losses.items():
            if name == "seq_aux_loss":
                yield name, self._balance_loss(sums, counts, length, coefficient / sums.shape[0])
                continue
            whole, total = counts.sum(0, keepdim=True) if len(counts) > 1 else counts, tokens
            if name == "global_aux_loss":
                whole, total = self._global_counts(whole, microbatch)
                coefficient *= self.dp.size  # gradients are averaged over dp, but this is the sum of its ranks' parts
            yield name, self._balance_loss(sums, whole, total, coefficient)

    def _global_counts(self, counts: Tensor, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return the mean of such counts over the microbatches of all dp ranks up to this one, by number, and the
        tokens of these ranks' microbatches of this number.

        Megatron's running mean, but in the order of the numbers; a replay finds what the forward has summed.
        """
        number = microbatch // self.dp.size
        if number not in self._sums:
            counts = counts.clone()
            all_reduce(counts, self.dp)
            if number:
                counts += self._sums[number - 1]
            self._sums[number] = counts
        own = self._sums[number] - self._sums[number - 1] if number else self._sums[number]
        return self._sums[number] / (number + 1), own.sum().clamp(min=1) / self.model.moe_router_topk

    def _balance_loss(self, sums: Tensor, counts: Tensor, total: int | Tensor, coefficient: float) -> Tensor:
        """Return coefficient x experts / (k T^2) x sum over experts of their tokens x their sum of shares, summed over
        the rows of counts [b or 1, experts].

        sums: of the shares of each sequence, [b, experts]. T: the tokens that counts count, in `total`, [b, 1] for each
        row (Shazeer et al. 2017; Wang et al. 2024, arXiv:2408.15664).
        """
        factor = coefficient * self.num_experts / (self.model.moe_router_topk * total * total)
        return (factor * counts * sums).sum()


@dataclass(frozen=True)
class Choice:
    """(logits [s, b, experts], an earlier choice or None, the experts' bias or None, padding [s, b] or None) ->
    weights [t, k], experts [t, k] and what it measures.

    measures: `squares`, the sum of the squared logsumexp of the logits; of each sequence `counts`, the tokens that
    would choose an expert by its share alone, and `sums`, those of the shares, both [b, experts]. rank: of tp.
    """

    model: LayerConfig
    measures: tuple[str, ...]
    rank: int

    def __call__(
        self, logits: Tensor, chosen: Tensor | None, bias: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, ...]:
        model, topk, num_experts = self.model, self.model.moe_router_topk, logits.shape[-1]
        is_softmax = model.moe_router_score_function == "softmax"
        whole = logits if is_softmax else logits.sigmoid()
        if is_softmax and model.moe_router_pre_softmax:
            whole = logits.softmax(-1)
        scores = whole.flatten(0, 1)
        if chosen is None and model.moe_router_force_load_balancing:
            places = torch.arange(scores.shape[0] * topk, device=scores.device) + self.rank
            chosen = (places % num_experts).view(-1, topk)
        elif chosen is None:
            seen = scores.detach()
            if bias is not None:  # it is added to shares of logits
                seen = (seen.softmax(-1) if is_softmax and not model.moe_router_pre_softmax else seen) + bias
            chosen = self._chosen(seen)
        weights = scores.gather(1, chosen)
        if is_softmax and not model.moe_router_pre_softmax:
            weights = weights.softmax(-1)
        elif not is_softmax and topk > 1 and model.moe_router_norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if model.moe_router_topk_scaling_factor is not None:
            weights = weights * model.moe_router_topk_scaling_factor
        return weights, chosen, *self._measured(logits, whole, padding)

    def _chosen(self, scores: Tensor) -> Tensor:
        """Return the best experts [t, k] by scores [t, experts], in the best groups where there are groups."""
        model, topk, groups = self.model, self.model.moe_router_topk, self.model.moe_router_num_groups
        if groups is not None:
            taken = model.moe_router_group_topk or groups
            grouped = scores.view(-1, groups, scores.shape[-1] // groups)
            best = grouped.sort(dim=-1, descending=True, stable=True).values
            best = best[..., : model.moe_router_group_score_topk].sum(-1)
            kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :taken]
            is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
            scores = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
        # a copy, since a view would keep the indices of all experts
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()

    def _measured(self, logits: Tensor, whole: Tensor, padding: Tensor | None) -> Iterator[Tensor]:
        """Yield what is measured, in the order of its names. whole: the scores, [s, b, experts]."""
        model = self.model
        if "squares" in self.measures:
            squares = logits.logsumexp(-1).square()
            yield (squares if padding is None else squares.masked_fill(padding, 0.0)).sum()
        if "counts" in self.measures:
            shares = whole
            is_softmax = model.moe_router_score_function == "softmax"
            if not (is_softmax and model.moe_router_pre_softmax):
                shares = logits.softmax(-1) if is_softmax else whole / whole.sum(-1, keepdim=True)
            best = shares.detach().sort(dim=-1, descending=True, stable=True).indices[..., : model.moe_router_topk]
            choices = torch.zeros_like(shares).scatter_(-1, best, 1.0)
            if padding is not None:
                choices, shares = (each.masked_fill(padding[..., None], 0.0) for each in (choices, shares))
            yield choices.sum(0)
            yield shares.sum(0)


SINKHORN_TOLERANCE, SINKHORN_EPSILON = 1e-4, 1e-8  # of Megatron: on the mean change of the experts' factors


@torch.no_grad()
def balanced_choice(logits: Tensor, topk: int, padding: Tensor | None) -> Tensor:
    """Return the experts [t, k] int64 of this rank's tokens, t = s b, so that each expert gets about as many.

    Sinkhorn's iteration, as in Megatron: factors of tokens and of experts with which the rows of exp(logits) sum to
    1 / t and its columns to 1 / experts (Lewis et al. 2021, arXiv:2103.16716; Clark et al. 2022, arXiv:2202.01169).
    The host waits for the end of each iteration. logits: [s, b, experts]; padding [s, b] takes no share.
    """
    shares, num_tokens = logits.flatten(0, 1).exp(), float(logits.shape[0] * logits.shape[1])
    if padding is not None:
        shares = shares.masked_fill(padding.reshape(-1, 1), 0.0)
        num_tokens = max(1.0, float((~padding).sum()))
    of_experts, is_done = torch.ones_like(shares[0]), False
    while not is_done:
        of_tokens = (1 / num_tokens) / ((of_experts * shares).sum(1) + SINKHORN_EPSILON)
        before, columns = of_experts, (of_tokens[:, None] * shares).sum(0)
        of_experts = (1 / shares.shape[1]) / (columns + SINKHORN_EPSILON)
        # a dry run has no values
        is_done = shares.is_meta or not bool((before - of_experts).abs().mean() > SINKHORN_TOLERANCE)
    balanced = of_experts * shares * of_tokens[:, None]
    return balanced.sort(dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()


@dataclass(frozen=True)
class Places:
    """(experts [t, k], weights [t, k], padding [t] or None, capacity or None) -> of each expert the tokens that choose
    it and those that it gets, both [experts]; order and slots as in `Routing`, all rows in the order of experts.

    A row's place among those of its expert is the number of tokens before it with the same expert.
    """

    model: LayerConfig

    def __call__(
        self, chosen: Tensor, weights: Tensor, padding: Tensor | None, capacity: int | Tensor | None
    ) -> tuple[Tensor, ...]:
        assert self.model.num_experts is not None
        num_experts, num_rows = self.model.num_experts, chosen.numel()
        # padding chooses an expert behind the last one, which no rank has
        experts = chosen if padding is None else chosen.masked_fill(padding.reshape(-1, 1), num_experts)
        tokens = torch.zeros(num_experts + 1, len(chosen), dtype=torch.int32, device=chosen.device)
        before = tokens.scatter_(0, experts.t(), 1).cumsum(1, dtype=torch.int32)
        load = before[:-1, -1].long()
        places = before.gather(0, experts.t()).t() - 1
        if capacity is not None and self.model.moe_token_drop_policy == "probs":
            places = _by_weight(experts, weights, load)
        sent = load if capacity is None else load.clamp(max=capacity)
        begins, end = F.pad(sent.cumsum(0) - sent, (0, 1)), num_rows
        if self.model.moe_pad_expert_input_to_capacity:
            most = expert_capacity(self.model, len(chosen))
            assert most is not None
            begins, end = torch.arange(num_experts + 1, device=chosen.device) * most, num_experts * most
        slots = begins[experts] + places
        if padding is not None or capacity is not None:
            is_kept = experts < num_experts
            slots = torch.where(is_kept if capacity is None else is_kept & (places < capacity), slots, end)
            end += 1  # all dropped rows share the last one
        order = torch.full((end,), num_rows, device=chosen.device)
        return load, sent, order.scatter_(0, slots.flatten(), torch.arange(num_rows, device=chosen.device)), slots


def _by_weight(experts: Tensor, weights: Tensor, load: Tensor) -> Tensor:
    """Return the places [t, k] of rows among those of their expert, the largest weight first."""
    first = weights.flatten().argsort(descending=True, stable=True)
    order = first[experts.flatten()[first].argsort(stable=True)]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return places.view_as(experts) - F.pad(load.cumsum(0) - load, (0, 1))[experts]


class ExpertWeights(nn.Module):
    """The experts of this rank: weight1 [n gates f, h] and weight2 [n f, h], n = experts / ep, f = width / etp.

    Both are the weights of the experts one after the other, as are the biases, bias1 [n gates f] and bias2 [n h / etp]:
    a rank adds its h / etp channels of bias2 to its part of the sum over etp. Gradients wait for W where the backward
    is split.
    """

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        config, experts = factory.config, factory.experts
        assert config.num_experts is not None
        self.queue: WeightQueue = factory.queue
        self.slots: dict[str, GradientSlot | None] = dict.fromkeys(("weight1", "weight2", "bias1", "bias2"))
        held = config.num_experts // experts.ep.size
        self.gemms: dict[str, Gemms] = {name: factory.gemms(layer, held) for name in ("weight1", "weight2")}
        kernels = factory.kernels
        self.is_grouped = kernels.groups_experts
        pointwise = kernels.pointwise if kernels.compiles else None
        kind, has_bias = KINDS[config.activation], config.add_bias_linear
        function = WeightedActivation(*activation_formulas(config, pointwise))
        element: Element = Segment("expert_activation", function, at=WEIGHTED, has_rows=True)
        if kind.function is not None:  # an extension's function cannot be traced
            element = Operator("expert_activation", lambda context, *values: function(*values), WEIGHTED)
        inputs = Segment("expert_inputs", weighted_inputs, at=WEIGHTED, has_rows=True)
        self.elements = Elements(
            [
                *([inputs] if config.moe_apply_probs_on_input else []),
                Operator("expert_fc1", self._first, SENT),
                *again_if("moe_act" in factory.recompute, Elements([element]), WEIGHTED),
                Operator("expert_fc2", self._second, SENT if has_bias else ROWS),
            ]
        )
        gates = 2 if kind.is_gated else 1
        rows = held * (config.expert_ffn_size // experts.etp.size)
        self.weight1 = nn.Parameter(torch.empty(gates * rows, config.hidden_size, device="meta"))
        self.weight2 = nn.Parameter(torch.empty(rows, config.hidden_size, device="meta"))
        self.bias1: nn.Parameter | None = None
        self.bias2: nn.Parameter | None = None
        channels = config.hidden_size // experts.etp.size
        self.channels = slice(experts.etp.rank * channels, (experts.etp.rank + 1) * channels)  # of bias2 on this rank
        if config.add_bias_linear:
            self.bias1 = nn.Parameter(torch.empty(gates * rows, device="meta"))
            self.bias2 = nn.Parameter(torch.empty(held * channels, device="meta"))

    def _first(self, context: LayerContext, routing: Routing, weights: Tensor, rows: Tensor) -> tuple[Any, ...]:
        """Return the routing, the weights, for a bias of the second linear twice, and the product of the first one."""
        product = self._product(rows, routing, 1)
        return (routing, weights, product) if self.bias2 is None else (routing, weights, weights, product)

    def _second(self, context: LayerContext, routing: Routing, *values: Any) -> tuple[Routing, Tensor]:
        """Return the routing and the product of the second linear. values: perhaps the weights, and its input."""
        *weights, rows = values
        product = self._product(rows, routing, 2)
        if self.bias2 is not None:
            counts = routing.routes.expert_rows
            product = _WeightedBias.apply(product, self.bias2, *weights, counts, self)
        return routing, product

    def _product(self, rows: Tensor | Remade, routing: Routing, number: int) -> Tensor:
        """Return the product of linear 1, with its bias, or 2, without."""
        weight, bias = (self.weight1, self.bias1) if number == 1 else (self.weight2, None)
        routes, again = routing.routes, input_recompute(rows)
        groups = RowGroups(routes.expert_rows, number == 2, routes.ends if self.is_grouped else None)
        return _Product.apply(tensor_of(rows), weight, bias, groups, self, number, again)  # type: ignore[no-any-return]


class _Product(Function):
    """x_e W_e^T + b_e of linear 1, or x_e W_e of linear 2, for the rows of each expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: RowGroups,
        owner: ExpertWeights,
        number: int,
        recompute: InputRecompute | None,
    ) -> Tensor:
        """recompute: of x from tensors that are saved anyway."""
        inputs = (x,) if recompute is None else recompute.inputs
        ctx.save_for_backward(weight, *inputs)
        # the parameters themselves too: under hooks that pack saved tensors (offload), unpacking yields another tensor
        ctx.arguments = weight, bias, groups, owner, number, None if recompute is None else recompute.function
        output = owner.gemms[f"weight{number}"].forward_groups(x, weight, groups)
        if bias is not None:
            for rows, values in zip(output.split(groups.counts), bias.view(len(groups.counts), -1), strict=True):
                rows += values
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (values, *inputs), (weight, bias, groups, owner, number, function) = ctx.saved_tensors, ctx.arguments
        name = f"weight{number}"
        if ctx.needs_input_grad[1]:
            saved = tuple(x.detach() for x in inputs)  # a queued gradient must not hold the graph
            product = owner.gemms[name], groups, not owner.queue.is_deferring
            owner.queue.submit(_WeightGradients(grad, saved, function, *product, owner.slots[name], weight))
        if bias is not None and ctx.needs_input_grad[2]:
            owner.queue.submit(_BiasGradients(grad, None, groups.counts, owner.slots["bias1"], bias))
        return owner.gemms[name].input_gradient_groups(grad, values, groups), None, None, None, None, None, None


@dataclass(eq=False)
class _WeightGradients(QueuedGradient):
    """grad_e^T x_e for every expert, or x_e^T grad_e for linear 2, waiting for W. An expert without rows gets no
    gradient, but is counted.

    inputs: x, or what `function` makes x of. then_input: the input gradient comes next.
    """

    grad: Tensor
    inputs: tuple[Tensor, ...]
    function: Callable[[Tensor], Tensor] | None
    gemms: Gemms
    groups: RowGroups
    then_input: bool
    slot: GradientSlot | None
    weight: Tensor

    @torch.no_grad()
    def accumulate(self) -> None:
        x = self.inputs[0] if self.function is None else self.function(*self.inputs)
        slot = GradientSlot(torch.zeros_like(self.weight)) if self.slot is None else self.slot
        self.gemms.add_weight_gradient_groups(slot, self.grad, x, self.groups, then_input=self.then_input)
        if self.slot is None:
            add_to_grad(self.weight, slot.main_grad)
        else:
            self.slot.ready()


class _WeightedBias(Function):
    """rows + w b_e of this rank's channels, in place, w the weight of each row: that of the results, which came before
    the second linear, would leave the bias as it is.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor, weights: Tensor, counts: tuple[int, ...], owner: ExpertWeights
    ) -> Tensor:
        ctx.mark_dirty(rows)
        ctx.save_for_backward(weights, bias)
        ctx.arguments = bias, counts, owner
        channels, biases = rows[:, owner.channels].split(counts), bias.view(len(counts), -1)
        for own, values, scale in zip(channels, biases, weights.split(counts), strict=True):
            own += scale[:, None] * values
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights, values), (bias, counts, owner) = ctx.saved_tensors, ctx.arguments
        channels, biases = grad[:, owner.channels], values.view(len(counts), -1).to(weights.dtype)
        if ctx.needs_input_grad[1]:
            owner.queue.submit(_BiasGradients(channels, weights, counts, owner.slots["bias2"], bias))
        pairs = zip(channels.split(counts), biases, strict=True)
        return grad, None, torch.cat([own.to(weights.dtype) @ each for own, each in pairs]), None, None


@dataclass(eq=False)
class _BiasGradients(QueuedGradient):
    """The sum of every expert's rows, perhaps times their weights, waiting for W."""

    rows: Tensor
    weights: Tensor | None
    counts: tuple[int, ...]
    slot: GradientSlot | None
    bias: Tensor

    @torch.no_grad()
    def accumulate(self) -> None:
        dtype = self.bias.dtype if self.slot is None else self.slot.main_grad.dtype
        rows = self.rows if self.weights is None else self.rows * self.weights[:, None]
        sums = torch.cat([each.sum(0, dtype=dtype) for each in rows.split(self.counts)])
        if self.slot is None:
            add_to_grad(self.bias, sums)
        else:
            self.slot.add(sums)
            self.slot.ready()


def _dispatched(context: LayerContext, routing: Routing, weights: Tensor, rows: Tensor) -> tuple[Any, ...]:
    """Return the routing, and the weights and rows that the ranks of ep send to this one."""
    assert isinstance(routing.routes, Routes)
    return routing, *routing.routes.dispatch(weights, rows)


def _sent(context: LayerContext, routing: Routing, weights: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    """Return the routing of tokens that DeepEP sends, and the weights and rows of this rank's experts."""
    assert isinstance(routing.routes, DeepRoutes)
    routes, own, rows = routing.routes.send(weights, tokens)
    return routing._replace(routes=routes), own, rows


def _sum_of_experts(shared: Tensor, output: Tensor) -> Tensor:
    """Return the sum of the shared experts' results [s, b, h] and the experts' [t, h]."""
    return output.view_as(shared) + shared


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, again: InputRecompute | None) -> Tensor:
    """Return x W^T + b in a dtype that is at least as wide as that of x. again: of x, which is then not saved."""
    if x.dtype == dtype and again is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, dtype, again)


class _Linear(Function):
    """x W^T + b; x is saved as it is, or recomputed, and cast again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, again: InputRecompute | None
    ) -> Tensor:
        ctx.save_for_backward(weight, *((x,) if again is None else again.inputs))
        ctx.arguments = dtype, None if bias is None else bias.dtype, None if again is None else again.function
        if x.is_cuda and bias is None and dtype == torch.float32 and x.dtype == weight.dtype:
            # the products of 16-bit numbers are exact in fp32, in which they are summed
            return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=dtype).view(*x.shape[:-1], -1)
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight, *inputs), (dtype, bias_dtype, function) = ctx.saved_tensors, ctx.arguments
        x = inputs[0] if function is None else function(*inputs)
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(dtype)
        of_bias = None if bias_dtype is None else grad.flatten(0, -2).sum(0).to(bias_dtype)
        return (grad @ weight.to(dtype)).to(x.dtype), of_weight.to(weight.dtype), of_bias, None, None


@dataclass(frozen=True)
class WeightedActivation:
    """(weights [n], x [n, F or 2 F]) -> the activation of x times the weight of each row. function, gradient: its
    `formulas`.
    """

    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, weights: Tensor, x: Tensor) -> Tensor:
        return _WeightedActivation.apply(x, weights, self.function, self.gradient)  # type: ignore[no-any-return]


def weighted_inputs(weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights that results are left with, ones [n], and the rows [n, h] times their weights."""
    return torch.ones_like(weights), _WeightedActivation.apply(rows, weights, torch.clone, lambda grad, x: grad)


@dataclass(frozen=True)
class Copies:
    """(order [n], slots [t, k], weights [t, k], tokens [s, b, h]) -> the weights [n] and rows [n, h] to send, zeros for
    padding. is_whole: no row is dropped or padded.
    """

    is_whole: bool

    def __call__(self, order: Tensor, slots: Tensor, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        own = _Copies.apply(weights.flatten(), order, slots.view(-1, 1), self.is_whole)
        return own, _Copies.apply(x.flatten(0, -2), order, slots, self.is_whole)


@dataclass(frozen=True)
class Sums:
    """(results [n, h], order [n], slots [t, k]) -> the sums of each token's results [t, h], a dropped row's being 0."""

    is_whole: bool

    def __call__(self, results: Tensor, order: Tensor, slots: Tensor) -> Tensor:
        return _Sums.apply(results, order, slots, self.is_whole)  # type: ignore[no-any-return]


def permuted(order: Tensor, back: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Return each rows[order]. order: a permutation; back: its inverse."""
    return tuple(_Permuted.apply(each, order, back) for each in rows)


# The functions below are traced with their backwards: they have no `once_differentiable`, which graphs cannot contain.


class _WeightedActivation(Function):
    """function(x) times a weight for each row, in the dtype of x; saves x and the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        function: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.formulas = function, gradient
        return function(x).mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weights), (function, gradient) = ctx.saved_tensors, ctx.formulas
        of_weights = function(x).to(weights.dtype).mul_(grad).sum(-1)
        return gradient(grad.clone().mul_(weights[:, None]), x), of_weights, None, None


class _Copies(Function):
    """Row i is token order[i] // k, zeros for padding. Backward: a token's gradient is the sum over its copies."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, slots: Tensor, is_whole: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.is_whole = is_whole
        return _taken(tokens, order // slots.shape[1], is_whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return _taken(grad, slots, ctx.is_whole).sum(1), None, None, None


class _Sums(Function):
    """The adjoint of `_Copies`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, slots: Tensor, is_whole: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.topk, ctx.is_whole = slots.shape[1], is_whole
        return _taken(rows, slots, is_whole).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return _taken(grad, order // ctx.topk, ctx.is_whole), None, None, None


class _Permuted(Function):
    """rows[order]; the backward is that by the inverse: no sum, in any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


class _SumInBackward(Function):
    """0, with the gradient of the sum of losses(x), which are asked for in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, losses: Callable[[Tensor], dict[str, Tensor]]) -> Tensor:
        ctx.losses = losses
        ctx.save_for_backward(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            total = torch.stack(list(ctx.losses(x).values())).sum()
        return torch.autograd.grad(total, x)[0] * grad, None


class _WithLoss(Function):
    """x, so that the backward of x also runs that of a loss, with gradient scale() x weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Callable[[], float], weight: Tensor | float) -> Tensor:
        ctx.loss = loss.dtype, loss.device
        ctx.factors = scale, weight
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (dtype, device), (scale, weight) = ctx.loss, ctx.factors
        return grad, torch.full((), scale(), dtype=dtype, device=device) * weight, None, None


def _taken(rows: Tensor, index: Tensor, is_whole: bool) -> Tensor:
    """Return rows[index], zeros for a number behind the last row. is_whole: there is none."""
    shape = *index.shape, *rows.shape[1:]
    if is_whole:
        return rows.index_select(0, index.flatten()).view(shape)
    if not len(rows):
        return rows.new_zeros(shape)
    is_there = (index < len(rows)).view(*index.shape, *[1] * (rows.ndim - 1))
    return rows.index_select(0, index.flatten().clamp(max=len(rows) - 1)).view(shape) * is_there
