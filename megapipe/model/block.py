"""`Block`: one transformer layer."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor, nn

from megapipe.model.attention import SelfAttention
from megapipe.model.compiled import CompiledBlock, Parts
from megapipe.model.context import LayerContext
from megapipe.model.latent_attention import LatentAttention
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.mlp import MLP
from megapipe.model.moe import MoE
from megapipe.tensor_parallel.gradients import InputRecompute
from megapipe.tensor_parallel.random import keyed_dropout


class Block(nn.Module):
    """One transformer layer: [s, b, h] (a slice of s with sequence parallelism) -> the same. layer: global index.

    x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), with the parts and the norms that its configuration has.
    """

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        self.layer = layer
        self.recompute = factory.recompute
        self.dropout_rate = factory.config.hidden_dropout
        # masks differ over tp only where ranks hold different slices of the sequence
        self.dropout_rank = factory.tp.rank if factory.sequence_parallel else None
        self.self_attention: SelfAttention | None = None
        self.mlp: MLP | MoE | None = None
        if factory.config.has_attention:
            self.input_layernorm, self.post_self_attn_layernorm = factory.branch_norms()
            kind = LatentAttention if factory.config.multi_latent_attention else SelfAttention
            self.self_attention = kind(layer, factory)
        if factory.config.has_mlp:
            self.pre_mlp_layernorm, self.post_mlp_layernorm = factory.branch_norms()
            self.mlp = MLP(layer, factory) if factory.config.num_experts is None else MoE(layer, factory)
        self.compiled: CompiledBlock | None = None

    @cached_property
    def parts(self) -> Parts:
        """Its modules, for the compiled form."""
        norms = {name: module for name, module in self.named_children() if name.endswith("layernorm")}
        assert not isinstance(self.mlp, MoE)  # refused by a rule of the configuration
        return Parts(self.layer, self.self_attention, self.mlp, norms, self.recompute, self.dropout_rank)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        if self.compiled is not None and self.compiled.accepts(hidden, context):
            return self.compiled(self.parts, hidden, context)
        hidden = self.attend(hidden, context)
        if self.mlp is None:
            return hidden
        of_microbatch = (context,) if isinstance(self.mlp, MoE) else ()
        return self.add_mlp(hidden, self.mlp(hidden, self.pre_mlp_layernorm, *of_microbatch), context)

    def attend(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Add the branch of attention to the residual stream."""
        if self.self_attention is None:
            return hidden
        norm, recompute = self.input_layernorm, None
        if norm is not None and "layernorm" in self.recompute:
            recompute = InputRecompute(norm.forward, (hidden,))
        update = self.self_attention(hidden if norm is None else norm(hidden), context, recompute)
        return self._add(hidden, update, self.post_self_attn_layernorm, context, "attention_output")

    def add_mlp(self, hidden: Tensor, update: Tensor, context: LayerContext) -> Tensor:
        """Add the output of the MLP, or of the experts, to the residual stream; `update` is overwritten."""
        return self._add(hidden, update, self.post_mlp_layernorm, context, "mlp_output")

    def modules_in_order(self) -> list[nn.Module | None]:
        """Return submodules that together hold all parameters, in the order in which a forward calls them."""
        order: list[nn.Module | None] = []
        if self.self_attention is not None:
            order += (self.input_layernorm, self.self_attention, self.post_self_attn_layernorm)
        if self.mlp is not None:
            mlp = list(self.mlp.children()) if isinstance(self.mlp, MoE) else [self.mlp]
            order += (self.pre_mlp_layernorm, *mlp, self.post_mlp_layernorm)
        return order

    def _add(self, hidden: Tensor, update: Tensor, norm: nn.Module | None, context: LayerContext, site: str) -> Tensor:
        """Return hidden + dropout(norm(update))."""
        update = update if norm is None else norm(update)
        update = keyed_dropout(update, self.dropout_rate, context.dropout_key, self.layer, site, self.dropout_rank)
        return update.add_(hidden)  # in place: it is the output of a linear, norm or dropout, which no operation saves
