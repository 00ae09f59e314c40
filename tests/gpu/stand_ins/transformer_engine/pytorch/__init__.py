"""Transformer Engine's modules on a CPU.

They take the constructor arguments that matter here (tests/gpu/test_signatures.py binds each call to the library's own
signature), communicate over the given group, write main gradients themselves, defer weight gradients until requested,
and return views.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

REGIONS: list[tuple[bool, Any, Any]] = []  # active regions: (enabled, recipe, group)
ENTERED: list[tuple[bool, Any, Any]] = []  # outermost regions of the process, in order


@contextmanager
def autocast(
    enabled: bool = True, *, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    if not REGIONS:
        ENTERED.append((enabled, recipe, amax_reduction_group))
    REGIONS.append((enabled, recipe, amax_reduction_group))
    try:
        yield
    finally:
        REGIONS.pop()
    if enabled and not REGIONS and recipe.delayed() and recipe.reduce_amax and dist.is_initialized():
        # the library then reduces over the group, which for None is the world: ranks of other stages never join
        assert amax_reduction_group is not None, "maxima are reduced over all ranks of the world"


def _rounded(x: Tensor) -> Tensor:
    """Round to e4m3 and back inside an fp8 region."""
    if not REGIONS or not REGIONS[-1][0]:
        return x
    scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: str = "cuda",
        delay_wgrad_compute: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        assert parallel_mode in ("row", "column", None)
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.waiting: queue.Queue[Any] | None = queue.Queue() if delay_wgrad_compute else None
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=params_dtype)) if bias else torch.Tensor()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        fused = self.parallel_mode != "row" or self.tp_size == 1
        output = _Linear.apply(inp, self.weight, self.bias if self.use_bias and fused else None, self)
        return output if fused or not self.use_bias else output + self.bias

    def backward_dw(self) -> None:
        if self.waiting is None:
            return
        wgrad, bgrad = self.waiting.get(block=False)()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = wgrad
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = bgrad.to(self.bias.dtype)


def gathered(x: Tensor, group: Any, size: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def scattered(x: Tensor, group: Any, size: int) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x.chunk(size)[dist.get_rank(group)].clone()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, module: Linear) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.module, ctx.has_bias = module, bias is not None
        if torch.is_grad_enabled() and module.fuse_wgrad_accumulation and ctx.needs_input_grad[1]:
            assert weight.main_grad.shape == weight.shape
        column, group, size = module.parallel_mode == "column", module.tp_group, module.tp_size
        whole = gathered(inp, group, size) if column and module.sequence_parallel else inp
        output = F.linear(_rounded(whole), _rounded(weight))
        if module.parallel_mode == "row" and size > 1:
            if module.sequence_parallel:
                output = scattered(output, group, size)
            else:
                dist.all_reduce(output, group=group)
        if bias is not None:
            output = output + bias
        return output.view(*output.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inp, weight = ctx.saved_tensors
        module: Linear = ctx.module
        row, group, size = module.parallel_mode == "row", module.tp_group, module.tp_size
        whole = gathered(grad, group, size) if row and module.sequence_parallel else grad
        dgrad = whole @ weight
        if module.parallel_mode == "column" and size > 1:
            if module.sequence_parallel:
                dgrad = scattered(dgrad, group, size)
            else:
                dist.all_reduce(dgrad, group=group)

        def weight_half() -> tuple[Tensor | None, Tensor | None]:
            x = gathered(inp, group, size) if module.parallel_mode == "column" and module.sequence_parallel else inp
            wgrad: Tensor | None = whole.flatten(0, -2).t() @ x.flatten(0, -2)
            bgrad = whole.flatten(0, -2).sum(0) if ctx.has_bias else None
            if module.fuse_wgrad_accumulation:
                weight.main_grad.add_(wgrad)
                wgrad = None
            return wgrad, bgrad

        if module.waiting is not None:
            module.waiting.put(weight_half)
            return dgrad, None, None, None
        wgrad, bgrad = weight_half()
        return dgrad, wgrad, bgrad, None


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device: str = "cuda",
        **others: Any,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device))
        self.bias = nn.Parameter(torch.empty(normalized_shape, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight + self.offset, self.bias, self.eps)


class RMSNorm(LayerNorm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight + self.offset, self.eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_size: int = 1,
        layer_number: int | None = None,
        softmax_scale: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        assert (attention_dropout, qkv_format, attn_mask_type, tp_size) == (0.0, "sbhd", "causal", 1)
        assert layer_number is None or layer_number > 0
        self.heads, self.groups, self.window, self.scale = (
            num_attention_heads,
            num_gqa_groups,
            window_size,
            softmax_scale,
        )

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
        """Attend: [s, b, heads, d] -> [s, b, heads d]."""
        from flash_attn import flash_attn_func

        assert query_layer.shape[2] == self.heads
        assert key_layer.shape[2] == self.groups
        heads = (x.transpose(0, 1) for x in (query_layer, key_layer, value_layer))
        window = (-1, -1) if self.window is None else self.window
        return (
            flash_attn_func(*heads, softmax_scale=self.scale, causal=True, window_size=window)
            .transpose(0, 1)
            .flatten(2)
        )
