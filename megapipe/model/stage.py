"""`GPTStage`: the part of a GPT that one pipeline stage holds on one tp rank; `Block`: one of its transformer layers.

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

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain

from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.gpu.kernels import TORCH, Kernels
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.model.attention import SelfAttention
from megapipe.model.context import ContextBuilder, LayerContext
from megapipe.model.embedding_and_head import Embedding, Loss, capped_logits
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.mlp import MLP
from megapipe.model.recompute import KeptAttention, RecomputedSegment, layer_groups
from megapipe.schedule.partition import StageLayers
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.gradients import InputRecompute, WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.random import keyed_dropout


class Block(nn.Module):
    """One transformer layer: [s, b, h] (a slice of s with sequence parallelism) -> the same. layer: global index."""

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
        recompute = InputRecompute(norm.forward, (hidden,)) if self.recompute_norm else None
        update = self.self_attention(norm(hidden), context, recompute)
        # add_ in place: the update is the output of a linear or of a dropout, which no operation saves
        hidden = keyed_dropout(update, rate, key, self.layer, "attention_output", rank).add_(hidden)
        update = self.mlp(hidden, self.pre_mlp_layernorm)
        return keyed_dropout(update, rate, key, self.layer, "mlp_output", rank).add_(hidden)


class Decoder(nn.Module):
    """The layers of a stage by their global number, and on the last stage the final norm."""

    def __init__(self, layers: Iterable[int], final_layernorm: nn.Module | None, factory: LayerFactory) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block(layer, factory) for layer in layers})
        self.final_layernorm = final_layernorm


class TiedHead(nn.Module):
    """The output layer under the word embedding's name, on a last stage that does not hold the embedding."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.word_embeddings = linear


# (group, fn, hidden, stays) -> fn(hidden), for example with what the group's layers save offloaded; stays: parameters,
# attention mask and rotary tables, which exist without the layers
GroupRunner = Callable[[int, Callable[[Tensor], Tensor], Tensor, Iterable[Tensor]], Tensor]


class GPTStage(nn.Module):
    """The embedding if it is the first stage, layers, final norm and head if it is the last.

    Parameters have this rank's shapes, are on the meta device until materialised (by data_parallel's buffers), and
    have the global Megatron names of `layers.model.model_parameters`. A tied head uses
    embedding.word_embeddings.weight: the same Parameter where the stage has both ends; otherwise another of that
    name, a copy, or the first stage's own where that is on this rank.
    """

    def __init__(
        self,
        config: ResolvedModelConfig,
        layers: StageLayers,
        tp: Group,
        *,
        sequence_parallel: bool,
        recompute: RecomputeConfig,
        loss: TrainingConfig,
        weight_queue: WeightQueue | None = None,
        kernels: Kernels = TORCH,
        chunks: CommChunks = WHOLE,
    ) -> None:
        super().__init__()
        self.config, self.stage_layers, self.tp = config, layers, tp
        self.sequence_parallel = sequence_parallel = sequence_parallel and tp.size > 1
        self.loss = Loss(config, loss) if layers.has_head else None
        self.make_context = ContextBuilder(config, has_attention_kernel=kernels.attention is not None)
        self.group_runner: GroupRunner | None = None
        self._library = kernels.layers
        numbers = range(layers.first_layer, layers.last_layer_exclusive)
        self._groups = layer_groups(recompute, numbers)
        self._keep_attention = recompute.recompute_keep_attention
        queue = WeightQueue() if weight_queue is None else weight_queue
        is_selective = recompute.recompute_granularity == "selective"
        modules = frozenset(recompute.recompute_modules if is_selective else ())
        factory = LayerFactory(config, tp, sequence_parallel, modules, queue, kernels, chunks)
        self.embedding: Embedding | TiedHead | None = None
        self.output_layer: ColumnParallelLinear | None = None
        if layers.has_embedding:
            self.embedding = Embedding(config, tp, sequence_parallel=sequence_parallel, queue=queue)
        self.decoder = Decoder(numbers, factory.norm(config.hidden_size) if layers.has_head else None, factory)
        if layers.has_head:
            head = ColumnParallelLinear(
                config.hidden_size,
                config.padded_vocab_size,
                bias=False,
                tp=tp,
                sequence_parallel=sequence_parallel,
                queue=queue,
                chunks=chunks,
            )
            if config.untie_embeddings_and_output_weights:
                self.output_layer = head
            elif self.embedding is None:
                self.embedding = TiedHead(head)
            else:
                self.output_layer = head
                head.weight = self.embedding.word_embeddings.weight
        self._fp8_linears = [
            (gemms, linear)
            for linear in self.decoder.modules()
            if isinstance(gemms := getattr(linear, "gemms", None), Fp8Gemms)
        ]

    def begin_row(self, trains: bool) -> None:
        """Start a run of a schedule: forwards and, if it trains, backwards, with one set of weights."""
        for gemms, _ in self._fp8_linears:
            gemms.begin(trains)

    def cast_weights(self) -> None:
        """Cast to 8 bits the weights that this run has not cast yet, before a forward that will not do it itself."""
        for gemms, linear in self._fp8_linears:
            gemms.cast_weight(linear.get_parameter("weight"))

    def parts(self) -> list[nn.Module]:
        """Return submodules that together hold all parameters, in the order in which a forward calls them."""
        parts = [self.embedding, *self.decoder.layers.values(), self.decoder.final_layernorm, self.output_layer]
        if isinstance(self.embedding, TiedHead):
            parts = [*parts[1:], self.embedding.word_embeddings]
        return [part for part in parts if part is not None]

    def forward(
        self, *inputs: Tensor | Microbatch | None, return_logits: bool = False, last_position: bool = False
    ) -> Tensor | StageLoss:
        """Run `stage(hidden, microbatch)`; on the first stage `stage(microbatch)` or `stage(None, microbatch)`.

        hidden: [s, b, h] from the previous stage, [s / tp, b, h] with sequence parallelism. Returns the hidden states
        for the next stage; on the last stage the `StageLoss`, or with return_logits the logits [s, b, V / tp]
        including padding; last_position: only the last position's, [1, b, V / tp] (without sequence parallelism).
        """
        hidden, microbatch = inputs if len(inputs) == 2 else (None, *inputs)
        assert isinstance(microbatch, Microbatch) and not isinstance(hidden, Microbatch)
        if self.stage_layers.has_embedding:
            assert isinstance(self.embedding, Embedding)
            hidden = self.embedding(microbatch)
        if hidden is None:
            raise ValueError(f"without the embedding a stage needs the hidden states before it: {self.stage_layers}")
        hidden = self.run_layers(hidden, self.make_context(microbatch, hidden.dtype))
        if self.loss is None:
            return hidden
        assert self.decoder.final_layernorm is not None
        hidden = self.decoder.final_layernorm(hidden[-1:] if last_position else hidden)
        head = self.output_layer
        if head is None:
            assert isinstance(self.embedding, TiedHead)
            head = self.embedding.word_embeddings
        if return_logits:
            return capped_logits(head(hidden), self.config.final_logit_softcapping)
        return self.loss(hidden, head, microbatch)

    def run_layers(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Run all layers, group by group: a group is one layer, or the layers of one checkpoint with full recompute."""
        constants = [tensor for tensor in (context.mask, *(context.rotary or ())) if tensor is not None]
        with nullcontext() if self._library is None else self._library.stage_region(self.tp):
            for group, (layers, is_checkpointed) in enumerate(self._groups):
                kept = KeptAttention() if is_checkpointed and self._keep_attention else None
                group_context = context if kept is None else dataclasses.replace(context, kept_attention=kept)
                run: Callable[[Tensor], Tensor] = partial(self._run_group, layers=layers, context=group_context)
                if is_checkpointed:
                    run = RecomputedSegment(run, kept)
                if self.group_runner is None:
                    hidden = run(hidden)
                else:
                    parameters = (self.decoder.layers[str(layer)].parameters() for layer in layers)
                    hidden = self.group_runner(group, run, hidden, chain(*parameters, constants))
        return hidden

    def _run_group(self, hidden: Tensor, layers: tuple[int, ...], context: LayerContext) -> Tensor:
        for layer in layers:
            hidden = self.decoder.layers[str(layer)](hidden, context)
        return hidden
