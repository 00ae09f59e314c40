"""`ExpertWeights`: the two linears of this rank's experts, each over the rows of every expert, and their activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.config.model import ACTIVATIONS as KINDS
from megapipe.model.context import LayerContext
from megapipe.model.layer_factory import LayerFactory, output_std
from megapipe.model.mlp import formulas as activation_formulas
from megapipe.model.routing import ROWS, SENT, Routing
from megapipe.model.segments import Element, Elements, Operator, Remade, Segment, again_if, input_recompute, tensor_of
from megapipe.sharding.spec import ExpertRows, Init, ParamSpec
from megapipe.tensor_parallel.gemms import Gemms, RowGroups
from megapipe.tensor_parallel.gradients import (
    GradientSlot,
    InputRecompute,
    QueuedGradient,
    WeightQueue,
    add_to_grad,
    collect,
)
from megapipe.tensor_parallel.parameter import declared

WEIGHTED = slice(-2, None)  # of a branch: weights and rows


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
        count, hidden, etp = config.num_experts, config.hidden_size, experts.etp
        cut = experts.ep.rank * etp.size + etp.rank, experts.ep.size * etp.size
        rows = count * config.expert_ffn_size
        inner, outer = ExpertRows(count, gates, etp.size), ExpertRows(count, 1, etp.size)
        first, last = Init("normal", config.init_method_std), Init("normal", output_std(config))
        weight1 = ParamSpec("", (gates * rows, hidden), 0, inner, first, matrix="outputs x inputs")
        weight2 = ParamSpec("", (rows, hidden), 0, outer, last, matrix="inputs x outputs")
        self.weight1, self.weight2 = declared(weight1, *cut), declared(weight2, *cut)
        self.bias1: nn.Parameter | None = None
        self.bias2: nn.Parameter | None = None
        channels = hidden // etp.size
        self.channels = slice(etp.rank * channels, (etp.rank + 1) * channels)  # of bias2 on this rank
        if has_bias:
            self.bias1 = declared(ParamSpec("", (gates * rows,), 0, inner, weight_decay=False), *cut)
            self.bias2 = declared(ParamSpec("", (count * hidden,), 0, outer, weight_decay=False), *cut)

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
        add_to_grad(self.weight, collect(self.slot, self.weight, self._add))

    def _add(self, slot: GradientSlot) -> None:
        x = self.inputs[0] if self.function is None else self.function(*self.inputs)
        self.gemms.add_weight_gradient_groups(slot, self.grad, x, self.groups, then_input=self.then_input)


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
        add_to_grad(self.bias, collect(self.slot, self.bias, self._add))

    def _add(self, slot: GradientSlot) -> None:
        rows = self.rows if self.weights is None else self.rows * self.weights[:, None]
        slot.add(torch.cat([each.sum(0, dtype=slot.main_grad.dtype) for each in rows.split(self.counts)]))


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
