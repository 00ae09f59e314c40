"""`MetaMode`: meta tensors, which have no values, in code that reads values and chooses kernels by device.

torch chooses kernels of attention and RMSNorm by the device of their inputs. On the meta device they are chosen here,
so that each keeps for its backward what the kernel of the real device keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Answer = Callable[..., Any]
HALF_TYPES = (torch.float16, torch.bfloat16)
ALIGNED_BIAS = 16  # torch pads masks for CUDA's memory-efficient kernel to a multiple of this many columns


class MetaMode(TorchFunctionMode):
    """A function mode in which every number read from a meta tensor is 1: a finite norm, no overflow.

    device: 'cuda' or 'cpu', whose kernels are used. Truth values are True: on the CPU every token then belongs to this
    rank's part of the vocabulary, which is the case in which an embedding's backward holds most.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._answers: dict[Any, Answer] = {
            Tensor.tolist: lambda tensor: _ones(tuple(tensor.shape)),
            Tensor.item: lambda tensor: 1.0,
            Tensor.__bool__: lambda tensor: True,
            Tensor.__float__: lambda tensor: 1.0,
            Tensor.__int__: lambda tensor: 1,
            F.scaled_dot_product_attention: cuda_attention if device == "cuda" else cpu_attention,
        }
        if device == "cuda":
            self._answers |= {
                Tensor.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
                F.rms_norm: cuda_rms_norm,
            }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.get(func, func)
        return answer(*args, **(kwargs or {}))


def _ones(shape: tuple[int, ...]) -> Any:
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1.0


def cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run torch's flash kernel for CPUs, which keeps q, k, v, its output and the log-sum-exp."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]


def cuda_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run CUDA's flash kernel for half types without a mask, the memory-efficient one for fp32 and masks, the math one
    for fp64."""
    if attn_mask is None and q.dtype in HALF_TYPES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if q.dtype is torch.float64:
        bias = attn_mask
        if is_causal:
            bias = q.new_zeros(q.shape[-2], k.shape[-2]).masked_fill_(
                q.new_ones(q.shape[-2], k.shape[-2]).triu_(1).bool(), -torch.inf
            )
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, bias, dropout_p, False, scale=scale)[0]  # type: ignore[no-any-return]
    bias = None
    if attn_mask is not None:
        bias = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if k.shape[2] % ALIGNED_BIAS:
            padded = F.pad(attn_mask, (0, -k.shape[2] % ALIGNED_BIAS))
            bias = padded[..., : k.shape[2]].expand(bias.shape)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def cuda_rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor, eps: float) -> Tensor:
    """Replace CUDA's fused kernel, which keeps x, weight and 1 / rms of each row in fp32."""
    return _RMSNormOfCuda.apply(x, weight)  # type: ignore[no-any-return]


class _RMSNormOfCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, statistics)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
