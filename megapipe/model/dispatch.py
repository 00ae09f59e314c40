"""`AllToAll`: rows on their way to the ranks of their experts and back, over ep, and all ranks' rows over etp.

A rank's rows are in the order of their experts, and for one expert in that of its tokens. The owner of an expert
receives them from every rank of ep, in order, and from every rank of etp: each of these multiplies by its slice of the
expert, and the slices of the results are added in the order of the ranks.

Backwards are the same operations the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megapipe.comm.collectives import WithAdjoint, Work, all_gather, all_to_all
from megapipe.comm.groups import ExpertGroups, Group
from megapipe.config.layers import LayerConfig
from megapipe.layers.moe import expert_capacity
from megapipe.model.context import LayerContext
from megapipe.model.permutation import Permutation, permuted, rows_by_expert
from megapipe.model.routing import ROWS, SENT, ExpertRows, Routing
from megapipe.model.segments import Elements, Operator, Segment, run_branch

InFlight = tuple[Work | None, Callable[[], Tensor]]  # an exchange, and what makes the result once it is complete


class AllToAll:
    """The `Dispatcher` that sends a row to each expert of a token."""

    def __init__(self, model: LayerConfig, groups: ExpertGroups) -> None:
        self.model, self.groups, permutation = model, groups, Permutation(model)
        self.by_expert = Elements([Segment("rows_by_expert", rows_by_expert, has_rows=True)])
        self.permuted = Elements([Segment("permuted", permuted, has_rows=True)])
        self.rows = Elements(
            [
                Operator("copies", permutation.copies, SENT),
                Operator("dispatch", self._dispatch, SENT),
                Operator("rows", self._by_expert, SENT),
            ]
        )
        self.sums = Elements(
            [
                Operator("results", self._by_rank, ROWS),
                Operator("combine", self._combine, ROWS),
                Operator("sums", lambda *values: permutation.sums(*values)[1], ROWS),
            ]
        )

    def routes(self, chosen: Tensor, order: Tensor, slots: Tensor, load: Tensor, context: LayerContext) -> Routing:
        """Return the routing as `Dispatcher.routes` does. Waits for the device, unless all experts get as many rows."""
        capacity = expert_capacity(self.model, len(slots))  # without regard to padding: the same on all ranks
        if self.model.moe_pad_expert_input_to_capacity:
            assert capacity is not None
            routes = Routes.even(capacity, len(load), self.groups, order.device)
        else:
            # a dry run has no values
            num_rows = slots.numel() if capacity is None else min(slots.numel(), capacity * len(load))
            routes = self.counted(slots, load, num_rows, context)
        return Routing(chosen, order[: sum(routes.sent)], slots, routes)

    def counted(self, slots: Tensor, load: Tensor, num_rows: int, context: LayerContext) -> Routes:
        """Exchange the numbers of rows. num_rows: in a dry run."""
        routes = Routes.of(load, num_rows, self.groups)
        if routes.arrived is None:
            return routes
        places = torch.arange(sum(routes.gathered), device=load.device)
        there, back = run_branch(self.by_expert, (places, routes.arrived), context)
        return replace(routes, order=there, back=back, arrived=None)

    def _dispatch(self, context: LayerContext, routing: Routing, *sent: Tensor) -> tuple[Routing, *tuple[Tensor, ...]]:
        """Return the routing, and the weights and rows that the ranks of ep send to this one."""
        return routing, *routes_of(routing).dispatch(*sent)

    def _by_expert(
        self, context: LayerContext, routing: Routing, *received: Tensor
    ) -> tuple[Routing, *tuple[Tensor, ...]]:
        """Return the routing, and the dispatched weights and rows of all ranks of etp, expert by expert."""
        routes = routes_of(routing)
        rows = tuple(map(routes.of_all, received))
        if routes.order is not None:
            rows = run_branch(self.permuted, (routes.order, routes.back, *rows), context)
        return routing, *rows

    def _by_rank(self, context: LayerContext, routing: Routing, results: Tensor) -> tuple[Routing, Tensor]:
        """Return the routing and the results of the dispatched rows. results: in the order of `_by_expert`."""
        routes = routes_of(routing)
        if routes.order is not None:
            (results,) = run_branch(self.permuted, (routes.back, routes.order, results), context)
        return routing, routes.of_own(results)

    def _combine(self, context: LayerContext, routing: Routing, results: Tensor) -> tuple[Routing, Tensor]:
        """Return the routing and the results of this rank's rows."""
        return routing, routes_of(routing).combine(results)


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
            reached = math.ceil(groups.imbalance * num_rows)
            rows, gathered = even_parts(reached * etp.size, per_rank), (reached,) * etp.size
            sent, from_ep = (even_parts(count, ep.size) for count in (num_rows, reached))
            return cls(groups, rows, ends_of(rows, counts), sent, from_ep, gathered, arrived=arrived)
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
        return tuple(WithAdjoint.apply(each, self._there, self._back) for each in rows)

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
        return WithAdjoint.apply(results, self._back, self._there)  # type: ignore[no-any-return]

    def _there(self, rows: Tensor) -> Tensor:
        return _completed(self.start_dispatch(rows))

    def _back(self, rows: Tensor) -> Tensor:
        return _completed(self.start_combine(rows))

    def start_dispatch(self, rows: Tensor) -> InFlight:
        """Start `dispatch`, or the backward of `combine`."""
        return start_exchange(rows, self.sent, self.received, self.groups.ep)

    def start_combine(self, rows: Tensor) -> InFlight:
        """Start `combine`, or the backward of `dispatch`."""
        return start_exchange(rows, self.received, self.sent, self.groups.ep)


def routes_of(routing: Routing) -> Routes:
    """Return the routes of all-to-alls."""
    assert isinstance(routing.routes, Routes)
    return routing.routes


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


def _completed(in_flight: InFlight) -> Tensor:
    """Return the result of an exchange."""
    work, finish = in_flight
    if work is not None:
        work.wait()
    return finish()


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Return the rows that all ranks of the group send to this one."""
    return _completed(start_exchange(rows, sent, received, group))


def start_exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> InFlight:
    """Start to fill a tensor with the rows that all ranks of the group send to this one."""
    if group.size == 1:
        return None, lambda: rows
    output = rows.new_empty(sum(received), *rows.shape[1:])
    return all_to_all(output, rows.contiguous(), received, sent, group, async_op=True), lambda: output


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
