"""`MoE`: a mixture of experts in place of a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538).

    router    [t, h] -> weights and numbers of the k experts of each token, both [t, k]
    dispatch  k copies of each token, in the order of experts, to the ranks of their experts (model/routing.py)
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

from megapipe.comm.groups import ExpertGroups
from megapipe.config.layers import LayerConfig
from megapipe.errors import ConfigError
from megapipe.model.context import LayerContext
from megapipe.model.deep_ep import DeepDispatch
from megapipe.model.dispatch import AllToAll
from megapipe.model.experts import ExpertWeights
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.mlp import MLP
from megapipe.model.node_dispatch import NodeDispatch
from megapipe.model.permutation import Places
from megapipe.model.router import Router, wide_linear
from megapipe.model.routing import Dispatcher, KeptRouting, Routing
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
from megapipe.sharding.spec import Init, ParamSpec
from megapipe.tensor_parallel.parameter import declared


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
        self.router = Router(model, tp, factory.experts.dp, factory.experts.cp, factory.sequence_parallel)
        self.experts = ExpertWeights(layer, factory)
        self.dispatcher = dispatcher_of(model, factory.experts)
        self.places = Elements([Segment("places", Places(model), self._operands)])
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
        yield from self.dispatcher.rows
        yield from self.experts.elements
        yield from self.dispatcher.sums
        if shared is None:
            # autograd forbids in-place operations, as the residual sum is one, on a view that a recomputed range makes
            view = torch.ops.aten._unsafe_view
            yield Operator("output", lambda context, shape, output: view(output, shape))
        else:
            yield Operator("shared_experts", lambda context, x: shared(x, context), FIRST)
            yield Segment("output", _sum_of_experts)

    def route(self, value: Tensor | Remade, context: LayerContext) -> tuple[Routing, Tensor, Tensor]:
        """Return the routing, in a recompute that of the forward, the weights [t, k] and the tokens. value: of the
        tokens [s, b, h].
        """
        x, kept, router = tensor_of(value), context.kept_routing, self.router
        weights, chosen = router(x, context, input_recompute(value))
        if kept is not None and kept.is_reused:
            assert kept.routing is not None
            return kept.routing, weights, x
        load, kept_load, order, slots = run_branch(self.places, (chosen, weights.detach()), context)
        routing = self.dispatcher.routes(chosen, order, slots, kept_load, context)
        if context.dropout_key is not None:
            _, capacity = self._operands(context, chosen)
            router.record(context.unit, load, capacity)
        if kept is not None:
            kept.routing = routing
        return routing, weights, x

    def _operands(self, context: LayerContext, chosen: Tensor) -> tuple[Any, ...]:
        """Return the operands of `Places`: which tokens are padding, and the capacity."""
        padding = self.router.padding(context, len(chosen))
        return padding, self.router.capacity(chosen.shape[0], padding)


class SharedExperts(MLP):
    """An MLP that sees every token; its output is multiplied by sigmoid(x gate_weight^T) with a gate."""

    declared_last = ("gate_weight",)

    def __init__(self, layer: int, factory: LayerFactory, width: int) -> None:
        recompute = factory.recompute & {"activation"}  # it receives the output of the norm before it
        if "shared_experts" in factory.recompute:
            recompute = frozenset({"mlp"})
        super().__init__(layer, factory.of(replace(factory.config, ffn_hidden_size=width), recompute))
        self.inner = Elements(self.elements())
        self.gate_weight: nn.Parameter | None = None
        if factory.config.moe_shared_expert_gate:
            init, shape = Init("normal", factory.config.init_method_std), (1, factory.config.hidden_size)
            gate = ParamSpec("", shape, 0, init=init, partial_gradient=factory.sequence_parallel)
            self.gate_weight = declared(gate)

    def forward(self, x: Tensor | Remade, context: LayerContext) -> Tensor:
        """Return the result for x, [s, b, h] both."""
        (output,) = run_branch(self.inner, (x,), context)
        if self.gate_weight is None:
            return output  # type: ignore[no-any-return]
        tokens = tensor_of(x)
        return output * wide_linear(tokens, self.gate_weight, None, tokens.dtype, input_recompute(x)).sigmoid()


def dispatcher_of(model: LayerConfig, groups: ExpertGroups) -> Dispatcher:
    """Return what sends rows over these groups."""
    if groups.deep_ep is not None:
        return DeepDispatch(model, groups)
    return NodeDispatch(model, groups) if groups.has_levels else AllToAll(model, groups)


def _sum_of_experts(shared: Tensor, output: Tensor) -> Tensor:
    """Return the sum of the shared experts' results [s, b, h] and the experts' [t, h]."""
    return output.view_as(shared) + shared
