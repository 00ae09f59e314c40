"""`Routing`: the experts of every token and how its rows travel. `Dispatcher`: what sends them.

all-to-alls      k rows of each token to the ranks of their experts             dispatch.py
once to a node   one row to each node, k rows from there                        node_dispatch.py
DeepEP           one row to each rank, k rows there                             deep_ep.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from megapipe.comm.groups import ExpertGroups
from megapipe.model.segments import Elements

# of a branch: routing and rows; routing, weights and rows
ROWS, SENT = slice(-2, None), slice(-3, None)


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The numbers of rows of this rank's experts for one microbatch, known on the host.

    expert_rows: of each expert of this rank. ends: their sums, on the device.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ()  # the fields with an entry for each row, or token

    groups: ExpertGroups
    expert_rows: tuple[int, ...]
    ends: Tensor


class Routing(NamedTuple):
    """The experts of every token of a microbatch, and how its rows travel.

    chosen: [t, k] int64. order: [rows] int64, entry i is token x k + j of row i, or k t for padding. slots: [t, k]
    int64, the row of token x k + j, or a number behind the last row. Where tokens are copied after they have arrived,
    both are those of the arrived tokens, None before.
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


class Dispatcher(Protocol):
    """A way of rows to the ranks of their experts, and of results back; results of all are equal up to rounding.

    rows: the elements from (routing, weights [t, k], tokens [s, b, h]) to (routing, weights [n], rows [n, h]), those of
    this rank's experts, expert by expert. sums: from (routing, results [n, h]) to the sums of each token's results
    [t, h]. Both have one operator of the exchange, `dispatch` and `combine`.
    """

    rows: Elements
    sums: Elements

    def routes(self, chosen: Tensor, order: Tensor, slots: Tensor, load: Tensor, context: Any) -> Routing:
        """Return the routing of a microbatch.

        chosen: [t, k]. order, slots: as in `Routing`, with rows that are not sent at the end. load: [experts], rows to
        send to each.
        """
