"""Self-attention: x + norm(proj(core_attention(qkv(norm(x))))), with either norm or both, grouped queries, rotary
positions, qk-norm, a sliding window, a soft-cap, a gate of the output.

Core attention is one fused kernel; where fused kernels lack an option it is written out ("explicit") and keeps [s, s]
matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megapipe.config.layers import LayerConfig, has_narrow_values, is_explicit
from megapipe.config.model import ATTENTIONS, NORMALIZATIONS, AttentionKind
from megapipe.layers.linear import (
    LinearTable,
    collectives,
    column_gradient_bytes,
    output_std,
    row_gradient_bytes,
    weight_gradient_bytes,
)
from megapipe.layers.norm import NormTable, branch_norms, residual_stream
from megapipe.layers.table import (
    MASK_BYTES,
    AttentionWork,
    Backward,
    Gemm,
    Kept,
    Operation,
    RankShape,
    Table,
    ring_bytes,
    total_bytes,
)
from megapipe.sharding.sequence import KeyBlock, SequencePart, SequenceSlice, Visibility
from megapipe.sharding.spec import Fused, HeadChannels, Init, ParamSpec, QueryGroups


@dataclass(frozen=True, eq=False)
class AttentionTable:
    """The attention branch of one transformer layer, its norms included."""

    model: LayerConfig
    is_fp8: bool  # its linears multiply in 8 bits
    cp_comm_type: str = "p2p"  # how it reaches the keys of other cp ranks

    @cached_property
    def norms(self) -> tuple[NormTable | None, NormTable | None]:
        """The norms of the branch's input and of its output."""
        return branch_norms(self.model, "input_layernorm", "post_self_attn_layernorm")

    @cached_property
    def qk_norms(self) -> tuple[NormTable, ...]:
        """The norms of q and of k; none without --qk-layernorm and --qk-l2-norm."""
        model = self.model
        if model.qk_l2_norm:
            rms, size = NORMALIZATIONS["RMSNorm"], model.kv_channels
            return tuple(NormTable(f"self_attention.{name}_l2norm", size, rms, False) for name in ("q", "k"))
        if not model.qk_layernorm:
            return ()
        q = k = model.kv_channels
        if model.qk_layernorm_scope == "projection":
            q, k = model.num_attention_heads * q, model.num_query_groups * k
        sizes = (("q", q), ("k", k))
        return tuple(NormTable.of(model, f"self_attention.{name}_layernorm", size) for name, size in sizes)

    @cached_property
    def is_explicit(self) -> bool:
        return is_explicit(self.model)

    @property
    def query_projections(self) -> int:
        """2 where linear_qkv makes gates besides queries, else 1."""
        return 2 if self.model.attention_output_gate else 1

    @property
    def registered(self) -> AttentionKind | None:
        """The row of a kind of attention that an extension has added: its backward replays it from q, k and v."""
        kind = ATTENTIONS[self.model.attention_kind]
        return None if kind.function is None else kind

    def parameters(self, prefix: str, layer: int, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the parameters of layer number `layer`, in model order."""
        model, hidden, name = self.model, self.model.hidden_size, f"{prefix}self_attention"
        heads, groups, channels = model.num_attention_heads, model.num_query_groups, model.kv_channels
        slicing = QueryGroups(heads, groups, channels, is_gated=model.attention_output_gate)
        rows = (self.query_projections * heads + 2 * groups) * channels
        has_bias, std = model.add_bias_linear, model.init_method_std
        qkv = LinearTable(f"{name}.linear_qkv", rows, hidden, slicing, has_bias or model.add_qkv_bias, std)
        projection = LinearTable(f"{name}.linear_proj", hidden, heads * channels, Fused(1), has_bias, output_std(model))
        before, after = self.norms
        yield from before.parameters(prefix, layer, sequence_parallel) if before is not None else ()
        yield from qkv.parameters(layer, sequence_parallel)
        if self.qk_norms and model.qk_layernorm_scope == "projection":  # cut over tp like the heads
            for norm, count in zip(self.qk_norms, (heads, groups), strict=True):
                yield norm.weight(prefix, layer, HeadChannels(count, channels))
        elif model.qk_layernorm:
            for norm in self.qk_norms:  # one weight for all heads, of which each tp rank sees its own
                yield from norm.parameters(prefix, layer, partial_gradient=True)
        if model.softmax_type == "learnable":
            offset = f"{name}.softmax_offset"
            yield ParamSpec(offset, (heads,), layer, Fused(0), Init("normal", std), weight_decay=False)
        yield from projection.parameters(layer, sequence_parallel)
        yield from after.parameters(prefix, layer, sequence_parallel) if after is not None else ()

    def gemms(self, tp: int) -> tuple[Gemm, Gemm]:
        """Return linear_qkv and linear_proj on one of tp ranks."""
        model, hidden = self.model, self.model.hidden_size
        query = model.num_attention_heads // tp * model.kv_channels
        key = max(1, model.num_query_groups // tp) * model.kv_channels
        rows = self.query_projections * query + 2 * key
        return Gemm(hidden, rows, True, self.is_fp8), Gemm(query, hidden, False, self.is_fp8)

    def up_gemms(self, tp: int) -> tuple[Gemm, ...]:
        """Return the linears from latents to heads on one of tp ranks; none without latents."""
        return ()

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, per token; a sliding window limits the causal count."""
        seen = Visibility.of(SequenceSlice((seq_length,)), **self.model.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        return 4.0 * keys * self.model.num_attention_heads * self.model.kv_channels

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank."""
        qkv, projection = self.gemms(shape.tp)
        hidden, query = shape.hidden_bytes(self.model.hidden_size), self._query(shape) * shape.element
        dropout = Kept("dropout masks", shape.own_tokens * self.model.hidden_size, MASK_BYTES)
        before, after = self.norms
        has_dropout = self.model.hidden_dropout > 0
        # the gradient behind the dropout or the norm after the projection stays until the branch is done
        behind = hidden if self.model.scales_branches or after is not None else 0
        qkv_bytes = shape.tokens * qkv.outputs * shape.element
        again = 0 if before is None else before.output_again_bytes(shape)
        redoes_core = shape.recomputes("core_attn")
        qkv_kept, core_kept = tuple(self._qkv_kept(shape)), () if redoes_core else tuple(self._core_kept(shape))
        # core attention's backward frees all but its output, which linear_proj keeps, and what a checkpoint holds until
        # its own backward is done
        freed = [tensor for tensor in qkv_kept if tensor.name != "norm statistics"]
        is_gated = self.model.attention_output_gate  # then linear_proj keeps the product
        freed += [tensor for tensor in core_kept if is_gated or tensor.name != "attention output"]
        if shape.recompute.recompute_keep_attention:
            freed = [tensor for tensor in freed if not tensor.with_replay]
        if before is None:
            start = residual_stream(shape, self.model.hidden_size)
        else:
            waiting = qkv_bytes + behind if shape.splits_backward else 0
            start = before.operation(shape, backward=Backward(waiting + hidden + before.gradient_bytes(shape)))
        operations = (
            start,
            Operation(
                "linear_qkv",
                qkv_kept,
                gemm=qkv,
                collectives=collectives(qkv, shape),
                deferred_bytes=hidden + qkv_bytes,
                backward=Backward(behind + qkv_bytes + again + column_gradient_bytes(qkv, shape)),
            ),
            Operation(
                "core_attention",
                core_kept,
                attention=self._core(shape),
                recompute_modules=("core_attn",),
                backward=Backward(behind + query + self._core_gradient_bytes(shape), total_bytes(freed)),
            ),
            *(self._gate(shape, behind) if is_gated else ()),
            Operation(
                "linear_proj",
                (dropout,) if has_dropout else (),
                gemm=projection,
                collectives=collectives(projection, shape),
                deferred_bytes=query + hidden,
                backward=Backward(behind + query + row_gradient_bytes(projection, shape)),
            ),
            *(() if after is None else (after.after_branch(shape, self.model.scales_branches),)),
        )
        return Table(operations, hidden, max(weight_gradient_bytes(gemm, shape) for gemm in (qkv, projection)))

    def _gate(self, shape: RankShape, behind: int) -> Iterator[Operation]:
        """Yield the gate of the output. behind: bytes of the gradient behind the branch."""
        query = self._query(shape)
        kept = () if shape.recomputes("core_attn") else (Kept("gated attention output", query, shape.element),)
        # the gradients of the product, of the output and of the gates, and the sigmoid and a product in at least fp32
        made = behind + query * (3 * shape.element + 3 * shape.wide)
        yield Operation("output_gate", kept, recompute_modules=("core_attn",), backward=Backward(made))

    def visibility(self, shape: RankShape, rank: int = 0) -> Visibility:
        """Return which keys the queries of a rank of the ring see. Layers that share a mask have it in common."""
        place, part = shape.slice or SequenceSlice((shape.whole_seq,)), SequencePart(rank, self._ring(shape))
        return Visibility.of(place, shape.documents.attention_mask, part, **self.model.limits)

    def sent_bytes(self, shape: RankShape) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes that a rank sends for one microbatch to other cp ranks, in a forward and in a backward, by
        group.

        A ring sends keys and values to each rank that needs them, in the backward again, and their gradients back, in
        at least fp32 where they are sums; gathering them, always sums. An exchange of heads and positions sends q, k, v
        and the output.
        """
        if shape.cp == 1:
            return {}, {}
        ring, keys, element = self._ring(shape), self._reached_keys(shape), shape.element
        a2a = self._exchange_bytes(shape)
        gathers, seen = self.cp_comm_type == "all_gather", self.visibility(shape)
        steps = ring - 1 if gathers else len(seen.sources) - 1
        of_gradient = shape.wide if gathers or seen.adds_key_gradients else element
        to_ring, back = float(steps * keys * element), float(steps * keys * (element + of_gradient))
        if self.cp_comm_type == "a2a+p2p":
            return {"cp_a2a": a2a, "cp_p2p": to_ring}, {"cp_a2a": a2a, "cp_p2p": back}
        return {"cp": a2a + to_ring}, {"cp": a2a + back}

    def resent_bytes(self, shape: RankShape) -> dict[str, float]:
        """Return the bytes that the shape's recompute sends for one microbatch, by group: those of the forward; of a
        ring none if attention's results are kept.
        """
        is_full = shape.recompute.recompute_granularity == "full"
        if shape.cp == 1 or not (is_full or shape.recomputes("core_attn", "mla_up_proj")):
            return {}
        keeps = shape.recompute.recompute_keep_attention if is_full else not shape.recomputes("core_attn")
        if not keeps:
            return self.sent_bytes(shape)[0]
        if self._exchanged(shape) == 1:
            return {}
        return {"cp_a2a" if self.cp_comm_type == "a2a+p2p" else "cp": self._exchange_bytes(shape)}

    def slice_key_bytes(self, shape: RankShape) -> tuple[int, int]:
        """Return the bytes of keys and values of all slices of a microbatch, and of their gradients, if any."""
        if shape.slice is None:
            return 0, 0
        elements = self._exchanged_keys(shape) * shape.slice.seq // shape.slice.length
        return elements * shape.element, elements * shape.wide

    def rotary_table_bytes(self, shape: RankShape) -> int:
        """Return the bytes of cos and sin of one sequence, [s, r / 2] each, r the rotated channels; with
        --yarn-query-scale also of the factors on queries, [s], with --nope-query-scale of these alone.
        """
        if self.model.position_tables is None:
            return 0
        if self.model.rotary is None:
            return shape.seq * shape.wide
        columns = 2 * (self.model.rotary_channels() // 2) + (self.model.yarn_query_scale > 0)
        return shape.seq * columns * shape.wide

    def shared_mask_bytes(self, shape: RankShape) -> int:
        """Return the bytes of the additive mask [s, s] that a stage makes once: with a sliding window, and where
        attention is written out. Documents have a mask for each microbatch, or their borders, instead.
        """
        is_needed = self.visibility(shape).window is not None or self._is_written_out(shape)
        if not is_needed or shape.attention_impl != "sdpa":
            return 0
        return 0 if shape.documents.attention_mask or shape.documents.borders else self._mask_bytes(shape)

    def document_mask_bytes(self, shape: RankShape, is_replayed: bool) -> int:
        """Return the bytes of a microbatch's mask [b, 1, s, s]; written out, only a replay keeps it. Blocks make theirs
        for each use.
        """
        is_dropped = self._is_written_out(shape) and self.registered is None and not is_replayed
        if not shape.documents.attention_mask or is_dropped or self._in_blocks(shape):
            return 0
        return shape.batch * self._mask_bytes(shape)

    def _mask_bytes(self, shape: RankShape) -> int:
        """Return the bytes of the masks of one sequence: of all its positions, or of blocks, on the rank with the most,
        with a byte for each query of a block that may be empty.
        """
        if not self._in_blocks(shape):
            return shape.whole_seq * shape.whole_seq * shape.element
        return max(
            sum(
                (block.queries[1] - block.queries[0])
                * ((block.keys[1] - block.keys[0]) * shape.element + block.can_be_empty)
                for block in self._blocks(shape, rank)
                if block.kind == "masked"
            )
            for rank in range(self._ring(shape))
        )

    def _blocks(self, shape: RankShape, rank: int = 0) -> Iterator[KeyBlock]:
        """Yield the blocks of the queries of a rank of the ring."""
        seen = self.visibility(shape, rank)
        return (block for source in range(seen.part.ranks) for block in seen.blocks(source))

    def _longest_block(self, shape: RankShape) -> int:
        """Return the most keys of one sequence in a block."""
        return max(block.keys[1] - block.keys[0] for block in self._blocks(shape))

    def _exchanged(self, shape: RankShape) -> int:
        """Return the number of cp ranks that exchange heads for positions."""
        return {"a2a": shape.cp, "a2a+p2p": shape.cp_inner}.get(self.cp_comm_type, 1)

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

    def _copies(self, shape: RankShape) -> int:
        """Return the number of cp ranks that share a key/value head once heads are exchanged."""
        return max(1, self._exchanged(shape) // self._groups(shape))

    def _exchange_bytes(self, shape: RankShape) -> float:
        """Return the bytes that the exchange of heads and positions sends in one direction."""
        elements = self._query(shape) + self._exchanged_keys(shape) + self._output(shape)
        return ring_bytes(elements * shape.element, self._exchanged(shape))

    def _heads(self, shape: RankShape) -> int:
        return self.model.num_attention_heads // shape.tp

    def _groups(self, shape: RankShape) -> int:
        return max(1, self.model.num_query_groups // shape.tp)

    def _gates(self, shape: RankShape) -> int:
        """Return the elements of the gates that linear_qkv makes."""
        return (self.query_projections - 1) * self._query(shape)

    def _shares_keys(self, shape: RankShape) -> bool:
        """Return True if several query heads of core attention use one of several key/value heads."""
        ranks = self._exchanged(shape)
        return self._heads(shape) // ranks > self._groups(shape) * self._copies(shape) // ranks > 1

    def _query(self, shape: RankShape) -> int:
        """Return the elements of q."""
        return shape.tokens * self._heads(shape) * self.model.kv_channels

    def _key(self, shape: RankShape) -> int:
        """Return the elements of k."""
        return shape.tokens * self._groups(shape) * self.model.kv_channels

    def _keys_and_values(self, shape: RankShape) -> int:
        """Return the elements of k and v."""
        return 2 * self._key(shape)

    def _exchanged_keys(self, shape: RankShape) -> int:
        """Return the elements of k and v during core attention, with the copies of heads that ranks share."""
        return self._keys_and_values(shape) * self._copies(shape)

    def _reached_keys(self, shape: RankShape) -> int:
        """Return the elements of such k and v, of the slices so far."""
        place = self.visibility(shape).place
        return self._exchanged_keys(shape) * place.stop // place.length

    def _output(self, shape: RankShape) -> int:
        """Return the elements of attention's output."""
        return self._query(shape)

    def _squares(self, shape: RankShape) -> int:
        """Return the elements of a matrix of all queries and keys."""
        return shape.tokens * self._heads(shape) * shape.whole_seq

    def _runs_fused(self, shape: RankShape) -> bool:
        return shape.attention_impl != "sdpa" or not self._is_written_out(shape)

    def _copies_output(self, shape: RankShape) -> bool:
        """Return True if attention's output is kept twice: once by a kernel in another order than linear_proj's.

        That is CUDA's memory-efficient kernel, which takes fp32 and masks, with several query groups, flash-attn, and
        the kernel that takes the borders of documents, with several sequences.
        """
        if shape.documents.borders:
            return shape.batch > 1
        if shape.attention_impl == "flash":
            # an exchange of heads, and values without their padding, are copies anyway
            is_last = self._exchanged(shape) == 1 and not has_narrow_values(self.model)
            return is_last and shape.batch * self._groups(shape) > 1
        is_masked = shape.documents.attention_mask or self.shared_mask_bytes(shape) > 0
        repeats_keys = shape.documents.attention_mask and shape.batch > 1
        is_efficient = shape.is_cuda and not self.is_explicit and (shape.dtype == "fp32" or is_masked)
        if self._in_blocks(shape):
            return False
        return is_efficient and self._shares_keys(shape) and not repeats_keys

    def _qkv_kept(self, shape: RankShape) -> Iterator[Kept]:
        """Yield q, k and v as one tensor; with qk-norm the normed q and k besides; with repeated keys three tensors
        of q's size: with one mask a sequence, query groups cannot join the batch.
        """
        name, element, query, key = "q, k, v", shape.element, self._query(shape), self._key(shape)
        is_repeatable = self._shares_keys(shape) and self._runs_fused(shape) and not shape.recomputes("core_attn")
        repeats = is_repeatable and shape.documents.attention_mask and shape.batch > 1
        repeats = repeats and not self._in_blocks(shape)
        if self._exchanged(shape) > 1:
            yield from self._exchanged_kept(shape, repeats)
            return
        if not repeats or self.qk_norms or self._gates(shape):
            yield Kept(name, query + 2 * key + self._gates(shape), element)
        for norm, heads in zip(self.qk_norms, (self._heads(shape), self._groups(shape)), strict=False):
            per_token = heads if self.model.qk_layernorm_scope == "head" else 1
            yield from norm.statistics(shape.tokens * per_token, shape)
        if self.qk_norms:
            keeps_order = self._runs_fused(shape) or self.registered is not None or shape.recomputes("core_attn")
            if keeps_order or self._heads(shape) == self._groups(shape):
                yield Kept(name, query, element)  # else a copy in another order, counted with core attention
            if not repeats and (shape.slice is None or shape.recomputes("core_attn")):  # slices share their keys
                yield Kept(name, key, element)
        if repeats:
            if not self.qk_norms:
                yield Kept(name, query, element)
            yield from [Kept("q, k, v repeated", query, element)] * 2
        if self.qk_norms and shape.documents.borders and shape.batch > 1 and not shape.recomputes("core_attn"):
            yield Kept(name, key, element)  # v in the kernel's order, besides q, k and v as the norms' inputs

    def _exchanged_kept(self, shape: RankShape, repeats: bool) -> Iterator[Kept]:
        """Yield q, k and v of this rank's heads at the positions of all; with qk-norm its input and statistics."""
        query, key, element = self._query(shape), self._key(shape), shape.element
        redoes_core = shape.recomputes("core_attn")
        if self.qk_norms or redoes_core or self._gates(shape):
            yield Kept("q, k, v", query + 2 * key + self._gates(shape), element)
        for norm, heads in zip(self.qk_norms, (self._heads(shape), self._groups(shape)), strict=False):
            per_token = heads if self.model.qk_layernorm_scope == "head" else 1
            yield from norm.statistics(shape.tokens * per_token, shape)
        if self.qk_norms and redoes_core:
            yield Kept("q, k, v", query + key, element)  # normed, before the exchange
        elif not redoes_core and not repeats:
            yield Kept("q, k, v", query + self._exchanged_keys(shape), element)
        if repeats:
            yield Kept("q, k, v", query, element)
            yield from [Kept("q, k, v repeated", query, element)] * 2

    def _core_kept(self, shape: RankShape) -> Iterator[Kept]:
        """Yield the output, and the log-sum-exp of the logits or, written out, what softmax and dropout keep."""
        element, wide, query, squares = shape.element, shape.wide, self._query(shape), self._squares(shape)
        if self._exchanged(shape) > 1 and self._runs_fused(shape):
            yield Kept("attention output", query, element)  # of all heads, as linear_proj keeps it
        if self._runs_fused(shape):
            yield Kept("attention output", query, element, with_replay=True)
            yield Kept("attention statistics", shape.tokens * self._heads(shape), wide, with_replay=True)
            if self._copies_output(shape):
                yield Kept("attention output copied", query, element, in_attention_time=True)
            return
        yield Kept("attention output", query, element)
        if self.registered is not None:
            return
        if self._heads(shape) > self._groups(shape):
            yield Kept("attention output", query, element)  # q in the order of its batched GEMM
        has_soft_cap = self.model.attn_logit_softcapping is not None
        matrices = [wide] * (1 + has_soft_cap)  # the probabilities; tanh
        if self.model.attention_dropout > 0:
            matrices += [MASK_BYTES, element]
        elif element != wide:
            matrices.append(element)
        for element_bytes in matrices:
            yield Kept("attention probabilities", squares, element_bytes, in_attention_time=True)

    def _core(self, shape: RankShape) -> AttentionWork:
        """Return the cost of core attention.

        Fused kernels skip what a causal mask hides, and recompute the probabilities in the backward: five products for
        two. Written out, all is computed, probabilities are moved, and the backward has four products.
        """
        heads = self._heads(shape)
        if not self._is_written_out(shape):
            keys, channels = self.visibility(shape).mean_keys, self.model.kv_channels
            kernel = "flash2" if shape.attention_impl == "flash" or shape.documents.borders else "cudnn"
            if shape.documents.attention_mask or self.shared_mask_bytes(shape):
                kernel = ""  # torch's kernel that takes masks
            calls = shape.cp // self._exchanged(shape)  # of a ring, each with as many of the keys
            flops = 4.0 * shape.tokens * keys * heads * channels
            return AttentionWork(flops, (0.0, 0.0), 2.5, kernel, keys / calls, channels)
        squares, channels = float(self._squares(shape)), self.model.kv_channels
        # casts to fp32 and back; mask and softmax, with scale, tanh and cap; a mask of dropout, drawn and multiplied
        cast = 2 * (shape.element + shape.wide) if shape.element != shape.wide else 0
        capped, is_dropped = self.model.attn_logit_softcapping is not None, self.model.attention_dropout > 0
        there = cast + shape.wide * (4 + 6 * capped) + (4 * shape.element + 10) * is_dropped
        back = cast + shape.wide * (3 + 3 * capped) + (4 * shape.element + 1) * is_dropped
        times = 2.0 if self.registered is None else 3.0  # it computes the forward again
        moved = squares * there, squares * back
        return AttentionWork(4.0 * squares * channels, moved, times, "", shape.whole_seq, channels)

    def _core_gradient_bytes(self, shape: RankShape) -> int:
        """Return what core attention's backward makes: the gradients of q, k and v apart and then side by side;
        written out, those of the probabilities. Recomputed results come on top.
        """
        element, wide = shape.element, shape.wide
        if self._in_blocks(shape):
            return self._block_gradient_bytes(shape)
        if not self._is_written_out(shape):
            output = self._query(shape) * element + shape.tokens * self._heads(shape) * wide
            qkv = (self._query(shape) + 2 * self._key(shape) + self._gates(shape)) * element
            return (output if shape.recomputes("core_attn") else 0) + 2 * qkv
        again = total_bytes(self._core_kept(shape)) if shape.recomputes("core_attn") else 0
        if self.registered is not None:
            qkv = (self._query(shape) + 2 * self._key(shape) + self._gates(shape)) * element
            return again + 2 * qkv + int(self.registered.backward_squares * self._squares(shape) * element)
        # the backward of softmax has the gradients of its output and input, the latter also in the dtype of the GEMMs,
        # and that of v; what dropout and the product after it kept is freed by then
        squares, beside = self._squares(shape), self._query(shape) * element
        cast = element if element != wide else 0
        freed = element + MASK_BYTES if self.model.attention_dropout > 0 else cast
        return again + max(squares * element, squares * (2 * wide + cast - freed) + beside)

    def _block_gradient_bytes(self, shape: RankShape) -> int:
        """Return what the backward of attention in blocks makes: keys and values of this rank, of the block and of the
        next one; in at least fp32 the gradients of q, of this rank's keys and of those on their way; those of a block.
        Then the gradients of q, k and v of this rank, apart and side by side.

        Gathered, keys and their gradients are those of all ranks of the ring. Those of slices are there already.
        """
        element, wide, query, keys = shape.element, shape.wide, self._query(shape), self._reached_keys(shape)
        ring, blocks, place = self._ring(shape), tuple(self._blocks(shape)), self.visibility(shape).place
        held, sums = (min(ring, 3), min(2 * ring - 2, 4)) if self.cp_comm_type != "all_gather" else (1 + ring, ring)
        if shape.slice is not None:
            held, sums = held - 1, max(sums - 1, 0)
        largest = self._longest_block(shape) * keys * ring // place.stop
        of_block = (query + largest) * element
        pairs = {block: math.prod(end - start for start, end in (block.queries, block.keys)) for block in blocks}
        if self.is_explicit:
            # probabilities, their gradients, tanh and dropout in at least fp32, and one cast
            num_wide = 2 + (self.model.attn_logit_softcapping is not None) + (self.model.attention_dropout > 0)
            matrices = num_wide * wide + (element if element != wide else 0)
            of_block += shape.batch * self._heads(shape) * max(pairs.values()) * matrices
            repeats = self._heads(shape) // self._groups(shape)  # of keys and values, for all heads
            of_block += largest * repeats * element if repeats > 1 else 0
        if shape.documents.attention_mask:  # the mask of a block, made from bools
            masked = shape.batch * max((size for block, size in pairs.items() if block.kind == "masked"), default=0)
            of_block = max(of_block + masked * element, masked * (element + MASK_BYTES))
        again = total_bytes(self._core_kept(shape)) if shape.recomputes("core_attn") else 0
        made = keys * (held * element + sums * wide) + query * wide + of_block
        if ring == 1 and shape.slice is None:  # one block, whose gradients are the result
            made = of_block
        return again + max(made, 2 * (query + self._keys_and_values(shape) + self._gates(shape)) * element)
