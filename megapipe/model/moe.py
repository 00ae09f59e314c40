"""`MoE`: a mixture of experts in place of a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538).

    router    [t, h] -> weights and numbers of the k experts of each token, both [t, k]
    dispatch  k copies of each token, in the order of experts, to the ranks of their experts (model/dispatch.py)
    experts   (weight x act(x W1^T)) W2 for the rows of each expert, whose weights travel with them
    combine   sum over j < k of result[j]; the order of its terms does not depend on the grid's ranks

t = s b / tp tokens: with tp every rank routes its slice of the sequence, with cp of its part of it. Padding of a
microbatch goes to no expert and counts in no load, loss or capacity; to it the experts add 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.errors import ConfigError
from megapipe.layers.distinct_nodes import num_pairs
from megapipe.layers.moe import expert_capacity
from megapipe.model.context import LayerContext
from megapipe.model.deep_ep import DeepRoutes
from megapipe.model.dispatch import KeptRouting, Routes, Routing
from megapipe.model.experts import ROWS, SENT, ExpertWeights
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.mlp import MLP
from megapipe.model.node_dispatch import NodeRoutes
from megapipe.model.permutation import Copies, Places, Sums, permuted, rows_by_expert
from megapipe.model.router import Router, wide_linear
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
        return output * wide_linear(tokens, self.gate_weight, None, tokens.dtype, input_recompute(x)).sigmoid()


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
