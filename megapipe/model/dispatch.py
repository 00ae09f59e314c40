"""Rows on their way to the ranks of their experts and back: all-to-alls over ep, and all ranks' rows over etp.

A rank's rows are in the order of their experts, and for one expert in that of its tokens. The owner of an expert
receives them from every rank of ep, in order, and from every rank of etp: each of these multiplies by its slice of the
expert, and the slices of the results are added in the order of the ranks.

Backwards are the same operations the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megapipe.comm.collectives import WithAdjoint, Work, all_gather, all_to_all
from megapipe.comm.groups import ExpertGroups, Group

InFlight = tuple[Work | None, Callable[[], Tensor]]  # an exchange, and what makes the result once it is complete


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The numbers of rows of this rank's experts for one microbatch, known on the host.

    expert_rows: of each expert of this rank. ends: their sums, on the device.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ()  # the fields with an entry for each row, or token

    groups: ExpertGroups
    expert_rows: tuple[int, ...]
    ends: Tensor


@dataclass(frozen=True, eq=False)
class Routes(ExpertRows):
    """The numbers of rows that travel for one microbatch, known on the host.

    sent, received: to and from each rank of ep. gathered: rows of each rank of etp after its all-to-all.
    order: [sum of gathered] int64, the rows of all ranks expert by expert, and back: its inverse; None where rows come
    in this order. arrived: the rows for each expert from each rank, [etp ep, experts of this rank] int64, of which
    `rows_by_expert` makes both.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("order", "back")

    sent: tuple[int, ...]
    received: tuple[int, ...]
    gathered: tuple[int, ...]
    order: Tensor | None = None
    back: Tensor | None = None
    arrived: Tensor | None = None

    @classmethod
    def of(cls, counts: Tensor, num_rows: int, groups: ExpertGroups) -> Routes:
        """Exchange the counts. counts: [experts] int64, rows of this rank for each expert, num_rows together.

        Waits for the device. A dry run has no counts: there every expert gets the same number of rows.
        """
        ep, etp = groups.ep, groups.etp
        experts, per_rank = counts.shape[0], counts.shape[0] // ep.size
        received = torch.empty_like(counts)
        all_to_all(received, counts, [per_rank] * ep.size, [per_rank] * ep.size, groups.counts or ep)
        everywhere = counts.new_empty(etp.size * experts)
        all_gather(everywhere, received, etp)
        arrived = None if ep.size == etp.size == 1 else everywhere.view(etp.size * ep.size, per_rank)
        if counts.is_meta:
            parts, rows = even_parts(num_rows, ep.size), even_parts(num_rows * etp.size, per_rank)
            return cls(groups, rows, ends_of(rows, counts), parts, parts, (num_rows,) * etp.size, arrived=arrived)
        numbers = np.array(to_host(torch.cat([counts, everywhere])))
        own, table = numbers[:experts].reshape(ep.size, -1), numbers[experts:].reshape(etp.size, ep.size, per_rank)
        sums = own.sum(1), table[etp.rank].sum(1), table.sum((1, 2)), table.sum((0, 1))
        sent, from_ep, gathered, rows = (tuple(each.tolist()) for each in sums)
        return cls(groups, rows, ends_of(rows, counts), sent, from_ep, gathered, arrived=arrived)

    @classmethod
    def even(cls, capacity: int, num_experts: int, groups: ExpertGroups, device: torch.device) -> Routes:
        """Return the routes of `capacity` rows from every rank for every expert: nothing is exchanged or waited for."""
        ep, etp = groups.ep.size, groups.etp.size
        per_rank, total = num_experts // ep, num_experts * capacity
        parts, rows = (per_rank * capacity,) * ep, (etp * ep * capacity,) * per_rank
        ends = torch.arange(1, per_rank + 1, dtype=torch.int32, device=device) * (etp * ep * capacity)
        routes = cls(groups, rows, ends, parts, parts, (total,) * etp)
        if etp == ep == 1:
            return routes
        places = torch.arange(etp * total, device=device)
        order = places.view(etp * ep, per_rank, capacity).transpose(0, 1).flatten()
        return replace(routes, order=order, back=places.view(per_rank, etp * ep, capacity).transpose(0, 1).flatten())

    def dispatch(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return what the ranks of ep send to this one. rows: tensors of this rank's rows, in the order of experts."""
        ways = partial(_completed, self.start_dispatch), partial(_completed, self.start_combine)
        return tuple(WithAdjoint.apply(each, *ways) for each in rows)

    def of_all(self, received: Tensor) -> Tensor:
        """Return the dispatched rows of all ranks of etp. received: those of this rank."""
        gather, add = self._over_etp
        return WithAdjoint.apply(received, gather, add)  # type: ignore[no-any-return]

    def of_own(self, results: Tensor) -> Tensor:
        """Return the results of the rows dispatched to this rank. results: of those of all ranks, partial over etp."""
        gather, add = self._over_etp
        return WithAdjoint.apply(results, add, gather)  # type: ignore[no-any-return]

    @property
    def _over_etp(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The gather of the dispatched rows, and its adjoint."""
        counts, etp = self.gathered, self.groups.etp
        return partial(gather_rows, counts=counts, group=etp), partial(sum_rows, counts=counts, group=etp)

    def combine(self, results: Tensor) -> Tensor:
        """Return the results for this rank's rows, in their order. results: those of the rows dispatched to it."""
        return WithAdjoint.apply(
            results, partial(_completed, self.start_combine), partial(_completed, self.start_dispatch)
        )

    def start_dispatch(self, rows: Tensor) -> InFlight:
        """Start `dispatch`, or the backward of `combine`."""
        filled, work = start_exchange(rows, self.sent, self.received, self.groups.ep)
        return work, lambda: filled

    def start_combine(self, rows: Tensor) -> InFlight:
        """Start `combine`, or the backward of `dispatch`."""
        filled, work = start_exchange(rows, self.received, self.sent, self.groups.ep)
        return work, lambda: filled


def to_host(numbers: Tensor) -> list[int]:
    """Return the values of a tensor: the one place of a layer where the host waits for the device."""
    found: list[int] = numbers.tolist()
    return found


def ends_of(rows: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the sums of the first 1, 2, ... numbers of rows, int32, on the device of `like`."""
    if like.is_meta:
        return like.new_empty(len(rows), dtype=torch.int32)
    ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32)
    # pinned, or the host would wait for the copy
    return ends.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else ends


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Return equal parts of a total, the first ones larger by 1 where it does not divide."""
    return tuple((total + parts - 1 - index) // parts for index in range(parts))


def _completed(start: Callable[[Tensor], InFlight], rows: Tensor) -> Tensor:
    """Return the result of an exchange."""
    work, finish = start(rows)
    if work is not None:
        work.wait()
    return finish()


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Return the rows that all ranks of the group send to this one."""
    output, work = start_exchange(rows, sent, received, group)
    if work is not None:
        work.wait()
    return output


class Routing(NamedTuple):
    """The experts of every token of a microbatch, and how its rows travel.

    chosen: [t, k] int64. order: [rows] int64, entry i is token x k + j of row i, or k t for padding. slots: [t, k]
    int64, the row of token x k + j, or a number behind the last row. Where DeepEP sends tokens, the routes alone have
    both.
    """

    chosen: Tensor
    order: Tensor | None
    slots: Tensor | None
    routes: ExpertRows


class KeptRouting:
    """The routing of one forward, which its recompute uses again (a `KeptResults`).

    So the recompute sends the same rows whatever has happened to the router since, exchanges no numbers of rows and
    does not wait for the device. routing: set by the forward; while recomputing, that of the forward.
    """

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.is_reused = False
        self._routes: ExpertRows | None = None
        self._is_there: list[bool] = []  # each tensor of a routing, of which it has not all

    def record(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = fn(*inputs)
        assert self.routing is not None
        *own, routes = self.routing
        names = routes.TENSORS
        found = *own, *(getattr(routes, name) for name in names)
        none: dict[str, Any] = dict.fromkeys(names)
        self.routing, self._routes = None, replace(routes, **none)  # the caller saves the tensors
        self._is_there = [tensor is not None for tensor in found]
        return output, tuple(tensor for tensor in found if tensor is not None)

    def reuse(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        assert self._routes is not None
        given = iter(tensors)
        chosen, order, slots, *others = (next(given) if is_there else None for is_there in self._is_there)
        assert chosen is not None
        of_routes: dict[str, Any] = dict(zip(self._routes.TENSORS, others, strict=True))
        routes = replace(self._routes, **of_routes)
        self.routing, self.is_reused = Routing(chosen, order, slots, routes), True
        try:
            return fn(*inputs)
        finally:
            self.routing, self._routes, self.is_reused = None, None, False


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
