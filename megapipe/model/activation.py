"""Activations of the MLP. Each keeps for its backward the output of linear_fc1 and nothing else (ReLU: its own output and nothing else).

`activation(name)` gives a plain function [..., F or 2 F] -> [..., F]; gated ones take [gate | up] halves of the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
Pointwise = Callable[..., Tensor]


def activation(name: str, compiler: Callable[[Pointwise], Pointwise] | None = None) -> Activation:
    """name: one of config.model.ACTIVATIONS. compiler: makes one kernel of a function and one of its gradient."""
    if compiler is None or name not in GRADIENTS:
        return ACTIVATIONS[name]
    forward, backward = GRADIENTS[name]
    forward, backward = compiler(forward), compiler(backward)
    return lambda x: _Compiled.apply(x, forward, backward)


class _Compiled(torch.autograd.Function):
    """A function of one tensor and its gradient, both compiled, neither seen by autograd: the input alone is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Pointwise, backward: Pointwise) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.gradient(grad, x), None, None


class _Gated(torch.autograd.Function):
    """act(gate) * up, with the two gradients written side by side into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, act: Activation, act_backward: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.act, ctx.act_backward = act, act_backward
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        torch.mul(grad, ctx.act(gate), out=grad_up)
        grad_gate.copy_(ctx.act_backward(grad * up, gate))
        return grads, None, None


class _SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2).mul_(grad)


_gelu_tanh = partial(F.gelu, approximate="tanh")


def _swiglu(gate_up: Tensor) -> Tensor:
    """SiLU gate (Shazeer 2020, arXiv:2002.05202)."""
    return _Gated.apply(gate_up, F.silu, torch.ops.aten.silu_backward)


def _geglu_tanh(gate_up: Tensor) -> Tensor:
    return _Gated.apply(gate_up, _gelu_tanh, partial(torch.ops.aten.gelu_backward, approximate="tanh"))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "squared_relu": _SquaredReLU.apply,
    "swiglu": _swiglu,
    "geglu_tanh": _geglu_tanh,
}


def _gated(act: Activation, act_backward: Pointwise) -> tuple[Pointwise, Pointwise]:
    """act(gate) * up and its gradient, for compilation: as formulas, without memory of their own."""

    def forward(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cat((act_backward(grad * up, gate), grad * act(gate)), dim=-1)

    return forward, backward


# what gains by compilation: ReLU is one kernel anyway
GRADIENTS: dict[str, tuple[Pointwise, Pointwise]] = {
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (_gelu_tanh, partial(torch.ops.aten.gelu_backward, approximate="tanh")),
    "squared_relu": (lambda x: F.relu(x).square(), lambda grad, x: 2 * F.relu(x) * grad),
    "swiglu": _gated(F.silu, torch.ops.aten.silu_backward),
    "geglu_tanh": _gated(_gelu_tanh, partial(torch.ops.aten.gelu_backward, approximate="tanh")),
}
