"""Results of attention in blocks, which are merged or added in one pass over memory.

A block has results for a range of rows: output and log-sum-exp, and the gradient of q, for some queries; the gradients
of k and v for some keys. They are held in the kernel's dtype until all are there, or `AT_ONCE` of them, and then each
range of rows is written once, computed in at least fp32. Rows are the first dimension of all tensors here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megapipe.tensor_parallel.gemms import at_least_fp32

AT_ONCE = 4  # results; with more, the first ones become one in at least fp32
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Passes:
    """The two functions that write results, `merge_` and `add_`. compile: how; by default they run as written."""

    def __init__(self, compile: Compile = lambda function: function) -> None:
        self._compiled = cache(compile)

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Call merge_ or add_."""
        self._compiled(function)(*args)


def merge_(output: Tensor, lse: Tensor, sink: Tensor | None, *parts: Tensor) -> None:
    """Write the output, [rows, b, heads, channels], and log-sum-exp, [rows, b, heads], over the keys of all parts.

    parts: their outputs, then their log-sum-exps. In each row that of the first part is finite. sink: [heads].
    """
    outputs, sums = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    if len(outputs) == 1 and sink is None:
        output.copy_(outputs[0])
        lse.copy_(sums[0])
        return
    total = sums[0]
    for own in sums[1:]:
        total = torch.logaddexp(total, own)
    if sink is not None:
        total = torch.logaddexp(total, sink.to(total.dtype))
    merged = outputs[0] * (sums[0] - total).exp().unsqueeze(-1)
    for each, own in zip(outputs[1:], sums[1:], strict=True):
        merged.addcmul_(each.to(merged.dtype), (own - total).exp().unsqueeze(-1))
    output.copy_(merged)
    lse.copy_(total)


def add_(total: Tensor, adds: bool, num_columns: int, *parts: Tensor) -> None:
    """Write the sums of parts to columns of `total`, or with `adds` add them.

    parts: of the first column, then of the second.
    """
    wide, each, start = at_least_fp32(total.dtype), len(parts) // num_columns, 0
    for first in range(0, len(parts), each):
        width = parts[first].shape[-1]
        column = total[..., start : start + width]
        terms = [*([column] if adds else []), *parts[first : first + each]]
        result = terms[0]
        if len(terms) > 1:
            result = terms[0].to(wide) + terms[1]
        for term in terms[2:]:
            result = result + term
        column.copy_(result)
        start += width


class _Parts:
    """Results for ranges of rows."""

    def __init__(self, num_rows: int, passes: Passes) -> None:
        self._num_rows, self._passes = num_rows, passes
        self._parts: list[tuple[range, tuple[Tensor, ...]]] = []

    def add(self, rows: tuple[int, int], *tensors: Tensor) -> None:
        """Add the results of a block."""
        if len(self._parts) == AT_ONCE:
            self._parts = [(range(self._num_rows), self._one())]  # the first blocks have parts of all rows
        self._parts.append((range(*rows), tensors))

    def _one(self) -> tuple[Tensor, ...]:
        """Return the result of all parts so far, in at least fp32."""
        raise NotImplementedError

    def _only(self, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """Return the one part of all rows, if it is that, in this dtype."""
        rows, tensors = self._parts[0]
        is_only = len(self._parts) == 1 and len(rows) == self._num_rows and tensors[0].dtype == dtype
        return tensors if is_only else None

    def _by_rows(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield ranges of all rows, and the parts of each: the first tensors, then the second ones."""
        ends = {0, self._num_rows, *(end for rows, _ in self._parts for end in (rows.start, rows.stop))}
        for start, stop in pairwise(sorted(ends)):
            of_each = [
                [tensor[start - rows.start : stop - rows.start] for tensor in tensors]
                for rows, tensors in self._parts
                if rows.start <= start and stop <= rows.stop
            ]
            yield slice(start, stop), [tensor for each in zip(*of_each, strict=True) for tensor in each]


class PartialOutputs(_Parts):
    """Outputs [rows, b, heads, channels] and log-sum-exps [rows, b, heads] over parts of the keys."""

    def finish(self, dtype: torch.dtype, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output in a dtype, contiguous, and the log-sum-exp as [b, heads, rows]. sink: one more key."""
        only = self._only(dtype) if sink is None else None
        output, lse = self._merged(dtype, sink) if only is None else (only[0].contiguous(), only[1])
        return output, lse.permute(1, 2, 0)

    def _one(self) -> tuple[Tensor, ...]:
        return self._merged(at_least_fp32(self._parts[0][1][0].dtype), None)

    def _merged(self, dtype: torch.dtype, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        like, (_, batch, heads) = self._parts[0][1][0], self._parts[0][1][1].shape
        output = like.new_empty(self._num_rows, batch, heads, like.shape[-1], dtype=dtype)
        lse = like.new_empty(batch, heads, self._num_rows, dtype=at_least_fp32(like.dtype)).permute(2, 0, 1)
        for rows, parts in self._by_rows():
            self._passes(merge_, output[rows], lse[rows], sink, *parts)
        return output, lse


class PartialSums(_Parts):
    """Gradients [rows, ...], or several side by side, of which some blocks have parts."""

    def finish(self, dtype: torch.dtype) -> Tensor:
        """Return the sum in a dtype."""
        only = self._only(dtype)
        return only[0] if only is not None and len(only) == 1 else self.write(self._empty(dtype))

    def write(self, total: Tensor, adds: bool = False) -> Tensor:
        """Write the sums to `total`, or add them; return it. Rows without a part are 0."""
        for rows, parts in self._by_rows():
            if parts:
                self._passes(add_, total[rows], adds, len(self._parts[0][1]), *parts)
            elif not adds:
                total[rows].zero_()
        return total

    def _one(self) -> tuple[Tensor, ...]:
        tensors = self._parts[0][1]
        return self.write(self._empty(at_least_fp32(tensors[0].dtype))).split([each.shape[-1] for each in tensors], -1)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        tensors = self._parts[0][1]
        width = sum(each.shape[-1] for each in tensors)
        return tensors[0].new_empty(self._num_rows, *tensors[0].shape[1:-1], width, dtype=dtype)
