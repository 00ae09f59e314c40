"""Every collective against the result computed from the inputs of all ranks.

Also covers groups of one rank, waiting twice, and peers that do not take part.
"""

from __future__ import annotations

import os
import resource
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.comm.collectives import (
    Work,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    reduce_scatter,
)
from megapipe.comm.groups import Group, second_communicator
from megapipe.comm.trace import Tracer
from megapipe.errors import CommunicationError
from megapipe.topology import Topology
from tests.comm.ranks import groups_of
from tests.harness import RankPool, run_ranks

WORLD = 4
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def input_of(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return small integers, which are exact in every dtype and in every order of summation."""
    return torch.randint(-9, 9, (rows, 3), generator=torch.Generator().manual_seed(rank)).to(dtype)


def every_collective(rank: int, world_size: int, async_op: bool) -> dict[str, list[Tensor]]:
    group = groups_of(rank, Topology(dp=world_size)).dp
    results: dict[str, list[Tensor]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch 2.13 warns about its own deprecated names
        for dtype in DTYPES:
            x = input_of(rank, 2, dtype)
            work: list[Work] = []
            for op in ("sum", "max", "min"):
                reduced = x.clone()
                work.append(all_reduce(reduced, group, op, async_op))
                results.setdefault(op, []).append(reduced)
            gathered = torch.empty(2 * world_size, 3, dtype=dtype)
            work.append(all_gather(gathered, x, group, async_op))
            results.setdefault("all_gather", []).append(gathered)
            scattered = torch.empty(2, 3, dtype=dtype)
            work.append(reduce_scatter(scattered, input_of(rank, 2 * world_size, dtype), group, async_op))
            results.setdefault("reduce_scatter", []).append(scattered)
            copied = x.clone()
            work.append(broadcast(copied, group, source=world_size // 2, async_op=async_op))
            results.setdefault("broadcast", []).append(copied)
            for one in work:
                one.wait()
                one.wait()
        barrier(group)
    return results


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_every_collective_equals_the_plain_result(async_op: bool) -> None:
    by_rank = run_ranks(every_collective, WORLD, async_op)
    for number, dtype in enumerate(DTYPES):
        small = torch.stack([input_of(rank, 2, dtype) for rank in range(WORLD)])
        large = sum(input_of(rank, 2 * WORLD, dtype) for rank in range(WORLD))
        assert isinstance(large, Tensor)
        for rank, results in enumerate(by_rank):
            expected = {
                "sum": small.sum(0).to(dtype),
                "max": small.max(0).values,
                "min": small.min(0).values,
                "all_gather": small.reshape(-1, 3),
                "reduce_scatter": large[2 * rank : 2 * rank + 2],
                "broadcast": small[2],
            }
            for name, tensor in expected.items():
                assert torch.equal(results[name][number], tensor), (name, dtype, rank)


def in_place(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    group = groups_of(rank, Topology(dp=world_size)).dp
    parameters = torch.zeros(3 * world_size)
    mine = slice(3 * rank, 3 * rank + 3)
    parameters[mine] = rank + 1
    all_gather(parameters, parameters[mine], group)
    gradients = torch.arange(3.0 * world_size) * (rank + 1)
    reduce_scatter(gradients[mine], gradients, group)
    return parameters, gradients[mine].clone()


def test_flat_buffers_are_gathered_and_reduced_in_place() -> None:
    for rank, (parameters, gradients) in enumerate(run_ranks(in_place, 3)):
        assert parameters.tolist() == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
        assert gradients.tolist() == [6.0 * n for n in range(3 * rank, 3 * rank + 3)]


def of_large_buffers(rank: int, world_size: int) -> tuple[bool, int]:
    """Return whether the sums are right, and by how many bytes the process has grown."""
    group, number = groups_of(rank, Topology(dp=world_size)).dp, 1 << 22
    buffer = torch.full((number * world_size,), rank + 1.0)
    mine, other = buffer[number * rank : number * (rank + 1)], torch.zeros(number * world_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reduce_scatter(mine, buffer, group)
    all_gather(buffer, mine, group)
    all_gather(other, mine, group)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return all(bool((each == 1.0 + 2.0 + 3.0).all()) for each in (buffer, other)), grown * 1024


def test_large_buffers_are_gathered_and_reduced_without_a_copy() -> None:
    for is_right, grown in run_ranks(of_large_buffers, 3):
        assert is_right and grown < 8 << 20, "a copy has 48 MiB"


def objects(rank: int, world_size: int) -> tuple[Any, list[Any]]:
    group = groups_of(rank, Topology(tp=2, dp=2)).dp  # ranks (0 2) and (1 3): group ranks are not global ranks
    return broadcast_object({"from": rank, "text": "x" * rank}, group, source=1), gather_objects(
        (rank, "y" * rank), group
    )


def test_objects_are_broadcast_and_gathered_by_group_rank() -> None:
    for rank, (received, gathered) in enumerate(run_ranks(objects, WORLD)):
        first, second = (0, 2) if rank % 2 == 0 else (1, 3)
        assert received == {"from": second, "text": "x" * second}
        assert gathered == [(first, "y" * first), (second, "y" * second)]


def test_group_of_one_is_a_no_op_or_a_copy() -> None:
    group = Group.alone("tp")
    x = torch.randn(2, 3)
    kept = x.clone()
    for op in ("sum", "max", "min"):
        all_reduce(x, group, op).wait()
    broadcast(x, group).wait()
    assert torch.equal(x, kept)
    gathered, scattered = torch.empty(2, 3), torch.empty(2, 3)
    all_gather(gathered, x, group, async_op=True).wait()
    reduce_scatter(scattered, x, group, async_op=True).wait()
    assert torch.equal(gathered, kept)
    assert torch.equal(scattered, kept)
    barrier(group)
    assert broadcast_object("a", group) == "a"
    assert gather_objects("a", group) == ["a"]


@pytest.mark.parametrize(
    ("output", "tensor", "message"),
    [
        pytest.param(
            torch.empty(3, 3),
            torch.empty(2, 3),
            r"the whole tensor is torch.float32 \(3, 3\), the shard torch.float32 \(2, 3\)",
            id="rows",
        ),
        pytest.param(torch.empty(2, 3).double(), torch.empty(2, 3), "the whole tensor is torch.float64", id="dtype"),
        pytest.param(torch.empty(2, 3), torch.empty(3, 2).t(), "needs contiguous tensors", id="strides"),
        pytest.param(torch.empty(()), torch.empty(()), "along dim 0", id="scalar"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_anything_is_sent(
    output: Tensor, tensor: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        all_gather(output, tensor, Group.alone("dp"))


def traced(rank: int, world_size: int) -> list[tuple[str, str, bool]]:
    tracer = Tracer()
    group = groups_of(rank, Topology(tp=world_size), tracer=tracer).tp
    all_reduce(torch.ones(4), group)
    pending = reduce_scatter(torch.empty(2), torch.ones(4), group, async_op=True)
    pending.wait()
    pending.wait()
    barrier(group)
    return [(event.name, event.kind, event.end_ns > event.start_ns > 0) for event in tracer.of_kind("collective")]


def test_tracer_sees_each_collective_once_under_its_groups_name() -> None:
    expected = [(f"tp {name}", "collective", True) for name in ("all_reduce", "reduce_scatter", "barrier")]
    assert run_ranks(traced, 2) == [expected, expected]


def wait_for_a_silent_peer(rank: int, world_size: int) -> list[str]:
    group = groups_of(rank, Topology(tp=world_size), timeout_seconds=1.0).tp
    if rank == 1:
        return []
    work = all_reduce(torch.ones(2, 2), group, async_op=True)
    messages = []
    for _ in range(2):  # the second wait must neither hang nor succeed
        with pytest.raises(CommunicationError) as caught:
            work.wait()
        messages.append(str(caught.value))
    return messages


def test_silent_peer_gives_an_error_that_names_the_operation_within_the_time_out() -> None:
    first, second = run_ranks(wait_for_a_silent_peer, 2, timeout=20)[0]
    assert first == second
    assert first.startswith("all_reduce of float32[2, 2] failed on global rank 0 in group tp (ranks 0 1) after 1.")
    assert "no answer within the timeout of 1 s" in first


def lose_a_peer(rank: int, world_size: int) -> str:
    group = groups_of(rank, Topology(dp=world_size)).dp
    barrier(group)
    if rank == 1:
        os._exit(1)
    with pytest.raises(CommunicationError) as caught:
        all_gather(torch.empty(2 * world_size), torch.ones(2), group)
    return str(caught.value)


def test_dead_peer_gives_an_error_at_once() -> None:
    message = run_ranks(lose_a_peer, 2, timeout=20, may_die=(1,))[0]
    assert message.startswith("all_gather of float32[2] failed on global rank 0 in group dp (ranks 0 1)")
    assert "a peer process has exited" in message


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(KeyError, match="mean"):
        all_reduce(torch.ones(1), Group.alone("dp"), "mean")


def many_rounds(rank: int, world_size: int, rounds: int) -> float:
    group = groups_of(rank, Topology(dp=world_size)).dp
    total = torch.zeros(1)
    for _ in range(rounds):
        all_reduce(total.fill_(rank), group)
    return total.item()


def test_pool_rebuilds_groups_for_each_job() -> None:
    with RankPool(2) as pool:
        assert [pool.run(many_rounds, 3) for _ in range(3)] == [[1.0, 1.0]] * 3


def over_two_communicators(rank: int, world_size: int) -> tuple[list[float], bool, str]:
    """Sum over two communicators of the same pair of ranks and wait for them in reverse order."""
    first = groups_of(rank, Topology(tp=2, dp=2)).tp
    second = second_communicator(first)
    values = [torch.tensor([rank + 1.0]), torch.tensor([10.0 * (rank + 1)])]
    works = [all_reduce(values[0], first, async_op=True), all_reduce(values[1], second, async_op=True)]
    for work in reversed(works):
        work.wait()
    return [float(value) for value in values], first.handle is not second.handle, second.name


def test_a_second_communicator_serves_the_same_ranks() -> None:
    for rank, (sums, is_another, name) in enumerate(run_ranks(over_two_communicators, WORLD)):
        total = 3.0 if rank < 2 else 7.0
        assert (sums, is_another, name) == ([total, 10 * total], True, "tp")
    alone = Group.alone("tp")
    assert second_communicator(alone) is alone
