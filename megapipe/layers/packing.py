"""How attention keeps packed documents apart: in kernels that take the documents' borders, or under a mask."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.layers import layer_configs
from megapipe.config.model import ATTENTIONS, ModelConfig

LARGEST_HEAD, HEAD_MULTIPLE = 256, 8  # channels of a head that torch's variable-length kernel takes
HALF_TYPES = ("bf16", "fp16")


def is_explicit(model: ModelConfig) -> bool:
    """Return True if training writes attention out: fused kernels have no soft-cap, keyed dropout or softmax dtype, nor
    the score function of an extension.
    """
    if ATTENTIONS[model.attention_kind].function is not None:
        return True
    return model.attn_logit_softcapping is not None or model.attention_softmax_in_fp32 or model.attention_dropout > 0


def why_masked(config: Config, is_cuda: bool) -> str | None:
    """Return why documents need a mask; None if attention takes their borders, or there are none."""
    model, dtype = config.model, config.precision.dtype
    if not config.data.reset_attention_mask or config.kernels.attention_impl == "flash":
        return None  # flash-attn has soft-caps too; the rules refuse what it lacks
    layers = [layer for layer in layer_configs(model) if layer.has_attention]
    head = model.head_size()
    reasons = {
        "only GPUs have variable-length kernels": not is_cuda,
        "values of latent attention have other sizes than keys": model.multi_latent_attention,
        "attention is not fused": any(is_explicit(layer) for layer in layers),
        "attention sinks need its log-sum-exp": any(layer.softmax_type != "vanilla" for layer in layers),
        "variable-length kernels have no chunks": any(layer.limits["has_chunks"] for layer in layers),
        f"variable-length kernels take bf16 and fp16, not {dtype}": dtype not in HALF_TYPES,
        f"they take heads of a multiple of {HEAD_MULTIPLE} channels up to {LARGEST_HEAD}, not {head}": (
            head % HEAD_MULTIPLE != 0 or head > LARGEST_HEAD
        ),
        "context parallelism cuts sequences": config.parallel.context_parallel_size > 1,
        "slices of a sequence read the keys of others": config.parallel.pipe_sp_splits > 1,
        "CUDA graphs need tensors of fixed sizes": config.gpu.cuda_graph_impl != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
