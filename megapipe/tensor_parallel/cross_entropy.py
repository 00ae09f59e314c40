"""Cross entropy over logits that stay cut over the vocabulary: no rank holds a whole row of logits. Used by model/'s head.

Three numbers a token cross the tp group (its label's logit, the sum of exponentials, for label smoothing the sum of logits) after one
all-reduce of the maximum. The logits' memory is used up: in fp32 and fp64 they become exponentials in the forward and the gradient in the
backward, one pass over exp, nothing of size [s, b, V / tp] is allocated. In bf16 and fp16 the logits stay and blocks of rows are raised to
fp32 twice, since stored exponentials would lose small probabilities.

With z = logits over the K true words, p = softmax(z), lse = logsumexp(z), a = label_smoothing K / (K - 1), as Megatron defines it:
    loss     = (1 - a) (lse - z_label) - a mean_k(z_k - lse) + z_loss lse^2            z-loss: PaLM, arXiv:2204.02311
    dloss/dz = p (1 + 2 z_loss lse) - (1 - a) [label] - a / K
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.tensor_parallel.vocabulary import VocabularySlice, check_ids

BLOCK_ELEMENTS = 1 << 21  # bf16 and fp16: logits raised to fp32 at a time, 8 MiB


@dataclass(frozen=True)
class TokenLoss:
    """The options of one loss over one rank's slice of the vocabulary."""

    tp: Group
    words: VocabularySlice
    vocab_size: int
    smoothing: float
    z_loss: float


def _is_wide(logits: Tensor) -> bool:
    return torch.promote_types(logits.dtype, torch.float32) == logits.dtype


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of dim 0 of [tokens, V / tp] that hold about BLOCK_ELEMENTS each."""
    step = max(BLOCK_ELEMENTS // rows.shape[1], 1)
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))


def _exponentials(rows: Tensor, maximum: Tensor) -> Tensor:
    """sum_k exp(z_k - maximum) of each row, [tokens]; wide rows are replaced by the exponentials."""
    if _is_wide(rows):
        return rows.sub_(maximum[:, None]).exp_().sum(-1)
    sums = torch.empty_like(maximum)
    for block in _blocks(rows):
        sums[block] = rows[block].to(maximum.dtype).sub_(maximum[block, None]).exp_().sum(-1)
    return sums


def token_loss(local_size: int, tp: Group, true_vocab_size: int, label_smoothing: float, z_loss: float) -> TokenLoss:
    """local_size: words of this rank's slice, padding included. label_smoothing: as Megatron defines it."""
    words = VocabularySlice.of(local_size * tp.size, true_vocab_size, tp.rank, tp.size)
    smoothing = label_smoothing * true_vocab_size / (true_vocab_size - 1) if label_smoothing else 0.0
    return TokenLoss(tp, words, true_vocab_size, smoothing, z_loss)


def combined(
    loss: TokenLoss, maximum: Tensor, label_logit: Tensor, all_logits: Tensor | None, sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, sum of exponentials, log-sum-exp), [tokens] each and the same on all tp ranks, of what each has summed over its words.

    maximum: over all ranks. label_logit, all_logits (only used for smoothing): of logits - maximum; sum_exp: of their exponentials.
    """
    sums = [label_logit, sum_exp] if all_logits is None or not loss.smoothing else [label_logit, all_logits, sum_exp]
    if loss.tp.size > 1:
        stacked = torch.stack(sums)
        all_reduce(stacked, loss.tp)
        sums = [row.clone() for row in stacked.unbind(0)]  # a row kept for the backward would keep all of them
    log_sum = sums[-1].log()
    losses = log_sum - sums[0]
    if loss.smoothing:
        losses = (1 - loss.smoothing) * losses + loss.smoothing * (log_sum - sums[1] / loss.vocab_size)
    log_sum_exp = log_sum + maximum
    if loss.z_loss:
        losses = losses + loss.z_loss * log_sum_exp.square()
    return losses, sums[-1], log_sum_exp


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss: TokenLoss) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.view(-1, logits.shape[-1])
        rows[:, loss.words.num_true :].fill_(-torch.inf)
        maximum = rows.amax(-1).to(wide)
        all_reduce(maximum, loss.tp, op="max")
        columns, is_here = loss.words.local(labels.reshape(-1))
        label_logit = rows.gather(1, columns[:, None]).squeeze(1).to(wide).sub_(maximum).masked_fill_(~is_here, 0)
        all_logits = None
        if loss.smoothing:
            all_logits = rows[:, : loss.words.num_true].sum(-1, dtype=wide).sub_(maximum * loss.words.num_true)
        sums = label_logit, all_logits, _exponentials(rows, maximum)
        losses, sum_exp, log_sum_exp = combined(loss, maximum, *sums)
        ctx.loss, ctx.is_used_up = loss, False
        ctx.save_for_backward(logits, labels, sum_exp, log_sum_exp)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_used_up:
            raise RuntimeError(
                "the logits of this cross entropy became their gradient in the first backward: a second one would be wrong"
            )
        ctx.is_used_up = True
        logits, labels, sum_exp, log_sum_exp = ctx.saved_tensors
        loss: TokenLoss = ctx.loss
        columns, is_here = loss.words.local(labels.reshape(-1))
        rows = logits.view(-1, logits.shape[-1])
        grad = grad_losses.reshape(-1).to(sum_exp.dtype)
        factor = grad if not loss.z_loss else grad * (1 + 2 * loss.z_loss * log_sum_exp)  # of p
        target = (grad * (loss.smoothing - 1)).masked_fill_(~is_here, 0)
        if _is_wide(logits):
            rows.mul_((factor / sum_exp)[:, None])
            subtract_targets(rows, columns, target, grad, loss)
            return logits.detach(), None, None
        for block in _blocks(rows):
            gradient = rows[block].to(grad.dtype).sub_(log_sum_exp[block, None]).exp_().mul_(factor[block, None])
            subtract_targets(gradient, columns[block], target[block], grad[block], loss)
            rows[block] = gradient
        return logits.detach(), None, None


def subtract_targets(rows: Tensor, columns: Tensor, target: Tensor, grad: Tensor, loss: TokenLoss) -> None:
    """Take the smoothed one-hot targets times grad from rows [n, V / tp], in place."""
    rows.scatter_add_(1, columns[:, None], target[:, None])
    if loss.smoothing:
        rows[:, : loss.words.num_true].sub_((grad * (loss.smoothing / loss.vocab_size))[:, None])


def vocab_parallel_cross_entropy(
    logits: Tensor,  # [s, b, padded_vocab / tp]
    labels: Tensor,  # [s, b], the same on all tp ranks
    tp: Group,
    true_vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each token, [s, b], in at least fp32, the same on all tp ranks; padded vocabulary rows are outside the softmax.

    Kept for the backward: the logits, the labels, and two numbers a token in at least fp32. The logits are used up, with and without
    autograd: nobody may read them afterwards (an operation that saved them for its own backward is told so by autograd). A second backward
    through the same graph raises RuntimeError.
    Raises DataError for a label outside the true vocabulary (CPU; on CUDA a device assertion).
    """
    check_ids(labels, true_vocab_size, "label")
    if not logits.is_contiguous() or (logits.is_leaf and logits.requires_grad):
        logits = logits.clone(memory_format=torch.contiguous_format)
    return _CrossEntropy.apply(
        logits, labels, token_loss(logits.shape[-1], tp, true_vocab_size, label_smoothing, z_loss)
    )
