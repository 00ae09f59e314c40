"""`LayerContext`: the attention mask and rotary tables that all layers of a stage share for one microbatch.

Masks are additive (0 or -inf), built once for a window and once per microbatch for documents. They cost s^2 elements
(b s^2 with documents) per stage, not per layer; plain causal attention with a fused kernel has no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.model.microbatch import KVCache, Microbatch
from megapipe.model.norm import at_least_fp32
from megapipe.model.recompute import KeptAttention
from megapipe.model.rotary import Rotary
from megapipe.tensor_parallel.random import DropoutKey


@dataclass(frozen=True)
class LayerContext:
    """The inputs of a layer besides the hidden states.

    rotary: cos and sin. mask: [1 or b, 1, s, keys] in the activations' dtype; None: the kernel's causality.
    explicit: attention is written out, because fused kernels lack soft-capping, keyed dropout and a softmax in fp32.
    kept_attention: keeps attention's results from the forward for the recompute.
    """

    rotary: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    explicit: bool
    dropout_key: DropoutKey | None
    cache: KVCache | None = None
    kept_attention: KeptAttention | None = None


class ContextBuilder:
    """Builds the context of each microbatch for one stage."""

    def __init__(self, config: ResolvedModelConfig, has_attention_kernel: bool = False) -> None:
        """has_attention_kernel: a library's kernel handles causality, window and soft-cap; only a cache needs masks."""
        self.config, self.has_attention_kernel = config, has_attention_kernel
        self.rotary = Rotary(config) if config.position_embedding_type == "rope" else None
        # one mask only: generation asks for a new length with every token
        self._causal_mask = lru_cache(maxsize=1)(partial(_causal_mask, config.window_size))

    def __call__(self, microbatch: Microbatch, dtype: torch.dtype) -> LayerContext:
        """dtype: that of the activations."""
        config, key = self.config, microbatch.dropout_key
        if self.has_attention_kernel and microbatch.cache is None:
            if microbatch.document_ids is not None:
                raise ValueError("this attention kernel cannot separate the documents of a sequence")
            return LayerContext(self._rotary(microbatch, dtype), None, False, key)
        explicit = config.attn_logit_softcapping is not None or config.attention_softmax_in_fp32
        explicit = explicit or (config.attention_dropout > 0.0 and key is not None)
        mask = self._mask(microbatch, dtype, explicit)
        return LayerContext(self._rotary(microbatch, dtype), mask, explicit, key, microbatch.cache)

    def _rotary(self, microbatch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None:
            return None
        if microbatch.position_ids is not None:
            return self.rotary.tables_at(microbatch.position_ids, at_least_fp32(dtype))
        tokens = microbatch.tokens
        return self.rotary.tables(tokens.shape[1], tokens.device, at_least_fp32(dtype))

    def _mask(self, microbatch: Microbatch, dtype: torch.dtype, explicit: bool) -> Tensor | None:
        seq, device = microbatch.tokens.shape[1], microbatch.tokens.device
        window, documents, cache = self.config.window_size, microbatch.document_ids, microbatch.cache
        if cache is not None:
            visible = cache.visible(seq, window, device)
            if visible is None:
                if not explicit and (cache.length == 0 or seq == 1):
                    return None  # a single query sees all cached keys
                visible = torch.ones(seq, cache.length + seq, dtype=torch.bool, device=device).tril_(cache.length)
                visible = visible[None, None]
            return additive(visible, dtype)
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return additive(same & causal(seq, window, device), dtype)
        if not explicit and (window is None or window >= seq):
            return None
        return self._causal_mask(seq, device, dtype)


def _causal_mask(window: int | None, seq: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return additive(causal(seq, window, device), dtype)


def causal(seq: int, window: int | None, device: torch.device) -> Tensor:
    """Return [1, 1, s, s], True where the query (row) i sees the key (column) j: j in (i - window, i]."""
    visible = torch.ones(seq, seq, dtype=torch.bool, device=device).tril_()
    if window is not None:
        visible.triu_(1 - window)
    return visible[None, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
