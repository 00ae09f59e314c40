"""The ends of the model: word and position embeddings; output logits, split over the vocabulary, and the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig
from megapipe.config.training import TrainingConfig
from megapipe.errors import DataError
from megapipe.gpu.kernels import TORCH, Kernels, compiled
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart
from megapipe.sharding.spec import Fused, Init, ParamSpec
from megapipe.tensor_parallel.cross_entropy import LossKernels, chunked_cross_entropy, vocab_parallel_cross_entropy
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.gemms import at_least_fp32, slice_length
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.parameter import declared
from megapipe.tensor_parallel.random import EMBEDDING_LAYER, DropoutKey, keyed_dropout


def vocabulary_weight(config: ResolvedModelConfig) -> ParamSpec:
    """Return the declaration of the weight of the word embedding, and of the output layer."""
    return ParamSpec(
        "",
        (config.padded_vocab_size, config.hidden_size),
        0,
        Fused(0),
        Init("normal", config.init_method_std),
        decoupled_lr=True,
        true_rows=config.vocab_size,
    )


def output_layer(
    config: ResolvedModelConfig, tp: Group, sequence_parallel: bool, queue: WeightQueue, **options: Any
) -> ColumnParallelLinear:
    """Build the output layer over the padded vocabulary. options: of the linear."""
    return ColumnParallelLinear(
        config.hidden_size,
        config.padded_vocab_size,
        bias=False,
        tp=tp,
        sequence_parallel=sequence_parallel,
        queue=queue,
        weight=vocabulary_weight(config),
        **options,
    )


class Embedding(nn.Module):
    """Tokens -> [s, b, h], with sequence parallelism this rank's [s / tp, b, h]. Saves position ids where given.

    part: of every sequence, on this cp rank; s is its length.
    """

    def __init__(
        self,
        config: ResolvedModelConfig,
        tp: Group,
        *,
        sequence_parallel: bool,
        queue: WeightQueue,
        part: SequencePart = WHOLE_SEQUENCE,
    ) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.tp, self.sequence_parallel, self.part = tp, sequence_parallel, part
        self.dropout_rate, self.scale = config.hidden_dropout, config.embedding_scale
        self.dropout_rank = tp.rank if sequence_parallel else None
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size,
            hidden_size,
            tp,
            sequence_parallel,
            true_vocab_size=config.vocab_size,
            queue=queue,
            weight=replace(vocabulary_weight(config), tied=config.has_embedding_at_both_ends),
        )
        self.position_embeddings: nn.Embedding | None = None  # replicated over tp
        if config.position_embedding_type == "learned_absolute":
            shape, init = (config.max_position_embeddings, hidden_size), Init("normal", config.init_method_std)
            self.position_embeddings = nn.Embedding(*shape, device="meta")
            # with sequence parallelism each tp rank sees only the positions of its tokens
            weight = ParamSpec("", shape, 0, init=init, partial_gradient=sequence_parallel)
            self.position_embeddings.weight = declared(weight)

    def forward(self, microbatch: Microbatch) -> Tensor:
        return self.embed(microbatch, microbatch.dropout_key, EMBEDDING_LAYER)

    def embed(self, microbatch: Microbatch, key: DropoutKey | None, layer: int) -> Tensor:
        """Return the embedding of the tokens with the dropout of `layer`."""
        hidden = self.word_embeddings(microbatch.tokens)
        if self.scale != 1.0:
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype).item()  # rounded, as in Gemma
        if self.position_embeddings is not None:
            table, ids = self.position_embeddings.weight, microbatch.position_ids
            place = microbatch.place(self.part)
            if place.stop > table.shape[0]:
                raise DataError(
                    f"a sequence of {place.stop} tokens is longer than --max-position-embeddings {table.shape[0]}"
                )
            if ids is not None:
                rows = ids.t()  # [s, b]
            else:
                held = [table[run.start : run.stop] for run in self.part.runs(place)]
                rows = (held[0] if len(held) == 1 else torch.cat(held)).unsqueeze(1)  # [s, 1, h]
            if self.sequence_parallel:  # this rank's slice; the gradient of the table is partial
                length = slice_length(rows, self.tp)
                rows = rows.narrow(0, self.tp.rank * length, length)
            hidden = hidden + (rows if ids is None else F.embedding(rows, table))
        return keyed_dropout(hidden, self.dropout_rate, key, layer, "embedding", self.dropout_rank)


class Loss:
    """Output layer and summed cross entropy; saves the logits [s, b, V / tp], twice with a soft-cap, none in chunks."""

    def __init__(self, config: ResolvedModelConfig, training: TrainingConfig, kernels: Kernels = TORCH) -> None:
        self.kernels = LossKernels(compiled) if kernels.compiles_loss else None
        self.vocab_size, self.cap = config.vocab_size, config.final_logit_softcapping
        self.scaling = config.logits_scaling
        self.options = {"label_smoothing": training.label_smoothing, "z_loss": training.z_loss}
        self.chunk_size = training.cross_entropy_chunk_size

    def __call__(self, hidden: Tensor, linear: ColumnParallelLinear, microbatch: Microbatch) -> StageLoss:
        """Return the loss of the normed hidden states [s(/ tp), b, h]. Raises ValueError without labels."""
        if microbatch.labels is None:
            raise ValueError("this microbatch has no labels; only its logits can be returned (return_logits=True)")
        labels, hidden = microbatch.labels.t(), scaled(hidden, self.scaling)
        if self.chunk_size is None:
            logits = capped_logits(linear(hidden), self.cap)
            losses = vocab_parallel_cross_entropy(
                logits, labels, linear.tp, self.vocab_size, **self.options, kernels=self.kernels
            )
        else:
            losses = chunked_cross_entropy(
                hidden, linear, labels, self.vocab_size, self.chunk_size, cap=self.cap, **self.options
            )
        mask, num_tokens = microbatch.loss_mask, microbatch.loss_tokens
        if mask is not None:
            mask = mask.t().to(losses.dtype)
            losses = losses * mask
        if num_tokens is None:  # this rank has whole sequences
            num_tokens = losses.new_full((), losses.numel()) if mask is None else mask.sum()
        return StageLoss(losses.sum(), num_tokens.to(losses.dtype))


def scaled(hidden: Tensor, scaling: float) -> Tensor:
    """Return the input of the output layer [..., h] whose logits are divided by --logits-scaling."""
    return hidden if scaling == 1.0 else hidden / scaling


def capped_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap) in at least fp32; the logits themselves without a cap."""
    return logits if cap is None else _SoftCap.apply(logits.to(at_least_fp32(logits.dtype)), cap)


class _SoftCap(torch.autograd.Function):
    """cap * tanh(x / cap). Saves x and not the result, since the cross entropy writes its gradient into the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        ctx.save_for_backward(x)
        return torch.div(x, cap).tanh_().mul_(cap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        squashed = torch.div(x, ctx.cap).tanh_()
        return grad * squashed.square_().neg_().add_(1), None
