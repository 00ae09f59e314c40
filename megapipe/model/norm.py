"""LayerNorm (Ba et al. 2016, arXiv:1607.06450) and RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last dim.

Statistics and products are computed in at least fp32. Saves the input and the statistics of each row (LayerNorm: mean
and 1 / deviation, RMSNorm: 1 / rms) in at least fp32. A zero-centred weight ("layernorm-1p") scales by weight + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import NORMALIZATIONS, ModelConfig
from megapipe.model.registered import registered_norm
from megapipe.model.segments import ALL, Element, Operator, Segment
from megapipe.sharding.spec import HeadChannels, Init, ParamSpec
from megapipe.tensor_parallel.gemms import at_least_fp32
from megapipe.tensor_parallel.parameter import declared

# (x, weight as it multiplies, bias or None for RMSNorm, epsilon) -> x's shape and dtype
NormKernel = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


class Norm(nn.Module):
    """The norm of the configuration: weight [size] and, for LayerNorm, bias [size]. kernel: replaces torch's.

    partial_gradient: each tp rank normalizes other tokens or heads. A zero-centred weight is stored as gamma - 1.
    """

    def __init__(
        self, config: ModelConfig, size: int, kernel: NormKernel | None = None, partial_gradient: bool = False
    ) -> None:
        super().__init__()
        self.kernel, self.name, self.kind = kernel, config.normalization, NORMALIZATIONS[config.normalization]
        self.epsilon = config.norm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        weight = norm_weight(config, size)
        self.weight = declared(replace(weight, partial_gradient=partial_gradient))
        self.bias: nn.Parameter | None = None
        if self.kind.has_bias:
            bias = ParamSpec("", (size,), 0, weight_decay=False, partial_gradient=partial_gradient)
            self.bias = declared(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return a new contiguous tensor of x's dtype. x: [..., size], any strides."""
        if self.kind.function is not None:
            zero_centered = self.zero_centered
            return registered_norm(self.kind, self.name, x, self.weight, self.bias, self.epsilon, zero_centered)
        if self.kernel is not None:
            weight = self.weight + 1 if self.zero_centered else self.weight
            return self.kernel(x, weight, self.bias, self.epsilon)
        return self.function(x, self.weight, self.bias)

    @property
    def is_pure(self) -> bool:
        """True if `function` computes it: torch's own kernels do, not those of a library or an extension."""
        return self.kernel is None and self.kind.function is None

    @property
    def function(self) -> NormFunction:
        return NormFunction(self.epsilon, self.zero_centered)


@dataclass(frozen=True)
class NormFunction:
    """(x [..., size], weight [size], bias [size] or None for RMSNorm) -> the norm of x, by torch's kernels. An RMSNorm
    may have no weight.
    """

    epsilon: float
    zero_centered: bool

    def __call__(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if not x.is_cuda:  # torch's CPU kernels, unlike those of CUDA, do not keep fp32 statistics for half types
            if bias is None:
                return _RMSNorm.apply(x, weight, self.epsilon, self.zero_centered)
            assert weight is not None
            return _LayerNorm.apply(x, weight, bias, self.epsilon, self.zero_centered)
        weight = weight + 1 if self.zero_centered and weight is not None else weight
        if bias is None:
            return F.rms_norm(x, x.shape[-1:], weight, self.epsilon)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.epsilon)


def norm_weight(config: ModelConfig, size: int) -> ParamSpec:
    """Return the declaration of a norm's weight."""
    init = Init("zeros" if config.layernorm_zero_centered_gamma else "ones")
    return ParamSpec("", (size,), 0, init=init, weight_decay=False)


def norm_element(name: str, norm: nn.Module, at: slice = ALL) -> Element:
    """Return the element of a norm over the last dim: a segment, unless a library or an extension computes it."""
    if isinstance(norm, Norm) and norm.is_pure:
        return Segment(name, norm.function, lambda context, like: (norm.weight, norm.bias), at, module=norm)
    return Operator(name, lambda context, x: norm(x), at)


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of q, or of k, together: [s, b, groups, heads, head_dim] of this tp rank -> the same.

    heads: of the model. The weight is cut like them. The sum of squares is a sum over tp; ranks that share heads count
    them all.
    """

    def __init__(self, config: ResolvedModelConfig, heads: int, tp: Group) -> None:
        super().__init__()
        self.epsilon, self.zero_centered, self.tp = config.norm_epsilon, config.layernorm_zero_centered_gamma, tp
        slicing = HeadChannels(heads, config.kv_channels)
        weight = replace(norm_weight(config, heads * config.kv_channels), slicing=slicing)
        self.weight = declared(weight, tp.rank, tp.size)

    def forward(self, x: Tensor) -> Tensor:
        """Return a new contiguous tensor of x's dtype. x may have any strides."""
        return _ProjectionRMSNorm.apply(x, self.weight, self.epsilon, self.zero_centered, self.tp)


HEADS = (-3, -2, -1)  # the dimensions of all channels of a token


class _ProjectionRMSNorm(torch.autograd.Function):
    """_RMSNorm over the heads of all tp ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, zero_centered: bool, tp: Group) -> Tensor:
        ctx.zero_centered, ctx.tp = zero_centered, tp
        dtype = at_least_fp32(x.dtype)
        squares = torch.linalg.vector_norm(x, dim=HEADS, keepdim=True, dtype=dtype).square_()
        if tp.size > 1:
            all_reduce(squares, tp)
        inverse = squares.div_(weight.numel() * tp.size).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        output = torch.mul(x.to(dtype), inverse, out=torch.empty(x.shape, dtype=dtype, device=x.device))
        return output.mul_(_scale(weight, zero_centered).view(x.shape[-3:])).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        grad = grad.to(inverse.dtype)
        normed = torch.mul(x.to(inverse.dtype), inverse)
        # products in the layout of normed, whatever the gradient's: sums over them keep their order and so their bits
        grad_weight = None
        if ctx.needs_input_grad[1]:
            summed = torch.mul(grad, normed, out=torch.empty_like(normed)).sum((0, 1))
            grad_weight = summed.flatten().to(weight.dtype)
        scale = _scale(weight, ctx.zero_centered).view(x.shape[-3:])
        grad_normed = torch.mul(grad, scale, out=torch.empty_like(normed))
        along = (grad_normed * normed).sum(HEADS, keepdim=True)
        if ctx.tp.size > 1:
            all_reduce(along, ctx.tp)
        # ranks that share heads have parts of their gradient, which are added up later: each subtracts its share
        along.div_(weight.numel() * ctx.tp.size)
        grad_x = grad_normed.addcmul_(normed, along, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None, None, None


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    weight = weight.to(at_least_fp32(weight.dtype))
    return weight + 1 if zero_centered else weight


class _LayerNorm(torch.autograd.Function):
    """torch's CPU kernel with weights in at least fp32: with half weights it would keep statistics in the half type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, zero_centered: bool) -> Tensor:
        ctx.zero_centered = zero_centered
        scale = _scale(weight, zero_centered)
        output, mean, inverse = torch.native_layer_norm(x, weight.shape, scale, bias.to(scale.dtype), epsilon)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean, inverse = ctx.saved_tensors
        scale = _scale(weight, ctx.zero_centered)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, inverse, scale, bias.to(scale.dtype), list(ctx.needs_input_grad[:3])
        )
        pairs = (grad_x, x), (grad_weight, weight), (grad_bias, bias)
        grads = [None if gradient is None else gradient.to(tensor.dtype) for gradient, tensor in pairs]
        return *grads, None, None


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * scale, rms(x) = sqrt(mean(x^2) + epsilon); torch's own on CPUs saves four tensors, not one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool) -> Tensor:
        ctx.zero_centered = zero_centered
        dtype = at_least_fp32(x.dtype)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        inverse = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        output = torch.mul(x.to(dtype), inverse, out=torch.empty(x.shape, dtype=dtype, device=x.device))
        return (output if weight is None else output.mul_(_scale(weight, zero_centered))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        grad = grad.to(inverse.dtype)
        normed = torch.mul(x.to(inverse.dtype), inverse)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_normed = grad.clone() if weight is None else grad * _scale(weight, ctx.zero_centered)
        along = torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1).div_(x.shape[-1])
        grad_x = grad_normed.addcmul_(normed, along, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None, None
