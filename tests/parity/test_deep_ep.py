"""The adapter of DeepEP with a stand-in over gloo, which takes what the signatures of the library's source take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
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


def like_the_library(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give a method its arguments by name, bound to the signature of the library's method of the same name."""
    signature = inspect.signature(eval(f"lambda {SIGNATURES[method.__name__]}: None"))

    def bound(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        given.apply_defaults()
        return method(given.arguments.pop("self"), SimpleNamespace(**given.arguments))

    bound.__signature__ = signature  # type: ignore[attr-defined]
    return bound


class Buffer:
    """Tokens go to each rank that has an expert of them, and are summed on the way back, in order of rank."""

    @like_the_library
    def __init__(self, given: Any) -> None:
        self.group, self.size, self.rank = given.group, dist.get_world_size(given.group), dist.get_rank(given.group)
        assert given.num_nvl_bytes > 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Sizes:
        return Sizes()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Sizes:
        return Sizes()

    @like_the_library
    def get_dispatch_layout(self, given: Any) -> tuple[Any, ...]:
        chosen_experts, num_experts = given.topk_idx, given.num_experts
        assert chosen_experts.dtype == torch.int64
        self.held = num_experts // self.size
        chosen = torch.zeros(len(chosen_experts), num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, chosen_experts.where(chosen_experts >= 0, num_experts), True)
        in_rank = chosen[:, :-1].view(len(chosen_experts), self.size, -1).any(2)
        return in_rank.sum(0).int(), None, chosen[:, :-1].sum(0).int(), in_rank, None

    @like_the_library
    def dispatch(self, given: Any) -> tuple[Any, ...]:
        x = given.x
        assert x.is_contiguous()
        if given.handle is not None:
            assert given.topk_idx is None and given.topk_weights is None
            return self._there(x, given.handle), None, None, None, None, None
        ranks, tokens = given.is_token_in_rank.t().nonzero().unbind(1)
        sent = given.num_tokens_per_rank.tolist()
        received = torch.empty_like(given.num_tokens_per_rank)
        dist.all_to_all_single(received, given.num_tokens_per_rank, group=self.group)
        handle = tokens, sent, received.tolist(), len(x)
        assert ranks.bincount(minlength=self.size).tolist() == sent
        experts = self._there(given.topk_idx, handle) - self.rank * self.held
        experts = experts.where((experts >= 0) & (experts < self.held), -1)
        counts = [int((experts == expert).sum()) for expert in range(self.held)]
        return self._there(x, handle), experts, self._there(given.topk_weights, handle), counts, handle, None

    @like_the_library
    def combine(self, given: Any) -> tuple[Any, ...]:
        assert given.x.is_contiguous()
        weights = None if given.topk_weights is None else self._back(given.topk_weights, given.handle)
        return self._back(given.x, given.handle), weights, None

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
