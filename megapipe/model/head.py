"""The model's last part: output logits cut over the vocabulary, and the loss. Used by `stage`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.config.model import ModelConfig
from megapipe.model.core_attention import soft_cap
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.norm import at_least_fp32
from megapipe.tensor_parallel.chunked_loss import chunked_cross_entropy
from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.linear import ColumnParallelLinear


class LossConfig(Protocol):
    """The part of `TrainingConfig` that the loss depends on."""

    @property
    def label_smoothing(self) -> float: ...

    @property
    def z_loss(self) -> float: ...

    @property
    def cross_entropy_chunk_size(self) -> int | None: ...


class Loss:
    """Output layer and per-token cross entropy, summed. Kept for the backward: the logits [s, b, V / tp], twice with a soft-cap; none with
    --cross-entropy-chunk-size."""

    def __init__(self, config: ModelConfig, loss: LossConfig, tp: Group) -> None:
        assert config.vocab_size is not None
        self.vocab_size, self.tp = config.vocab_size, tp
        self.label_smoothing, self.z_loss, self.chunk_size = (
            loss.label_smoothing,
            loss.z_loss,
            loss.cross_entropy_chunk_size,
        )
        self.cap = config.final_logit_softcapping

    def __call__(self, hidden: Tensor, linear: ColumnParallelLinear, microbatch: Microbatch) -> StageLoss:
        """hidden: [s(/ tp), b, h], normed. linear: the output layer. Raises ValueError for a microbatch without labels."""
        if microbatch.labels is None:
            raise ValueError(
                "this microbatch has no labels: the last stage can only return logits (return_logits=True)"
            )
        labels = microbatch.labels.t()
        if self.chunk_size is None:
            logits = capped_logits(linear(hidden), self.cap)
            losses = vocab_parallel_cross_entropy(
                logits, labels, self.tp, self.vocab_size, self.label_smoothing, self.z_loss
            )
        else:
            losses = chunked_cross_entropy(
                hidden,
                linear,
                labels,
                self.vocab_size,
                self.chunk_size,
                cap=self.cap,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
            )
        if microbatch.loss_mask is None:
            return StageLoss(losses.sum(), losses.new_full((), losses.numel()))
        mask = microbatch.loss_mask.t().to(losses.dtype)
        return StageLoss((losses * mask).sum(), mask.sum())


def capped_logits(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), in at least fp32 where there is a cap."""
    return logits if cap is None else soft_cap(logits.to(at_least_fp32(logits.dtype)), cap)
