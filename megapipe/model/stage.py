"""`GPTStage`: the part of a GPT that one pipeline stage holds on one tp rank. Built by build/, run by pipeline/ and inference/."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.gpu.choose import TORCH, Kernels
from megapipe.model.block import Block
from megapipe.model.context import ContextMaker, LayerContext
from megapipe.model.embedding import Embedding
from megapipe.model.head import Loss, LossConfig, capped_logits
from megapipe.model.kept_attention import KeptAttention
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.parts import Parts
from megapipe.model.recompute import checkpoint, layer_groups, selected_modules
from megapipe.plan.comm_chunks import WHOLE, CommChunks
from megapipe.schedule.partition import StageLayers
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.weight_queue import WeightQueue


class Decoder(nn.Module):
    """The stage's blocks under their global layer numbers, and on the last stage the final norm."""

    def __init__(self, blocks: dict[int, Block], final_layernorm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.final_layernorm = final_layernorm


class TiedHead(nn.Module):
    """The head's linear under the word embedding's name, on a last stage that does not hold the embedding."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.word_embeddings = linear


class GroupRunner(Protocol):
    """Runs the groups of layers of a stage, so that it can take care of what they keep."""

    def run(self, group: int, fn: Callable[[Tensor], Tensor], hidden: Tensor, stays: Iterable[Tensor]) -> Tensor:
        """fn(hidden). stays: tensors that the layers keep and that are there anyway."""


class GPTStage(nn.Module):
    """Embedding if it is the first stage, blocks, final norm and head if it is the last.

    Parameters have this rank's shapes, stand on the meta device until materialised (`init.materialize_plain`, data_parallel's buffers), and
    carry the global Megatron names of `sharding.model_specs` in named_parameters(). A tied head uses embedding.word_embeddings.weight:
    the same Parameter where the stage has both ends; else one of that name, a copy, or the first stage's own where that is on this rank.
    """

    def __init__(
        self,
        config: ModelConfig,  # derived sizes filled in
        layers: StageLayers,
        tp: Group,
        *,
        sequence_parallel: bool,
        recompute: RecomputeConfig,
        loss: LossConfig,
        weight_queue: WeightQueue | None = None,
        kernels: Kernels = TORCH,
        chunks: CommChunks = WHOLE,
    ) -> None:
        super().__init__()
        self.config, self.stage_layers, self.tp = config, layers, tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.weight_queue = weight_queue
        self.loss = Loss(config, loss, tp) if layers.has_head else None
        self._make_context = ContextMaker(config, has_own_attention=kernels.attention is not None)
        numbers = range(layers.first_layer, layers.last_layer_exclusive)
        self._groups = layer_groups(recompute, numbers)
        self._keeps_attention = recompute.recompute_keep_attention
        self.group_runner: GroupRunner | None = None
        tied = not config.untie_embeddings_and_output_weights
        self.embedding: Embedding | TiedHead | None = None
        if layers.has_embedding:
            self.embedding = Embedding(config, tp, sequence_parallel=self.sequence_parallel, queue=weight_queue)
        parts = Parts(config, tp, self.sequence_parallel, selected_modules(recompute), weight_queue, kernels, chunks)
        blocks = {number: Block(number, parts) for number in numbers}
        self.decoder = Decoder(blocks, parts.norm(config.hidden_size) if layers.has_head else None)
        self._library = kernels.layers
        self._fp8 = [
            (gemms, part)
            for part in self.decoder.modules()
            if isinstance(gemms := getattr(part, "gemms", None), Fp8Gemms)
        ]
        self.output_layer: ColumnParallelLinear | None = None
        if layers.has_head:
            self._add_head(tied, chunks)

    def _add_head(self, tied: bool, chunks: CommChunks) -> None:
        config = self.config
        assert config.padded_vocab_size is not None
        head = ColumnParallelLinear(
            config.hidden_size,
            config.padded_vocab_size,
            bias=False,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            queue=self.weight_queue,
            chunks=chunks,
        )
        if tied and self.embedding is None:
            self.embedding = TiedHead(head)
            return
        self.output_layer = head
        if tied:
            assert isinstance(self.embedding, Embedding)
            head.weight = self.embedding.word_embeddings.weight

    def begin_row(self, trains: bool) -> None:
        """A row of the schedule begins: forwards, and if it trains backwards, with one set of weights."""
        for gemms, _ in self._fp8:
            gemms.begin(trains)

    def cast_weights(self) -> None:
        """Cast to 8 bits what this row has not cast yet, before a forward that will not do it itself."""
        for gemms, linear in self._fp8:
            gemms.cast_weight(linear.get_parameter("weight"))

    def parts(self) -> list[nn.Module]:
        """Submodules that together hold all parameters, in the order in which a forward calls them."""
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
        """`stage(hidden, microbatch)`; on the first stage `stage(microbatch)` or `stage(None, microbatch)`.

        hidden: [s, b, h] from the stage before, [s / tp, b, h] under sequence parallelism. Returns the hidden states for the next stage; on
        the last stage the `StageLoss`, or with return_logits the logits [s, b, V / tp] (padding included); last_position: only those of the
        last position, [1, b, V / tp] (not under sequence parallelism).
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
                f"a stage without the embedding ({self.stage_layers}) needs the hidden states of the stage before"
            )
        hidden = self._run_groups(hidden, self._make_context(microbatch, hidden.dtype))
        if self.loss is None:
            return hidden
        assert self.decoder.final_layernorm is not None
        hidden = self.decoder.final_layernorm(hidden[-1:] if last_position else hidden)
        if return_logits:
            return capped_logits(self._head()(hidden), self.config.final_logit_softcapping)
        return self.loss(hidden, self._head(), microbatch)

    def _run_groups(self, hidden: Tensor, context: LayerContext) -> Tensor:
        with nullcontext() if self._library is None else self._library.stage_region(self.tp):
            for group, (layers, is_checkpointed) in enumerate(self._groups):
                own = partial(self._run_layers, layers=layers, context=context)
                run = partial(checkpoint, own, keeps_attention=self._keeps_attention) if is_checkpointed else own
                if self.group_runner is None:
                    hidden = run(hidden)
                else:
                    hidden = self.group_runner.run(group, run, hidden, self._stays(layers, context))
        return hidden

    def _stays(self, layers: tuple[int, ...], context: LayerContext) -> Iterator[Tensor]:
        """What these layers keep for the backward that is there without them."""
        for layer in layers:
            yield from self.decoder.layers[str(layer)].parameters()
        yield from () if context.mask is None else (context.mask,)
        yield from context.rotary or ()

    def _run_layers(
        self, hidden: Tensor, layers: tuple[int, ...], context: LayerContext, attention: KeptAttention | None = None
    ) -> Tensor:
        if attention is not None:
            context = dataclasses.replace(context, attention=attention)
        for layer in layers:
            hidden = self.decoder.layers[str(layer)](hidden, context)
        return hidden

    def _head(self) -> ColumnParallelLinear:
        if self.output_layer is not None:
            return self.output_layer
        assert isinstance(self.embedding, TiedHead)
        return self.embedding.word_embeddings
