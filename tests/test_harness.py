"""The test harness itself.

Results come by rank, the first traceback is reported, hung ranks are shown and killed, and a failed pool is rebuilt.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import REPOSITORY, RankFailure, RankPool, run_ranks


def add_up(rank: int, world_size: int, offset: int) -> torch.Tensor:
    total = torch.tensor([float(rank + offset)])
    if world_size > 1:
        dist.all_reduce(total)
    return total


def fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("about to fail")
        raise ValueError("planted")
    dist.barrier()


def hang_on_rank_zero(rank: int, world_size: int) -> None:
    while rank == 0:
        time.sleep(0.01)


def die_on_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(3)
    return "alive"


def make_groups(rank: int, world_size: int) -> int:
    dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


def make_a_group_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.new_group([1])


@pytest.mark.parametrize("world_size", [1, 4], ids=lambda n: f"world{n}")
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(add_up, world_size, 10)
    expected = float(sum(rank + 10 for rank in range(world_size)))
    assert [result.item() for result in results] == [expected] * world_size


def test_first_traceback_and_its_output_are_shown() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on_rank_one, 2)
    assert (caught.value.rank, caught.value.error_type, caught.value.error_text) == (1, "ValueError", "planted")
    assert "fail_on_rank_one" in caught.value.report
    assert "about to fail" in caught.value.report


def test_hung_rank_is_shown_with_its_stack_and_killed() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"no answer from ranks \[0\] of 2 within 1.5 s") as caught:
        run_ranks(hang_on_rank_zero, 2, timeout=1.5)
    assert "in hang_on_rank_zero" in caught.value.report
    assert time.monotonic() - began < 20


def test_dead_rank_is_reported_unless_it_may_die() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code 3"):
        run_ranks(die_on_rank_one, 2)
    assert run_ranks(die_on_rank_one, 2, may_die=(1,)) == ["alive", None]


def test_pool_answers_many_jobs_and_is_rebuilt_after_a_failure() -> None:
    with RankPool(2) as pool:
        assert [pool.run(add_up, offset)[0].item() for offset in range(5)] == [1.0, 3.0, 5.0, 7.0, 9.0]
        with pytest.raises(RankFailure, match="planted"):
            pool.run(fail_on_rank_one)
        assert pool.run(add_up, 0)[1].item() == 1.0


def test_ranks_that_create_different_groups_fail() -> None:
    with pytest.raises(RankFailure, match=r"different numbers of process groups.*0: 1, 1: 2"):
        run_ranks(make_a_group_on_rank_one, 2)


def test_pool_destroys_the_groups_of_a_job() -> None:
    with RankPool(2) as pool:
        assert pool.run(make_groups) == pool.run(make_groups)


@pytest.mark.parametrize("offset", [1, 2], ids=lambda n: f"offset{n}")
def test_shared_pools_keep_their_ranks(rank_pools: Callable[[int], RankPool], offset: int) -> None:
    assert rank_pools(2) is rank_pools(2)
    assert rank_pools(2).run(add_up, offset)[0].item() == 2 * offset + 1


def test_processes_that_tests_start_take_interrupts_though_the_shell_ignores_them() -> None:
    """As in `pytest ... &` of a script."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    tests = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    words = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, tests]
    found = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("True\n", 0), found.stderr
