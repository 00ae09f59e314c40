"""NVIDIA's Transformer Engine: linears, norms, attention and Adam, with fp8 inside the linears.

Its modules are subclassed, so that they hold our parameters under our names (weight, bias), on the meta device until materialised, in
our flat buffers, from our initial values, and in our checkpoints. Weight gradients are accumulated by the library straight into our main
gradients (fuse_wgrad_accumulation); scales of fp8 are its own state, which no checkpoint holds: a resumed run finds them anew.

What the library does at a linear, it does inside its own Function: collectives over tp included, which our tracer does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.gpu.attention import Attention, AttentionShape, folded
from megapipe.gpu.installed import TRANSFORMER_ENGINE, wanted


class TensorGroup(Protocol):
    """A tensor-parallel group: comm.groups.Group."""

    @property
    def size(self) -> int: ...

    @property
    def handle(self) -> Any: ...


class Queue(Protocol):
    """Where weight gradients wait for W: tensor_parallel.weight_queue.WeightQueue."""

    is_deferring: bool

    def submit(self, gradient: Any) -> None: ...


@dataclass(frozen=True)
class LinearWish:
    """One linear of a layer. in_features, out_features: of the whole linear, padded where key/value heads are replicated (rows x tp)."""

    in_features: int
    out_features: int
    bias: bool
    mode: str  # 'column' or 'row'
    tp: TensorGroup
    sequence_parallel: bool
    queue: Queue | None
    splits_backward: bool
    uses_fp8: bool


class TransformerEngine:
    """The library, imported. precision: fp8's settings."""

    def __init__(self, flag: str, instead: str, precision: PrecisionConfig) -> None:
        """flag, instead: what asked for it, and what needs no such library. Raises ConfigError where it is not installed."""
        with wanted(TRANSFORMER_ENGINE, flag, instead):
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

    def linear(self, wish: LinearWish) -> torch.nn.Module:
        """A linear with parameters on the meta device, `slots` for its weight, and the shapes of tensor_parallel.linear."""
        linear = self._linear_type(
            wish.in_features,
            wish.out_features,
            sequence_parallel=wish.sequence_parallel and wish.tp.size > 1,
            fuse_wgrad_accumulation=True,
            tp_group=wish.tp.handle,
            tp_size=wish.tp.size,
            bias=wish.bias,
            parallel_mode=wish.mode if wish.tp.size > 1 else None,
            device="meta",
            delay_wgrad_compute=wish.splits_backward,
        )
        linear.prepare(wish, lambda: self._region(wish.tp, wish.uses_fp8))
        return linear

    def norm(self, normalization: str, size: int, epsilon: float, zero_centered: bool) -> torch.nn.Module:
        """weight [size], and for LayerNorm bias [size], on the meta device."""
        return self._norm_types[normalization](size, eps=epsilon, zero_centered_gamma=zero_centered, device="meta")

    def attention(self, shape: AttentionShape) -> Attention:
        """DotProductAttention, which chooses among flash-attn, cuDNN's and its own kernels; a rank's heads are all it sees."""
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
            return module(folded(q), folded(k), folded(v)).reshape(*q.shape[:2], -1)

        return attend

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
        """AdamW over parameter groups; it counts its steps in each group's 'step'."""
        betas = (config.adam_beta1, config.adam_beta2)
        return self._adam(
            groups, lr=0.0, bias_correction=True, betas=betas, eps=config.adam_eps, adam_w_mode=True, weight_decay=0.0
        )

    def stage_region(self, tp: TensorGroup) -> AbstractContextManager[Any]:
        """Around the layers of a stage in a forward: delayed scales are renewed, and their maxima reduced over tp, at its end."""
        return nullcontext() if self._recipe is None else self._region(tp, True)

    def _region(self, tp: TensorGroup, enabled: bool) -> AbstractContextManager[Any]:
        """tp alone shares maxima: its ranks multiply slices of the same tensors and gather them in 8 bits; replicas have scales of their
        own, and wait for nobody."""
        if self._recipe is None:
            return nullcontext()
        if hasattr(self._te, "autocast"):  # from 2.8
            return self._te.autocast(enabled=enabled, recipe=self._recipe, amax_reduction_group=tp.handle)
        return self._te.fp8_autocast(enabled=enabled, fp8_recipe=self._recipe, fp8_group=tp.handle)


def _recipe(library: Any, precision: PrecisionConfig) -> Any:
    """The library's object for fp8's settings; None without fp8."""
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
    """What is ours in the subclass of the library's Linear: gradient slots, the weight queue, and outputs that may be changed in place."""

    takes_remake = False
    slots: dict[str, Any]
    weight: Tensor
    bias: Tensor | None

    def prepare(self, wish: LinearWish, region: Callable[[], AbstractContextManager[Any]]) -> None:
        self.slots = {}
        self._wish, self._fp8_region = wish, region

    def forward(self, x: Tensor) -> Tensor:
        """As tensor_parallel.linear's table says, for wish.mode."""
        slot = self.slots.get("weight")
        self.fuse_wgrad_accumulation = slot is not None
        if slot is not None:
            self.weight.main_grad = slot.main_grad  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            x = _WeightGradient.apply(x, self)
        with self._fp8_region():
            return _Own.apply(super().forward(x))  # type: ignore[misc]

    def weight_gradient_came(self) -> None:
        """The library's backward of one use is done, but for what it was told to delay."""
        if self._wish.splits_backward:
            delayed, queue = _Delayed(self), self._wish.queue
            assert queue is not None
            queue.submit(delayed)
        elif "weight" in self.slots:
            self.slots["weight"].ready()


class _Delayed:
    """A weight gradient that the library keeps back until it is asked (delay_wgrad_compute), first in, first out."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def launch(self) -> None:
        """The library communicates by itself."""

    @torch.no_grad()
    def accumulate(self) -> None:
        linear = self._linear
        if "weight" not in linear.slots:
            raise RuntimeError(
                "Transformer Engine's delayed weight gradients need a GradientSlot: without one the next would replace them"
            )
        bias = linear.bias if linear._wish.bias else None
        is_added_apart = (
            linear._wish.mode == "row" and linear._wish.tp.size > 1
        )  # by autograd, which has had its gradient by now
        if bias is not None and is_added_apart:
            bias.grad = bias.detach()  # the library would fill an empty place with a gradient that it does not have
        linear.backward_dw()
        linear.slots["weight"].ready()
        if bias is not None:
            gradient, bias.grad = bias.grad, None
            if not is_added_apart:  # written past autograd, so that no hook has seen it
                linear.slots["bias"].add(gradient)
                linear.slots["bias"].ready()


class _WeightGradient(torch.autograd.Function):
    """Stands before a linear: its backward runs when that of the linear is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: _Linear) -> Tensor:
        ctx.linear = linear
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.linear.weight_gradient_came()
        return grad, None


class _Own(torch.autograd.Function):
    """The library returns a view made inside its Function, which autograd lets nobody change in place; nobody else reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.aten._unsafe_view(x, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad
