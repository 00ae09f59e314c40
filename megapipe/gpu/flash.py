"""Attention by flash-attn 2 (Dao 2023, arXiv:2307.08691): causal, grouped queries, a sliding window, a soft-cap; bf16 and fp16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megapipe.gpu.attention import Attention, AttentionShape, folded
from megapipe.gpu.installed import FLASH, wanted


@dataclass(frozen=True)
class FlashAttention:
    """The library, imported. version: its own word for it."""

    version: str
    function: Callable[..., Any]

    @classmethod
    def open(cls) -> FlashAttention:
        """Raises ConfigError where flash-attn is not installed."""
        with wanted(FLASH, "--attention-impl flash", "--attention-impl sdpa"):
            import flash_attn

            return cls(str(getattr(flash_attn, "__version__", "?")), flash_attn.flash_attn_func)

    def attention(self, shape: AttentionShape) -> Attention:
        """Kept for the backward: q, k, v (views into one tensor), the output, and the log-sum-exp in fp32."""
        # the library counts the tokens left of a token, we count it in
        window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seq, batch = q.shape[:2]
            heads = (folded(x).transpose(0, 1) for x in (q, k, v))  # [b g, s, n or 1, d]
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
