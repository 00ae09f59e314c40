"""Mistakes that are planted into a step on the fake device, each of which a check of the suite has to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megapipe.model import dispatch
from megapipe.model.block import ResidualSum
from megapipe.tensor_parallel import gemms

Forward = Callable[..., Tensor]


def _read(y: Tensor) -> Tensor:
    y.sum().item()
    return y


# name -> what is done to the result of every linear without fp8
PLANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "wrong_device": lambda y: y + torch.ones(y.shape[-1], dtype=y.dtype),
    "host_read": _read,
    "extra_kernel": lambda y: y.clone(),
    "pageable_copy": lambda y: y + torch.ones(y.shape[-1], dtype=y.dtype).to(y.device),
    "mixed_dtype": lambda y: torch.mm(y.flatten(0, -2).float(), y.new_zeros(y.shape[-1], 1).float()).sum() * 0 + y,
}

# what is done in the routing of rows to experts, to the tensors that it is given and to its order
Routes = Callable[..., Any]


def _host_reads_a_load(of: Routes, chosen: Tensor, *more: Any) -> Any:
    chosen.sum().item()
    return of(chosen, *more)


def _index_on_the_host(of: Routes, *given: Any) -> Any:
    routes = of(*given)
    name = "ends" if routes.order is None else "order"
    on_device = getattr(routes, name)
    return dataclasses.replace(routes, **{name: torch.zeros(on_device.shape, dtype=on_device.dtype)})


def _rows_counted_by_values(of: Routes, chosen: Tensor, *more: Any) -> Any:
    chosen.flatten().repeat_interleave(chosen.flatten())  # without its output_size
    return of(chosen, *more)


PLANTED_IN_DISPATCH: dict[str, Callable[..., Any]] = {
    "host_reads_a_load": _host_reads_a_load,
    "index_on_the_host": _index_on_the_host,
    "rows_counted_by_values": _rows_counted_by_values,
}

# the same to the residual sums of compiled blocks
PLANTED_IN_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "graph_break": lambda y: (torch._dynamo.graph_break(), y)[1],
    "host_read_in_a_graph": lambda y: y + y.nonzero().sum() * 0,  # the host needs its size
}


@contextmanager
def mistake(name: str) -> Iterator[None]:
    """Make a mistake inside; none for ''."""
    if name in PLANTED_IN_BLOCKS:
        right_sum = ResidualSum.__call__
        with patch.object(ResidualSum, "__call__", lambda *args: PLANTED_IN_BLOCKS[name](right_sum(*args))):
            yield
        return
    if name in PLANTED_IN_DISPATCH:
        wrong_of = PLANTED_IN_DISPATCH[name]
        with patch.object(dispatch.Routes, "of", partial(wrong_of, dispatch.Routes.of)):
            yield
        return
    right: Any = gemms.Gemms.forward
    if name:
        wrong = PLANTED[name]
        gemms.Gemms.forward = lambda *args: wrong(right(*args)).to(args[1].dtype)  # type: ignore[method-assign]
    try:
        yield
    finally:
        gemms.Gemms.forward = right  # type: ignore[method-assign]
