"""`NodeDispatch`: a token travels once to each node that has an expert of it.

ep = nodes x places. A rank sends to the rank at its own place in every other node (`ep_nodes`), which passes on to the
ranks of its node (`ep_places`):

    rows of this rank        by (expert, token): the first of a token's copies for each node, a pair (token, node), is
                             sent, with the numbers of all its rows there
    rows of a node           copied from the pairs, by (place, node that they come from, expert, token)
    rows of an expert        sorted by (expert, etp rank, ep rank, token), as those of `Routes`

On the way back all rows travel, so that a token adds them in the order of its choice, and results are those of `Routes`
bit for bit; or the rank between adds up those of a pair, and one row a pair travels. Backwards are the same the other
way round: gradients of the combined rows, which are equal for the copies of a token, once to a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megapipe.comm.collectives import WithAdjoint, all_gather, all_to_all
from megapipe.comm.groups import ExpertGroups
from megapipe.layers.distinct_nodes import num_pairs
from megapipe.model import dispatch
from megapipe.model.context import LayerContext
from megapipe.model.dispatch import AllToAll, InFlight, Routes, ends_of, even_parts, exchange, start_exchange
from megapipe.model.permutation import rows_by_expert


class NodeDispatch(AllToAll):
    """The `Dispatcher` over the nodes and places of ep."""

    def counted(self, slots: Tensor, load: Tensor, num_rows: int, context: LayerContext) -> Routes:
        """Exchange the numbers of rows, and the rows of every pair. num_rows: in a dry run."""
        groups, adds_in_node = self.groups, self.model.moe_combine_in_node
        if load.is_meta:
            pairs = min(num_pairs(self.model, len(slots), groups.nodes.size), num_rows)
            return NodeRoutes.planned(load, num_rows, pairs, slots.shape[1], groups, adds_in_node)
        return NodeRoutes.of_slots(load, slots, groups, adds_in_node)


@dataclass(frozen=True, eq=False)
class NodeRoutes(Routes):
    """The numbers of rows and pairs of one microbatch, known on the host, and which row each pair is.

    sent, received: rows to and from each node. pairs_sent, pairs_received: pairs likewise. to_places, from_places: rows
    to and from each rank of this node. first: [pairs to send] int64, a row of each pair. expand: [rows of the node]
    int64, the received pair of each row that is passed on. arrange: [rows of the node] int64, where such a row is among
    those of the node by (node that they come from, expert, token), and restore, its inverse. sums: [received pairs, k]
    int64, the rows that are passed on of each pair, or a number behind the last one; None: all rows travel back.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("order", "back", "first", "expand", "arrange", "restore", "sums")

    pairs_sent: tuple[int, ...] = ()
    pairs_received: tuple[int, ...] = ()
    to_places: tuple[int, ...] = ()
    from_places: tuple[int, ...] = ()
    first: Tensor | None = None
    expand: Tensor | None = None
    arrange: Tensor | None = None
    restore: Tensor | None = None
    sums: Tensor | None = None

    @classmethod
    def of_slots(cls, counts: Tensor, slots: Tensor, groups: ExpertGroups, adds_in_node: bool = False) -> NodeRoutes:
        """Exchange the counts, and the rows of every pair.

        counts: [experts] int64, rows of this rank for each expert. slots: [t, k] int64, the row of token x k + j by
        (expert, token), or a number behind the last one. adds_in_node: sum the rows of a pair before they come back.
        Waits once for the device.
        """
        num_nodes, held = groups.nodes.size, counts.shape[0] // groups.ep.size
        of_node = counts.view(num_nodes, -1)
        node_ends = of_node.sum(1).cumsum(0)
        pairs, tokens = pairs_of(slots, node_ends)
        table = _exchange_counts(torch.cat([of_node, pairs[:, None]], 1), groups)
        rows_from = table[:, :-1].reshape(num_nodes, groups.places.size, held)
        everywhere = _pass_on_counts(rows_from, groups)
        known = counts, pairs, table, everywhere
        of = _split_numbers(dispatch.to_host(torch.cat([each.flatten() for each in known])), known)
        sent, received = of[0].reshape(num_nodes, -1).sum(1), of[2][:, :-1].sum(1)
        own = of[3][groups.etp.rank]
        first, entries = entries_of(slots, tokens[: int(of[1].sum())], node_ends, pairs)
        to, back = (tuple(each.tolist()) for each in (of[1], of[2][:, -1]))
        entries = exchange(entries, to, back, groups.counts or groups.nodes)
        expand, arrange, restore, sums = passed_on(entries, table[:, -1], rows_from, int(received.sum()))
        expert_rows = tuple(of[3].sum((0, 1, 2)).tolist())
        places = torch.arange(int(of[3].sum()), device=counts.device)
        order, inverse = rows_by_expert(places, everywhere, (3, 0, 2, 1))
        return cls(
            groups,
            expert_rows,
            ends_of(expert_rows, counts),
            tuple(sent.tolist()),
            tuple(received.tolist()),
            tuple(of[3].sum((1, 2, 3)).tolist()),
            order,
            inverse,
            pairs_sent=to,
            pairs_received=back,
            to_places=tuple(of[2][:, :-1].reshape(rows_from.shape).sum((0, 2)).tolist()),
            from_places=tuple(own.sum((1, 2)).tolist()),
            first=first,
            expand=expand,
            arrange=arrange,
            restore=restore,
            sums=sums if adds_in_node else None,
        )

    @classmethod
    def planned(
        cls, like: Tensor, num_rows: int, num_pairs: int, topk: int, groups: ExpertGroups, adds_in_node: bool = False
    ) -> NodeRoutes:
        """Return the routes of a dry run, where every expert gets as many rows, and every node as many pairs. What
        `of_slots` exchanges is exchanged here, too.

        like: [experts] int64 on the device without values.
        """
        nodes, places, etp = groups.nodes.size, groups.places.size, groups.etp.size
        rows, pairs = even_parts(num_rows, nodes), even_parts(num_pairs, nodes)
        table = _exchange_counts(like.new_empty(nodes, like.shape[0] // nodes + 1), groups)
        _pass_on_counts(table[:, :-1].reshape(nodes, places, -1), groups)
        entries = like.new_empty(num_pairs, topk, dtype=torch.int32)
        exchange(entries, pairs, pairs, groups.counts or groups.nodes)
        reached = math.ceil(groups.imbalance * num_rows)
        expert_rows = even_parts(reached * etp, like.shape[0] // groups.ep.size)
        first, here, whole = (like.new_empty(count) for count in (num_pairs, num_rows, reached * etp))
        return cls(
            groups,
            expert_rows,
            ends_of(expert_rows, like),
            rows,
            rows,
            (reached,) * etp,
            whole,
            torch.empty_like(whole),
            pairs_sent=pairs,
            pairs_received=pairs,
            to_places=even_parts(num_rows, places),
            from_places=even_parts(reached, places),
            first=first,
            expand=here,
            arrange=torch.empty_like(here),
            restore=torch.empty_like(here),
            sums=like.new_empty(num_pairs, topk) if adds_in_node else None,
        )

    def start_dispatch(self, rows: Tensor) -> InFlight:
        """Start to send a row of each pair, and make those to pass on; weights [n] one by one. rows: [n, h], equal for
        the copies of a token.
        """
        assert self.first is not None and self.expand is not None and self.arrange is not None
        nodes, of_passed = self.groups.nodes, self.arrange
        if rows.ndim == 1:
            work, filled = start_exchange(rows, self.sent, self.received, nodes)
        else:
            rows, of_passed = rows.index_select(0, self.first), self.expand
            work, filled = start_exchange(rows, self.pairs_sent, self.pairs_received, nodes)
        return work, lambda: filled().index_select(0, of_passed)

    def start_combine(self, rows: Tensor) -> InFlight:
        """Start to send back the rows that were passed on. Of sums in the node, the first row of a pair is the sum of
        all, the others are 0.
        """
        assert self.first is not None and self.restore is not None
        nodes, first, num_rows = self.groups.nodes, self.first, sum(self.sent)
        if self.sums is None or rows.ndim == 1:
            return start_exchange(rows.index_select(0, self.restore), self.received, self.sent, nodes)
        work, filled = start_exchange(sums_of_rows(rows, self.sums), self.pairs_received, self.pairs_sent, nodes)
        shape = num_rows, *rows.shape[1:]
        return work, lambda: filled().new_zeros(shape).index_copy_(0, first, filled())

    def of_all(self, received: Tensor) -> Tensor:
        """Return the rows of this rank's experts, of all ranks of etp. received: those to pass on."""
        return super().of_all(WithAdjoint.apply(received, self._to_owners, self._from_owners))

    def of_own(self, results: Tensor) -> Tensor:
        """Return the results of the rows that were passed on. results: as of `Routes.of_own`."""
        passed: Tensor = WithAdjoint.apply(super().of_own(results), self._from_owners, self._to_owners)
        return passed

    def _to_owners(self, rows: Tensor) -> Tensor:
        return exchange(rows, self.to_places, self.from_places, self.groups.places)

    def _from_owners(self, rows: Tensor) -> Tensor:
        return exchange(rows, self.from_places, self.to_places, self.groups.places)


def pairs_of(slots: Tensor, node_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of pairs of each node [nodes], and the tokens of the pairs in the order of (node, token), with
    places behind the last pair that are undefined.

    slots: as `NodeRoutes.of_slots`. node_ends: [nodes] int64, the first rows and those of each node together.
    """
    (num_tokens, topk), num_nodes = slots.shape, node_ends.shape[0]
    node = torch.searchsorted(node_ends, slots, right=True)
    is_pair = torch.zeros(num_nodes + 1, num_tokens, dtype=torch.int64, device=slots.device)
    is_pair = is_pair.scatter_(0, node.t(), 1)[:-1]
    most = num_tokens * min(num_nodes, topk)
    places = torch.where(is_pair > 0, is_pair.flatten().cumsum(0).view_as(is_pair) - 1, most)
    tokens = torch.arange(num_tokens, device=slots.device).repeat(num_nodes)
    return is_pair.sum(1), tokens.new_empty(most + 1).scatter_(0, places.flatten(), tokens)


def entries_of(slots: Tensor, tokens: Tensor, node_ends: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row of each pair [pairs], and its k rows as numbers among those of its node, -1 for one of
    another node, [pairs, k] int32. tokens: of the pairs; others as `pairs_of`.
    """
    node = torch.searchsorted(pairs.cumsum(0), torch.arange(tokens.shape[0], device=slots.device), right=True)
    end = node_ends[node][:, None]
    begin = torch.where(node > 0, node_ends[node - 1], 0)[:, None]
    rows = slots[tokens]
    is_there = (rows >= begin) & (rows < end)
    return torch.where(is_there, rows, end).amin(1), torch.where(is_there, rows - begin, -1).int()


def passed_on(
    entries: Tensor, pairs: Tensor, rows_from: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return expand, arrange, restore and sums of `NodeRoutes`.

    entries: [pairs, k] int32, as `entries_of` makes them on the ranks that sent the pairs. pairs: [nodes] int64, from
    each. rows_from: [nodes, places, experts of a rank] int64, rows from each node for each expert of this one; num_rows
    together.
    """
    arrange, restore = rows_by_expert(torch.arange(num_rows, device=entries.device), rows_from, (1, 0, 2))
    numbers = torch.arange(entries.shape[0], device=entries.device)
    source = torch.searchsorted(pairs.cumsum(0), numbers, right=True)
    from_node = rows_from.sum((1, 2))
    begins = (from_node.cumsum(0) - from_node)[source][:, None]
    rows = torch.where(entries >= 0, entries + begins, num_rows)
    pair = restore.new_empty(num_rows + 1)
    pair = pair.scatter_(0, rows.flatten(), numbers[:, None].expand_as(rows).flatten())
    return pair[arrange], arrange, restore, torch.cat([restore, restore.new_full((1,), num_rows)])[rows]


def sums_of_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the sums [pairs, h] of the rows numbers[:, 0], numbers[:, 1], ..., added in at least fp32, then rounded.

    A number behind the last row stands for zeros.
    """
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    total = padded.new_zeros(numbers.shape[0], *rows.shape[1:], dtype=torch.promote_types(rows.dtype, torch.float32))
    for column in numbers.unbind(1):
        total += padded.index_select(0, column)
    return total.to(rows.dtype)


def _exchange_counts(table: Tensor, groups: ExpertGroups) -> Tensor:
    """Return row r of the tables [nodes, n] of all nodes, r this rank's."""
    received = torch.empty_like(table)
    ones = [1] * groups.nodes.size
    all_to_all(received, table.contiguous(), ones, ones, groups.counts or groups.nodes)
    return received


def _pass_on_counts(rows_from: Tensor, groups: ExpertGroups) -> Tensor:
    """Return the rows [etp, places, nodes, experts of a rank] from every rank for this rank's experts, on all of etp.

    rows_from: [nodes, places, experts of a rank].
    """
    sent = rows_from.transpose(0, 1).contiguous()
    received, ones = torch.empty_like(sent), [1] * groups.places.size
    all_to_all(received, sent, ones, ones, groups.places)
    everywhere = received.new_empty(groups.etp.size * received.shape[0], *received.shape[1:])
    all_gather(everywhere, received, groups.etp)
    return everywhere.view(groups.etp.size, *received.shape)


def _split_numbers(numbers: list[int], like: tuple[Tensor, ...]) -> list[np.ndarray]:
    """Return consecutive numbers as arrays of these tensors' shapes."""
    parts = np.split(np.array(numbers), np.cumsum([each.numel() for each in like])[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, like, strict=True)]
