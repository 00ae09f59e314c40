"""The MLP of one layer: linear_fc1, activation, linear_fc2; and the activation functions.

With tp, a gated linear_fc1 holds [gate_r; up_r]. Each activation is a function [..., F or 2 F] -> [..., F] that saves
the output of linear_fc1 and nothing else (ReLU: its own output and nothing else); gated ones take [gate | up] halves
of the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config.layers import LayerConfig
from megapipe.config.model import ACTIVATIONS as KINDS
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.registered import registered_activation
from megapipe.model.segments import (
    NOTHING,
    Again,
    Element,
    Elements,
    Operator,
    Segment,
    again_if,
    linear_element,
)
from megapipe.sharding.spec import Fused

Activation = Callable[[Tensor], Tensor]
Pointwise = Callable[..., Tensor]
Formulas = tuple[Pointwise, Pointwise]  # x -> y, and (gradient of y, x) -> gradient of x
Compile = Callable[[Pointwise], Pointwise]


class MLP(nn.Module):
    """The MLP: elements from [s, b, h] (a slice of s with sequence parallelism) to the same shape."""

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        config, recompute, kernels = factory.config, factory.recompute, factory.kernels
        self.recompute = recompute
        self.activation = activation_element(config, kernels.pointwise if kernels.compiles else None)
        kind = KINDS[config.activation]
        # relu saves only its output, which linear_fc2 saves too: recomputing it would free nothing
        self.recompute_activation = "activation" in recompute and not kind.keeps_output
        hidden, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        gates = 2 if kind.is_gated else 1
        self.linear_fc1 = factory.linear("column", layer, hidden, gates * ffn, bias, Fused(0, gates))
        self.linear_fc2 = factory.linear("row", layer, ffn, hidden, bias)

    def elements(self, norm: Elements = NOTHING) -> Iterator[Element]:
        """Yield the elements of the branch. norm: those before linear_fc1, which may be recomputed together with it."""
        middle = Elements([self.activation])
        inner = Elements([linear_element("linear_fc1", self.linear_fc1), *middle])
        if "mlp" in self.recompute:
            with_norm = "layernorm" in self.recompute
            yield from () if with_norm else norm
            yield Again(Elements([*norm, *inner]) if with_norm else inner)
        else:
            yield from again_if("layernorm" in self.recompute, norm)
            yield inner[0]
            yield from again_if(self.recompute_activation, middle)
        yield linear_element("linear_fc2", self.linear_fc2)


def activation_element(model: LayerConfig, compiler: Compile | None = None) -> Element:
    """Return the activation of a layer: a segment, unless an extension computes it. compiler: as in `activation`."""
    function = activation(model, compiler)
    if KINDS[model.activation].function is not None:
        return Operator("activation", lambda context, x: function(x))
    return Segment("activation", function)


def activation(model: LayerConfig, compiler: Compile | None = None) -> Activation:
    """Return the activation of a layer. compiler: compiles it and its gradient into one kernel each."""
    kind = KINDS[model.activation]
    if kind.function is not None:
        return registered_activation(kind, model.activation)
    return F.relu if kind.keeps_output else _differentiable(*formulas(model, compiler))


def formulas(model: LayerConfig, compiler: Compile | None = None) -> Formulas:
    """Return the activation of a layer as a plain function of x, and its gradient as one of (grad, x)."""
    return _formulas(model.activation, model.activation_func_clamp_value, model.glu_linear_offset, compiler)


# cached, since segments share a graph if their functions are equal


@cache
def _differentiable(forward: Pointwise, backward: Pointwise) -> Activation:
    return lambda x: _WithGradient.apply(x, forward, backward)


@cache
def _formulas(name: str, clamp: float | None, offset: float, compiler: Compile | None) -> Formulas:
    if KINDS[name].function is not None:
        function = registered_activation(KINDS[name], name)
        return function, partial(_gradient_of, function)
    if clamp is not None or offset != 0:
        bent = BentGate(name, clamp, offset)
        return bent.forward, bent.backward
    if compiler is None or name not in COMPILED:
        return FORMULAS[name]
    forward, backward = map(compiler, COMPILED[name])
    return forward, backward


def _gradient_of(function: Activation, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, by autograd."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        output = function(x)
    return torch.autograd.grad(output, x, grad)[0]


def _multiply_into(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Set out, a slice, to x y in one kernel, or in two where torch.compile traces, which takes no slice as `out`."""
    if torch.compiler.is_compiling():
        out.copy_(x.mul_(y))
    else:
        torch.mul(x, y, out=out)


def _gate(act: Pointwise, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate).mul_(up)


def _gate_gradient(act: Pointwise, act_backward: Pointwise, grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradients of gate and up, written side by side into one tensor."""
    gate, up = gate_up.chunk(2, dim=-1)
    grads = torch.empty_like(gate_up)
    grad_gate, grad_up = grads.chunk(2, dim=-1)
    _multiply_into(grad_up, act(gate), grad)
    grad_gate.copy_(act_backward(grad * up, gate))
    return grads


class _WithGradient(torch.autograd.Function):
    """A function of one tensor and its gradient, (grad, x) -> grad of x; saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Pointwise, backward: Pointwise) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.gradient(grad, x), None, None


_gelu_tanh = partial(F.gelu, approximate="tanh")
_gelu_tanh_backward = partial(torch.ops.aten.gelu_backward, approximate="tanh")
QUICK_GELU = 1.702  # x sigmoid(1.702 x) is close to GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)


# name -> the activation of the gate, and (grad, gate) -> its gradient
GATES: dict[str, Formulas] = {
    "swiglu": (F.silu, torch.ops.aten.silu_backward),
    "geglu_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "quick_geglu": (
        lambda x: F.silu(x * QUICK_GELU).div_(QUICK_GELU),
        lambda grad, x: torch.ops.aten.silu_backward(grad, x * QUICK_GELU),
    ),
}


@dataclass(frozen=True)
class BentGate:
    """act(min(gate, limit)) * (clamp(up, -limit, limit) + offset) of halves [gate | up], without a limit if None."""

    name: str  # in GATES
    limit: float | None
    offset: float

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = self._bent(gate_up)
        output: Tensor = GATES[self.name][0](gate).mul_(up)
        return output

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of gate_up; what the limit has cut off has none."""
        act, act_backward = GATES[self.name]
        gate, up = self._bent(gate_up)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        _multiply_into(grad_up, act(gate), grad)
        grad_gate.copy_(act_backward(up.mul_(grad), gate))
        if self.limit is not None:
            gate, up = gate_up.chunk(2, dim=-1)
            grad_gate.masked_fill_(gate > self.limit, 0.0)
            grad_up.masked_fill_(up > self.limit, 0.0).masked_fill_(up < -self.limit, 0.0)
        return grads

    def _bent(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is None:
            return gate, up + self.offset
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit).add_(self.offset)


FORMULAS: dict[str, Formulas] = {
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "relu": (F.relu, partial(torch.ops.aten.threshold_backward, threshold=0)),
    # So et al. 2021, arXiv:2109.08668
    "squared_relu": (lambda x: F.relu(x).square_(), lambda grad, x: F.relu(x).mul_(2).mul_(grad)),
    # gated linear units: Shazeer 2020, arXiv:2002.05202
    **{name: (partial(_gate, act), partial(_gate_gradient, act, back)) for name, (act, back) in GATES.items()},
}


def _gated(act: Pointwise, act_backward: Pointwise) -> Formulas:
    """Return act(gate) * up and its gradient as plain formulas, for compilation."""

    def forward(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cat((act_backward(grad * up, gate), grad * act(gate)), dim=-1)

    return forward, backward


# those that gain by compilation; ReLU is one kernel anyway
COMPILED = {name: _gated(*GATES[name]) if name in GATES else pair for name, pair in FORMULAS.items() if name != "relu"}
