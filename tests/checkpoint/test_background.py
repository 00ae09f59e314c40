"""Background saves.

They write the values copied at the start, do not block training, and report the outcome to all ranks.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import KEEP_ALL
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Attempt, BackgroundSave, Extras, Staging
from megapipe.checkpoint.shard import TensorBox
from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group, build_process_groups
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box
from megapipe.topology import Topology
from tests.checkpoint.layouts import WORLD, newest, save_one
from tests.harness import RankPool

Pools = Callable[[int], RankPool]


def begin(
    root: Path,
    step: int,
    values: torch.Tensor,
    disk: Disk | None = None,
    group: Group = WORLD,
    staging: Staging | None = None,
) -> BackgroundSave:
    """Start a background save of row `group.rank` of a tensor `master/w`."""
    box = TensorBox("master/w", (group.size, values.numel()), Box((group.rank, 0), (1, values.numel())), values)
    attempt = Attempt(disk or Disk(), root, step, Extras({"training": {"step": step}}, ""), KEEP_ALL, 1 << 22)
    return BackgroundSave(attempt, [box], group, staging or Staging())


def test_what_is_saved_is_what_was_there_when_the_save_began(tmp_path: Path) -> None:
    gate = threading.Event()
    values = torch.arange(1000.0)
    save = begin(tmp_path, 1, values, Disk(lambda what, path: None if what == "make" else gate.wait(10) and None))
    values.fill_(-1.0)  # training continues
    assert not save.is_ready
    gate.set()
    report = save.finish()
    assert report.waited_seconds is not None and report.waited_seconds < report.seconds
    loaded = torch.zeros(1000)
    load_tensors(newest(tmp_path), [TensorBox("master/w", (1, 1000), Box((0, 0), (1, 1000)), loaded)], WORLD)
    assert torch.equal(loaded, torch.arange(1000.0))


def test_nothing_is_complete_before_all_ranks_have_agreed(tmp_path: Path) -> None:
    save = begin(tmp_path, 1, torch.zeros(4))
    while not save.is_ready:
        time.sleep(0.001)
    assert list(tmp_path.glob("step_*")) == []
    assert save.advance() is None  # this starts the commit
    report = save.finish()
    assert report.path == tmp_path / "step_00000001" == newest(tmp_path).path


def test_the_staging_memory_is_as_large_as_the_shard_and_used_again(tmp_path: Path) -> None:
    staging = Staging()
    memories = set()
    for step in (1, 2, 3):
        begin(tmp_path, step, torch.full((1001,), float(step)), staging=staging).finish()
        box = TensorBox("master/w", (1,), Box((0,), (1,)), torch.zeros(1))
        memory = staging.copy([box])()[0].values.untyped_storage()
        memories.add((memory.data_ptr(), memory.nbytes()))
    ((_, num_bytes),) = memories
    assert num_bytes == -(-4004 // 64) * 64


def test_an_error_of_any_kind_in_the_thread_is_reported(tmp_path: Path) -> None:
    def broken(what: str, path: Path) -> None:
        if what == "write":
            raise ValueError("a mistake of ours")

    save_one(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match=r"rank 0 .*ValueError: a mistake of ours",
    ):
        begin(tmp_path, 2, torch.zeros(4), Disk(broken)).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def fails_on_one_rank(rank: int, world_size: int, root: str) -> tuple[str, bool]:
    """Save twice with a full disk on rank 1 in the first save, polling as the training loop does.

    Return the error that this rank received and whether the second save is complete.
    """
    group = build_process_groups(Topology(tp=1, cp=1, pp=1, dp=world_size), rank, "gloo", 30).world

    def full(what: str, path: Path) -> None:
        if rank == 1 and what == "write" and "step_00000001" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    heard: list[Any] = []
    staging = Staging()
    for step in (1, 2):
        save = begin(Path(root), step, torch.full((4,), float(rank)), Disk(full), group, staging)
        report = None
        while report is None:
            waiting = torch.tensor([int(not save.is_ready)])
            all_reduce(waiting, group, "max")
            if waiting.item():
                continue
            try:
                report = save.advance()
            except CheckpointError as error:
                heard.append(str(error))
                break
    return heard[0], report is not None and report.path == newest(Path(root)).path


def test_all_ranks_see_the_failure_of_one_and_the_next_save_succeeds(rank_pools: Pools, tmp_path: Path) -> None:
    answers = rank_pools(3).run(fails_on_one_rank, str(tmp_path))
    assert len(set(answers)) == 1
    assert (
        answers[0][0].startswith("rank 1 cannot write ")
        and "No space left on device (errno 28)" in answers[0][0]
        and answers[0][1]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002"]
