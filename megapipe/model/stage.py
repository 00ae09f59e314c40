"""`GPTStage`: the part of a GPT that one pipeline stage holds on one tp rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.gpu.kernels import TORCH, Kernels
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.model.block import Block
from megapipe.model.context import ContextBuilder, LayerContext
from megapipe.model.embedding import Embedding
from megapipe.model.head import Loss, capped_logits
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.recompute import KeptAttention, checkpoint, layer_groups, selected_modules
from megapipe.schedule.partition import StageLayers
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear


class Decoder(nn.Module):
    """The layers of a stage by their global number, and on the last stage the final norm."""

    def __init__(self, blocks: dict[int, Block], final_layernorm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.final_layernorm = final_layernorm


class TiedHead(nn.Module):
    """The output layer under the word embedding's name, on a last stage that does not hold the embedding."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.word_embeddings = linear


class GroupRunner(Protocol):
    """Runs the groups of layers of a stage in its own way, for example to offload what they save."""

    def run(self, group: int, fn: Callable[[Tensor], Tensor], hidden: Tensor, stays: Iterable[Tensor]) -> Tensor:
        """Return fn(hidden). stays: tensors that the layers save but that exist independently of them."""


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
        factory = LayerFactory(config, tp, sequence_parallel, selected_modules(recompute), queue, kernels, chunks)
        self.embedding: Embedding | TiedHead | None = None
        if layers.has_embedding:
            self.embedding = Embedding(config, tp, sequence_parallel=sequence_parallel, queue=queue)
        blocks = {number: Block(number, factory) for number in numbers}
        self.decoder = Decoder(blocks, factory.norm(config.hidden_size) if layers.has_head else None)
        self._fp8_linears = [
            (gemms, linear)
            for linear in self.decoder.modules()
            if isinstance(gemms := getattr(linear, "gemms", None), Fp8Gemms)
        ]
        self.output_layer: ColumnParallelLinear | None = None
        if layers.has_head:
            self._add_head(queue, chunks)

    def _add_head(self, queue: WeightQueue, chunks: CommChunks) -> None:
        config = self.config
        head = ColumnParallelLinear(
            config.hidden_size,
            config.padded_vocab_size,
            bias=False,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            queue=queue,
            chunks=chunks,
        )
        tied = not config.untie_embeddings_and_output_weights
        if tied and self.embedding is None:
            self.embedding = TiedHead(head)
            return
        self.output_layer = head
        if tied:
            assert isinstance(self.embedding, Embedding)
            head.weight = self.embedding.word_embeddings.weight

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
        parts: list[nn.Module | None] = [None if isinstance(self.embedding, TiedHead) else self.embedding]
        parts += [*self.decoder.layers.values(), self.decoder.final_layernorm, self.output_layer]
        if isinstance(self.embedding, TiedHead):
            parts.append(self.embedding.word_embeddings)
        return [part for part in parts if part is not None]

    def forward(
        self,
        *hidden_and_microbatch: Tensor | Microbatch | None,
        return_logits: bool = False,
        last_position: bool = False,
    ) -> Tensor | StageLoss:
        """Run `stage(hidden, microbatch)`; on the first stage `stage(microbatch)` or `stage(None, microbatch)`.

        hidden: [s, b, h] from the previous stage, [s / tp, b, h] with sequence parallelism. Returns the hidden states
        for the next stage; on the last stage the `StageLoss`, or with return_logits the logits [s, b, V / tp]
        including padding; last_position: only the last position's, [1, b, V / tp] (without sequence parallelism).
        """
        *inputs, microbatch = hidden_and_microbatch
        assert isinstance(microbatch, Microbatch)
        hidden = inputs[0] if inputs else None
        assert hidden is None or isinstance(hidden, Tensor)
        if self.stage_layers.has_embedding:
            assert isinstance(self.embedding, Embedding)
            hidden = self.embedding(microbatch)
        if hidden is None:
            raise ValueError(
                f"a stage without the embedding ({self.stage_layers}) needs the hidden states of the previous stage"
            )
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
        with nullcontext() if self._library is None else self._library.stage_region(self.tp):
            for group, (layers, is_checkpointed) in enumerate(self._groups):
                run: Callable[[Tensor], Tensor] = partial(self._run_group, layers=layers, context=context)
                if is_checkpointed:
                    run = partial(checkpoint, run, keep_attention=self._keep_attention)
                if self.group_runner is None:
                    hidden = run(hidden)
                else:
                    hidden = self.group_runner.run(group, run, hidden, self._stays(layers, context))
        return hidden

    def _run_group(
        self,
        hidden: Tensor,
        layers: tuple[int, ...],
        context: LayerContext,
        kept_attention: KeptAttention | None = None,
    ) -> Tensor:
        if kept_attention is not None:
            context = dataclasses.replace(context, kept_attention=kept_attention)
        for layer in layers:
            hidden = self.decoder.layers[str(layer)](hidden, context)
        return hidden

    def _stays(self, layers: tuple[int, ...], context: LayerContext) -> Iterator[Tensor]:
        """Yield tensors that these layers save but that exist without them: parameters, mask, rotary tables."""
        for layer in layers:
            yield from self.decoder.layers[str(layer)].parameters()
        yield from () if context.mask is None else (context.mask,)
        yield from context.rotary or ()
