"""The last part of the model: output logits, split over the vocabulary, and the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.training import TrainingConfig
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.model.norm import at_least_fp32
from megapipe.tensor_parallel.cross_entropy import chunked_cross_entropy, vocab_parallel_cross_entropy
from megapipe.tensor_parallel.linear import ColumnParallelLinear


class Loss:
    """Output layer and per-token cross entropy, summed over the microbatch.

    Saves the logits [s, b, V / tp], twice with a soft-cap; none with --cross-entropy-chunk-size.
    """

    def __init__(self, config: ResolvedModelConfig, training: TrainingConfig) -> None:
        self.vocab_size, self.cap = config.vocab_size, config.final_logit_softcapping
        self.label_smoothing, self.z_loss = training.label_smoothing, training.z_loss
        self.chunk_size = training.cross_entropy_chunk_size

    def __call__(self, hidden: Tensor, linear: ColumnParallelLinear, microbatch: Microbatch) -> StageLoss:
        """Return the loss of the normed hidden states [s(/ tp), b, h]. linear: the output layer.

        Raises ValueError for a microbatch without labels.
        """
        if microbatch.labels is None:
            raise ValueError(
                "this microbatch has no labels: the last stage can only return logits (return_logits=True)"
            )
        labels = microbatch.labels.t()
        if self.chunk_size is None:
            logits = capped_logits(linear(hidden), self.cap)
            losses = vocab_parallel_cross_entropy(
                logits, labels, linear.tp, self.vocab_size, self.label_smoothing, self.z_loss
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
