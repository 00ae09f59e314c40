"""`GPTStage`: the part of a GPT that one pipeline stage holds on one tp rank.

Each module declares its parameters where it makes them. What a stage keeps for the backward is counted by `trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.comm.groups import ContextGroups, ExpertGroups, Group
from megapipe.config.config import ResolvedModelConfig, convert
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.gpu.kernels import TORCH, Kernels
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.model.block import Block, Prediction, keeping
from megapipe.model.context import ContextBuilder, LayerContext, SharedTables
from megapipe.model.context_parallel import ContextParallel
from megapipe.model.embedding_and_head import Embedding, Loss, capped_logits, output_layer, scaled
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.moe import MoE
from megapipe.model.recompute import RecomputedSegment, layer_groups, recomputed_modules
from megapipe.model.router import Router
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear


class Decoder(nn.Module):
    """The layers of a stage by their global number, and on the last stage the final norm."""

    def __init__(self, factories: Mapping[int, LayerFactory], final_layernorm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block(number, factory) for number, factory in factories.items()})
        self.final_layernorm = final_layernorm


class Predictions(nn.Module):
    """The modules of multi-token prediction, by their number."""

    def __init__(self, modules: Sequence[Prediction]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): module for number, module in enumerate(modules)})

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.layers.values())  # type: ignore[arg-type]


class TiedHead(nn.Module):
    """The output layer under the word embedding's name, on a last stage that does not hold the embedding."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.word_embeddings = linear


def _groups_of(
    numbers: range, recompute: RecomputeConfig | Sequence[RecomputeConfig]
) -> tuple[dict[int, RecomputeConfig], list[tuple[tuple[int, ...], bool]]]:
    """Return the recompute of each layer, and the groups of `recompute.layer_groups`."""
    if isinstance(recompute, RecomputeConfig):
        return dict.fromkeys(numbers, recompute), layer_groups(recompute, numbers)
    own = dict(zip(numbers, recompute, strict=True))
    return own, [group for number, each in own.items() for group in layer_groups(each, (number,))]


# (fn, hidden, stays) -> fn(hidden), for example with what a group of layers saves offloaded; stays: parameters, masks
# and rotary tables, which exist without the layers
GroupRunner = Callable[[Callable[[Tensor], Tensor], Tensor, Iterable[Tensor]], Tensor]


class GPTStage(nn.Module):
    """The embedding if it is the first stage, layers, final norm, head and modules of multi-token prediction if it is
    the last, which then has the embedding too.

    Parameters have this rank's shapes, are on the meta device until materialised (by data_parallel's buffers), and
    have the global Megatron names of `trace.parameters.model_parameters`. A tied head uses
    embedding.word_embeddings.weight: the same Parameter where the stage has both ends; otherwise another of that
    name, a copy, or the first stage's own where that is on this rank.
    """

    group_runner: GroupRunner | None = None
    # where a forward leaves what runs its checkpoints again ahead of the backward; None: the backward does
    replays: list[Callable[[], None]] | None = None

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
        tables: SharedTables | None = None,  # of all stages of the rank
        configs: Sequence[LayerConfig] | None = None,  # of all layers of the model, in place of `config`
    ) -> None:
        super().__init__()
        self.config, self.stage_layers, self.tp, self._library = config, layers, tp, kernels.layers
        self.sequence_parallel = sequence_parallel = sequence_parallel and tp.size > 1
        self.loss = Loss(config, loss, kernels) if layers.has_head else None
        numbers = range(layers.first_layer, layers.last_layer_exclusive)
        configs = configs or layer_configs(config)
        num_ahead = config.mtp_num_layers or 0 if layers.has_head else 0
        predicting = range(config.num_layers, config.num_layers + num_ahead)
        held = {number: configs[number] for number in numbers} | dict.fromkeys(predicting, configs[-1])
        self.context_parallel: dict[int, ContextParallel] = {}
        self.part = WHOLE_SEQUENCE
        if context is not None and context.cp.size > 1:
            self.part = SequencePart(context.cp.rank, context.cp.size)
            of_layer = [cp_comm_types[min(number, len(cp_comm_types) - 1)] for number in held]
            self.context_parallel = {
                n: ContextParallel.of(kind, context) for n, kind in zip(held, of_layer, strict=True)
            }
        rings = {number: layer.part for number, layer in self.context_parallel.items()}
        per_token, has_kernel = loss.calculate_per_token_loss, kernels.attention is not None
        self.make_context = ContextBuilder(held, has_kernel, self.part, rings, per_token, tables)
        ahead = recompute.of_predictions if isinstance(recompute, RecomputeConfig) else RecomputeConfig()
        own, self._groups = _groups_of(numbers, recompute)
        self.keep_attention = {number for number, each in own.items() if each.recompute_keep_attention}
        queue, own_experts = weight_queue or WeightQueue(), experts or ExpertGroups()
        model = convert(LayerConfig, config)
        factory = LayerFactory(model, tp, sequence_parallel, frozenset(), queue, kernels, chunks, own_experts)
        self.embedding: Embedding | TiedHead | None = None
        self.output_layer: ColumnParallelLinear | None = None
        if layers.has_embedding or predicting:
            self.embedding = Embedding(config, tp, sequence_parallel=sequence_parallel, queue=queue, part=self.part)
        self.factories = {
            number: factory.of(held[number], recomputed_modules(each), self.context_parallel.get(number))
            for number, each in own.items()
        }
        self.decoder = Decoder(self.factories, factory.norm(config.hidden_size) if layers.has_head else None)
        if layers.has_head:
            self._add_head(queue, chunks, kernels)
        self.mtp: Predictions | None = None
        if predicting:
            self._add_predictions(predicting, factory.of(layer_configs(config)[-1], recomputed_modules(ahead)), ahead)
        self._fp8_weights = list(self._weights_in_fp8())

    def _weights_in_fp8(self) -> Iterator[tuple[Fp8Gemms, nn.Module, str]]:
        """Yield the GEMMs in 8 bits, each with the module that has their weight, and its name there."""
        for module in self.modules():
            gemms = getattr(module, "gemms", None)
            for name, each in (gemms if isinstance(gemms, dict) else {"weight": gemms}).items():
                if isinstance(each, Fp8Gemms):
                    yield each, module, name

    def _add_head(self, queue: WeightQueue, chunks: CommChunks, kernels: Kernels) -> None:
        """Build the output layer, which uses the word embedding's parameter where the two are tied."""
        options = {"chunks": chunks, "sm_carveout": kernels.sm_carveout}
        head = output_layer(self.config, self.tp, self.sequence_parallel, queue, **options)
        if self.config.untie_embeddings_and_output_weights:
            self.output_layer = head
        elif self.embedding is None:
            self.embedding = TiedHead(head)
        else:
            self.output_layer = head
            head.weight = self.embedding.word_embeddings.weight

    def _add_predictions(self, numbers: range, factory: LayerFactory, recompute: RecomputeConfig) -> None:
        """Build the modules of multi-token prediction. numbers: of their layers."""
        factories = ((n, replace(factory, context=self.context_parallel.get(n))) for n in numbers)
        self.mtp = Predictions([Prediction(number, each, recompute) for number, each in factories])
        assert isinstance(self.embedding, Embedding)
        self.embedding.word_embeddings.uses = len(numbers) + self.stage_layers.has_embedding
        self._head().uses = 1 + len(numbers)

    def routers(self) -> dict[int, Router]:
        """Return the routers of its layers with experts, by the layers' global numbers."""
        blocks = (module for module in self.modules() if isinstance(module, Block))
        return {block.layer: block.mlp.router for block in blocks if isinstance(block.mlp, MoE)}

    def begin_row(self, num_versions: int = 1) -> None:
        """Start a run of a schedule: forwards and, if it trains, backwards.

        num_versions: of the weights that are in use at the same time.
        """
        for gemms, _, _ in self._fp8_weights:
            gemms.begin(num_versions)

    def use_version(self, version: int) -> None:
        """Multiply by the copies in 8 bits of this version of the weights, which are counted from the run's start."""
        for gemms, _, _ in self._fp8_weights:
            gemms.version = version

    def cast_weights(self) -> None:
        """Cast to 8 bits the weights that this run has not cast yet, before a forward that will not do it itself."""
        for gemms, module, name in self._fp8_weights:
            gemms.cast_weight(module.get_parameter(name))

    def parts(self) -> list[nn.Module]:
        """Return submodules that together hold all parameters, in the order in which a forward calls them."""
        parts: list[nn.Module | None] = [*self.decoder.layers.values(), self.decoder.final_layernorm, self.output_layer]
        if isinstance(self.embedding, TiedHead):
            parts.append(self.embedding.word_embeddings)
        elif self.stage_layers.has_embedding:
            parts.insert(0, self.embedding)
        elif self.embedding is not None:  # called apart from its forward
            parts.append(self.embedding.word_embeddings)
        return [part for part in (*parts, *(self.mtp or ())) if part is not None]

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
        contexts = self.make_context(microbatch, hidden.dtype)
        hidden = self.run_layers(hidden, contexts)
        if self.loss is None:
            return hidden
        return self.run_head(hidden, microbatch, contexts, return_logits, last_position)

    def embed(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Return the hidden states that enter the layers: those of the previous stage, or the embedding's."""
        if self.stage_layers.has_embedding:
            assert isinstance(self.embedding, Embedding)
            embedded = self.embedding(microbatch)
            # gradients of activations flow to the start of the model, whichever parameters are frozen
            return embedded if embedded.requires_grad or not torch.is_grad_enabled() else embedded.requires_grad_()
        if hidden is None:
            raise ValueError(f"without the embedding a stage needs the hidden states before it: {self.stage_layers}")
        return hidden

    def run_head(
        self,
        hidden: Tensor,
        microbatch: Microbatch,
        contexts: Mapping[int, LayerContext],
        return_logits: bool = False,
        last_position: bool = False,
    ) -> Tensor | StageLoss:
        """Run the final norm, the output layer, the loss, and multi-token prediction; arguments as in `forward`."""
        assert self.decoder.final_layernorm is not None and self.loss is not None
        hidden, head = self.decoder.final_layernorm(hidden[-1:] if last_position else hidden), self._head()
        if return_logits:
            return capped_logits(head(scaled(hidden, self.config.logits_scaling)), self.config.final_logit_softcapping)
        loss = self.loss(hidden, head, microbatch)
        return loss if self.mtp is None else replace(loss, ahead=self._losses_ahead(hidden, microbatch, contexts))

    def _losses_ahead(
        self, hidden: Tensor, microbatch: Microbatch, contexts: Mapping[int, LayerContext]
    ) -> tuple[StageLoss, ...]:
        """Return the losses of the modules of multi-token prediction; hidden: the input of the output layer."""
        assert self.mtp is not None and self.loss is not None and isinstance(self.embedding, Embedding)
        if not microbatch.ahead and not torch.is_grad_enabled():
            return ()  # only the model's own loss is asked for
        if len(microbatch.ahead) != len(self.mtp.layers):
            wanted = len(self.mtp.layers)
            raise ValueError(f"{wanted} modules of multi-token prediction were given {len(microbatch.ahead)} inputs")
        losses = []
        for module, ahead in zip(self.mtp, microbatch.ahead, strict=True):
            embedded = self.embedding.embed(ahead, microbatch.dropout_key, module.layer)
            context = replace(contexts[module.layer], real=self.make_context.real_tokens(ahead))
            hidden = module(hidden, embedded, context)
            losses.append(self.loss(hidden, self._head(), ahead))
        return tuple(losses)

    def _head(self) -> ColumnParallelLinear:
        """Return the output layer."""
        if self.output_layer is not None:
            return self.output_layer
        assert isinstance(self.embedding, TiedHead)
        return self.embedding.word_embeddings

    def run_layers(self, hidden: Tensor, contexts: Mapping[int, LayerContext]) -> Tensor:
        """Run all layers, group by group: a group is one layer, or the layers of one checkpoint with full recompute.

        contexts: of every layer, by its global number.
        """
        constants = [
            tensor
            for context in dict.fromkeys(contexts.values())
            for tensor in (
                *context.masks,
                *(context.rotary or ()),
                *(() if context.borders is None else (context.borders.starts,)),
            )
        ]
        with nullcontext() if self._library is None else self._library.region(self.tp):
            for layers, is_checkpointed in self._groups:
                blocks: list[Any] = [self.decoder.layers[str(layer)] for layer in layers]
                own, kept = [contexts[layer] for layer in layers], None
                if is_checkpointed:
                    own, kept = keeping(blocks, own, layers[0] in self.keep_attention)
                run: Callable[[Tensor], Tensor] = partial(_run_group, list(zip(blocks, own, strict=True)))
                if is_checkpointed:
                    run = segment = RecomputedSegment(run, kept)
                if self.group_runner is None:
                    hidden = run(hidden)
                else:
                    parameters = (block.parameters() for block in blocks)
                    hidden = self.group_runner(run, hidden, chain(*parameters, constants))
                if is_checkpointed and self.replays is not None and torch.is_grad_enabled():
                    self.replays.append(segment.ahead(hidden))
        return hidden


def _run_group(blocks: Iterable[tuple[Block, LayerContext]], hidden: Tensor) -> Tensor:
    for block, context in blocks:
        hidden = block(hidden, context)
    return hidden
