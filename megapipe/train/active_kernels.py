"""The kernels that torch really picks on this GPU, for the lines at the start of a run."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from megapipe.config.config import Config
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig
from megapipe.dtypes import DTYPES
from megapipe.gpu.kernels import Kernels, why_not_packed
from megapipe.layers.packing import is_explicit
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32

NAMES = {
    SDPBackend.FLASH_ATTENTION: "torch's flash kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's fused kernel",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.MATH: "separate kernels, not fused",
}
FEW_TOKENS = 256  # the choice depends on the GPU, dtype and sizes of heads


def _attention(model: ModelConfig, dtype: torch.dtype, device: torch.device, masked: bool) -> str:
    """Name the kernel of scaled_dot_product_attention for the heads of one layer, as in model.core_attention."""
    queries = model.num_attention_heads // model.query_groups()
    q, k = (
        torch.empty(1, heads, FEW_TOKENS, model.head_size(), dtype=dtype, device=device, requires_grad=True)
        for heads in (queries, 1)
    )
    mask = torch.zeros(1, 1, FEW_TOKENS, FEW_TOKENS, dtype=dtype, device=device) if masked else None
    choice = torch._fused_sdp_choice(q, k, k, mask, 0.0, not masked, enable_gqa=queries > 1)
    return NAMES.get(SDPBackend(choice), SDPBackend(choice).name)


def active_kernels(config: Config, kernels: Kernels, device: torch.device) -> tuple[str, ...]:
    """Return lines on the attention and the weight gradients of this device; () on a CPU."""
    if device.type == "cpu":
        return ()
    model, dtype = config.model, getattr(torch, DTYPES[config.precision.dtype].torch_name)
    lines = []
    plain = [layer for layer in layer_configs(model) if not is_explicit(layer)]
    packs = config.data.reset_attention_mask and why_not_packed(config, device) is None
    if kernels.attention is None and plain and not packs:
        masks = {layer.window_size is not None or config.data.reset_attention_mask for layer in plain}
        parts = (f"{_attention(plain[0], dtype, device, masked)}{' under a mask' * masked}" for masked in sorted(masks))
        lines.append(f"           on this GPU: {', '.join(parts)}")
    if kernels.layers is None and dtype in (torch.bfloat16, torch.float16):
        adds = kernels.norms is not None or gemm_adds_to_fp32(device, dtype)
        lines.append(f"gradients  of weights are added to fp32 {'inside' if adds else 'by a kernel after'} their GEMMs")
    return tuple(lines)
