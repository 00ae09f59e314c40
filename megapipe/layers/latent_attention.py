"""Multi-head latent attention: x + norm(proj(core_attention(q, k, v))), with q, k and v projected up from latents of
the tokens and one rotated key for all heads (DeepSeek-V2, arXiv:2405.04434).

Core attention and its options are those of `AttentionTable`. Fused, it runs as one block with values narrower than
keys; written out, and by kernels of libraries, values are padded to the width of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.layers import has_narrow_values
from megapipe.layers.attention import AttentionTable
from megapipe.layers.table import RankShape
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

    def _in_blocks(self, shape: RankShape) -> bool:
        """Return True if attention is computed in blocks: also if values are narrower than keys."""
        is_narrow = has_narrow_values(self.model) and shape.attention_impl == "sdpa"
        return is_narrow or super()._in_blocks(shape)
