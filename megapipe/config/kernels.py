"""The kernels section: which library computes what. The arithmetic meant is the same; rounding is each library's own."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import option

TRANSFORMER_IMPLS = ("local", "transformer_engine")
ATTENTION_IMPLS = ("sdpa", "flash", "te")
OPTIMIZER_IMPLS = ("torch", "apex", "te")


@dataclass(frozen=True)
class KernelsConfig:
    """What is chosen here is imported only when it is chosen, and only by a run: a plan is made without it. See docs/gpu.md."""

    transformer_impl: str = option(
        "local",
        "linears and norms of the layers: megapipe's own on torch's kernels, or NVIDIA's Transformer Engine (installed apart)",
        choices=TRANSFORMER_IMPLS,
    )
    attention_impl: str = option(
        "sdpa",
        "core attention of training: torch's scaled_dot_product_attention, flash_attn_func of the package flash-attn, or Transformer "
        "Engine's DotProductAttention; generation always takes the first",
        choices=ATTENTION_IMPLS,
    )
    optimizer_impl: str = option(
        "torch",
        "AdamW and SGD of torch, or FusedAdam of NVIDIA's apex or of Transformer Engine; apex brings its fused norms and the weight "
        "gradient that accumulates inside its GEMM, too",
        choices=OPTIMIZER_IMPLS,
    )
    compile_pointwise: bool = option(
        False,
        "torch.compile for what stands between the linears: activations and the casts of fp8; the first step compiles",
    )
