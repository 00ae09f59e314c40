"""Adapters of apex and flash-attn, and what the adapters of all optional libraries share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.config.training import OptimizerConfig
from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Library:
    """An optional library: its usual name, and the command that installs it."""

    name: str
    install: str


TRANSFORMER_ENGINE = Library(
    "NVIDIA's Transformer Engine",
    "pip install --no-build-isolation 'transformer_engine[pytorch]' (builds against CUDA and cuDNN)",
)
APEX = Library(
    "NVIDIA's apex",
    "git clone https://github.com/NVIDIA/apex, and in it: "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . (the apex of PyPI is another package)",
)
FLASH = Library("flash-attn", "pip install --no-build-isolation flash-attn (builds against CUDA)")


@contextmanager
def importing(library: Library, flag: str, instead: str) -> Iterator[None]:
    """Raise ConfigError with the install command if the import inside the block fails.

    flag: the option that chose the library. instead: the value of it that needs no library.
    """
    try:
        yield
    except (
        Exception
    ) as error:  # PyPI's empty transformer-engine raises RuntimeError, a build for another torch anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{flag} needs {library.name}, which cannot be imported here ({reason}): {library.install}; "
            f"or use {instead}"
        ) from error


# (q [s, b, g, n, d], k [s, b, g, 1, d], v [s, b, g, 1, d]) -> [s, b, g n d], causal
AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer on one rank.

    queries: n per key/value head. window: tokens that a token sees, itself included.
    """

    layer: int
    queries: int
    head_dim: int
    scale: float
    window: int | None  # None: all before it
    cap: float | None
    deterministic: bool


def fold_groups(x: Tensor) -> Tensor:
    """View [s, b, g, n, d] as [s, b g, n, d]: each key/value head becomes a batch entry with its n query heads."""
    return x.flatten(1, 2)


@dataclass(frozen=True)
class Apex:
    """NVIDIA's apex: a multi-tensor Adam, fused norms, and a weight gradient that is accumulated inside its GEMM."""

    fused_adam: Callable[..., torch.optim.Optimizer]
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    weight_gradients: Any  # the extension module

    @classmethod
    def load(cls) -> Apex:
        """Import the library. Raises ConfigError if apex is not installed or lacks its CUDA extensions."""
        with importing(APEX, "--optimizer-impl apex", "--optimizer-impl torch"):
            import fused_weight_gradient_mlp_cuda
            from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
            from apex.optimizers import FusedAdam

            return cls(FusedAdam, fused_layer_norm_affine, fused_rms_norm_affine, fused_weight_gradient_mlp_cuda)

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
        """Build AdamW over parameter groups; it counts its steps in each group's 'step'."""
        betas = (config.adam_beta1, config.adam_beta2)
        return self.fused_adam(
            groups, lr=0.0, bias_correction=True, betas=betas, eps=config.adam_eps, adam_w_mode=True, weight_decay=0.0
        )

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        """Apply LayerNorm, or without a bias RMSNorm, over the last dimension, with fp32 statistics."""
        if bias is None:
            return self.rms_norm(x, weight, weight.shape, epsilon)
        return self.layer_norm(x, weight, bias, weight.shape, epsilon)

    def add_outer(self, main_grad: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_output^T [tokens, out] @ inputs [tokens, in] to main_grad [out, in] in the GEMM's epilogue.

        main_grad: fp32; inputs: bf16, fp16 or fp32.
        """
        self.weight_gradients.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)


@dataclass(frozen=True)
class FlashAttention:
    """flash-attn 2 (Dao 2023, arXiv:2307.08691): causal, grouped queries, sliding window, soft-cap; bf16 and fp16."""

    version: str
    function: Callable[..., Any]

    @classmethod
    def load(cls) -> FlashAttention:
        """Import the library. Raises ConfigError if flash-attn is not installed."""
        with importing(FLASH, "--attention-impl flash", "--attention-impl sdpa"):
            import flash_attn

            return cls(str(getattr(flash_attn, "__version__", "?")), flash_attn.flash_attn_func)

    def attention(self, shape: AttentionShape) -> AttentionKernel:
        """Build the attention of one layer.

        Saves q, k, v (views into one tensor), the output and the fp32 log-sum-exp.
        """
        # the library counts only the tokens to the left; our window includes the token itself
        window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seq, batch = q.shape[:2]
            heads = (fold_groups(x).transpose(0, 1) for x in (q, k, v))  # [b g, s, n or 1, d]
            output = self.function(
                *heads,
                dropout_p=0.0,
                softmax_scale=shape.scale,
                causal=True,
                window_size=window,
                softcap=shape.cap or 0.0,
                deterministic=shape.deterministic,
            )
            return output.transpose(0, 1).reshape(seq, batch, -1)

        return attend
