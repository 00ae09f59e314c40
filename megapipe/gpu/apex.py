"""NVIDIA's apex: a multi-tensor Adam, norms in one kernel, and a weight gradient that is added inside its GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.gpu.installed import APEX, wanted


@dataclass(frozen=True)
class Apex:
    """The library, imported: four of its functions."""

    fused_adam: Callable[..., torch.optim.Optimizer]
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    weight_gradients: Any  # the extension module

    @classmethod
    def open(cls) -> Apex:
        """Raises ConfigError where apex is not installed, or lacks its CUDA extensions."""
        with wanted(APEX, "--optimizer-impl apex", "--optimizer-impl torch"):
            import fused_weight_gradient_mlp_cuda
            from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
            from apex.optimizers import FusedAdam

            return cls(FusedAdam, fused_layer_norm_affine, fused_rms_norm_affine, fused_weight_gradient_mlp_cuda)

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
        """AdamW over parameter groups; it counts its steps in each group's 'step'."""
        betas = (config.adam_beta1, config.adam_beta2)
        return self.fused_adam(
            groups, lr=0.0, bias_correction=True, betas=betas, eps=config.adam_eps, adam_w_mode=True, weight_decay=0.0
        )

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        """LayerNorm, without a bias RMSNorm, over the last dimension; weight as it multiplies. Statistics in fp32."""
        if bias is None:
            return self.rms_norm(x, weight, weight.shape, epsilon)
        return self.layer_norm(x, weight, bias, weight.shape, epsilon)

    def add_outer(self, main_grad: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
        """main_grad [out, in] += grad_output^T [tokens, out] @ inputs [tokens, in], in the GEMM's epilogue; main_grad fp32, inputs bf16,
        fp16 or fp32."""
        self.weight_gradients.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
