"""Self-attention: x + norm(proj(core_attention(qkv(norm(x))))), with either norm or both, grouped queries, rotary
positions, qk-norm, a sliding window, a soft-cap, a gate of the output.

Core attention is one fused kernel; where fused kernels lack an option it is written out ("explicit") and keeps [s, s]
matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from megapipe.config.layers import is_explicit
from megapipe.config.model import ATTENTIONS, AttentionKind
from megapipe.layers.branch import Branch
from megapipe.layers.table import AttentionWork, RankShape
from megapipe.sharding.sequence import SequencePart, SequenceSlice, Visibility


@dataclass(frozen=True, eq=False)
class AttentionTable(Branch):
    """The attention branch of one transformer layer, its norms included."""

    site = "has_attention"
    recompute_modules: ClassVar[tuple[str, ...]] = ("core_attn",)

    cp_comm_type: str = "p2p"  # how it reaches the keys of other cp ranks

    @cached_property
    def is_explicit(self) -> bool:
        return is_explicit(self.model)

    @property
    def registered(self) -> AttentionKind | None:
        """The row of a kind of attention that an extension has added: its backward replays it from q, k and v."""
        kind = ATTENTIONS[self.model.attention_kind]
        return None if kind.function is None else kind

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, per token; a sliding window limits the causal count."""
        seen = Visibility.of(SequenceSlice((seq_length,)), **self.model.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        return 4.0 * keys * self.model.num_attention_heads * self.model.kv_channels

    def visibility(self, shape: RankShape, rank: int = 0) -> Visibility:
        """Return which keys the queries of a rank of the ring see. Layers that share a mask have it in common."""
        place, part = shape.slice or SequenceSlice((shape.whole_seq,)), SequencePart(rank, self._ring(shape))
        return Visibility.of(place, shape.documents.attention_mask, part, **self.model.limits)

    def _has_mask(self, shape: RankShape) -> bool:
        """Return True if torch's kernel takes a mask, or attention is written out."""
        is_needed = self.visibility(shape).window is not None or self._is_written_out(shape)
        is_shared = is_needed and shape.attention_impl == "sdpa" and not shape.documents.borders
        return shape.documents.attention_mask or is_shared

    def _exchanged(self, shape: RankShape) -> int:
        """Return the number of cp ranks that exchange heads for positions."""
        return {"a2a": shape.cp, "a2a+p2p": shape.cp_inner}.get(self.cp_comm_type, 1)

    def exchanges(self, shape: RankShape) -> bool:
        """Return True if ranks exchange heads for positions."""
        return self._exchanged(shape) > 1

    def _ring(self, shape: RankShape) -> int:
        """Return the number of cp ranks whose keys a rank reaches in blocks."""
        return shape.cp // self._exchanged(shape)

    def _in_blocks(self, shape: RankShape) -> bool:
        """Return True if attention is computed in blocks of queries and keys: of a ring, of a slice, or with sinks."""
        has_sinks = self.model.softmax_type != "vanilla" and not self.is_explicit
        return self._ring(shape) > 1 or shape.slice is not None or has_sinks

    def _is_written_out(self, shape: RankShape) -> bool:
        """Return True if whole matrices of queries and keys are kept; blocks compute theirs again."""
        return self.is_explicit and not self._in_blocks(shape)

    def _heads(self, shape: RankShape) -> int:
        return self.model.num_attention_heads // shape.tp

    def squares(self, shape: RankShape) -> int:
        """Return the elements of a matrix of all queries and keys."""
        return shape.tokens * self._heads(shape) * shape.whole_seq

    def runs_fused(self, shape: RankShape) -> bool:
        """Return True if a fused kernel computes core attention."""
        return shape.attention_impl != "sdpa" or not self._is_written_out(shape)

    def core(self, shape: RankShape) -> AttentionWork:
        """Return the cost of core attention.

        Fused kernels skip what a causal mask hides, and recompute the probabilities in the backward: five products for
        two. Written out, all is computed, probabilities are moved, and the backward has four products.
        """
        heads = self._heads(shape)
        if not self._is_written_out(shape):
            keys, channels = self.visibility(shape).mean_keys, self.model.kv_channels
            kernel = "flash2" if shape.attention_impl == "flash" or shape.documents.borders else "cudnn"
            if self._has_mask(shape):
                kernel = ""  # torch's kernel that takes masks
            calls = shape.cp // self._exchanged(shape)  # of a ring, each with as many of the keys
            flops = 4.0 * shape.tokens * keys * heads * channels
            return AttentionWork(flops, (0.0, 0.0), 2.5, kernel, keys / calls, channels)
        squares, channels = float(self.squares(shape)), self.model.kv_channels
        # casts to fp32 and back; mask and softmax, with scale, tanh and cap; a mask of dropout, drawn and multiplied
        cast = 2 * (shape.element + shape.wide) if shape.element != shape.wide else 0
        capped, is_dropped = self.model.attn_logit_softcapping is not None, self.model.attention_dropout > 0
        there = cast + shape.wide * (4 + 6 * capped) + (4 * shape.element + 10) * is_dropped
        back = cast + shape.wide * (3 + 3 * capped) + (4 * shape.element + 1) * is_dropped
        times = 2.0 if self.registered is None else 3.0  # it computes the forward again
        moved = squares * there, squares * back
        return AttentionWork(4.0 * squares * channels, moved, times, "", shape.whole_seq, channels)
