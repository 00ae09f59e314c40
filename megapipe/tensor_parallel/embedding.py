"""`VocabParallelEmbedding`: an embedding table with its rows split over tp; `VocabularySlice`: the rows of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megapipe.comm.groups import Group
from megapipe.errors import ConfigError, DataError
from megapipe.sharding.spec import Fused, ParamSpec
from megapipe.tensor_parallel.gemms import SequenceGather, summed
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue, add_to_grad, collect
from megapipe.tensor_parallel.parameter import declared


@dataclass(frozen=True)
class VocabularySlice:
    """Rows [first, first + num_rows) of the padded vocabulary; the first `num_true` are real, the rest padding."""

    first: int
    num_rows: int
    num_true: int

    @classmethod
    def of(cls, padded_size: int, true_size: int, tp_rank: int, tp: int) -> VocabularySlice:
        """Split padded_size rows equally. Raises ConfigError if tp does not divide them or true_size exceeds them."""
        if padded_size % tp:
            raise ConfigError(
                f"a vocabulary of {padded_size} rows cannot be split over {tp} tensor-parallel ranks; "
                f"raise --make-vocab-size-divisible-by so that it is padded to a multiple of {tp}"
            )
        if not 0 < true_size <= padded_size:
            raise ConfigError(f"the true vocabulary size {true_size} must be in 1 .. {padded_size}, the padded size")
        num_rows = padded_size // tp
        return cls(tp_rank * num_rows, num_rows, min(max(true_size - tp_rank * num_rows, 0), num_rows))

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, is_local): the local row of each id that is_local, and some valid row for the others."""
        rows = ids - self.first
        is_local = (rows >= 0) & (rows < self.num_rows)
        # other rows are spread over the slice: CUDA adds duplicates one by one, so many zeros into one row are slow
        return rows.remainder_(self.num_rows), is_local


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Raise DataError (on CUDA a device assertion) for ids outside [0, size), which no rank would look up."""
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < size)).all())  # no synchronisation
    elif ids.numel() and ids.device.type == "cpu":
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise DataError(
                f"{what} {low if low < 0 else high} is outside the vocabulary of {size}; check that the data and the "
                "tokenizer belong together (positions that should not count belong in the loss mask)"
            )


class VocabParallelEmbedding(nn.Module):
    """An embedding table with the rows of the padded vocabulary split over tp; each rank looks up the ids in its rows.

    weight: [padded_vocab / tp, h], on the meta device until materialised.
    forward: tokens [b, s] -> [s, b, h] by an all-reduce, with sequence parallelism [s / tp, b, h] by a reduce-scatter.
    backward: output gradients (gathered under sequence parallelism) are added row by row into slots["weight"], in a
    fixed order. Saves the tokens. Raises DataError for an id outside the true vocabulary (on CUDA a device assertion).
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
        weight: ParamSpec | None = None,
    ) -> None:
        """weight: how [padded_vocab, hidden] is initialized and updated."""
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.queue = WeightQueue() if queue is None else queue
        self.slots: dict[str, GradientSlot] = {}
        self.uses = 1  # calls for each microbatch
        self.true_vocab_size = padded_vocab if true_vocab_size is None else true_vocab_size
        self.vocabulary = VocabularySlice.of(padded_vocab, self.true_vocab_size, tp.rank, tp.size)
        self.weight = declared(weight or ParamSpec("", (padded_vocab, hidden), 0, Fused(0)), tp.rank, tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        check_ids(tokens, self.true_vocab_size, "token id")
        return _Embedding.apply(self.weight, tokens.t(), self)

    def extra_repr(self) -> str:
        shape, first = list(self.weight.shape), self.vocabulary.first
        return f"weight={shape}, first_row={first}, tp={self.tp.size}, sequence_parallel={self.sequence_parallel}"


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, module: VocabParallelEmbedding) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(weight, tokens)
        if module.tp.size == 1:
            return functional.embedding(tokens, weight)
        rows, is_local = module.vocabulary.local(tokens)
        partial = functional.embedding(rows, weight).masked_fill_(~is_local.unsqueeze(-1), 0)
        return summed(partial, module.tp, module.sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, tokens = ctx.saved_tensors
        module: VocabParallelEmbedding = ctx.module
        gather = SequenceGather(grad_output, module.tp if module.sequence_parallel else None)
        gradient = EmbeddingWeightGradient(module, weight, tokens, gather)
        if module.queue.is_deferring:
            module.queue.submit(gradient)
            return None, None, None
        return gradient.compute(), None, None


@dataclass
class EmbeddingWeightGradient:
    """The gradient of the table: weight[id] += grad_output at each position, for the rows of this rank."""

    module: VocabParallelEmbedding
    weight: Tensor
    tokens: Tensor  # [s, b]
    grad_output: SequenceGather  # to [s, b, h]

    @torch.no_grad()
    def launch(self) -> None:
        """Start the gather of the output gradient."""
        self.grad_output.launch()

    def compute(self) -> Tensor | None:
        """Add to the slot; without one, return the dense gradient, [padded_vocab / tp, h], for autograd."""
        grad_output = self.grad_output.full().flatten(0, -2)
        rows, is_local = self.module.vocabulary.local(self.tokens.reshape(-1))
        rows, grad_output = _local_rows(rows, grad_output, is_local)
        add = partial(GradientSlot.add_rows, rows=rows, gradient=grad_output)
        return collect(self.module.slots.get("weight"), self.weight, add)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add to the slot, or without one to .grad."""
        add_to_grad(self.weight, self.compute())


def _local_rows(rows: Tensor, gradient: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
    """Select rows [n] and gradient [n, h] of this rank's tokens; on a GPU set the others to zero instead."""
    if gradient.is_cuda:
        return rows, gradient.masked_fill(~is_local[:, None], 0)  # selecting by a mask would wait for the device
    return (rows, gradient) if bool(is_local.all()) else (rows[is_local], gradient[is_local])
