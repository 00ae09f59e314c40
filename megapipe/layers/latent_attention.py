"""Multi-head latent attention: x + norm(proj(core_attention(q, k, v))), with q, k and v projected up from latents of
the tokens and one rotated key for all heads (DeepSeek-V2, arXiv:2405.04434).

Core attention and its options are those of `AttentionTable`. Fused, it runs as one block with values narrower than
keys; written out, and by kernels of libraries, values are padded to the width of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.config.layers import has_narrow_values
from megapipe.layers.attention import AttentionTable
from megapipe.layers.linear import (
    LinearTable,
    collectives,
    column_gradient_bytes,
    output_std,
    row_gradient_bytes,
    weight_gradient_bytes,
)
from megapipe.layers.norm import NormTable, residual_stream
from megapipe.layers.table import (
    ALL_REDUCE,
    MASK_BYTES,
    Backward,
    Collectives,
    Gemm,
    Kept,
    Operation,
    RankShape,
    Table,
    replayed,
    total_bytes,
)
from megapipe.sharding.sequence import SequenceSlice, Visibility
from megapipe.sharding.spec import Fused, Init, ParamSpec, Replicated


@dataclass(frozen=True, eq=False)
class LatentAttentionTable(AttentionTable):
    """The branch of one transformer layer with latent attention, its norms included."""

    @cached_property
    def qk_norms(self) -> tuple[NormTable, ...]:
        """Nothing: --qk-layernorm norms the latents."""
        return ()

    @cached_property
    def latent_norms(self) -> dict[str, NormTable]:
        """The norms of the latents 'q' and 'kv', where there are latents and --qk-layernorm."""
        model = self.model
        ranks = {"q": model.q_lora_rank, "kv": model.kv_lora_rank}
        return {
            name: NormTable.of(model, f"self_attention.{name}_layernorm", rank)
            for name, rank in ranks.items()
            if rank is not None and model.qk_layernorm
        }

    @property
    def kv_down_rows(self) -> int:
        """The latent of keys and values, and the key that all heads share."""
        return self.model.kv_lora_rank + self.model.qk_pos_emb_head_dim

    def parameters(self, prefix: str, layer: int, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the parameters of layer number `layer`, in model order.

        Down projections and norms of latents see this rank's tokens only under sequence parallelism.
        """
        model, hidden, name = self.model, self.model.hidden_size, f"{prefix}self_attention"
        heads, std, before, after = model.num_attention_heads, model.init_method_std, *self.norms

        def down(which: str, rows: int) -> ParamSpec:
            shape, init = (rows, hidden), Init("normal", std)
            return ParamSpec(
                f"{name}.{which}.weight",
                shape,
                layer,
                Replicated(),
                init,
                True,
                sequence_parallel,
                matrix="outputs x inputs",
            )

        def up(which: str, width: int, rank: int) -> Iterator[ParamSpec]:
            return LinearTable(f"{name}.{which}", heads * width, rank, Fused(0), False, std).parameters(layer, False)

        def norm(which: str) -> Iterator[ParamSpec]:
            found = self.latent_norms.get(which)
            return iter(()) if found is None else found.parameters(prefix, layer, sequence_parallel)

        yield from before.parameters(prefix, layer, sequence_parallel) if before is not None else ()
        if model.q_lora_rank is None:
            yield from up("linear_q_proj", model.kv_channels, hidden)
        else:
            yield down("linear_q_down_proj", model.q_lora_rank)
            yield from norm("q")
            yield from up("linear_q_up_proj", model.kv_channels, model.q_lora_rank)
        yield down("linear_kv_down_proj", self.kv_down_rows)
        yield from norm("kv")
        yield from up("linear_kv_up_proj", model.qk_head_dim + model.v_head_dim, model.kv_lora_rank)
        values = heads * model.v_head_dim
        projection = LinearTable(
            f"{name}.linear_proj", hidden, values, Fused(1), model.add_bias_linear, output_std(model)
        )
        yield from projection.parameters(layer, sequence_parallel)
        yield from after.parameters(prefix, layer, sequence_parallel) if after is not None else ()

    def gemms(self, tp: int) -> tuple[Gemm, ...]:  # type: ignore[override]
        """Return its linears on one of tp ranks, in the order of the forward."""
        model, hidden, heads = self.model, self.model.hidden_size, self.model.num_attention_heads // tp
        query, is_fp8 = heads * model.kv_channels, self.is_fp8
        if model.q_lora_rank is None:
            queries: tuple[Gemm, ...] = (Gemm(hidden, query, True, is_fp8),)
        else:
            down = Gemm(hidden, model.q_lora_rank, True, is_fp8, is_replicated=True)
            queries = down, Gemm(model.q_lora_rank, query, True, is_fp8)
        return (
            *queries,
            Gemm(hidden, self.kv_down_rows, True, is_fp8, is_replicated=True),
            Gemm(model.kv_lora_rank, heads * (model.qk_head_dim + model.v_head_dim), True, is_fp8),
            Gemm(heads * model.v_head_dim, hidden, False, is_fp8),
        )

    def up_gemms(self, tp: int) -> tuple[Gemm, Gemm]:
        """Return the projections of queries, and of keys and values, to heads on one of tp ranks."""
        *_, queries, _, keys, _ = self.gemms(tp)
        return queries, keys

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, per token, without the padding of values."""
        seen = Visibility.of(SequenceSlice((seq_length,)), **self.model.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        return 2.0 * keys * self.model.num_attention_heads * (self.model.kv_channels + self.model.v_head_dim)

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank."""
        if not shape.recomputes("mla_up_proj"):
            return self._table(shape)
        redone = {"mla_up_proj", "core_attn"}
        if self.model.q_lora_rank is None:  # the norm's output is an input of what runs again
            redone.add("layernorm")
        others = tuple(module for module in shape.recompute.recompute_modules if module not in redone)
        table = self._table(replace(shape, recompute=replace(shape.recompute, recompute_modules=others)))
        operations = table.operations
        # those from latents to the output of core attention run again in the backward; until then the latents are kept
        # and, unless `core_attn` is recomputed, the results of core attention
        names = [operation.name for operation in operations]
        start = names.index("linear_kv_down_proj") + 1
        core = names.index("core_attention")
        inner, kept_core = list(operations[start : core + 1]), operations[core].keeps
        ranks = [rank for rank in (self.model.q_lora_rank, self.kv_down_rows) if rank is not None]
        latents = tuple(Kept("latents", shape.own_tokens * rank, shape.element) for rank in ranks)
        # those that the projections keep: inputs of norms, and a latent of the queries without one
        counted = latents if self.latent_norms else latents[:-1]
        more, freed = -total_bytes(counted), [*latents]
        if not shape.recomputes("core_attn"):
            of_output = [tensor for tensor in kept_core if tensor.name == self._output_name(shape)]
            more += total_bytes(tensor for tensor in of_output if not tensor.with_replay)  # trimmed again
            freed += [tensor for tensor in kept_core if tensor not in of_output]
            made = operations[core].backward
            assert made is not None
            inner[-1] = replace(
                inner[-1], keeps=(), backward=replace(made, frees=made.frees - total_bytes(freed[len(latents) :]))
            )
        inner = replayed(inner, more)
        if not shape.recomputes("core_attn"):
            inner[-1] = replace(inner[-1], keeps=kept_core)
        last = inner[0].backward
        assert last is not None
        inner[0] = replace(inner[0], keeps=latents, backward=replace(last, frees=total_bytes(freed)))
        return replace(table, operations=(*operations[:start], *inner, *operations[core + 1 :]))

    def _output_name(self, shape: RankShape) -> str:
        """Return the name of the output as linear_proj keeps it, trimmed or not."""
        is_whole = self.model.v_head_dim == self.model.kv_channels or self._in_blocks(shape)
        return "attention output" if is_whole else "attention output trimmed"

    def _table(self, shape: RankShape) -> Table:
        model, gemms, (before, after) = self.model, self.gemms(shape.tp), self.norms
        hidden, query = shape.hidden_bytes(model.hidden_size), self._query(shape) * shape.element
        values, splits = shape.tokens * gemms[-1].inputs * shape.element, shape.splits_backward
        has_dropout = model.hidden_dropout > 0
        dropout = Kept("dropout masks", shape.own_tokens * model.hidden_size, MASK_BYTES)
        behind = hidden if model.scales_branches or after is not None else 0
        redoes_core = shape.recomputes("core_attn")
        heads_kept = (Kept("q, k, v", self._heads_kept(shape), shape.element),)
        core_kept = () if redoes_core else self._trimmed_kept(shape)
        output = self._output_name(shape)
        freed = [tensor for tensor in (*heads_kept, *core_kept) if tensor.name != output]
        if shape.recompute.recompute_keep_attention:
            freed = [tensor for tensor in freed if not tensor.with_replay]
        key_gemm = gemms[-2]
        keys = shape.tokens * key_gemm.outputs * shape.element
        waiting = sum(self._output_bytes(gemm, shape) for gemm in gemms[:-1]) + behind if splits else 0
        start = residual_stream(shape, model.hidden_size)
        if before is not None:
            start = before.operation(shape, backward=Backward(waiting + hidden + before.gradient_bytes(shape)))
        # the gradients of q, k and v, rotated channels of the first, and the gradient of the projection to keys and
        # values; that of q is copied unless it comes from blocks
        in_blocks, rotated = self._in_blocks(shape), query * model.qk_pos_emb_head_dim // model.kv_channels
        made = Backward(behind + (3 if in_blocks else 4) * query + rotated + keys)
        is_less = not self.is_explicit and not in_blocks
        core_made = (values if in_blocks else query) + self._core_gradient_bytes(shape) - (3 * query if is_less else 0)
        operations = (
            start,
            *self._down_projections(shape, behind + query + keys),
            *self._up_projections(shape, behind + query + keys),
            Operation(
                "heads",
                heads_kept,
                # the gather of the key that all heads share, and the sum of its gradient over tp
                collectives=self._share(
                    Collectives(1, 1) if shape.sequence_parallel else Collectives(inputs=ALL_REDUCE),
                    model.qk_pos_emb_head_dim,
                ),
                recompute_modules=("mla_up_proj",),
                backward=made,
            ),
            Operation(
                "core_attention",
                core_kept,
                attention=self._core(shape),
                recompute_modules=("core_attn",),
                backward=Backward(behind + core_made, total_bytes(freed)),
            ),
            Operation(
                "linear_proj",
                (dropout,) if has_dropout else (),
                gemm=gemms[-1],
                collectives=collectives(gemms[-1], shape),
                deferred_bytes=values + hidden,
                backward=Backward(behind + values + row_gradient_bytes(gemms[-1], shape)),
            ),
            *(() if after is None else (after.after_branch(shape, model.scales_branches),)),
        )
        return Table(operations, hidden, max(weight_gradient_bytes(gemm, shape) for gemm in gemms))

    def _down_projections(self, shape: RankShape, held: int) -> Iterator[Operation]:
        """Yield the projections down to latents.

        held: bytes of the gradients of q, and of keys and values, which are there when the backward of projections
        starts.
        """
        hidden, before = shape.hidden_bytes(self.model.hidden_size), self.norms[0]
        again = 0 if before is None else before.output_again_bytes(shape)
        *queries, kv_down, _, _ = self.gemms(shape.tp)
        both = held + again + 2 * hidden  # two gradients of the same input
        has_latent = self.model.q_lora_rank is not None
        if has_latent:
            yield self._operation("linear_q_down_proj", queries[0], shape, (), both)
        # its input is that of the queries' projection too
        made = both - hidden if has_latent else both
        yield self._operation("linear_kv_down_proj", kv_down, shape, (), made, waits_for_input=False)

    def _up_projections(self, shape: RankShape, held: int) -> Iterator[Operation]:
        """Yield the norms of latents and the projections up to heads. held: as in `_down_projections`."""
        before, rank, modules = self.norms[0], self.model.q_lora_rank, ("mla_up_proj",)
        q_up, kv_up = self.up_gemms(shape.tp)
        kept: tuple[Kept, ...] = ()
        made, name = held + column_gradient_bytes(q_up, shape), "linear_q_proj"
        if rank is None:
            made += 0 if before is None else before.output_again_bytes(shape)
        else:
            kept, name = self._latent_kept("q", rank, rank, shape), "linear_q_up_proj"
        yield replace(self._operation(name, q_up, shape, kept, made), recompute_modules=modules)
        kept = self._latent_kept("kv", self.model.kv_lora_rank, self.kv_down_rows, shape)
        up = self._operation("linear_kv_up_proj", kv_up, shape, kept, held + column_gradient_bytes(kv_up, shape))
        yield replace(up, recompute_modules=modules)

    def _operation(
        self, name: str, gemm: Gemm, shape: RankShape, kept: tuple[Kept, ...], held: int, waits_for_input: bool = True
    ) -> Operation:
        """Return a projection. held: bytes while its backward runs. kept: its input, and that of the norm before it."""
        inputs = shape.own_tokens * gemm.inputs * shape.element if waits_for_input else 0
        return Operation(
            name,
            kept,
            gemm=gemm,
            collectives=Collectives() if gemm.is_replicated else self._share(collectives(gemm, shape), gemm.inputs),
            deferred_bytes=inputs + self._output_bytes(gemm, shape),
            backward=Backward(held),
        )

    def _latent_kept(self, name: str, rank: int, rows: int, shape: RankShape) -> tuple[Kept, ...]:
        """Return a latent as the projection up keeps it; with a norm its input, [t, rows], and statistics too."""
        tokens, normed = shape.own_tokens, Kept("latents", shape.own_tokens * rank, shape.element)
        norm = self.latent_norms.get(name)
        if norm is None:
            return (normed,)
        return Kept("latents", tokens * rows, shape.element), *norm.statistics(tokens, shape), normed

    def _output_bytes(self, gemm: Gemm, shape: RankShape) -> int:
        """Return the bytes of a projection's output on one rank."""
        return (shape.own_tokens if gemm.is_replicated else shape.tokens) * gemm.outputs * shape.element

    def _output(self, shape: RankShape) -> int:
        """Return the elements of attention's output, and of v, without padding."""
        return shape.tokens * self._heads(shape) * self.model.v_head_dim

    def _keys_and_values(self, shape: RankShape) -> int:
        """Return the elements of k and v, without padding."""
        return self._key(shape) + self._output(shape)

    def _heads_kept(self, shape: RankShape) -> int:
        """Return the elements of q, k and v. With context parallelism v is padded after the exchange. Slices share keys
        and values.
        """
        query, is_narrow = self._query(shape), self.model.v_head_dim < self.model.kv_channels
        redoes_core = shape.recomputes("core_attn")
        if shape.slice is not None and self._exchanged(shape) == 1 and not redoes_core:
            return query
        is_padded = is_narrow and not self._in_blocks(shape) and not redoes_core
        if is_padded:  # exchanged values are a view of what is exchanged, and kept beside the padded ones
            return 3 * query + (self._output(shape) if shape.cp > 1 else 0)
        return query + self._keys_and_values(shape)

    def _in_blocks(self, shape: RankShape) -> bool:
        """Return True if attention is computed in blocks: also if values are narrower than keys."""
        is_narrow = has_narrow_values(self.model) and shape.attention_impl == "sdpa"
        return is_narrow or super()._in_blocks(shape)

    def _trimmed_kept(self, shape: RankShape) -> tuple[Kept, ...]:
        """Return what core attention keeps, and its output without the padding of values."""
        model, values = self.model, self._output(shape)
        if self._in_blocks(shape):
            output = Kept("attention output", values, shape.element)
            statistics = Kept("attention statistics", shape.tokens * self._heads(shape), shape.wide, with_replay=True)
            own = (replace(output, with_replay=True), statistics)
            return own if self._exchanged(shape) == 1 else (*own, output)
        if model.v_head_dim == model.kv_channels:
            return tuple(self._core_kept(shape))
        kept = [each for each in self._core_kept(shape) if each.with_replay or each.name != "attention output"]
        return *kept, Kept("attention output trimmed", values, shape.element)

    def _block_gradient_bytes(self, shape: RankShape) -> int:
        """Return what the backward of attention in blocks makes; padded are v, the output, and gradients of both."""
        made, is_narrow = super()._block_gradient_bytes(shape), self.model.v_head_dim < self.model.kv_channels
        if is_narrow and self._ring(shape) == 1 and shape.slice is None and not self.is_explicit:
            # one block: besides these the gradients of q, k and v, all as wide as q
            again = total_bytes(self._core_kept(shape)) if shape.recomputes("core_attn") else 0
            masks = shape.batch * self._mask_bytes(shape) if shape.documents.attention_mask else 0
            return again + masks + 6 * self._query(shape) * shape.element
        widened = 2 * self._query(shape) + 2 * self._key(shape) * self._longest_block(shape) // shape.seq
        return made + (widened * shape.element if is_narrow else 0)

    def _share(self, counts: Collectives, width: int) -> Collectives:
        """Return collectives of so many channels as parts of those of hidden states."""
        part = width / self.model.hidden_size
        return Collectives(counts.forward * part, counts.inputs * part, counts.weights * part)
