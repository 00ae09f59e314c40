"""What the configuration chose: `Kernels`, opened once on every rank of a run, and the lines that the start of a run shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megapipe.config.config import Config
from megapipe.config.precision import PrecisionConfig
from megapipe.gpu.apex import Apex
from megapipe.gpu.compiled import compiled
from megapipe.gpu.flash import FlashAttention
from megapipe.gpu.transformer_engine import TransformerEngine

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kernels:
    """Where a field is None, torch's own kernels are used.

    layers: linears and norms. norms: norms alone. fp8: its settings, None without.
    splits_backward: the schedule has I and W. deterministic: --deterministic-mode.
    """

    layers: TransformerEngine | None = None
    norms: Apex | None = None
    attention: FlashAttention | TransformerEngine | None = None
    optimizer: Apex | TransformerEngine | None = None
    fp8: PrecisionConfig | None = None
    compiles: bool = False
    splits_backward: bool = False
    deterministic: bool = False

    def pointwise(self, function: AnyFunction) -> AnyFunction:
        """The function, compiled if that was asked for."""
        return compiled(function) if self.compiles else function


TORCH = Kernels()


def choose(config: Config, splits_backward: bool = False) -> Kernels:
    """Import what was chosen and nothing else. Raises ConfigError for a library that is not installed."""
    kernels, precision = config.kernels, config.precision
    layers: TransformerEngine | None = None
    norms: Apex | None = None
    attention: FlashAttention | TransformerEngine | None = None
    optimizer: Apex | TransformerEngine | None = None
    if kernels.transformer_impl == "transformer_engine":
        layers = TransformerEngine("--transformer-impl transformer_engine", "--transformer-impl local", precision)
    if kernels.attention_impl == "flash":
        attention = FlashAttention.open()
    elif kernels.attention_impl == "te":
        attention = layers or TransformerEngine("--attention-impl te", "--attention-impl sdpa", precision)
    if kernels.optimizer_impl == "apex":
        optimizer = norms = Apex.open()
    elif kernels.optimizer_impl == "te":
        optimizer = layers or TransformerEngine("--optimizer-impl te", "--optimizer-impl torch", precision)
    fp8 = precision if precision.fp8_format is not None else None
    deterministic = config.training.deterministic_mode
    return Kernels(layers, norms, attention, optimizer, fp8, kernels.compile_pointwise, splits_backward, deterministic)


def words_of(kernels: Kernels, config: Config, device_type: str) -> tuple[str, ...]:
    """Which implementation of each part is active, and why: one line a part."""
    chosen, layers = config.kernels, kernels.layers
    linears = f"Transformer Engine {layers.version}" if layers is not None else "megapipe's on torch's GEMMs"
    norms = (
        f"Transformer Engine {layers.version}"
        if layers is not None
        else "apex's fused norms"
        if kernels.norms is not None
        else "torch's"
    )
    return (
        f"linears    {linears} (--transformer-impl {chosen.transformer_impl}); {_fp8_words(kernels, config.precision, device_type)}",
        f"norms      {norms}; pointwise functions {'compiled' if kernels.compiles else 'as written'} (--compile-pointwise)",
        f"attention  {_attention_words(kernels, config, device_type)} (--attention-impl {chosen.attention_impl})",
        f"optimizer  {_optimizer_words(kernels, config)} (--optimizer-impl {chosen.optimizer_impl})",
    )


def _fp8_words(kernels: Kernels, precision: PrecisionConfig, device_type: str) -> str:
    if precision.fp8_format is None:
        return "no fp8"
    settings = f"fp8 {precision.fp8_format}, {precision.fp8_recipe} scaling"
    if kernels.layers is not None:
        return settings
    how = (
        "torch._scaled_mm"
        if device_type == "cuda"
        else "no fp8 units here: operands rounded to fp8, products in fp32, for tests"
    )
    return f"{settings} ({how})"


def _attention_words(kernels: Kernels, config: Config, device_type: str) -> str:
    if isinstance(kernels.attention, FlashAttention):
        return f"flash-attn {kernels.attention.version}"
    if kernels.attention is not None:
        return f"DotProductAttention of Transformer Engine {kernels.attention.version}"
    model = config.model
    reasons = [
        name
        for name, is_on in (
            ("--attention-dropout", model.attention_dropout > 0),
            ("--attn-logit-softcapping", model.attn_logit_softcapping is not None),
            ("--attention-softmax-in-fp32", model.attention_softmax_in_fp32),
        )
        if is_on
    ]
    if reasons:
        return f"written out, not fused, for {' and '.join(reasons)}"
    half = device_type == "cuda" and config.precision.dtype in ("bf16", "fp16")
    return "scaled_dot_product_attention" + (", a flash kernel where there is no mask" if half else "")


def _optimizer_words(kernels: Kernels, config: Config) -> str:
    if isinstance(kernels.optimizer, Apex):
        return "FusedAdam of apex, and its accumulating weight gradient"
    if kernels.optimizer is not None:
        return f"FusedAdam of Transformer Engine {kernels.optimizer.version}"
    return f"torch's fused {'AdamW' if config.optimizer.optimizer == 'adam' else 'SGD'}"
