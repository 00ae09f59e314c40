"""`GPTStage`: the part of a GPT that one pipeline stage holds on one tp rank; `Block`: one of its transformer layers.

What a layer saves for the backward on one rank, in elements of the model's dtype unless said otherwise (fp32+: at
least fp32). T = b s tokens; t = T, with sequence parallelism T / tp. H hidden; F, Q, K = ffn, heads x head_dim,
key/value heads x head_dim, divided by tp (K: at least one head). "unless x": not if --recompute-modules names x.

    2 t H                   residual stream, the inputs of the two branches
    2 t x (1 or 2) fp32+    norms before them: statistics, RMSNorm 1, LayerNorm 2   (the second not with both layernorm
                            and mlp)
    2 t H                   their outputs, the inputs of linear_qkv and linear_fc1      unless layernorm
    T (Q + 2 K)             q, k and v, one tensor
    T Q                     attention's output, the input of linear_proj                unless core_attn
    T heads fp32+           log-sum-exp of the logits                                   unless core_attn
    T F, gated 2 T F        output of linear_fc1, the input of the activation           unless mlp; ReLU: never
    T F                     output of the activation, the input of linear_fc2           unless mlp or activation
                            (ReLU: also with activation)
    2 t H bytes             masks of hidden dropout
    norms after branches    add 2 t H, the outputs of linear_proj and linear_fc2, and their statistics; without norms
                            before, linear_qkv and linear_fc1 save the residual stream itself
    qk-norm adds            T (Q + K), and the statistics of each head, or of q and k as a whole
    explicit attention      (soft-cap, attention dropout, softmax in fp32) replaces the log-sum-exp by
                            S2 fp32+ probabilities, S2 = b heads s^2; S2 fp32+ of tanh with a cap; with dropout S2 and
                            S2 bytes of mask, without it S2 in half types; T Q with grouped queries
    latent attention        replaces T (Q + 2 K) and T Q by t (q rank + kv rank + rotated) and their statistics,
                            t (q rank + kv rank) normed, 3 T Q of q, k and v padded to the queries' width, T Q of padded
                            output, and T V, V = heads x value channels
    documents, grouped      q, k and v with k and v repeated for each query head: 3 T Q instead of T (Q + 2 K), with
                            qk-norm in addition to T (Q + 2 K)
A layer without attention or without an MLP has the rows of the other branch alone.
Full recompute: t H per checkpoint, and with --recompute-keep-attention T Q and the log-sum-exp of each of its layers.
Embedding: t H bytes of dropout mask. Head: 2 t H and the statistics of the final norm, logits T V / tp (twice with a
soft-cap, fp32+), 2 fp32+ per token. Per stage and microbatch: the masks of `context`, one for each window.
tests/model/test_saved_bytes.py compares this table with what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import chain

from torch import Tensor, nn

from megapipe.comm.groups import ContextGroups, ExpertGroups, Group
from megapipe.config.config import ResolvedModelConfig, convert
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.gpu.kernels import TORCH, Kernels
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.model.attention import SelfAttention
from megapipe.model.compiled import CompiledBlock, Parts
from megapipe.model.context import ContextBuilder, LayerContext
from megapipe.model.context_parallel import ContextParallel
from megapipe.model.embedding_and_head import Embedding, Loss, capped_logits
from megapipe.model.latent_attention import LatentAttention
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.mlp import MLP
from megapipe.model.moe import MoE, Router
from megapipe.model.recompute import KeptAttention, RecomputedSegment, layer_groups, recomputed_modules
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.gradients import InputRecompute, WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
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


class Decoder(nn.Module):
    """The layers of a stage by their global number, and on the last stage the final norm."""

    def __init__(self, factories: Mapping[int, LayerFactory], final_layernorm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block(number, factory) for number, factory in factories.items()})
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
        recompute: RecomputeConfig | Sequence[RecomputeConfig],  # of all layers, or of each one apart
        loss: TrainingConfig,
        weight_queue: WeightQueue | None = None,
        kernels: Kernels = TORCH,
        chunks: CommChunks = WHOLE,
        experts: ExpertGroups | None = None,
        context: ContextGroups | None = None,
        cp_comm_types: Sequence[str] = ("p2p",),  # one, or one for each layer of the model
    ) -> None:
        super().__init__()
        self.config, self.stage_layers, self.tp, self._library = config, layers, tp, kernels.layers
        self.sequence_parallel = sequence_parallel = sequence_parallel and tp.size > 1
        self.loss = Loss(config, loss, kernels) if layers.has_head else None
        self.group_runner: GroupRunner | None = None
        numbers = range(layers.first_layer, layers.last_layer_exclusive)
        held = {number: layer_configs(config)[number] for number in numbers}
        self.context_parallel: dict[int, ContextParallel] = {}
        self.part = WHOLE_SEQUENCE
        if context is not None and context.cp.size > 1:
            self.part = SequencePart(context.cp.rank, context.cp.size)
            kinds = tuple(cp_comm_types) * (config.num_layers if len(cp_comm_types) == 1 else 1)
            self.context_parallel = {number: ContextParallel.of(kinds[number], context) for number in numbers}
        rings = {number: layer.part for number, layer in self.context_parallel.items()}
        per_token, has_kernel = loss.calculate_per_token_loss, kernels.attention is not None
        self.make_context = ContextBuilder(held, has_kernel, self.part, rings, per_token)
        if isinstance(recompute, RecomputeConfig):
            own, self._groups = dict.fromkeys(numbers, recompute), layer_groups(recompute, numbers)
        else:
            own = dict(zip(numbers, recompute, strict=True))
            self._groups = [group for number, each in own.items() for group in layer_groups(each, (number,))]
        self.keep_attention = {number for number, each in own.items() if each.recompute_keep_attention}
        queue = WeightQueue() if weight_queue is None else weight_queue
        model, own_experts = convert(LayerConfig, config), experts or ExpertGroups()
        factory = LayerFactory(model, tp, sequence_parallel, frozenset(), queue, kernels, chunks, own_experts)
        self.embedding: Embedding | TiedHead | None = None
        self.output_layer: ColumnParallelLinear | None = None
        if layers.has_embedding:
            self.embedding = Embedding(config, tp, sequence_parallel=sequence_parallel, queue=queue, part=self.part)
        self.factories = {
            number: factory.of(layer, recomputed_modules(own[number]), self.context_parallel.get(number))
            for number, layer in held.items()
        }
        self.decoder = Decoder(self.factories, factory.norm(config.hidden_size) if layers.has_head else None)
        if layers.has_head:
            self._add_head(queue, chunks, kernels)
        self._fp8_linears = [
            (gemms, linear)
            for linear in self.decoder.modules()
            if isinstance(gemms := getattr(linear, "gemms", None), Fp8Gemms)
        ]

    def _add_head(self, queue: WeightQueue, chunks: CommChunks, kernels: Kernels) -> None:
        """Build the output layer, which uses the word embedding's parameter where the two are tied."""
        head = ColumnParallelLinear(
            self.config.hidden_size,
            self.config.padded_vocab_size,
            bias=False,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            queue=queue,
            chunks=chunks,
            sm_carveout=kernels.sm_carveout,
        )
        if self.config.untie_embeddings_and_output_weights:
            self.output_layer = head
        elif self.embedding is None:
            self.embedding = TiedHead(head)
        else:
            self.output_layer = head
            head.weight = self.embedding.word_embeddings.weight

    def routers(self) -> dict[int, Router]:
        """Return the routers of its layers with experts, by the layers' global numbers."""
        layers = ((layer.layer, layer.mlp) for layer in self.decoder.layers.values() if isinstance(layer, Block))
        return {number: mlp.router for number, mlp in layers if isinstance(mlp, MoE)}

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
        blocks: list[Block] = list(self.decoder.layers.values())  # type: ignore[arg-type]
        layers: list[nn.Module | None] = list(blocks)
        if self.config.num_experts is not None:  # they may run in parts (--overlap-moe-expert-parallel-comm)
            layers = [module for block in blocks for module in block.modules_in_order()]
        parts = [self.embedding, *layers, self.decoder.final_layernorm, self.output_layer]
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
        hidden = self.embed(hidden, microbatch)
        hidden = self.run_layers(hidden, self.make_context(microbatch, hidden.dtype))
        if self.loss is None:
            return hidden
        return self.run_head(hidden, microbatch, return_logits, last_position)

    def embed(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Return the hidden states that enter the layers: those of the previous stage, or the embedding's."""
        if self.stage_layers.has_embedding:
            assert isinstance(self.embedding, Embedding)
            return self.embedding(microbatch)
        if hidden is None:
            raise ValueError(f"without the embedding a stage needs the hidden states before it: {self.stage_layers}")
        return hidden

    def run_head(
        self, hidden: Tensor, microbatch: Microbatch, return_logits: bool = False, last_position: bool = False
    ) -> Tensor | StageLoss:
        """Run the final norm, the output layer and the loss of the last stage; arguments as in `forward`."""
        assert self.decoder.final_layernorm is not None and self.loss is not None
        hidden = self.decoder.final_layernorm(hidden[-1:] if last_position else hidden)
        head = self.output_layer
        if head is None:
            assert isinstance(self.embedding, TiedHead)
            head = self.embedding.word_embeddings
        if return_logits:
            return capped_logits(head(hidden), self.config.final_logit_softcapping)
        return self.loss(hidden, head, microbatch)

    def run_layers(self, hidden: Tensor, contexts: Mapping[int, LayerContext]) -> Tensor:
        """Run all layers, group by group: a group is one layer, or the layers of one checkpoint with full recompute.

        contexts: of every layer, by its global number.
        """
        constants = [
            tensor
            for context in dict.fromkeys(contexts.values())
            for tensor in (*context.masks, *(context.rotary or ()), context.borders and context.borders.starts)
            if tensor is not None
        ]
        with nullcontext() if self._library is None else self._library.stage_region(self.tp):
            for group, (layers, is_checkpointed) in enumerate(self._groups):
                kept = KeptAttention() if is_checkpointed and layers[0] in self.keep_attention else None
                run: Callable[[Tensor], Tensor] = partial(
                    self._run_group, contexts={layer: contexts[layer].keeping(kept) for layer in layers}
                )
                if is_checkpointed:
                    run = RecomputedSegment(run, kept)
                if self.group_runner is None:
                    hidden = run(hidden)
                else:
                    parameters = (self.decoder.layers[str(layer)].parameters() for layer in layers)
                    hidden = self.group_runner(group, run, hidden, chain(*parameters, constants))
        return hidden

    def _run_group(self, hidden: Tensor, contexts: Mapping[int, LayerContext]) -> Tensor:
        for layer, context in contexts.items():
            hidden = self.decoder.layers[str(layer)](hidden, context)
        return hidden
