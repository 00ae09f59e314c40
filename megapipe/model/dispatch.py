"""Rows on their way to the ranks of their experts and back: all-to-alls over ep, and all ranks' rows over etp.

A rank's rows are in the order of their experts, and for one expert in that of its tokens. The owner of an expert
receives them from every rank of ep, in order, and from every rank of etp: each of these multiplies by its slice of the
expert, and the slices of the results are added in the order of the ranks.

Backwards are the same operations the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import Work, all_gather, all_to_all
from megapipe.comm.groups import ExpertGroups, Group


@dataclass(frozen=True, eq=False)
class Routes:
    """The numbers of rows that travel for one microbatch, known on the host.

    sent, received: to and from each rank of ep. gathered: rows of each rank of etp after its all-to-all.
    expert_rows: of each expert of this rank. order: [sum of gathered] int64, the rows of all ranks expert by expert.
    """

    groups: ExpertGroups
    sent: tuple[int, ...]
    received: tuple[int, ...]
    gathered: tuple[int, ...]
    expert_rows: tuple[int, ...]
    order: Tensor

    @classmethod
    def of(cls, counts: Tensor, num_rows: int, groups: ExpertGroups) -> Routes:
        """Exchange the counts. counts: [experts] int64, rows of this rank for each expert, num_rows together.

        Waits for the device. A dry run has no counts: there every expert gets the same number of rows.
        """
        ep, etp = groups.ep, groups.etp
        per_rank = counts.shape[0] // ep.size
        received = torch.empty_like(counts)
        all_to_all(received, counts, [per_rank] * ep.size, [per_rank] * ep.size, groups.counts or ep)
        everywhere = counts.new_empty(etp.size * counts.shape[0])
        all_gather(everywhere, received, etp)
        if counts.is_meta:
            parts, rows = _even(num_rows, ep.size), _even(num_rows * etp.size, per_rank)
            return cls(groups, parts, parts, (num_rows,) * etp.size, rows, counts.new_empty(num_rows * etp.size))
        expert = torch.arange(per_rank, device=counts.device).repeat(etp.size * ep.size)
        order = expert.repeat_interleave(everywhere).argsort(stable=True)
        table = everywhere.view(etp.size, ep.size, per_rank)
        numbers = torch.cat([counts.view(ep.size, -1).sum(1), table.sum(2).flatten(), table.sum((0, 1))]).tolist()
        sent, rest = tuple(numbers[: ep.size]), numbers[ep.size :]
        by_source = [rest[index * ep.size : (index + 1) * ep.size] for index in range(etp.size)]
        rows = tuple(rest[etp.size * ep.size :])
        return cls(groups, sent, tuple(by_source[etp.rank]), tuple(sum(source) for source in by_source), rows, order)

    @classmethod
    def even(cls, capacity: int, num_experts: int, groups: ExpertGroups, device: torch.device) -> Routes:
        """Return the routes of `capacity` rows from every rank for every expert: nothing is exchanged or waited for."""
        ep, etp = groups.ep.size, groups.etp.size
        per_rank, total = num_experts // ep, num_experts * capacity
        places = torch.arange(etp * total, device=device).view(etp * ep, per_rank, capacity)
        parts, rows = (per_rank * capacity,) * ep, (etp * ep * capacity,) * per_rank
        return cls(groups, parts, parts, (total,) * etp, rows, places.transpose(0, 1).flatten())

    def dispatch(self, rows: Tensor) -> Tensor:
        """Return the rows that the ranks of ep send to this one. rows: this rank's, in the order of experts."""
        return _Exchange.apply(rows, self.sent, self.received, self.groups.ep)

    def by_expert(self, received: Tensor) -> Tensor:
        """Return the dispatched rows of all ranks of etp, expert by expert. received: those of this rank."""
        return _Reorder.apply(_Gather.apply(received, self.gathered, self.groups.etp), self.order, True)

    def by_rank(self, results: Tensor) -> Tensor:
        """Return the results of the dispatched rows, in their order. results: partial over etp, expert by expert."""
        return _Sum.apply(_Reorder.apply(results, self.order, False), self.gathered, self.groups.etp)

    def combine(self, results: Tensor) -> Tensor:
        """Return the results for this rank's rows, in their order. results: those of the rows dispatched to it."""
        return _Exchange.apply(results, self.received, self.sent, self.groups.ep)


def _even(total: int, parts: int) -> tuple[int, ...]:
    """Return equal parts of a total, the first ones larger by 1 where it does not divide."""
    return tuple((total + parts - 1 - index) // parts for index in range(parts))


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Return the rows that all ranks of the group send to this one."""
    output, work = start_exchange(rows, sent, received, group)
    if work is not None:
        work.wait()
    return output


def start_exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> tuple[Tensor, Work | None]:
    """Start to fill a tensor with the rows that all ranks of the group send to this one; None: it is filled."""
    if group.size == 1:
        return rows, None
    output = rows.new_empty(sum(received), *rows.shape[1:])
    return output, all_to_all(output, rows.contiguous(), received, sent, group, async_op=True)


def gather_rows(rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Return the rows of all ranks, counts[r] from rank r."""
    if group.size == 1:
        return rows
    return exchange(rows.repeat(group.size, *[1] * (rows.ndim - 1)), [rows.shape[0]] * group.size, counts, group)


def sum_rows(rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Return the sum over the group of what its ranks hold for this rank's rows, added in order of rank."""
    if group.size == 1:
        return rows
    own = counts[group.rank]
    parts = exchange(rows, counts, [own] * group.size, group).view(group.size, own, *rows.shape[1:])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.arguments = received, sent, group
        return exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grad, *ctx.arguments), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        ctx.arguments = counts, group
        return gather_rows(rows, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(grad, *ctx.arguments), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        ctx.arguments = counts, group
        return sum_rows(rows, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_rows(grad, *ctx.arguments), None, None


class _Reorder(Function):
    """rows[order] for a permutation, or back from that order; the backward is the other one: no sum, in any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, to_order: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.to_order = to_order
        return _reordered(rows, order, to_order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _reordered(grad, order, not ctx.to_order), None, None


def _reordered(rows: Tensor, order: Tensor, to_order: bool) -> Tensor:
    if to_order:
        return rows[order]
    result = torch.empty_like(rows)
    result[order] = rows
    return result
