"""Output layer and cross entropy in one, some tokens at a time: neither the logits nor their gradient are ever whole.

The forward computes the logits of a chunk [n, V / tp], takes from them what the loss needs, and forgets them; the backward computes them
again. That is one GEMM more, of four; with a split backward two, for W makes them again instead of keeping their gradient since I. Over
tp two collectives of [s b] numbers replace those of `cross_entropy`: maxima first stay local, so that chunks need none. The loss is that
of `cross_entropy`, which names its terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_reduce, reduce_scatter
from megapipe.tensor_parallel.cross_entropy import TokenLoss, combined, subtract_targets, token_loss
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.mappings import gathered, slice_length
from megapipe.tensor_parallel.vocabulary import check_ids
from megapipe.tensor_parallel.weight_gradient import Gathering, add_to_grad


@dataclass(frozen=True)
class ChunkedHead:
    """linear: the output layer, weight [V / tp, h], without a bias. size: tokens of a chunk. cap: of the logits, or None."""

    linear: ColumnParallelLinear
    loss: TokenLoss
    size: int
    cap: float | None

    @property
    def sequence_parallel(self) -> bool:
        return self.linear.sequence_parallel and self.linear.tp.size > 1

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        return (slice(start, min(start + self.size, num_tokens)) for start in range(0, num_tokens, self.size))

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows [n, h] -> [n, V / tp]: in their dtype, with a cap in at least fp32; -inf in the columns of padding."""
        logits = torch.mm(rows, weight.t())
        if self.cap is not None:
            logits = logits.to(_wide(logits)).div_(self.cap).tanh_().mul_(self.cap)
        logits[:, self.loss.words.num_true :].fill_(-torch.inf)
        return logits

    def gradient(self, rows: Tensor, weight: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor) -> Tensor:
        """d(loss) / d(logits before the cap) of one chunk, [n, V / tp] in rows' dtype. log_sum_exp, grad: [n], at least fp32."""
        loss, logits = self.loss, self.logits(rows, weight)
        num_true = loss.words.num_true
        slope = None if self.cap is None else 1 - (logits[:, :num_true] / self.cap).square_()
        factor = grad if not loss.z_loss else grad * (1 + 2 * loss.z_loss * log_sum_exp)  # of p
        gradient = logits.to(log_sum_exp.dtype).sub_(log_sum_exp[:, None]).exp_().mul_(factor[:, None])
        columns, is_here = loss.words.local(labels)
        subtract_targets(gradient, columns, (grad * (loss.smoothing - 1)).masked_fill_(~is_here, 0), grad, loss)
        if slope is not None:
            gradient[:, :num_true].mul_(slope)
        return gradient.to(rows.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _WeightGradient:
    """The output layer's half of a backward: at once, or when W asks for it."""

    def __init__(
        self, head: ChunkedHead, weight: Tensor, hidden: Gathering, labels: Tensor, log_sum_exp: Tensor, grad: Tensor
    ) -> None:
        self._head, self._weight, self._hidden = head, weight, hidden
        self._labels, self._log_sum_exp, self._grad = labels, log_sum_exp, grad
        self._sum: Tensor | None = None

    def launch(self) -> None:
        """Start to gather the sequence."""
        self._hidden.launch()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Make the logits again, and add."""
        rows, labels = self._hidden.whole().flatten(0, -2), self._labels.reshape(-1)
        for chunk in self._head.chunks(rows.shape[0]):
            arguments = (tensor[chunk] for tensor in (labels, self._log_sum_exp, self._grad))
            self.add(self._head.gradient(rows[chunk], self._weight, *arguments), rows[chunk])
        add_to_grad(self._weight, self.finish())

    def add(self, gradient: Tensor, rows: Tensor) -> None:
        """What one chunk contributes."""
        slot = self._head.linear.slots.get("weight")
        if slot is not None:
            slot.add_outer(gradient, rows)
        elif self._sum is None:
            self._sum = torch.mm(gradient.t(), rows).to(_wide(rows))
        else:
            self._sum += torch.mm(gradient.t(), rows)

    def finish(self) -> Tensor | None:
        """All chunks are there. The gradient, where there is no slot that has it."""
        slot = self._head.linear.slots.get("weight")
        if slot is not None:
            slot.ready()
        total, self._sum = self._sum, None
        return None if total is None else total.to(self._weight.dtype)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: ChunkedHead) -> Tensor:
        loss, tp = head.loss, head.linear.tp
        rows = (gathered(hidden, tp) if head.sequence_parallel else hidden).flatten(0, -2)
        wide, flat = _wide(rows), labels.reshape(-1)
        columns, is_here = loss.words.local(flat)
        highest, label_logit, sum_exp, sums = (
            torch.empty(flat.shape, dtype=wide, device=rows.device) for _ in range(4)
        )
        for chunk in head.chunks(rows.shape[0]):
            logits = head.logits(rows[chunk], weight)
            # a rank whose words are all padding: its highest logit is no number to subtract
            highest[chunk] = logits.amax(-1).to(wide).clamp_(min=torch.finfo(wide).min)
            label_logit[chunk] = logits.gather(1, columns[chunk, None]).squeeze(1).to(wide)
            if loss.smoothing:
                sums[chunk] = logits[:, : loss.words.num_true].sum(-1, dtype=wide)
            sum_exp[chunk] = logits.to(wide).sub_(highest[chunk, None]).exp_().sum(-1)
        maximum = highest.clone()
        all_reduce(maximum, tp, op="max")
        sum_exp *= highest.sub_(maximum).exp_()
        label_logit.sub_(maximum).masked_fill_(~is_here, 0)
        all_logits = sums.sub_(maximum * loss.words.num_true) if loss.smoothing else None
        losses, _, log_sum_exp = combined(loss, maximum, label_logit, all_logits, sum_exp)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        head: ChunkedHead = ctx.head
        linear, flat = head.linear, labels.reshape(-1)
        grad = grad_losses.reshape(-1).to(log_sum_exp.dtype).contiguous()
        gathering = Gathering(hidden.detach(), linear.tp if head.sequence_parallel else None)
        defers = linear.queue is not None and linear.queue.is_deferring
        weight_gradient = (
            _WeightGradient(head, weight, gathering, labels, log_sum_exp, grad) if ctx.needs_input_grad[1] else None
        )
        rows = gathering.whole().flatten(0, -2)
        partial = torch.empty_like(rows)
        for chunk in head.chunks(rows.shape[0]):
            gradient = head.gradient(rows[chunk], weight, flat[chunk], log_sum_exp[chunk], grad[chunk])
            torch.mm(gradient, weight, out=partial[chunk])
            if weight_gradient is not None and not defers:
                weight_gradient.add(gradient, rows[chunk])
        grad_weight = None
        if weight_gradient is not None and defers:
            assert linear.queue is not None
            own = Gathering(
                hidden.detach(), linear.tp if head.sequence_parallel else None
            )  # what waits keeps this rank's slice alone
            linear.queue.submit(_WeightGradient(head, weight, own, labels, log_sum_exp, grad))
        elif weight_gradient is not None:
            grad_weight = weight_gradient.finish()
        return _summed(partial.view(-1, *hidden.shape[1:]), head), grad_weight, None, None


def _summed(partial: Tensor, head: ChunkedHead) -> Tensor:
    """The input's gradient over tp: [s, b, h], sequence parallel [s / tp, b, h]."""
    tp = head.linear.tp
    if not head.sequence_parallel:
        all_reduce(partial, tp)
        return partial
    own = partial.new_empty((slice_length(partial, tp), *partial.shape[1:]))
    reduce_scatter(own, partial, tp)
    return own


def chunked_cross_entropy(
    hidden: Tensor,  # [s, b, h]; sequence parallel: [s / tp, b, h]
    linear: ColumnParallelLinear,  # the output layer
    labels: Tensor,  # [s, b], the same on all tp ranks
    true_vocab_size: int,
    size: int,
    *,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each token, [s, b], in at least fp32: vocab_parallel_cross_entropy(cap tanh(linear(hidden) / cap), ...), `size` tokens
    at a time.

    Kept for the backward: hidden as it came, labels, one number a token in at least fp32. Raises DataError for a label outside the true
    vocabulary (CPU; on CUDA a device assertion).
    """
    check_ids(labels, true_vocab_size, "label")
    loss = token_loss(linear.weight.shape[0], linear.tp, true_vocab_size, label_smoothing, z_loss)
    return _ChunkedCrossEntropy.apply(hidden, linear.weight, labels, ChunkedHead(linear, loss, size, cap))
