"""VocabParallelEmbedding: the embedding table cut by rows over tp. Used by model/."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gradient_slot import GradientSlot
from megapipe.tensor_parallel.mappings import reduce_scattered
from megapipe.tensor_parallel.vocabulary import VocabularySlice, check_ids
from megapipe.tensor_parallel.weight_gradient import Gathering, Slots, add_to_grad
from megapipe.tensor_parallel.weight_queue import WeightQueue


class EmbeddingWeightGradient:
    """weight[id] += grad_output at each position, rows of this rank only; no dense [vocabulary, h] where there is a slot.

    tokens: [s, b]; grad_output: Gathering to [s, b, h].
    """

    def __init__(
        self, weight: Tensor, slots: Slots, tokens: Tensor, rows: VocabularySlice, grad_output: Gathering
    ) -> None:
        self.weight, self.slots, self.tokens, self.rows, self.grad_output = weight, slots, tokens, rows, grad_output

    @torch.no_grad()
    def launch(self) -> None:
        """Start the gather of the output gradient."""
        self.grad_output.launch()

    def compute(self) -> Tensor | None:
        """Accumulate into the slot; without one, the dense gradient for autograd."""
        grad_output = self.grad_output.whole()
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        rows, is_here = self.rows.local(self.tokens.reshape(-1))
        rows, grad_output = _contributing(rows, grad_output, is_here)
        slot = self.slots.get("weight")
        if slot is None:
            dense = GradientSlot(torch.zeros_like(self.weight))
            dense.add_rows(rows, grad_output)
            return dense.main_grad
        slot.add_rows(rows, grad_output)
        slot.ready()
        return None

    @torch.no_grad()
    def accumulate(self) -> None:
        """As `compute`, but without a slot the gradient goes to .grad."""
        add_to_grad(self.weight, self.compute())


def _contributing(rows: Tensor, gradient: Tensor, is_here: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n] and gradient [n, h] of the tokens that are in this rank's vocabulary; on a GPU those of all, zeros for the others."""
    if gradient.is_cuda:
        return rows, gradient.masked_fill(~is_here[:, None], 0)  # choosing by a mask would wait for the device
    return (rows, gradient) if bool(is_here.all()) else (rows[is_here], gradient[is_here])


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, module: VocabParallelEmbedding) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(weight, tokens)
        if module.tp.size == 1:
            return functional.embedding(tokens, weight)
        rows, is_here = module.rows.local(tokens)
        partial = functional.embedding(rows, weight).masked_fill_(~is_here.unsqueeze(-1), 0)
        if module.sequence_parallel:
            return reduce_scattered(partial, module.tp)
        all_reduce(partial, module.tp)
        return partial

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, tokens = ctx.saved_tensors
        module: VocabParallelEmbedding = ctx.module
        gathering = Gathering(grad_output, module.tp if module.sequence_parallel and module.tp.size > 1 else None)
        waiting = EmbeddingWeightGradient(weight, module.slots, tokens, module.rows, gathering)
        if module.queue is not None and module.queue.is_deferring:
            module.queue.submit(waiting)
            return None, None, None
        return waiting.compute(), None, None


class VocabParallelEmbedding(nn.Module):
    """Rows of the padded vocabulary cut over tp; each rank looks up its own ids, the sum over tp completes the rest.

    weight: [padded_vocab / tp, h], on the meta device until materialised. forward: tokens [b, s] -> [s, b, h], under sequence parallelism
    [s / tp, b, h] (reduce-scatter instead of all-reduce). Backward: output gradients (gathered under sequence parallelism) are added row by
    row into slots["weight"], in a fixed order; kept for it: the tokens.
    Raises DataError for an id outside the true vocabulary (CPU; on CUDA a device assertion).
    """

    def __init__(
        self,
        padded_vocab: int,
        hidden: int,
        tp: Group,
        sequence_parallel: bool,
        *,
        true_vocab_size: int | None = None,
        queue: WeightQueue | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.queue = queue
        self.slots: dict[str, GradientSlot] = {}
        self.true_vocab_size = padded_vocab if true_vocab_size is None else true_vocab_size
        self.rows = VocabularySlice.of(padded_vocab, self.true_vocab_size, tp.rank, tp.size)
        self.weight = nn.Parameter(torch.empty((self.rows.num_rows, hidden), device="meta"))

    def forward(self, tokens: Tensor) -> Tensor:
        check_ids(tokens, self.true_vocab_size, "token id")
        return _Embedding.apply(self.weight, tokens.t(), self)

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, first_row={self.rows.first}, tp={self.tp.size}, sequence_parallel={self.sequence_parallel}"
