"""Multi-head latent attention: x + norm(proj(core_attention(q, k, v))), with q, k and v projected up from latents of
the tokens and one rotated key for all heads (DeepSeek-V2, arXiv:2405.04434).

Core attention and its options are those of `AttentionTable`. Fused, it runs as one block with values narrower than
keys; written out, and by kernels of libraries, values are padded to the width of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megapipe.config.layers import has_narrow_values
from megapipe.layers.attention import AttentionTable
from megapipe.layers.linear import LinearTable, output_std
from megapipe.layers.norm import NormTable
from megapipe.layers.table import RankShape
from megapipe.sharding.sequence import SequenceSlice, Visibility
from megapipe.sharding.spec import Fused, Init, ParamSpec, Replicated


@dataclass(frozen=True, eq=False)
class LatentAttentionTable(AttentionTable):
    """The branch of one transformer layer with latent attention, its norms included."""

    recompute_modules = ("core_attn", "mla_up_proj")

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

    def own_parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int) -> Iterator[ParamSpec]:
        """Yield the parameters between the norms.

        Down projections and norms of latents see this rank's tokens only under sequence parallelism.
        """
        model, hidden, name = self.model, self.model.hidden_size, f"{prefix}self_attention"
        heads, std = model.num_attention_heads, model.init_method_std

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

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, per token, without the padding of values."""
        seen = Visibility.of(SequenceSlice((seq_length,)), **self.model.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        return 2.0 * keys * self.model.num_attention_heads * (self.model.kv_channels + self.model.v_head_dim)

    def _in_blocks(self, shape: RankShape) -> bool:
        """Return True if attention is computed in blocks: also if values are narrower than keys."""
        is_narrow = has_narrow_values(self.model) and shape.attention_impl == "sdpa"
        return is_narrow or super()._in_blocks(shape)
