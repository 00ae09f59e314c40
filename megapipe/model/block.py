"""One transformer layer, pre-norm: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

What a layer saves for the backward on one rank, in elements of the model's dtype unless said otherwise (fp32+: at
least fp32). T = b s tokens; t = T, with sequence parallelism T / tp. H hidden; F, Q, K = ffn, heads x head_dim,
key/value heads x head_dim, divided by tp (K: at least one head). "unless x": not if --recompute-modules names x.

    2 t H                   residual stream, the inputs of the two norms
    2 t x (1 or 2) fp32+    their statistics: RMSNorm 1, LayerNorm 2      (the second not with both layernorm and mlp)
    2 t H                   their outputs, the inputs of linear_qkv and linear_fc1      unless layernorm
    T (Q + 2 K)             q, k and v, one tensor
    T Q                     attention's output, the input of linear_proj                unless core_attn
    T heads fp32+           log-sum-exp of the logits                                   unless core_attn
    T F, gated 2 T F        output of linear_fc1, the input of the activation           unless mlp; ReLU: never
    T F                     output of the activation, the input of linear_fc2           unless mlp or activation
                            (ReLU: also with activation)
    2 t H bytes             masks of hidden dropout
    qk-norm adds            T (Q + K), and the statistics of each head
    explicit attention      (soft-cap, attention dropout, softmax in fp32) replaces the log-sum-exp by
                            S2 fp32+ probabilities, S2 = b heads s^2; S2 fp32+ of tanh with a cap; with dropout S2 and
                            S2 bytes of mask, without it S2 in half types; T Q with grouped queries
    documents, grouped      q, k and v with k and v repeated for each query head: 3 T Q instead of T (Q + 2 K), with
                            qk-norm in addition to T (Q + 2 K)
Full recompute: t H per checkpoint, and with --recompute-keep-attention T Q and the log-sum-exp of each of its layers.
Embedding: t H bytes of dropout mask. Head: 2 t H and the statistics of the final norm, logits T V / tp (twice with a
soft-cap, fp32+), 2 fp32+ per token. Per stage and microbatch: the mask of `context`, if there is one.
tests/model/test_saved_bytes.py compares this table with what autograd saves.
"""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.model.attention import SelfAttention
from megapipe.model.context import LayerContext
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.mlp import MLP
from megapipe.model.norm import without_graph
from megapipe.tensor_parallel.gradients import InputRecompute
from megapipe.tensor_parallel.random import keyed_dropout


class Block(nn.Module):
    """One transformer layer: [s, b, h] (a slice of s with sequence parallelism) -> the same shape.

    layer: global index.
    """

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        hidden_size = factory.config.hidden_size
        self.layer = layer
        self.recompute_norm = "layernorm" in factory.recompute
        self.dropout_rate = factory.config.hidden_dropout
        # masks differ over tp only where ranks hold different slices of the sequence
        self.dropout_rank = factory.tp.rank if factory.sequence_parallel else None
        self.input_layernorm = factory.norm(hidden_size)
        self.self_attention = SelfAttention(layer, factory)
        self.pre_mlp_layernorm = factory.norm(hidden_size)
        self.mlp = MLP(layer, factory)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        norm, rate, key, rank = self.input_layernorm, self.dropout_rate, context.dropout_key, self.dropout_rank
        recompute = InputRecompute(without_graph(norm), (hidden,)) if self.recompute_norm else None
        update = self.self_attention(norm(hidden), context, recompute)
        # add_ in place: the update is the output of a linear or of a dropout, which no operation saves
        hidden = keyed_dropout(update, rate, key, self.layer, "attention_output", rank).add_(hidden)
        update = self.mlp(hidden, self.pre_mlp_layernorm)
        return keyed_dropout(update, rate, key, self.layer, "mlp_output", rank).add_(hidden)
