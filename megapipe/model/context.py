"""`LayerContext`: what all layers of a stage share for one microbatch, and the tables and masks it is made from.

Masks are additive (0 or -inf): made once for a window, once a microbatch for documents. They cost s^2 (with documents b s^2) elements a
stage, not a layer; plain causal attention through the fused kernels has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.model.kept_attention import KeptAttention
from megapipe.model.kv_cache import KVCache
from megapipe.model.microbatch import Microbatch
from megapipe.model.norm import at_least_fp32
from megapipe.model.rotary import Rotary
from megapipe.tensor_parallel.random import DropoutKey


@dataclass(frozen=True)
class LayerContext:
    """rotary: cos and sin. mask: [1 or b, 1, s, keys] in the activations' dtype, None: causal, by the fused kernel's own rule.

    explicit: attention is written out, because the fused kernels lack soft-capping, keyed dropout and a softmax in a chosen dtype.
    attention: what core attention is run through, so that a replay need not compute it again.
    """

    rotary: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    explicit: bool
    dropout_key: DropoutKey | None
    cache: KVCache | None = None
    attention: KeptAttention | None = None


class ContextMaker:
    """Makes the context of each microbatch for one stage."""

    def __init__(self, config: ModelConfig, has_own_attention: bool = False) -> None:
        """has_own_attention: the layers' kernel knows causality, window and soft-cap by itself; only a cache needs masks."""
        self.config, self.has_own_attention = config, has_own_attention
        self.rotary = Rotary(config) if config.position_embedding_type == "rope" else None
        self._mask_key: tuple[int, torch.device, torch.dtype] | None = None
        self._last_mask: Tensor | None = None  # one only: generation comes with a new length for each token

    def __call__(self, microbatch: Microbatch, dtype: torch.dtype) -> LayerContext:
        """dtype: of the activations."""
        config, key = self.config, microbatch.dropout_key
        if self.has_own_attention and microbatch.cache is None:
            if microbatch.document_ids is not None:
                raise ValueError("an attention kernel of a library was given documents, which it cannot keep apart")
            return LayerContext(self._rotary(microbatch, dtype), None, False, key)
        explicit = config.attn_logit_softcapping is not None or config.attention_softmax_in_fp32
        explicit = explicit or (config.attention_dropout > 0.0 and key is not None)
        mask = (
            self._mask(microbatch, dtype, explicit)
            if microbatch.cache is None
            else self._cached_mask(microbatch, dtype, explicit)
        )
        return LayerContext(self._rotary(microbatch, dtype), mask, explicit, key, microbatch.cache)

    def _rotary(self, microbatch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None:
            return None
        if microbatch.position_ids is not None:
            return self.rotary.tables_at(microbatch.position_ids, at_least_fp32(dtype))
        tokens = microbatch.tokens
        return self.rotary.tables(tokens.shape[1], tokens.device, at_least_fp32(dtype))

    def _cached_mask(self, microbatch: Microbatch, dtype: torch.dtype, explicit: bool) -> Tensor | None:
        """Of the newest positions over all that are cached; a single one that sees everything needs none."""
        cache, seq, device = microbatch.cache, microbatch.tokens.shape[1], microbatch.tokens.device
        assert cache is not None
        visible = cache.visible(seq, self.config.window_size, device)
        if visible is None and not explicit and (cache.length == 0 or seq == 1):
            return None
        if visible is None:
            visible = torch.ones(seq, cache.length + seq, dtype=torch.bool, device=device).tril_(cache.length)[
                None, None
            ]
        return additive(visible, dtype)

    def _mask(self, microbatch: Microbatch, dtype: torch.dtype, explicit: bool) -> Tensor | None:
        seq, device = microbatch.tokens.shape[1], microbatch.tokens.device
        window = self.config.window_size
        documents = microbatch.document_ids
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return additive(same & causal(seq, window, device), dtype)
        if not explicit and (window is None or window >= seq):
            return None
        key = (seq, device, dtype)
        if key != self._mask_key:
            self._mask_key, self._last_mask = key, additive(causal(seq, window, device), dtype)
        return self._last_mask


def causal(seq: int, window: int | None, device: torch.device) -> Tensor:
    """[1, 1, s, s]: True where the query (row) i sees the key (column) j: j in (i - window, i]."""
    visible = torch.ones(seq, seq, dtype=torch.bool, device=device).tril_()
    if window is not None:
        visible.triu_(1 - window)
    return visible[None, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
