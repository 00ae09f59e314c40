"""A whole examination on four ranks: every group is measured, and all ranks name the same slow direction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megapipe.comm import timing
from megapipe.comm.groups import Group, build_process_groups
from megapipe.environment import Environment
from megapipe.extras.doctor.examination import Request, examine_allocation
from megapipe.extras.doctor.report import allocation_json, allocation_text
from megapipe.schedule.placement import linear
from megapipe.topology import Topology
from tests.harness import RankPool

SLOW_SECONDS = 0.1  # delay of a planted slow message, far above the noise of a busy machine


def examined(rank: int, world_size: int, factor: float, slow_rank: int | None) -> tuple[dict[str, Any], str]:
    topology = Topology(tp=2, pp=2)
    environment = Environment(rank, world_size, rank, world_size, 1, 0, "127.0.0.1", 0, "torchrun")
    groups = build_process_groups(topology, rank, "gloo", 60)
    send = timing._send

    def slow_send(tensor: torch.Tensor, group: Group, peer: int) -> None:
        if tensor.numel() > 2:  # neither header nor acknowledgement
            time.sleep(SLOW_SECONDS)
        send(tensor, group, peer)

    if rank == slow_rank:
        timing._send = slow_send
    try:
        found = examine_allocation(
            Request(topology, linear(2), None, factor, 0.01), groups, environment, torch.device("cpu")
        )
    finally:
        timing._send = send
    return allocation_json(found, None), allocation_text(found, None, "4 ranks")


def test_every_group_of_a_layout_is_measured(rank_pools: Callable[[int], RankPool]) -> None:
    answers = rank_pools(4).run(examined, 1000.0, None)
    found, text = answers[0]
    assert {(row["kind"], *row["ranks"]) for row in found["measured"]} == {
        *(("tp all_reduce", *ranks) for ranks in ((0, 1), (2, 3))),
        *(("pp forward", *ranks) for ranks in ((0, 2), (1, 3))),
        *(("pp backward", *ranks) for ranks in ((2, 0), (3, 1))),
    }
    assert all(row["seconds"] > 0 and row["bytes_per_second"] > 0 for row in found["measured"])
    assert {row["bytes"] for row in found["measured"]} >= {8}
    assert (found["fine"], found["slow"], found["blame"], found["hardware"]) == (True, [], [], None)
    assert [other["measured"] for other, _ in answers] == [found["measured"]] * 4, "all ranks have the same result"
    assert "tp all_reduce  2       in a host" in text
    assert text.splitlines()[-1].startswith("fine (examined in ")


def test_a_slow_direction_of_the_pipeline_is_named_by_its_ranks(rank_pools: Callable[[int], RankPool]) -> None:
    found, text = rank_pools(4).run(examined, 5.0, 3)[0]
    assert not found["fine"]
    assert {tuple(row["ranks"]) for row in found["slow"] if row["operation"] == "send"} == {(3, 1)}
    assert any("the link from rank 3 to rank 1 (on " in line for line in text.splitlines() if line.startswith("slow"))
