"""Adapters of the optional libraries: apex, flash-attn, and NVIDIA's Transformer Engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import WithAdjoint
from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.gpu.packed_attention import DocumentBorders, packed_attention

# usual name -> the command that installs it; {cuda}: the major version of CUDA that torch is built for
INSTALL = {
    "NVIDIA's Transformer Engine": (
        "pip install --no-build-isolation 'transformer_engine[pytorch,core_cu{cuda}]' (builds against CUDA and cuDNN)"
    ),
    "NVIDIA's apex": (
        "git clone https://github.com/NVIDIA/apex, and in it: "
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . (the apex of PyPI is another package)"
    ),
    "flash-attn": "pip install --no-build-isolation flash-attn (builds against CUDA)",
}


@contextmanager
def importing(library: str, flag: str, instead: str) -> Iterator[None]:
    """Raise ConfigError with the install command if the import inside the block fails.

    flag: the option that chose the library. instead: the value of it that needs none.
    """
    try:
        yield
    # PyPI's empty transformer-engine raises RuntimeError, a build for another torch anything
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        command = INSTALL[library].format(cuda=(torch.version.cuda or "12").split(".")[0])
        raise ConfigError(
            f"{flag} needs {library}, which cannot be imported here ({reason}): {command}; or use {instead}"
        ) from error


# (q [s, b, g, n, d], k [s, b, g, 1, d], v [s, b, g, 1, d], documents) -> [s, b, g n d], causal
AttentionKernel = Callable[[Tensor, Tensor, Tensor, DocumentBorders | None], Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer on one rank."""

    layer: int
    queries: int  # n per key/value head
    head_dim: int
    scale: float
    window: int | None  # tokens that a token sees, itself included; None: all before it
    cap: float | None
    deterministic: bool


def soft_cap(cap: float | None, function: Callable[..., Any], library: str, known_in: str) -> dict[str, float]:
    """Return the argument for --attn-logit-softcapping. Raises ConfigError if this version of a library has none.

    known_in: a version that is known to have it.
    """
    if cap is None:
        return {}
    if "softcap" not in inspect.signature(function).parameters:
        raise ConfigError(
            f"--attn-logit-softcapping: the attention of {library} has no soft-cap; install {known_in} or newer, or "
            "use --attention-impl sdpa"
        )
    return {"softcap": cap}


def fold_groups(x: Tensor) -> Tensor:
    """View [s, b, g, n, d] as [s, b g, n, d]: each key/value head becomes a batch entry with its n query heads."""
    return x.flatten(1, 2)


class _FusedAdam:
    """A library whose FusedAdam takes apex's arguments."""

    _adam: Any

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
        """Build AdamW over parameter groups; it counts its steps in each group's 'step'."""
        betas = (config.adam_beta1, config.adam_beta2)
        return self._adam(  # type: ignore[no-any-return]
            groups, lr=0.0, bias_correction=True, betas=betas, eps=config.adam_eps, adam_w_mode=True, weight_decay=0.0
        )


class Apex(_FusedAdam):
    """NVIDIA's apex: a multi-tensor Adam, fused norms, and a weight gradient that is accumulated inside its GEMM."""

    def __init__(self) -> None:
        """Import the library. Raises ConfigError if apex is not installed or lacks its CUDA extensions."""
        with importing("NVIDIA's apex", "--optimizer-impl apex", "--optimizer-impl torch"):
            import fused_weight_gradient_mlp_cuda
            from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
            from apex.optimizers import FusedAdam
        self._adam, self._weight_gradients = FusedAdam, fused_weight_gradient_mlp_cuda
        self._layer_norm, self._rms_norm = fused_layer_norm_affine, fused_rms_norm_affine

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        """Apply LayerNorm, or without a bias RMSNorm, over the last dimension, with fp32 statistics."""
        if bias is None:
            return self._rms_norm(x, weight, weight.shape, epsilon)  # type: ignore[no-any-return]
        return self._layer_norm(x, weight, bias, weight.shape, epsilon)  # type: ignore[no-any-return]

    def add_outer(self, main_grad: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_output^T [tokens, out] @ inputs [tokens, in] to main_grad [out, in] in the GEMM's epilogue.

        main_grad: fp32; inputs: bf16, fp16 or fp32.
        """
        self._weight_gradients.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)


class FlashAttention:
    """flash-attn 2 (Dao 2023, arXiv:2307.08691): causal, grouped queries, sliding window, soft-cap; bf16 and fp16."""

    def __init__(self) -> None:
        """Import the library. Raises ConfigError if flash-attn is not installed."""
        with importing("flash-attn", "--attention-impl flash", "--attention-impl sdpa"):
            import flash_attn
        self.version = str(getattr(flash_attn, "__version__", "?"))
        self._function: Callable[..., Any] = flash_attn.flash_attn_func
        self._packed: Callable[..., Any] = flash_attn.flash_attn_varlen_func

    def attention(self, shape: AttentionShape) -> AttentionKernel:
        """Build the attention of one layer; saves q, k, v (views of one tensor), the output and fp32 log-sum-exp."""
        # the library counts only the tokens to the left; our window includes the token itself
        options = {
            "window_size": (-1, -1) if shape.window is None else (shape.window - 1, 0),
            "softmax_scale": shape.scale,
            **soft_cap(shape.cap, self._function, f"flash-attn {self.version}", "2.6"),
            "deterministic": shape.deterministic,
            "dropout_p": 0.0,
            "causal": True,
        }

        def packed(q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders) -> Tensor:
            starts, longest = borders.starts, borders.longest
            return self._packed(q, k, v, starts, starts, longest, longest, **options)  # type: ignore[no-any-return]

        def attend(q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders | None = None) -> Tensor:
            if borders is not None:
                return packed_attention(q, k, v, borders, packed)
            seq, batch = q.shape[:2]
            heads = (fold_groups(x).transpose(0, 1) for x in (q, k, v))  # [b g, s, n or 1, d]
            output = self._function(*heads, **options)
            return output.transpose(0, 1).reshape(seq, batch, -1)

        return attend


class TransformerEngine(_FusedAdam):
    """NVIDIA's Transformer Engine: linears, norms, attention and Adam, with fp8 inside the linears.

    Its modules are subclassed, so that they hold our parameters under our names (weight, bias): on the meta device
    until materialised, then in our flat buffers, with our initial values, and in our checkpoints. The library
    accumulates weight gradients directly into our main gradients (fuse_wgrad_accumulation). fp8 scales are its own
    state, which no checkpoint holds: a resumed run computes them afresh. A linear's collectives over tp run inside
    the library's Function and do not appear in our traces.
    """

    def __init__(self, flag: str, instead: str, precision: PrecisionConfig) -> None:
        """Import the library. flag, instead: as in `importing`. Raises ConfigError if it is not installed."""
        with importing("NVIDIA's Transformer Engine", flag, instead):
            import transformer_engine
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe
            from transformer_engine.pytorch.optimizers import FusedAdam

        self._te, self._adam = te, FusedAdam
        self.version = str(getattr(transformer_engine, "__version__", "?"))
        self._recipes = {spans_tp: _recipe(recipe, precision, spans_tp) for spans_tp in (False, True)}
        self._linear_type: Any = type("Linear", (_EngineLinear, te.Linear), {})
        self._norm_types = {
            "LayerNorm": type("LayerNorm", (te.LayerNorm,), {}),
            "RMSNorm": type("RMSNorm", (te.RMSNorm,), {}),
        }

    def linear(
        self,
        kind: str,  # 'column' or 'row'
        in_features: int,  # unsharded
        out_features: int,  # unsharded, padded where key/value heads are replicated (rows x tp)
        *,
        bias: bool,
        tp: Group,
        sequence_parallel: bool,
        queue: Any,  # tensor_parallel's WeightQueue
        splits_backward: bool,
        uses_fp8: bool,
    ) -> torch.nn.Module:
        """Build a linear on the meta device, with `slots` for its weight and the shapes of tensor_parallel.linear."""
        linear = self._linear_type(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel and tp.size > 1,
            fuse_wgrad_accumulation=True,
            tp_group=tp.handle,
            tp_size=tp.size,
            bias=bias,
            parallel_mode=kind if tp.size > 1 else None,
            device="meta",
            delay_wgrad_compute=splits_backward,
        )
        linear.slots, linear.weight_queue = {}, queue if splits_backward else None
        linear.bias_by_autograd = kind == "row" and tp.size > 1
        linear.enter_fp8 = partial(self.region, tp, uses_fp8)
        return linear  # type: ignore[no-any-return]

    def norm(self, normalization: str, size: int, epsilon: float, zero_centered: bool) -> torch.nn.Module:
        """Build a norm on the meta device: weight [size] and, for LayerNorm, bias [size]."""
        return self._norm_types[normalization](size, eps=epsilon, zero_centered_gamma=zero_centered, device="meta")

    def attention(self, shape: AttentionShape) -> AttentionKernel:
        """Build DotProductAttention, which chooses among flash-attn, cuDNN and its own kernels."""
        window = None if shape.window is None else (shape.window - 1, 0)
        kind = self._te.DotProductAttention
        module = kind(
            shape.queries,
            shape.head_dim,
            num_gqa_groups=1,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=window,
            softmax_scale=shape.scale,
            layer_number=shape.layer + 1,
            **soft_cap(shape.cap, kind.__init__, f"Transformer Engine {self.version}", "2.20"),
        )

        def attend(q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders | None = None) -> Tensor:
            if borders is not None:
                raise ValueError("this attention does not keep documents apart")
            return module(fold_groups(q), fold_groups(k), fold_groups(v)).reshape(*q.shape[:2], -1)

        return attend

    def region(self, tp: Group, enabled: bool = True) -> AbstractContextManager[Any]:
        """Enter fp8. The region of a stage's whole forward updates delayed scales at its end, from maxima over tp.

        Only tp ranks share maxima, since they multiply slices of the same tensors and gather them in 8 bits;
        data-parallel replicas have independent scales.
        """
        recipe = self._recipes[tp.size > 1]
        if recipe is None:
            return nullcontext()
        if hasattr(self._te, "autocast"):  # from 2.8
            return self._te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=tp.handle)
        return self._te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=tp.handle)


def _recipe(library: Any, precision: PrecisionConfig, spans_tp: bool) -> Any:
    """Return the library's object for the fp8 settings; None without fp8.

    spans_tp: maxima are reduced over the group of the region. The library takes a missing group for the whole world,
    whose ranks are in different stages, so a tp group of one rank has to turn the reduction off.
    """
    if precision.fp8_format is None:
        return None
    numbers = library.Format.E4M3 if precision.fp8_format == "e4m3" else library.Format.HYBRID
    if precision.fp8_recipe == "tensorwise":
        return library.Float8CurrentScaling(fp8_format=numbers)
    if precision.fp8_recipe == "blockwise":
        return library.Float8BlockScaling(fp8_format=numbers)
    if precision.fp8_recipe == "mxfp8":
        return library.MXFP8BlockScaling(fp8_format=numbers)
    return library.DelayedScaling(
        margin=precision.fp8_margin,
        fp8_format=numbers,
        amax_history_len=precision.fp8_amax_history_len,
        amax_compute_algo=precision.fp8_amax_compute_algo,
        reduce_amax=spans_tp,
    )


class _EngineLinear:
    """Our part of the subclass of the library's Linear: gradient slots, weight queue, outputs writable in place.

    The names added here are not attributes of the library's Linear or its base classes (checked with 2.20.0.dev0).
    """

    can_recompute_input = False
    slots: dict[str, Any]
    weight: Tensor
    bias: Tensor | None
    use_bias: bool  # set by the library; without it, `bias` is an empty tensor
    weight_queue: Any  # tensor_parallel's WeightQueue, where the backward is split; else None
    bias_by_autograd: bool  # in a split backward, the bias gradient is added at I
    enter_fp8: Callable[[], AbstractContextManager[Any]]

    def forward(self, x: Tensor, recompute: None = None) -> Tensor:
        """Compute the linear as described in tensor_parallel.linear. recompute: not supported."""
        assert recompute is None
        slot = self.slots.get("weight")
        self.fuse_wgrad_accumulation = slot is not None
        if slot is not None:
            self.weight.main_grad = slot.main_grad  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            x = _AfterBackward.apply(x, self)
        with self.enter_fp8():
            output, unsafe_view = super().forward(x), torch.ops.aten._unsafe_view  # type: ignore[misc]
            # the library's output is a view made inside its Function, which may not be changed in place
            return WithAdjoint.apply(output, lambda y: unsafe_view(y, y.shape), lambda grad: grad)


class _DelayedWeightGradient:
    """A weight gradient that the library holds until asked (delay_wgrad_compute), first in, first out."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def launch(self) -> None:
        """Do nothing: the library runs its communication itself."""

    @torch.no_grad()
    def accumulate(self) -> None:
        linear = self._linear
        if "weight" not in linear.slots:
            raise RuntimeError(
                "Transformer Engine's delayed weight gradients need a GradientSlot: without one the next would "
                "replace them"
            )
        bias = linear.bias if linear.use_bias else None
        if bias is not None and linear.bias_by_autograd:
            bias.grad = bias.detach()  # otherwise the library would fill .grad with a gradient that it does not have
        linear.backward_dw()
        linear.slots["weight"].ready()
        if bias is not None:
            gradient, bias.grad = bias.grad, None
            if not linear.bias_by_autograd:  # written without autograd, so no hook has fired
                linear.slots["bias"].add(gradient)
                linear.slots["bias"].ready()


class _AfterBackward(torch.autograd.Function):
    """The identity before a linear: its backward, which queues or reports the weight gradient, runs when that of the
    linear is done.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: _EngineLinear) -> Tensor:
        ctx.linear = linear
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        linear = ctx.linear
        if linear.weight_queue is not None:
            linear.weight_queue.submit(_DelayedWeightGradient(linear))
        elif "weight" in linear.slots:
            linear.slots["weight"].ready()
        return grad, None
