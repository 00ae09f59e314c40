"""The order of rows: a token's copies by expert, the sums of its results, and rows of all ranks expert by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megapipe.config.layers import LayerConfig
from megapipe.layers.moe import expert_capacity
from megapipe.model.context import LayerContext
from megapipe.model.routing import Routing
from megapipe.model.segments import Elements, Segment, run_branch


@dataclass(frozen=True)
class Places:
    """(experts [t, k], weights [t, k], padding [t] or None, capacity or None) -> of each expert the tokens that choose
    it and those that it gets, both [experts]; order and slots as in `Routing`, all rows in the order of experts.

    A row's place among those of its expert is the number of tokens before it with the same expert.
    """

    model: LayerConfig

    def __call__(
        self, chosen: Tensor, weights: Tensor, padding: Tensor | None, capacity: int | Tensor | None
    ) -> tuple[Tensor, ...]:
        assert self.model.num_experts is not None
        num_experts, num_rows = self.model.num_experts, chosen.numel()
        # padding chooses an expert behind the last one, which no rank has
        experts = chosen if padding is None else chosen.masked_fill(padding.reshape(-1, 1), num_experts)
        tokens = torch.zeros(num_experts + 1, len(chosen), dtype=torch.int32, device=chosen.device)
        before = tokens.scatter_(0, experts.t(), 1).cumsum(1, dtype=torch.int32)
        load = before[:-1, -1].long()
        places = before.gather(0, experts.t()).t() - 1
        if capacity is not None and self.model.moe_token_drop_policy == "probs":
            places = _by_weight(experts, weights, load)
        sent = load if capacity is None else load.clamp(max=capacity)
        begins, end = F.pad(sent.cumsum(0) - sent, (0, 1)), num_rows
        if self.model.moe_pad_expert_input_to_capacity:
            most = expert_capacity(self.model, len(chosen))
            assert most is not None
            begins, end = torch.arange(num_experts + 1, device=chosen.device) * most, num_experts * most
        slots = begins[experts] + places
        if padding is not None or capacity is not None:
            is_kept = experts < num_experts
            slots = torch.where(is_kept if capacity is None else is_kept & (places < capacity), slots, end)
            end += 1  # all dropped rows share the last one
        order = torch.full((end,), num_rows, device=chosen.device)
        return load, sent, order.scatter_(0, slots.flatten(), torch.arange(num_rows, device=chosen.device)), slots


def _by_weight(experts: Tensor, weights: Tensor, load: Tensor) -> Tensor:
    """Return the places [t, k] of rows among those of their expert, the largest weight first."""
    first = weights.flatten().argsort(descending=True, stable=True)
    order = first[experts.flatten()[first].argsort(stable=True)]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return places.view_as(experts) - F.pad(load.cumsum(0) - load, (0, 1))[experts]


def rows_by_expert(places: Tensor, arrived: Tensor, dims: tuple[int, ...] = (1, 0)) -> tuple[Tensor, Tensor]:
    """Return the order in which rows are expert by expert, for each expert in that of the ranks, and its inverse.

    places: 0, 1, ..., one for each row. arrived: rows of each rank for each expert, in the order in which they arrive.
    dims: those of `arrived` in the order that is wanted, the slowest first, if ranks have several or others come first.
    """
    sizes, turned = arrived.flatten(), arrived.permute(dims)
    ends, turned_ends = sizes.cumsum(0), turned.flatten().cumsum(0)
    # how far the rows of a rank for an expert move
    shift = (ends - sizes).view_as(arrived).permute(dims) - (turned_ends.view(turned.shape) - turned)
    order = places + shift.flatten()[torch.searchsorted(turned_ends, places, right=True)]
    moved = shift.permute([dims.index(dim) for dim in range(arrived.ndim)]).flatten()
    return order, places - moved[torch.searchsorted(ends, places, right=True)]


class Permutation:
    """The copies of tokens in the order of their experts, and the sums of their results, by a `Routing`."""

    def __init__(self, model: LayerConfig) -> None:
        self.is_limited = model.moe_expert_capacity_factor is not None
        # by whether no row is dropped
        self._copies, self._sums = (
            {is_whole: Elements([Segment(name, kind(is_whole), has_rows=True)]) for is_whole in (False, True)}
            for name, kind in (("copies", Copies), ("sums", Sums))
        )

    def copies(
        self, context: LayerContext, routing: Routing, weights: Tensor, tokens: Tensor
    ) -> tuple[Routing, Tensor, Tensor]:
        """Return the routing, and the weights [n] and rows [n, h]. weights: [t, k], tokens: [..., h], t of them.

        Without capacities and padding n = k t.
        """
        values = routing.order, routing.slots, weights, tokens
        return routing, *run_branch(self._copies[self._is_whole(routing)], values, context)

    def sums(self, context: LayerContext, routing: Routing, results: Tensor) -> tuple[Routing, Tensor]:
        """Return the routing, and the sums of each token's results [t, h]. results: [n, h]."""
        values = results, routing.order, routing.slots
        return routing, *run_branch(self._sums[self._is_whole(routing)], values, context)

    def _is_whole(self, routing: Routing) -> bool:
        """Return True if no row is dropped."""
        assert routing.order is not None and routing.slots is not None
        return not self.is_limited and routing.order.shape[0] == routing.slots.numel()


@dataclass(frozen=True)
class Copies:
    """(order [n], slots [t, k], weights [t, k], tokens [s, b, h]) -> the weights [n] and rows [n, h] to send, zeros for
    padding. is_whole: no row is dropped or padded.
    """

    is_whole: bool

    def __call__(self, order: Tensor, slots: Tensor, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        own = _Selected.apply(weights.flatten(), order, slots.view(-1, 1), self.is_whole, False)
        return own, _Selected.apply(x.flatten(0, -2), order, slots, self.is_whole, False)


@dataclass(frozen=True)
class Sums:
    """(results [n, h], order [n], slots [t, k]) -> the sums of each token's results [t, h], a dropped row's being 0."""

    is_whole: bool

    def __call__(self, results: Tensor, order: Tensor, slots: Tensor) -> Tensor:
        return _Selected.apply(results, order, slots, self.is_whole, True)  # type: ignore[no-any-return]


def permuted(order: Tensor, back: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Return each rows[order]. order: a permutation; back: its inverse."""
    return tuple(_Permuted.apply(each, order, back) for each in rows)


# The functions below are traced with their backwards: they have no `once_differentiable`, which graphs cannot contain.


class _Selected(Function):
    """The copies of tokens: row i is token order[i] // k, zeros for padding. adds: the adjoint, the sum over a token's
    rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slots: Tensor, is_whole: bool, adds: bool) -> Tensor:
        ctx.save_for_backward(order if adds else slots)
        ctx.arguments = slots.shape[1], is_whole, adds
        return _taken(x, slots, is_whole).sum(1) if adds else _taken(x, order // slots.shape[1], is_whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (index,), (topk, is_whole, adds) = ctx.saved_tensors, ctx.arguments
        found = _taken(grad, index // topk, is_whole) if adds else _taken(grad, index, is_whole).sum(1)
        return found, None, None, None, None


class _Permuted(Function):
    """rows[order]; the backward is that by the inverse: no sum, in any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


def _taken(rows: Tensor, index: Tensor, is_whole: bool) -> Tensor:
    """Return rows[index], zeros for a number behind the last row. is_whole: there is none."""
    shape = *index.shape, *rows.shape[1:]
    if is_whole:
        return rows.index_select(0, index.flatten()).view(shape)
    if not len(rows):
        return rows.new_zeros(shape)
    is_there = (index < len(rows)).view(*index.shape, *[1] * (rows.ndim - 1))
    return rows.index_select(0, index.flatten().clamp(max=len(rows) - 1)).view(shape) * is_there
