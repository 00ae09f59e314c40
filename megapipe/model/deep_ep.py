"""`DeepDispatch`: an adapter of DeepEP, which sends a token once to each rank.

DeepEP is DeepSeek's library (github.com/deepseek-ai/DeepEP); `--moe-flex-dispatcher-backend deepep` uses it where it
can. Tokens are copied for their experts where they arrive, and results are added there and on the way back: equal to
those of all-to-alls up to rounding. Written against versions 1.2.1 and 2.1.0 of its `Buffer`; it has not run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import WithAdjoint
from megapipe.comm.groups import ExpertGroups, Group
from megapipe.config.config import Config
from megapipe.config.layers import LayerConfig
from megapipe.model.context import LayerContext
from megapipe.model.dispatch import ends_of
from megapipe.model.permutation import Permutation
from megapipe.model.routing import ROWS, SENT, ExpertRows, Routing
from megapipe.model.segments import Elements, Operator
from megapipe.topology import Topology

LIBRARY = "deep_ep"
ELEMENT = 2  # bytes of bf16, the dtype of its kernels


def why_not_deep_ep(config: Config, topology: Topology, in_parts: bool, backend: str | None) -> str:
    """Return why a run over such communicators does not use DeepEP, for a message; '' if it does. in_parts: layers run
    in parts.
    """
    reasons = {
        "--moe-flex-dispatcher-backend deepep is not given": config.model.moe_flex_dispatcher_backend != "deepep",
        "ep has one rank": topology.ep == 1,
        "it needs --bf16": config.precision.dtype != "bf16",
        "experts are divided over etp": topology.etp > 1,
        "layers run in parts": in_parts,
        "it needs NCCL": backend != "nccl",
        "it is not installed": find_spec(LIBRARY) is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@dataclass(frozen=True, eq=False)
class DeepEP:
    """DeepEP's buffer for one ep group. index: the dtype in which it takes numbers of experts."""

    buffer: Any
    index: torch.dtype

    @classmethod
    def of(cls, group: Group, hidden_size: int) -> DeepEP:
        """Allocate the buffer, as DeepEP's readme does. A collective."""
        library, size = import_module(LIBRARY), hidden_size * ELEMENT
        configs = library.Buffer.get_dispatch_config(group.size), library.Buffer.get_combine_config(group.size)
        nvlink = max(config.get_nvl_buffer_size_hint(size, group.size) for config in configs)
        network = max(config.get_rdma_buffer_size_hint(size, group.size) for config in configs)
        return cls(library.Buffer(group.handle, nvlink, network), getattr(library, "topk_idx_t", torch.int64))


@dataclass(frozen=True, eq=False)
class DeepRoutes(ExpertRows):
    """The numbers of rows of this rank's experts, known once tokens have arrived.

    chosen: [t, k], experts of this rank's tokens, -1 for a row that is dropped. handle: DeepEP's, of what was sent.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("chosen",)

    chosen: Tensor
    library: DeepEP
    num_experts: int
    handle: Any = None

    def back(self, sums: Tensor) -> Tensor:
        """Return the sums over the ranks of what they hold for this rank's tokens."""
        return self.library.buffer.combine(sums.contiguous(), self.handle)[0]  # type: ignore[no-any-return]

    def there(self, grad: Tensor) -> Tensor:
        """Send once more to where the tokens went."""
        return self.library.buffer.dispatch(grad.contiguous(), handle=self.handle)[0]  # type: ignore[no-any-return]


class DeepDispatch:
    """The `Dispatcher` by DeepEP: a token is copied for the experts of the rank that it is sent to."""

    def __init__(self, model: LayerConfig, groups: ExpertGroups) -> None:
        self.groups, permutation = groups, Permutation(model)
        self.rows = Elements([Operator("dispatch", self._send, SENT), Operator("copies", permutation.copies, SENT)])
        self.sums = Elements([Operator("sums", permutation.sums, ROWS), Operator("combine", self._combine, ROWS)])

    def routes(self, chosen: Tensor, order: Tensor, slots: Tensor, load: Tensor, context: LayerContext) -> Routing:
        """Return the routing as `Dispatcher.routes` does, before anything is sent."""
        sent, none, library = chosen.masked_fill(slots >= load.sum(), -1), chosen.new_empty(0), self.groups.deep_ep
        routes = DeepRoutes(self.groups, (), none, sent.to(library.index), library, len(load))
        return Routing(chosen, None, None, routes)

    def _send(
        self, context: LayerContext, routing: Routing, weights: Tensor, tokens: Tensor
    ) -> tuple[Routing, Tensor, Tensor]:
        """Return the routing, and the weights [t, k] and rows [t, h] of the tokens sent to this rank. Waits for the
        device.

        weights: [t, k] fp32, tokens: [s, b, h] bf16, both this rank's.
        """
        assert isinstance(routing.routes, DeepRoutes)
        received, scales, experts, counts, handle = _Sent.apply(tokens.flatten(0, -2), weights, routing.routes)
        expert = torch.where(experts >= 0, experts, len(counts)).flatten()
        order = expert.argsort(stable=True)[: sum(counts)].clone()
        slots = torch.full_like(expert, len(order))
        slots[order] = torch.arange(len(order), device=order.device, dtype=slots.dtype)
        routes = replace(routing.routes, expert_rows=tuple(counts), ends=ends_of(tuple(counts), order), handle=handle)
        return Routing(routing.chosen, order, slots.view_as(experts), routes), scales, received

    def _combine(self, context: LayerContext, routing: Routing, sums: Tensor) -> Tensor:
        """Return the sums [t, h] of the results of this rank's tokens. sums: of those of this rank's experts."""
        routes = routing.routes
        assert isinstance(routes, DeepRoutes)
        return WithAdjoint.apply(sums, routes.back, routes.there)  # type: ignore[no-any-return]


class _Sent(Function):
    """Tokens and weights where their experts are, the experts' numbers there, the rows of each, and the handle."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, routes: DeepRoutes) -> tuple[Any, ...]:
        buffer, chosen = routes.library.buffer, routes.chosen
        to_rank, to_node, to_expert, is_in_rank, _ = buffer.get_dispatch_layout(chosen, routes.num_experts)
        received, experts, scales, counts, handle, _ = buffer.dispatch(
            tokens.contiguous(),
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=chosen,
            topk_weights=weights.contiguous(),
        )
        ctx.mark_non_differentiable(experts)
        ctx.arguments = buffer, handle
        return received, scales, experts, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        buffer, handle = ctx.arguments
        of_tokens, own, _ = buffer.combine(grad.contiguous(), handle, topk_weights=of_weights.contiguous())
        return of_tokens, own, None
