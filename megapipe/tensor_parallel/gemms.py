"""The GEMMs of a linear (`Gemms`), and the collectives along the sequence that run before, after or under them.

Names as in linear.py: x [..., in], weight W [out, in], dy [..., out]; leading dims are tokens; shapes are those of
one rank.

    gathered, SequenceGather   [s / tp, ...] -> [s, ...], at once or asynchronously
    summed                     [s, ...] -> the sum over tp, or this rank's slice of it [s / tp, ...]
    gathered_product   x [s / tp, b, n] -> full(x) M [s, b, m]     chunk i + 1 is gathered while chunk i is multiplied
    summed_product     x [s, b, n] -> sum over tp of x M [s, b, m], or this rank's slice of it [s / tp, b, m]
                                                                   chunk i is reduced while chunk i + 1 is multiplied

A collective runs in chunks where a linear has no other GEMM to hide it under. M [n, m] is W or its transpose. A chunk
holds the same positions of every rank's slice, so each chunk is one all-gather or reduce-scatter, and in the full
tensor it is a strided set of rows that batched GEMMs read and write in place. The gather of the first chunk and the
reduction of the last stay exposed. (Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition", uses a ring instead.)

Chunks are gathered bit for bit as the whole tensor would be. A sum over tp has the same bits where the backend adds
ranks in one order whatever the size (as with two ranks), and a product where its GEMM computes a row alike for any
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.comm.collectives import Work, all_gather, all_reduce, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.tensor_parallel.gradients import GradientSlot

# (x [ranks, rows, n], out [ranks, rows, m]) sets out = x M + bias; the rows of two ranks need not be adjacent in memory
ChunkProduct = Callable[[Tensor, Tensor], None]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and statistics: fp32 for half types, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def leaving_sms(count: int, x: Tensor) -> Iterator[None]:
    """Let the GEMMs launched inside leave SMs of x's GPU to a collective that runs beside them. count: 0 for none.

    A GEMM with a block for every SM takes two waves where a collective holds some. The setting is one of the process, a
    hint to cuBLAS at each launch (github.com/pytorch/pytorch/issues/143988); it is put back afterwards.
    """
    if not count or not x.is_cuda:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def slice_length(x: Tensor, group: Group) -> int:
    """Return the length of one rank's slice of dim 0, the sequence. Raises ConfigError if tp does not divide it."""
    if x.shape[0] % group.size:
        raise ConfigError(
            f"a sequence of {x.shape[0]} cannot be split over {group.size} tensor-parallel ranks: sequence parallelism "
            "needs a sequence length divisible by --tensor-model-parallel-size; "
            f"pad it to {-(-x.shape[0] // group.size) * group.size}"
        )
    return x.shape[0] // group.size


def empty_gathered(x: Tensor, group: Group) -> Tensor:
    """Allocate the result of an all-gather along dim 0: [n, ...] -> [n * tp, ...]."""
    return x.new_empty((x.shape[0] * group.size, *x.shape[1:]))


def gathered(x: Tensor, group: Group) -> Tensor:
    """All-gather along dim 0, outside autograd: [n, ...] -> [n * tp, ...]."""
    output = empty_gathered(x, group)
    all_gather(output, x.contiguous(), group)
    return output


def summed(x: Tensor, group: Group, scatter: bool) -> Tensor:
    """Sum over the group, outside autograd: [n, ...] in x or, with `scatter`, this rank's slice [n / tp, ...]."""
    if not scatter:
        all_reduce(x, group)
        return x
    output = x.new_empty((slice_length(x, group), *x.shape[1:]))
    reduce_scatter(output, x, group)
    return output


class SequenceGather:
    """An asynchronous all-gather of a tensor along the sequence: [s / tp, b, n] -> [s, b, n].

    group None: already complete. work: None before the launch.
    """

    __slots__ = ("_full", "_group", "tensor", "work")

    def __init__(self, tensor: Tensor, group: Group | None) -> None:
        self.tensor = tensor
        self._group = group
        self._full: Tensor | None = None
        self.work: Work | None = None

    def launch(self) -> None:
        """Start the all-gather, once."""
        if self._group is not None and self.work is None:
            self.tensor = self.tensor.contiguous()
            self._full = empty_gathered(self.tensor, self._group)
            self.work = all_gather(self._full, self.tensor, self._group, async_op=True)

    def full(self) -> Tensor:
        """Wait for the all-gather and return the full tensor."""
        if self._group is None:
            return self.tensor
        self.launch()
        assert self.work is not None and self._full is not None
        self.work.wait()
        return self._full


@dataclass(frozen=True)
class RowGroups:
    """Rows in groups that are multiplied by a matrix each, such as those of experts.

    The matrices stand one after the other in a weight [groups x m, n]. counts: of the rows of each group, in order.
    inputs_first: a matrix is [in, out], not [out, in]. ends: the sums of the counts on the device, int32, if torch's
    grouped GEMM multiplies all of them.
    """

    counts: tuple[int, ...]
    inputs_first: bool
    ends: Tensor | None = None

    def matrices(self, weight: Tensor) -> Tensor:
        """View a weight, or its gradient, as [groups, m, n]."""
        return weight.view(len(self.counts), -1, weight.shape[1])

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yield the groups that have rows, each with its rows."""
        for group, end in enumerate(accumulate(self.counts)):
            if self.counts[group]:
                yield group, slice(end - self.counts[group], end)


class Gemms:
    """The GEMMs of one linear, in the dtype of their operands; `fp8.Fp8Gemms` computes them in 8 bits."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, [..., out], not a view of another tensor."""
        # _unsafe_view: autograd forbids in-place operations (rotation, residual sum) on a view made in a Function
        y = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    def input_gradient(self, grad_output: Tensor, weight: Tensor, *, then_weight: bool = False) -> Tensor:
        """Return dy W, [..., in]. then_weight: the weight gradient of the same dy is the next call."""
        return torch.mm(grad_output.reshape(-1, weight.shape[0]), weight).view(*grad_output.shape[:-1], weight.shape[1])

    def forward_chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> ChunkProduct:
        """Return `forward` for chunks of x. group: gathers x, which is a slice; None if x is complete."""
        return partial(_multiply, weight.t(), bias)

    def input_gradient_chunks(self, grad_output: Tensor, weight: Tensor, group: Group | None) -> ChunkProduct:
        """Return `input_gradient` for chunks of grad_output; group as in `forward_chunks`."""
        return partial(_multiply, weight, None)

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        """Add dy^T x to the slot's main gradient; grad_output [tokens, out], inputs [tokens, in]."""
        slot.add_outer(grad_output, inputs)

    def forward_groups(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """Return the products of each group's rows with its matrix, [rows, out]."""
        return _grouped_product(x, weight, groups, not groups.inputs_first)

    def input_gradient_groups(self, grad_output: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """Return the gradient of the rows, [rows, in]."""
        return _grouped_product(grad_output, weight, groups, groups.inputs_first)

    def add_weight_gradient_groups(
        self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor, groups: RowGroups, *, then_input: bool = False
    ) -> None:
        """Add the gradient of each group's matrix to the slot's main gradient, nothing for a group without rows.

        then_input: the input gradient of the same dy is the next call.
        """
        outer, inner = (inputs, grad_output) if groups.inputs_first else (grad_output, inputs)
        matrices = groups.matrices(slot.main_grad)
        for group, rows in groups.slices():
            GradientSlot(matrices[group], kernel=slot.kernel).add_outer(outer[rows], inner[rows])


PLAIN_GEMMS = Gemms()


def _multiply(matrix: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """Set out [ranks, rows, m] = x [ranks, rows, n] @ matrix [n, m] + bias [m]."""
    if x.shape[0] == 1:
        if bias is None:
            torch.mm(x[0], matrix, out=out[0])
        else:
            torch.addmm(bias, x[0], matrix, out=out[0])
        return
    matrices = matrix.expand(x.shape[0], *matrix.shape)  # stride 0: one matrix in memory for the whole batch
    if bias is None:
        torch.bmm(x, matrices, out=out)
    else:
        torch.baddbmm(bias, x, matrices, out=out)


def _grouped_product(x: Tensor, weight: Tensor, groups: RowGroups, transpose: bool) -> Tensor:
    """Return the products of each group's rows with its matrix, or with the transpose of it, joined."""
    matrices = groups.matrices(weight)
    if groups.ends is not None and not x.is_meta and len(x):  # torch refuses some dtypes of meta tensors
        return functional.grouped_mm(x.contiguous(), matrices.mT if transpose else matrices, offs=groups.ends)
    output = x.new_empty(x.shape[0], matrices.shape[1] if transpose else weight.shape[1])
    for group, rows in groups.slices():
        matrix = matrices[group]
        torch.mm(x[rows], matrix.t() if transpose else matrix, out=output[rows])
    return output


def chunk_slices(length: int, count: int) -> list[slice]:
    """Split range(length) into `count` slices (at most `length`) whose lengths differ by at most one."""
    count = max(1, min(count, length))
    ends = [length * i // count for i in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def gathered_product(
    x: Tensor,  # [s / tp, ..., n]
    product: ChunkProduct,
    width: int,  # m
    group: Group,
    count: int,
    full: Tensor | None = None,  # [s, ..., n]
    carveout: int = 0,
) -> Tensor:
    """Return full(x) M + bias, [s, ..., m], with the all-gather in `count` chunks. full: set to full(x) if given.

    carveout: SMs that the products beside a gather leave free.
    """
    x = x.contiguous()
    y = x.new_empty((x.shape[0] * group.size, *x.shape[1:-1], width))
    chunks = chunk_slices(x.shape[0], count)
    ahead = SequenceGather(x[chunks[0]], group)
    ahead.launch()
    for positions, following in zip(chunks, [*chunks[1:], None], strict=True):
        current = ahead
        if following is not None:
            ahead = SequenceGather(x[following], group)
            ahead.launch()
        by_rank = current.full().view(group.size, -1, x.shape[-1])
        with leaving_sms(carveout if following is not None else 0, x):
            product(by_rank, _rows_by_rank(y, group.size, positions))
        if full is not None:
            _rows_by_rank(full, group.size, positions).copy_(by_rank)
    return y


def summed_product(
    x: Tensor,  # [s, ..., n]
    product: ChunkProduct,
    width: int,  # m
    group: Group,
    scatter: bool,
    count: int,
    carveout: int = 0,
) -> Tensor:
    """Return the sum over the group of x M, reduced in `count` chunks. carveout: as in `gathered_product`.

    Returns [s, ..., m] after an all-reduce or, with `scatter`, this rank's slice [s / tp, ..., m] after a
    reduce-scatter. Raises ConfigError if the group's size does not divide s and it scatters.
    """
    x, ranks = x.contiguous(), group.size if scatter else 1
    length = slice_length(x, group) if scatter else x.shape[0]
    y = x.new_empty((length, *x.shape[1:-1], width))
    works: list[Work] = []
    for positions in chunk_slices(length, count):
        output = y[positions]
        partial_sum = empty_gathered(output, group) if scatter else output
        with leaving_sms(carveout if works else 0, x):
            product(_rows_by_rank(x, ranks, positions), partial_sum.view(ranks, -1, width))
        if scatter:
            works.append(reduce_scatter(output, partial_sum, group, async_op=True))
        else:
            works.append(all_reduce(output, group, async_op=True))
    for work in works:
        work.wait()
    return y


def _rows_by_rank(full: Tensor, ranks: int, positions: slice) -> Tensor:
    """View the same positions of each rank's slice in full [ranks * n, ..., m] as [ranks, rows, m]."""
    by_rank = full.view(ranks, -1, full.shape[-1])
    rows_per_position = by_rank.shape[1] * ranks // max(1, full.shape[0])  # the product of the dims between 0 and -1
    return by_rank[:, positions.start * rows_per_position : positions.stop * rows_per_position]
