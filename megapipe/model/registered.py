"""Norms, activations and attention of extensions, as modules and functions of the model.

They are plain functions. `replayed` saves their inputs alone and runs them again in the backward, under autograd: what
a layer keeps then follows from the kind of part, whatever the function does inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.config.model import ATTENTIONS, ActivationKind, AttentionHeads, NormKind
from megapipe.errors import ConfigError
from megapipe.tensor_parallel.gemms import at_least_fp32


def replayed(function: Callable[..., Tensor], name: str, shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
    """Return function(*inputs), which has `shape`; saves the inputs, and recomputes the rest in the backward.

    name: for errors. Raises ConfigError if the result has another shape or dtype, or if an input was changed.
    """
    return _Replayed.apply(partial(_checked, function, name, shape), *inputs)  # type: ignore[no-any-return]


def registered_norm(
    kind: NormKind, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, zero_centered: bool
) -> Tensor:
    """Return the norm of x [..., size] by a function of an extension, computed in at least fp32."""
    function, wide = kind.function, at_least_fp32(x.dtype)
    assert function is not None

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
        found = function(x.to(wide), scale, None if bias is None else bias.to(wide), epsilon)
        return found.to(x.dtype) if isinstance(found, Tensor) else found

    return replayed(run, f"norm {name!r}", tuple(x.shape), x, weight, *(() if bias is None else (bias,)))


def registered_activation(kind: ActivationKind, name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation of an extension: [..., F], or gated [..., 2 F], -> [..., F]."""
    function, parts = kind.function, 2 if kind.is_gated else 1
    assert function is not None
    return lambda x: replayed(function, f"activation {name!r}", (*x.shape[:-1], x.shape[-1] // parts), x)


def registered_attention(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: AttentionHeads) -> Tensor:
    """Return attention's output [s, b, heads x d] by a function of an extension.

    q: [s, b, g, n, d]; k, v: [keys, b, g, 1, d]. The function gets [b, heads, s or keys, d].
    """
    function, (seq, batch, groups, queries, size) = ATTENTIONS[name].function, q.shape
    assert function is not None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.expand(-1, batch, groups, queries, size) for x in (k, v))
        q, k, v = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (q, k, v))
        found = function(q, k, v, mask, heads)
        if not isinstance(found, Tensor) or found.shape != q.shape:
            return found
        return found.permute(2, 0, 1, 3).reshape(seq, batch, -1)

    return replayed(run, f"attention kind {name!r}", (seq, batch, groups * queries * size), q, k, v)


def _checked(function: Callable[..., Tensor], name: str, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    versions = [x._version for x in inputs]
    result = function(*inputs)
    if not isinstance(result, Tensor):
        raise ConfigError(f"{name} returned {type(result).__name__}, not a tensor")
    if tuple(result.shape) != shape or result.dtype != inputs[0].dtype:
        found, expected = f"{list(result.shape)} in {result.dtype}", f"{list(shape)} in {inputs[0].dtype}"
        raise ConfigError(f"{name} returned {found}, expected {expected}")
    if versions != [x._version for x in inputs]:
        raise ConfigError(f"{name} changed its input in place; the backward needs it: use x * y in place of x.mul_(y)")
    held = {x.untyped_storage()._cdata for x in inputs}
    return result.clone() if result.untyped_storage()._cdata in held else result


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        wanted = [x for x in inputs if x.requires_grad]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        grads = iter(torch.autograd.grad(output, wanted, grad, allow_unused=True))
        return None, *(next(grads) if x.requires_grad else None for x in inputs)
