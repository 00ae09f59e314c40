"""Processes that know at their start that something is wrong with them: the other ranks hear of it and end too."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from megapipe.comm.bootstrap import start
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.cli import frame
from megapipe.extras.cli.frame import run_on_ranks
from tests.comm.test_bootstrap import free_port
from tests.harness import run_ranks

Variables = dict[str, str]


class Ended(BaseException):
    """The end of a process."""


def come(rank: int, _: int, of_ranks: list[Variables], refused: int | None) -> tuple[int, str, float, float]:
    """Start a command on ranks, the last one late; return exit code, standard error, times of arrival and end.

    refused: the process whose flags are wrong.
    """

    def end(code: int) -> None:
        raise Ended(code)

    def body(environment: Environment) -> int:
        if rank == refused:
            raise ConfigError("--lr 0 must be above 0")
        start(environment, "gloo", 30.0, "cpu", facts_of=lambda _: {})
        return 0

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os.environ.update(of_ranks[rank])
    frame.end_at_once = end  # type: ignore[assignment]
    sys.stderr, code = io.StringIO(), 0
    if rank == len(of_ranks) - 1:
        time.sleep(1.0)
    arrived = time.time()
    try:
        code = run_on_ranks(body, "interrupted")
    except Ended as ended:
        code = int(ended.args[0])
    assert not dist.is_initialized(), "nobody joins"
    return code, sys.stderr.getvalue(), arrived, time.time()


def three(**changes: Any) -> list[Variables]:
    """Return the variables of three ranks on one node. changes: a variable -> its values by process."""
    port = str(free_port())
    whole = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values = {"RANK": "012", "LOCAL_RANK": "012", **changes}
    return [whole | {name: of_ranks[rank] for name, of_ranks in values.items()} for rank in range(3)]


@pytest.mark.parametrize(
    ("changes", "refused", "said"),
    [
        pytest.param({"RANK": "017"}, None, "the global rank is 7, but it must be in 0 .. 2", id="RANK out of range"),
        pytest.param({"RANK": "01x"}, None, "RANK is 'x' in the environment", id="RANK that is no number"),
        pytest.param({"LOCAL_RANK": "015"}, None, "the local rank is 5, but it must be", id="LOCAL_RANK out of range"),
        pytest.param({"LOCAL_RANK": "901"}, None, "the local rank is 9, but it must be", id="rank 0 is wrong itself"),
        pytest.param({"LOCAL_RANK": "011"}, None, "are both on local rank 1 of node 0", id="LOCAL_RANK taken"),
        pytest.param({"RANK": "011"}, None, "its rank is taken by process ", id="RANK taken"),
        pytest.param({"RANK": "010"}, None, "rank 0 is there already; each process needs", id="a second rank 0"),
        pytest.param({"WORLD_SIZE": "334"}, None, "it was started with WORLD_SIZE 4, but rank 0", id="WORLD_SIZE"),
        pytest.param({}, 1, "--lr 0 must be above 0", id="refused flags of one rank"),
        pytest.param({}, 0, "--lr 0 must be above 0", id="refused flags of rank 0"),
    ],
)
def test_all_ranks_end_with_the_message_of_the_wrong_one(
    changes: dict[str, str], refused: int | None, said: str
) -> None:
    found = run_ranks(come, 3, three(**changes), refused, timeout=280)
    codes, texts, arrivals, ends = zip(*found, strict=True)
    assert all(said in text for text in texts if "cannot listen" not in text), texts
    assert 0 not in codes, codes
    assert max(ends) - max(arrivals) < 20.0  # 10 s where cores are idle
