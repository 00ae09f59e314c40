"""Cross entropy over vocabulary-parallel logits: no rank ever holds a full row of logits.

Two forms compute the same loss:

- `vocab_parallel_cross_entropy` takes logits. Three numbers per token cross the tp group (the label's logit, the sum of
  exponentials and, for label smoothing, the sum of logits) after one all-reduce of the maximum. The logits' memory is
  reused: in fp32 and fp64 they become exponentials in the forward and the gradient in the backward, and nothing of size
  [s, b, V / tp] is allocated. In bf16 and fp16 they stay, and blocks of rows are raised to fp32 twice, since stored
  exponentials would lose small probabilities. Blocks have a budget of bytes: small on CPUs, whose caches hold them, and
  large on GPUs, where each block costs kernel launches. Compiled, forward and backward read the half-precision logits
  once each and write nothing in fp32.
- `chunked_cross_entropy` takes the output layer and its input, and computes the logits of some tokens at a time:
  neither the logits nor their gradient exist in full. The backward recomputes the logits: one GEMM more, or two with a
  split backward, where W recomputes them instead of keeping their gradient since I. Maxima stay local until the end,
  so a chunk needs no collective. (torch's linear_cross_entropy cuts the same way, but needs the whole vocabulary on one
  rank and returns the weight gradient to autograd, where ours is added to main gradients in fp32 and may wait for W.)

With K true words, z their logits, p = softmax(z), lse = logsumexp(z), a = label_smoothing K / (K - 1) (Megatron-LM):
    loss     = (1 - a) (lse - z_label) - a mean_k(z_k - lse) + z_loss lse^2            z-loss: PaLM, arXiv:2204.02311
    dloss/dz = p (1 + 2 z_loss lse) - (1 - a) [label] - a / K
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.layers.ends import loss_block_bytes
from megapipe.tensor_parallel.embedding import VocabularySlice, check_ids
from megapipe.tensor_parallel.gemms import SequenceGather, at_least_fp32, gathered, summed
from megapipe.tensor_parallel.gradients import GradientSlot, add_to_grad
from megapipe.tensor_parallel.linear import ColumnParallelLinear


def vocab_parallel_cross_entropy(
    logits: Tensor,  # [s, b, padded_vocab / tp]
    labels: Tensor,  # [s, b], the same on all tp ranks
    tp: Group,
    true_vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    kernels: LossKernels | None = None,
) -> Tensor:
    """Return the loss of each token, [s, b], in at least fp32, the same on all tp ranks. Padding is not in the softmax.

    kernels: compiled passes over logits in half precision.

    Saves the logits, the labels, and two numbers per token in at least fp32. The logits are overwritten, with and
    without autograd, and must not be read afterwards (autograd reports an operation that saved them for its own
    backward). A second backward through the same graph raises RuntimeError. Raises DataError for a label outside the
    true vocabulary (on CUDA a device assertion).
    """
    check_ids(labels, true_vocab_size, "label")
    if not logits.is_contiguous() or (logits.is_leaf and logits.requires_grad):
        logits = logits.clone(memory_format=torch.contiguous_format)
    loss = _TokenLoss(logits.shape[-1], tp, true_vocab_size, label_smoothing, z_loss)
    return _CrossEntropy.apply(logits, labels, loss, kernels)


def chunked_cross_entropy(
    hidden: Tensor,  # [s, b, h]; sequence parallel: [s / tp, b, h]
    linear: ColumnParallelLinear,  # the output layer, without a bias
    labels: Tensor,  # [s, b], the same on all tp ranks
    true_vocab_size: int,
    size: int,
    *,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss of each token, [s, b], in at least fp32, computing the logits of `size` tokens at a time.

    Equals vocab_parallel_cross_entropy(cap tanh(linear(hidden) / cap), ...). Saves hidden as it is, the labels, and
    one number per token in at least fp32. Raises DataError for a label outside the true vocabulary (on CUDA a device
    assertion).
    """
    check_ids(labels, true_vocab_size, "label")
    loss = _TokenLoss(linear.weight.shape[0], linear.tp, true_vocab_size, label_smoothing, z_loss)
    return _ChunkedCrossEntropy.apply(hidden, linear.weight, labels, _ChunkedHead(linear, loss, size, cap))


class _TokenLoss:
    """A cross entropy over one rank's slice of the vocabulary, of local_size words with padding, and its options."""

    def __init__(self, local_size: int, tp: Group, true_vocab_size: int, label_smoothing: float, z_loss: float) -> None:
        self.tp, self.vocab_size, self.z_loss = tp, true_vocab_size, z_loss
        self.vocabulary = VocabularySlice.of(local_size * tp.size, true_vocab_size, tp.rank, tp.size)
        # a of the module's docstring
        self.smoothing = label_smoothing * true_vocab_size / (true_vocab_size - 1) if label_smoothing else 0.0

    def reduce(
        self, maximum: Tensor, label_logit: Tensor, all_logits: Tensor | None, sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum each rank's terms over tp. Return (losses, sum of exponentials, log-sum-exp), each [tokens].

        maximum: over all ranks. The others are sums of logits - maximum (all_logits only for smoothing), or of their
        exponentials.
        """
        sums = [label_logit, sum_exp] if all_logits is None else [label_logit, all_logits, sum_exp]
        if self.tp.size > 1:
            stacked = torch.stack(sums)
            all_reduce(stacked, self.tp)
            sums = [row.clone() for row in stacked.unbind(0)]  # a row saved for the backward would keep all of them
        log_sum = sums[-1].log()
        losses = log_sum - sums[0]
        if self.smoothing:
            losses = (1 - self.smoothing) * losses + self.smoothing * (log_sum - sums[1] / self.vocab_size)
        log_sum_exp = log_sum + maximum
        if self.z_loss:
            losses = losses + self.z_loss * log_sum_exp.square()
        return losses, sums[-1], log_sum_exp

    def softmax_factor(self, grad: Tensor, log_sum_exp: Tensor) -> Tensor:
        """Return the factor of p in the gradient, [tokens]."""
        return grad if not self.z_loss else grad * (1 + 2 * self.z_loss * log_sum_exp)

    def subtract_targets(self, rows: Tensor, labels: Tensor, grad: Tensor) -> None:
        """Subtract the smoothed one-hot targets times grad from rows [n, V / tp], in place. labels, grad: [n]."""
        columns, is_local = self.vocabulary.local(labels)
        target = (grad * (self.smoothing - 1)).masked_fill_(~is_local, 0)
        rows.scatter_add_(1, columns[:, None], target[:, None])
        if self.smoothing:
            rows[:, : self.vocabulary.num_true].sub_((grad * (self.smoothing / self.vocab_size))[:, None])

    def gradient(self, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor) -> Tensor:
        """Compute d(loss) / d(logits) of logits [n, V / tp] in grad's dtype, at least fp32. Others: [n]."""
        factor = self.softmax_factor(grad, log_sum_exp)
        gradient = _difference(logits, log_sum_exp).exp_().mul_(factor[:, None])
        self.subtract_targets(gradient, labels, grad)
        return gradient


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss: _TokenLoss, kernels: LossKernels | None) -> Tensor:
        wide, num_true = at_least_fp32(logits.dtype), loss.vocabulary.num_true
        rows = logits.detach().view(-1, logits.shape[-1])  # torch.compile takes no views of what autograd follows
        rows[:, num_true:].fill_(-torch.inf)
        maximum = rows.amax(-1).to(wide)
        all_reduce(maximum, loss.tp, op="max")
        columns, is_local = loss.vocabulary.local(labels.reshape(-1))
        label_logit = rows.gather(1, columns[:, None]).squeeze(1).to(wide).sub_(maximum).masked_fill_(~is_local, 0)
        all_logits = None
        if loss.smoothing:
            all_logits = rows[:, :num_true].sum(-1, dtype=wide).sub_(maximum * num_true)
        if rows.dtype == wide:
            sum_exp = rows.sub_(maximum[:, None]).exp_().sum(-1)  # the rows are exponentials from now on
        elif kernels is not None:
            sum_exp = kernels.sum_of_exponentials(rows, maximum)
        else:
            sum_exp = torch.empty_like(maximum)
            for block in _blocks(rows):
                sum_exp[block] = sum_of_exponentials(rows[block], maximum[block])
        losses, sum_exp, log_sum_exp = loss.reduce(maximum, label_logit, all_logits, sum_exp)
        ctx.loss, ctx.kernels, ctx.is_used_up = loss, kernels, False
        ctx.save_for_backward(logits, labels, sum_exp, log_sum_exp)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_used_up:
            raise RuntimeError(
                "the first backward of this cross entropy replaced its logits by their gradient; "
                "a second backward is not possible"
            )
        ctx.is_used_up = True
        logits, labels, sum_exp, log_sum_exp = ctx.saved_tensors
        loss: _TokenLoss = ctx.loss
        labels, rows = labels.reshape(-1), logits.detach().view(-1, logits.shape[-1])
        grad = grad_losses.reshape(-1).to(sum_exp.dtype)
        if logits.dtype == sum_exp.dtype:  # the rows hold exponentials since the forward
            rows.mul_((loss.softmax_factor(grad, log_sum_exp) / sum_exp)[:, None])
            loss.subtract_targets(rows, labels, grad)
        elif ctx.kernels is not None:
            columns, is_local = loss.vocabulary.local(labels)
            target = (grad * (1 - loss.smoothing)).masked_fill_(~is_local, 0)
            smoothed = grad * (loss.smoothing / loss.vocab_size) if loss.smoothing else None
            factor = loss.softmax_factor(grad, log_sum_exp)
            ctx.kernels.write_gradient(rows, log_sum_exp, factor, columns, target, smoothed, loss.vocabulary.num_true)
        else:
            for block in _blocks(rows):
                rows[block] = loss.gradient(rows[block], labels[block], log_sum_exp[block], grad[block])
        return logits.detach(), None, None, None


def sum_of_exponentials(rows: Tensor, maximum: Tensor) -> Tensor:
    """Return the sums of exp(rows - maximum), [n], in the dtype of maximum [n]; rows: [n, V / tp]."""
    return _difference(rows, maximum).exp_().sum(-1)


def _difference(rows: Tensor, subtracted: Tensor) -> Tensor:
    """Return rows [n, m] - subtracted [n], in its dtype: in place if the rows have it, else one kernel raises them."""
    return rows.sub_(subtracted[:, None]) if rows.dtype == subtracted.dtype else torch.sub(rows, subtracted[:, None])


def write_gradient(
    rows: Tensor,  # [n, V / tp], the logits; overwritten by their gradient
    log_sum_exp: Tensor,  # [n], fp32, as the others
    factor: Tensor,  # [n], of the probabilities
    columns: Tensor,  # [n], int64, of the labels
    target: Tensor,  # [n], subtracted there
    smoothed: Tensor | None,  # [n], subtracted from the num_true words
    num_true: int,
) -> Tensor:
    """Compute what `_TokenLoss.gradient` does as one pointwise formula, for compilation; return rows."""
    words = torch.arange(rows.shape[1], device=rows.device)
    gradient = (rows.float() - log_sum_exp[:, None]).exp() * factor[:, None]
    gradient = gradient - torch.where(words == columns[:, None], target[:, None], 0.0)
    if smoothed is not None:
        gradient = gradient - torch.where(words < num_true, smoothed[:, None], 0.0)
    return rows.copy_(gradient)


class LossKernels:
    """The passes over logits in half precision, each compiled into one kernel that writes nothing in fp32.

    compiler: gpu.kernels.compiled.
    """

    def __init__(self, compiler: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        self.sum_of_exponentials, self.write_gradient = compiler(sum_of_exponentials), compiler(write_gradient)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Return slices of rows [n, V / tp] that take about `loss_block_bytes` in fp32 each."""
    return _slices(rows.shape[0], max(loss_block_bytes(rows.is_cuda) // (4 * rows.shape[1]), 1))


@dataclass(frozen=True)
class _ChunkedHead:
    """The output layer, without a bias, and its loss. size: tokens of a chunk. cap: of the logits, or None."""

    linear: ColumnParallelLinear
    loss: _TokenLoss
    size: int
    cap: float | None

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Compute [n, V / tp] from rows [n, h]: in their dtype, with a cap in at least fp32; -inf in the padding."""
        logits = torch.mm(rows, weight.t())
        if self.cap is not None:
            logits = logits.to(at_least_fp32(logits.dtype)).div_(self.cap).tanh_().mul_(self.cap)
        logits[:, self.loss.vocabulary.num_true :].fill_(-torch.inf)
        return logits

    def gradient(self, rows: Tensor, weight: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor) -> Tensor:
        """Compute d(loss) / d(logits before the cap) of a chunk, [n, V / tp] in rows' dtype; log_sum_exp, grad: [n]."""
        logits, num_true = self.logits(rows, weight), self.loss.vocabulary.num_true
        slope = None if self.cap is None else 1 - (logits[:, :num_true] / self.cap).square_()
        gradient = self.loss.gradient(logits, labels, log_sum_exp, grad)
        if slope is not None:
            gradient[:, :num_true].mul_(slope)
        return gradient.to(rows.dtype)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: _ChunkedHead) -> Tensor:
        loss, tp = head.loss, head.linear.tp
        rows = (gathered(hidden, tp) if head.linear.sequence_parallel else hidden).flatten(0, -2)
        wide, flat, num_true = at_least_fp32(rows.dtype), labels.reshape(-1), loss.vocabulary.num_true
        columns, is_local = loss.vocabulary.local(flat)
        highest, label_logit, sum_exp, sums = torch.empty((4, *flat.shape), dtype=wide, device=rows.device)
        for chunk in _slices(rows.shape[0], head.size):
            logits = head.logits(rows[chunk], weight)
            # clamped, because -inf, the maximum on a rank that holds only padding, cannot be subtracted
            highest[chunk] = logits.amax(-1).to(wide).clamp_(min=torch.finfo(wide).min)
            label_logit[chunk] = logits.gather(1, columns[chunk, None]).squeeze(1).to(wide)
            if loss.smoothing:
                sums[chunk] = logits[:, :num_true].sum(-1, dtype=wide)
            sum_exp[chunk] = sum_of_exponentials(logits, highest[chunk])
        maximum = highest.clone()
        all_reduce(maximum, tp, op="max")
        sum_exp *= highest.sub_(maximum).exp_()
        label_logit.sub_(maximum).masked_fill_(~is_local, 0)
        all_logits = sums.sub_(maximum * num_true) if loss.smoothing else None
        losses, _, log_sum_exp = loss.reduce(maximum, label_logit, all_logits, sum_exp)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        head: _ChunkedHead = ctx.head
        linear, flat = head.linear, labels.reshape(-1)
        tp, deferring = linear.tp if linear.sequence_parallel else None, linear.queue.is_deferring
        grad = grad_losses.reshape(-1).to(log_sum_exp.dtype).contiguous()
        gather = SequenceGather(hidden.detach(), tp)
        pending = None
        if ctx.needs_input_grad[1]:
            # a queued gradient keeps this rank's slice of hidden, not the gathered one
            own = SequenceGather(hidden.detach(), tp) if deferring else gather
            pending = _ChunkedWeightGradient(head, weight, own, labels, log_sum_exp, grad)
        rows = gather.full().flatten(0, -2)
        partial = torch.empty_like(rows)
        for chunk in _slices(rows.shape[0], head.size):
            gradient = head.gradient(rows[chunk], weight, flat[chunk], log_sum_exp[chunk], grad[chunk])
            torch.mm(gradient, weight, out=partial[chunk])
            if pending is not None and not deferring:
                pending.slot.add_outer(gradient, rows[chunk])  # gradient: of the logits, [n, V / tp]
        grad_weight = None
        if pending is not None and deferring:
            linear.queue.submit(pending)
        elif pending is not None:
            grad_weight = pending.finish()
        grad_hidden = summed(partial.view(-1, *hidden.shape[1:]), linear.tp, linear.sequence_parallel)
        return grad_hidden, grad_weight, None, None


@dataclass
class _ChunkedWeightGradient:
    """The weight gradient of the output layer: added chunk by chunk in the backward, or recomputed in W."""

    head: _ChunkedHead
    weight: Tensor
    hidden: SequenceGather
    labels: Tensor
    log_sum_exp: Tensor
    grad: Tensor

    @cached_property
    def slot(self) -> GradientSlot:
        """The slot of the weight; for one without the gradient alone."""
        found = self.head.linear.slots.get("weight")
        if found is not None:
            return found
        return GradientSlot(torch.zeros_like(self.weight, dtype=at_least_fp32(self.weight.dtype)))

    def launch(self) -> None:
        """Start the gather of the input."""
        self.hidden.launch()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Recompute the logits and their gradient, and add the weight gradient of every chunk."""
        rows, labels = self.hidden.full().flatten(0, -2), self.labels.reshape(-1)
        for chunk in _slices(rows.shape[0], self.head.size):
            arguments = (tensor[chunk] for tensor in (labels, self.log_sum_exp, self.grad))
            self.slot.add_outer(self.head.gradient(rows[chunk], self.weight, *arguments), rows[chunk])
        add_to_grad(self.weight, self.finish())

    def finish(self) -> Tensor | None:
        """Report the slot ready after the last chunk, or return the gradient where there is no slot."""
        self.slot.ready()
        return None if "weight" in self.head.linear.slots else self.slot.main_grad.to(self.weight.dtype)
