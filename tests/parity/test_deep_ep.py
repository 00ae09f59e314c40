"""The adapter of DeepEP with a stand-in over gloo, whose methods have the signatures of the library's source."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.assembly import compose
from megapipe.extras.report.kernels import dispatch_words
from megapipe.model import deep_ep
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.grids import DROPS, SHARED, SIGMOID, ZERO, again
from tests.parity.test_node_dispatch import FLEX, SMALL, trained
from tests.tiny import make_config

# of class Buffer, deep_ep/buffer.py at 9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee (1.2.1); the same but for a last option
# of __init__ in deep_ep/buffers/legacy.py at dd758caf451848bd150e1046af3d0a73e5fff38d (2.1.0)
SIGNATURES = {
    "__init__": "self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, comm=None",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_dispatch_layout": "self, topk_idx, num_experts, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False",
    "dispatch": "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
    "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, "
    "config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False",
}
DEEP = FLEX | {"moe_flex_dispatcher_backend": "deepep"}


class Sizes:
    """The library's `Config`, as far as it is asked."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Tokens go to each rank that has an expert of them, and are summed on the way back, in order of rank."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        assert num_nvl_bytes > 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Sizes:
        return Sizes()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Sizes:
        return Sizes()

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        self.held = num_experts // self.size
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
        in_rank = chosen[:, :-1].view(len(topk_idx), self.size, -1).any(2)
        return in_rank.sum(0).int(), None, chosen[:, :-1].sum(0).int(), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._there(x, handle), None, None, None, None, None
        ranks, tokens = is_token_in_rank.t().nonzero().unbind(1)
        sent = num_tokens_per_rank.tolist()
        received = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        handle = tokens, sent, received.tolist(), len(x)
        assert ranks.bincount(minlength=self.size).tolist() == sent
        experts = self._there(topk_idx, handle) - self.rank * self.held
        experts = experts.where((experts >= 0) & (experts < self.held), -1)
        counts = [int((experts == expert).sum()) for expert in range(self.held)]
        return self._there(x, handle), experts, self._there(topk_weights, handle), counts, handle, None

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        return self._back(x, handle), None if topk_weights is None else self._back(topk_weights, handle), None

    def _there(self, x: Tensor, handle: Any) -> Tensor:
        tokens, sent, received, _ = handle
        output = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(output, x[tokens], received, sent, group=self.group)
        return output

    def _back(self, x: Tensor, handle: Any) -> Tensor:
        tokens, sent, received, count = handle
        returned = x.new_empty(sum(sent), *x.shape[1:])
        dist.all_to_all_single(returned, x, sent, received, group=self.group)
        return x.new_zeros(count, *x.shape[1:]).index_add_(0, tokens, returned)


def with_deep_ep(rank: int, world_size: int, per_node: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train with the stand-in."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {"deep_ep": module}),
        mock.patch.object(compose, "why_not_deep_ep", return_value=""),
        mock.patch.object(Buffer, "combine", autospec=True, side_effect=Buffer.combine) as combined,
    ):
        found = trained(rank, world_size, per_node, options)
    return found | {"combined": combined.call_count}


def test_the_stand_in_has_the_signatures_of_the_library() -> None:
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(Buffer, name)).parameters.values()
        found = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters]
        assert ", ".join(found) == expected, name


CASES: dict[str, dict[str, Any]] = {
    "groups, shared": SIGMOID | SHARED | ZERO,
    "capacity": SIGMOID | DROPS,
    "experts again": {"num_experts": 16, "moe_router_topk": 8} | again("moe"),
    "dualpipe": {"pp": 2, "pipeline_schedule": "dualpipe"},
}


@pytest.mark.parametrize("name", CASES)
def test_training_with_deep_ep_equals_that_with_all_to_alls(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    options = {"ep": 2 if "pp" in CASES[name] else 4} | CASES[name]
    plain = rank_pools(4).run(trained, 2, options)
    for one, other in zip(plain, rank_pools(4).run(with_deep_ep, 2, options | DEEP), strict=True):
        assert other["combined"] > 0 == other["routes"]
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-10)
        for key, values in one["weights"].items():
            torch.testing.assert_close(other["weights"][key], values, rtol=1e-10, atol=1e-10)


BF16 = {"dtype": "bf16", "ep": 4}


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({"dtype": "fp32"}, "nccl", "it needs --bf16"),
        ({"overlap_moe_expert_parallel_comm": True}, "nccl", "layers run in parts"),
        ({"ep": 2, "etp": 2}, "nccl", "experts are divided over etp"),
        ({}, "gloo", "it needs NCCL"),
        ({}, "nccl", "it is not installed"),
    ],
)
def test_where_deep_ep_does_not_fit_the_start_says_why(options: dict[str, Any], backend: str, reason: str) -> None:
    plan = resolve(make_config(**SMALL | DEEP | BF16 | options), 4, 2)
    assert deep_ep.why_not_deep_ep(plan.config, plan.topology, plan.parts is not None, backend) == reason
    (line,) = dispatch_words(plan, backend)
    assert line.count(reason) == 1 and "not --moe-flex-dispatcher-backend deepep" in line


def test_the_start_says_that_deep_ep_sends() -> None:
    plan = resolve(make_config(**SMALL | DEEP | BF16), 4, 2)
    with mock.patch.object(deep_ep, "find_spec", return_value=object()):
        (line,) = dispatch_words(plan, "nccl")
    assert "once to each rank by DeepEP" in line and "equal up to rounding" in line
