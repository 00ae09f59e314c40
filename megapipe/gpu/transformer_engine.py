"""NVIDIA's Transformer Engine: linears, norms, attention and Adam, with fp8 inside the linears.

Its modules are subclassed, so that they hold our parameters under our names (weight, bias): on the meta device until
materialised, then in our flat buffers, with our initial values, and in our checkpoints. The library accumulates
weight gradients directly into our main gradients (fuse_wgrad_accumulation). fp8 scales are its own state, which no
checkpoint holds: a resumed run computes them afresh. A linear's collectives over tp run inside the library's Function
and do not appear in our traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.gpu.libraries import TRANSFORMER_ENGINE, AttentionKernel, AttentionShape, fold_groups, importing


@dataclass(frozen=True)
class LinearOptions:
    """One linear. in_features, out_features: unsharded, padded where key/value heads are replicated (rows x tp)."""

    in_features: int
    out_features: int
    bias: bool
    mode: str  # 'column' or 'row'
    tp: Group
    sequence_parallel: bool
    queue: Any  # tensor_parallel's WeightQueue
    splits_backward: bool
    uses_fp8: bool


class TransformerEngine:
    """The imported library."""

    def __init__(self, flag: str, instead: str, precision: PrecisionConfig) -> None:
        """Import the library. flag, instead: as in `importing`. Raises ConfigError if it is not installed."""
        with importing(TRANSFORMER_ENGINE, flag, instead):
            import transformer_engine
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe
            from transformer_engine.pytorch.optimizers import FusedAdam

        self._te, self._adam = te, FusedAdam
        self.version = str(getattr(transformer_engine, "__version__", "?"))
        self._recipe = _recipe(recipe, precision)
        self._linear_type: Any = type("Linear", (_Linear, te.Linear), {})
        self._norm_types = {
            "LayerNorm": type("LayerNorm", (te.LayerNorm,), {}),
            "RMSNorm": type("RMSNorm", (te.RMSNorm,), {}),
        }

    def linear(self, options: LinearOptions) -> torch.nn.Module:
        """Build a linear on the meta device, with `slots` for its weight and the shapes of tensor_parallel.linear."""
        linear = self._linear_type(
            options.in_features,
            options.out_features,
            sequence_parallel=options.sequence_parallel and options.tp.size > 1,
            fuse_wgrad_accumulation=True,
            tp_group=options.tp.handle,
            tp_size=options.tp.size,
            bias=options.bias,
            parallel_mode=options.mode if options.tp.size > 1 else None,
            device="meta",
            delay_wgrad_compute=options.splits_backward,
        )
        linear.prepare(options, lambda: self._region(options.tp, options.uses_fp8))
        return linear

    def norm(self, normalization: str, size: int, epsilon: float, zero_centered: bool) -> torch.nn.Module:
        """Build a norm on the meta device: weight [size] and, for LayerNorm, bias [size]."""
        return self._norm_types[normalization](size, eps=epsilon, zero_centered_gamma=zero_centered, device="meta")

    def attention(self, shape: AttentionShape) -> AttentionKernel:
        """Build DotProductAttention, which chooses among flash-attn, cuDNN and its own kernels."""
        window = None if shape.window is None else (shape.window - 1, 0)
        module = self._te.DotProductAttention(
            shape.queries,
            shape.head_dim,
            num_gqa_groups=1,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=window,
            softmax_scale=shape.scale,
            layer_number=shape.layer + 1,
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module(fold_groups(q), fold_groups(k), fold_groups(v)).reshape(*q.shape[:2], -1)

        return attend

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
        """Build AdamW over parameter groups; it counts its steps in each group's 'step'."""
        betas = (config.adam_beta1, config.adam_beta2)
        return self._adam(
            groups, lr=0.0, bias_correction=True, betas=betas, eps=config.adam_eps, adam_w_mode=True, weight_decay=0.0
        )

    def stage_region(self, tp: Group) -> AbstractContextManager[Any]:
        """Enclose a stage's forward, at whose end delayed scales are updated from maxima over tp."""
        return nullcontext() if self._recipe is None else self._region(tp, True)

    def _region(self, tp: Group, enabled: bool) -> AbstractContextManager[Any]:
        """Enter fp8.

        Only tp ranks share maxima, since they multiply slices of the same tensors and gather them in 8 bits;
        data-parallel replicas have independent scales.
        """
        if self._recipe is None:
            return nullcontext()
        if hasattr(self._te, "autocast"):  # from 2.8
            return self._te.autocast(enabled=enabled, recipe=self._recipe, amax_reduction_group=tp.handle)
        return self._te.fp8_autocast(enabled=enabled, fp8_recipe=self._recipe, fp8_group=tp.handle)


def _recipe(library: Any, precision: PrecisionConfig) -> Any:
    """Return the library's object for the fp8 settings; None without fp8."""
    if precision.fp8_format is None:
        return None
    numbers = library.Format.E4M3 if precision.fp8_format == "e4m3" else library.Format.HYBRID
    if precision.fp8_recipe == "tensorwise":
        return library.Float8CurrentScaling(fp8_format=numbers)
    return library.DelayedScaling(
        margin=precision.fp8_margin,
        fp8_format=numbers,
        amax_history_len=precision.fp8_amax_history_len,
        amax_compute_algo=precision.fp8_amax_compute_algo,
    )


class _Linear:
    """Our part of the subclass of the library's Linear: gradient slots, weight queue, outputs writable in place."""

    can_recompute_input = False
    slots: dict[str, Any]
    weight: Tensor
    bias: Tensor | None

    def prepare(self, options: LinearOptions, region: Callable[[], AbstractContextManager[Any]]) -> None:
        self.slots = {}
        self._options, self._fp8_region = options, region

    def forward(self, x: Tensor, recompute: None = None) -> Tensor:
        """Compute the linear as described in tensor_parallel.linear. recompute: not supported."""
        assert recompute is None
        slot = self.slots.get("weight")
        self.fuse_wgrad_accumulation = slot is not None
        if slot is not None:
            self.weight.main_grad = slot.main_grad  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            x = _AfterBackward.apply(x, self)
        with self._fp8_region():
            return _NoView.apply(super().forward(x))  # type: ignore[misc]

    def after_backward(self) -> None:
        """Queue or report the weight gradient, once the library's backward of one use is done."""
        if self._options.splits_backward:
            self._options.queue.submit(_DelayedWeightGradient(self))
        elif "weight" in self.slots:
            self.slots["weight"].ready()


class _DelayedWeightGradient:
    """A weight gradient that the library holds until asked (delay_wgrad_compute), first in, first out."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def launch(self) -> None:
        """Do nothing: the library runs its communication itself."""

    @torch.no_grad()
    def accumulate(self) -> None:
        linear = self._linear
        options: LinearOptions = linear._options
        if "weight" not in linear.slots:
            raise RuntimeError(
                "Transformer Engine's delayed weight gradients need a GradientSlot: without one the next would "
                "replace them"
            )
        bias = linear.bias if options.bias else None
        by_autograd = options.mode == "row" and options.tp.size > 1  # which has added the bias gradient already
        if bias is not None and by_autograd:
            bias.grad = bias.detach()  # otherwise the library would fill .grad with a gradient that it does not have
        linear.backward_dw()
        linear.slots["weight"].ready()
        if bias is not None:
            gradient, bias.grad = bias.grad, None
            if not by_autograd:  # written without autograd, so no hook has fired
                linear.slots["bias"].add(gradient)
                linear.slots["bias"].ready()


class _AfterBackward(torch.autograd.Function):
    """The identity before a linear: its backward runs when that of the linear is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: _Linear) -> Tensor:
        ctx.linear = linear
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.linear.after_backward()
        return grad, None


class _NoView(torch.autograd.Function):
    """The identity on the library's output, a view made inside its Function, so that it can be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.aten._unsafe_view(x, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad
