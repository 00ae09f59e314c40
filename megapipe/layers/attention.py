"""Self-attention: x + norm(proj(core_attention(qkv(norm(x))))), with either norm or both, grouped queries, rotary
positions, qk-norm, a sliding window, a soft-cap, a gate of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megapipe.layers.branch import Branch
from megapipe.layers.table import RankShape
from megapipe.sharding.sequence import SequencePart, SequenceSlice, Visibility


@dataclass(frozen=True, eq=False)
class AttentionTable(Branch):
    """The attention branch of one transformer layer, its norms included."""

    site = "has_attention"
    recompute_modules: ClassVar[tuple[str, ...]] = ("core_attn",)

    cp_comm_type: str = "p2p"  # how it reaches the keys of other cp ranks

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, per token; a sliding window limits the causal count."""
        seen = Visibility.of(SequenceSlice((seq_length,)), **self.model.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        return 4.0 * keys * self.model.num_attention_heads * self.model.kv_channels

    def visibility(self, shape: RankShape) -> Visibility:
        """Return which keys the first rank of the ring sees. Layers that share a mask have it in common."""
        exchanged = {"a2a": shape.cp, "a2a+p2p": shape.cp_inner}.get(self.cp_comm_type, 1)  # heads for positions
        place, part = shape.slice or SequenceSlice((shape.whole_seq,)), SequencePart(0, shape.cp // exchanged)
        return Visibility.of(place, shape.documents.attention_mask, part, **self.model.limits)
