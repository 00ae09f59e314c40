"""Multi-head latent attention: x + norm(proj(core_attention(q, k, v))), with q, k and v projected up from latents of
the tokens and one rotated key for all heads (DeepSeek-V2, arXiv:2405.04434).
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.layers.attention import AttentionTable
from megapipe.sharding.sequence import SequenceSlice, Visibility


@dataclass(frozen=True, eq=False)
class LatentAttentionTable(AttentionTable):
    """The branch of one transformer layer with latent attention, its norms included."""

    recompute_modules = ("core_attn", "mla_up_proj")

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, per token, without the padding of values."""
        seen = Visibility.of(SequenceSlice((seq_length,)), **self.model.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        return 2.0 * keys * self.model.num_attention_heads * (self.model.kv_channels + self.model.v_head_dim)
