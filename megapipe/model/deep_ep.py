"""An adapter of DeepEP (DeepSeek's kernels, github.com/deepseek-ai/DeepEP), which sends a token once to each rank.

`--moe-flex-dispatcher-backend deepep` uses it where it can. Tokens are copied for their experts where they arrive, and
results are added there and on the way back: equal to those of all-to-alls up to rounding. Written against versions
1.2.1 and 2.1.0 of its `Buffer`; it has not run on a GPU.
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
from megapipe.model.dispatch import ExpertRows, ends_of
from megapipe.tensor_parallel.gemms import at_least_fp32
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
    """The rows that the experts of this rank take from the tokens sent to it; known once they have arrived (`send`).

    rows: [n] int64, entry i is arrived token x k + j of row i, expert by expert, in the order of tokens. slots:
    [arrived tokens, k], the row of each choice, or n if its expert is on another rank. chosen: [t, k], experts of this
    rank's tokens, -1 for a row that is dropped. handle: DeepEP's, of what was sent.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("chosen",)

    rows: Tensor
    slots: Tensor
    chosen: Tensor
    library: DeepEP
    num_experts: int
    handle: Any = None

    @classmethod
    def unsent(cls, chosen: Tensor, num_experts: int, groups: ExpertGroups) -> DeepRoutes:
        """Return the routes before anything is sent."""
        none, library = chosen.new_empty(0), groups.deep_ep
        return cls(groups, (), none, none, none, chosen.to(library.index), library, num_experts)

    def send(self, weights: Tensor, tokens: Tensor) -> tuple[DeepRoutes, Tensor, Tensor]:
        """Return the routes, and the weights and rows of this rank's experts. Waits for the device.

        weights: [t, k] fp32, tokens: [t, h] bf16, both this rank's.
        """
        received, scales, experts, counts, handle = _Sent.apply(tokens, weights, self)
        expert = torch.where(experts >= 0, experts, len(counts)).flatten()
        rows = expert.argsort(stable=True)[: sum(counts)].clone()
        slots = torch.full_like(expert, len(rows))
        slots[rows] = torch.arange(len(rows), device=rows.device, dtype=slots.dtype)
        slots = slots.view_as(experts)
        routes = replace(
            self, expert_rows=tuple(counts), ends=ends_of(tuple(counts), rows), rows=rows, slots=slots, handle=handle
        )
        own = Select.apply(scales.reshape(-1, 1), rows, slots.view(-1, 1))
        return routes, own.view(-1), Select.apply(received, rows, slots)

    def combine(self, results: Tensor) -> Tensor:
        """Return the sums [t, h] of the results of this rank's tokens: on the experts' ranks, then by DeepEP."""
        sums = Sums.apply(results, self.rows, self.slots)
        return WithAdjoint.apply(sums, self._back, self._there)  # type: ignore[no-any-return]

    def _back(self, sums: Tensor) -> Tensor:
        return self.library.buffer.combine(sums.contiguous(), self.handle)[0]  # type: ignore[no-any-return]

    def _there(self, grad: Tensor) -> Tensor:
        return self.library.buffer.dispatch(grad.contiguous(), handle=self.handle)[0]  # type: ignore[no-any-return]


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


class Select(Function):
    """Row i is token rows[i] // k. Backward: the sum over a token's rows, in the order of the choice.

    slots: [tokens, k], the row of each choice, or a number behind the last one.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return tokens[rows // slots.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return _sum_of_rows(grad, slots), None, None


class Sums(Function):
    """The adjoint of `Select`."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.topk = slots.shape[1]
        return _sum_of_rows(results, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grad[rows // ctx.topk], None, None


def _sum_of_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the sums [tokens, h] of the rows slots[:, 0], slots[:, 1], ..., in this order."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    total = rows.new_zeros(slots.shape[0], rows.shape[1], dtype=at_least_fp32(rows.dtype))
    for place in range(slots.shape[1]):
        total += padded[slots[:, place]]
    return total.to(rows.dtype)
