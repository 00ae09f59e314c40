"""Saves of a run: their schedule, background saves, and failed saves."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import Retention, find_checkpoint
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.manifest import ITEM_BYTES
from megapipe.checkpoint.shard import TensorBox
from megapipe.comm.groups import Group
from megapipe.extras.inspect.checkpoint import damage
from megapipe.sharding.boxes import Box
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.train.jobs import job, job_on_rank
from tests.train.test_loop import checkpoints, plant


def contents(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Return every global tensor of a checkpoint."""
    folder = find_checkpoint(root, step)
    assert folder is not None and list(damage(folder)) == []
    found = {}
    for name, saved in folder.manifest.tensors.items():
        assert ITEM_BYTES[saved.dtype] == 4
        values = torch.zeros(saved.shape)
        box = Box((0,) * values.dim(), saved.shape)
        load_tensors(folder, [TensorBox(name, saved.shape, box, values.reshape(-1))], Group.alone("world"))
        found[name] = values
    return found


GRIDS = {
    "one_rank": (1, ""),
    "pp2_dp2_zero_overlapped": (
        4,
        (
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--ddp-bucket-size 700"
        ),
    ),
}


@pytest.mark.parametrize(("world", "flags"), GRIDS.values(), ids=GRIDS.keys())
def test_asynchronous_saves_hold_the_same_bits(tmp_path: Path, world: int, flags: str) -> None:
    with RankPool(world) as pool:
        for name, extra in (("waiting", ""), ("beside", "--async-save")):
            command = f"{flags} --train-iters 6 --save-interval 2 --save {tmp_path / name} {extra}"
            for result in pool.run(job_on_rank, command):
                assert result[2] is None, result
    for step in (2, 4, 6):
        waiting, beside = contents(tmp_path / "waiting", step), contents(tmp_path / "beside", step)
        assert waiting.keys() == beside.keys() and len(waiting) > 20
        assert all(torch.equal(waiting[name], beside[name]) for name in waiting)


def held_up(rank: int) -> None:
    """Hold back every save until this rank has begun its fourth step.

    The save of step 2 is in flight until then.
    """
    gate, launch, begun = threading.Event(), TrainStep.run, 0

    def counted(self: TrainStep, *arguments: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 4:
            gate.set()
        return launch(self, *arguments)

    TrainStep.run = counted  # type: ignore[method-assign]
    create = Disk.create

    def gated(self: Disk, path: Path) -> Any:
        assert not is_of_a_save(path) or gate.wait(20)
        return create(self, path)

    Disk.create = gated  # type: ignore[method-assign]


def is_of_a_save(path: Path) -> bool:
    """Return False for the record of starts, which is written before the rendezvous."""
    return path.parent.name.startswith(".step_")


def test_training_continues_while_a_save_is_in_flight(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        said = pool.run(job_on_rank, f"--train-iters 6 --save-interval 2 --async-save --save {tmp_path}", held_up)[0]
    assert said[2] is None, said
    lines = [line for line in said[0].splitlines() if re.match(r"step |saved |waited", line)]
    kinds = [re.match(r"step +(\d)|saved .*step_0000000(\d)|waited", line) for line in lines]
    order = [
        f"step {kind[1]}" if kind and kind[1] else f"saved {kind[2]}" if kind and kind[2] else "waited"
        for kind in kinds
    ]
    assert order.index("saved 2") > order.index("step 3"), order
    assert order[-1] == "saved 6" and checkpoints(tmp_path) == [2, 4, 6]


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active, most = 0, 0
    create = Disk.create

    def slow(disk: Disk, path: Path) -> Any:
        nonlocal active, most
        active += 1
        most = max(most, active)
        threading.Event().wait(0.05)
        active -= 1
        return create(disk, path)

    monkeypatch.setattr(Disk, "create", slow)
    code, said = job(f"--train-iters 4 --save-interval 1 --async-save --save {tmp_path}")
    assert code == 0, said
    assert most == 1 and checkpoints(tmp_path) == [1, 2, 3, 4]
    assert re.search(r"waited 0\.\d s for the save of step 1 to end before the next begins", said)


def full_disk(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    create = Disk.create

    def full(disk: Disk, path: Path) -> Any:
        if path.parent.name.startswith(f".step_0000000{step}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(disk, path)

    monkeypatch.setattr(Disk, "create", full)


@pytest.mark.parametrize(
    ("flags", "step", "code", "left"),
    [
        ("--async-save", 2, 0, [1, 3, 4]),
        ("--async-save", 4, 1, [1, 2, 3]),
        ("--async-save --exit-on-save-failure", 2, 1, [1]),
        ("", 2, 1, [1]),
    ],
    ids=["beside", "beside_and_the_last_one", "beside_and_asked_to_end", "waiting"],
)
def test_a_failed_save_ends_the_run_only_if_asked_or_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, step: int, code: int, left: list[int]
) -> None:
    full_disk(monkeypatch, step)
    found, said = job(f"--train-iters 4 --save-interval 1 --save {tmp_path} {flags}")
    assert (found, checkpoints(tmp_path)) == (code, left), said
    assert "rank 0 cannot write" in said and "No space left on device" in said
    assert ("the save of step 2 FAILED" in said) == (code == 0)


def test_a_last_save_that_cannot_begin_ends_the_run_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Disk.make_folder

    def read_only(disk: Disk, path: Path) -> None:
        if path.name.startswith(".step_00000004"):
            raise OSError(errno.EROFS, "Read-only file system")
        make(disk, path)

    monkeypatch.setattr(Disk, "make_folder", read_only)
    code, said = job(f"--train-iters 4 --save-interval 1 --save {tmp_path} --async-save")
    assert (code, checkpoints(tmp_path)) == (1, [1, 2, 3]), said
    assert "Read-only file system" in said and "ended after step 4" not in said


def test_a_nan_does_not_cost_the_save_in_flight(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        flags = f"--train-iters 4 --pipeline-model-parallel-size 2 --save-interval 1 --async-save --save {tmp_path}"
        results = pool.run(
            job_on_rank, flags, plant, 1, 3, 4 + 1, False
        )  # in step 2, right after the first save has begun
    assert {result[1] for result in results} == {"TrainingError"}
    assert checkpoints(tmp_path) == [1]


def planted_on_a_full_disk(rank: int) -> None:
    plant(rank, 1, 3, 4 + 1, False)
    create = Disk.create

    def full(disk: Disk, path: Path) -> Any:
        if is_of_a_save(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(disk, path)

    Disk.create = full  # type: ignore[method-assign]


def test_a_nan_is_reported_with_the_failure_of_the_save_in_flight(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        flags = (
            f"--train-iters 4 --pipeline-model-parallel-size 2 --save-interval 1 --async-save "
            f"--exit-on-save-failure --save {tmp_path}"
        )
        results = pool.run(job_on_rank, flags, planted_on_a_full_disk)
    assert {result[1] for result in results} == {"TrainingError"}, results
    assert all(
        str(result[2]).startswith("step 2: ") and "No space left on device" in str(result[2]) for result in results
    ), results


def test_saves_come_every_save_interval_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    launch = TrainStep.run

    def one_minute(self: TrainStep, *arguments: Any) -> Any:
        now[0] += 60.0
        return launch(self, *arguments)

    monkeypatch.setattr(TrainStep, "run", one_minute)
    code, said = job(f"--train-iters 9 --save-interval-minutes 3 --save-interval 5 --save {tmp_path}")
    assert code == 0, said
    assert checkpoints(tmp_path) == [3, 5, 8, 9]  # the interval counts from the last save


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Retention(), [10, 20, 30, 40, 45]),
        (Retention(last=2), [40, 45]),
        (Retention(every=20), [20, 40, 45]),
        (Retention(last=3, every=20), [20, 30, 40, 45]),
    ],
    ids=["all", "last", "every", "both"],
)
def test_keep_last_and_retain_interval_choose_the_checkpoints_kept(keep: Retention, left: list[int]) -> None:
    steps = [10, 20, 30, 40, 45]
    assert [step for step in steps if step not in keep.to_remove(steps, 45)] == left
