"""A save that is interrupted or fails at any point leaves only complete checkpoints.

What it leaves behind is reported and cleaned up.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import prepare_root, read_latest, remove_leftovers
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Extras, save_checkpoint
from megapipe.checkpoint.shard import TensorBox
from megapipe.comm.groups import Group, build_process_groups
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box
from megapipe.topology import Topology
from tests.checkpoint.layouts import WORLD, newest, save_one
from tests.harness import RankFailure, RankPool, run_ranks


class Stopped(BaseException):
    """Simulated end of the process, raised inside the code under test."""


class Trap:
    """Observer that raises at event number `at`, counted from 0, or never without `at`."""

    def __init__(self, at: int | None = None, error: type[BaseException] | BaseException = Stopped) -> None:
        self.events: list[tuple[str, Path]] = []
        self._at = at
        self._error = error

    def __call__(self, what: str, path: Path) -> None:
        self.events.append((what, path))
        if self._at == len(self.events) - 1:
            raise self._error


def value_of(root: Path) -> float:
    """Load the newest checkpoint and return its value, which equals its step in all elements."""
    values = torch.zeros(20)
    load_tensors(newest(root), [TensorBox("master/w", (5, 4), Box((0, 0), (5, 4)), values)], WORLD)
    assert len(set(values.tolist())) == 1
    return values[0].item()


def events_of_a_save(root: Path) -> list[str]:
    """Return the events of a save that also removes the previous checkpoint."""
    save_one(root, 1)
    trap = Trap()
    save_one(root, 2, disk=Disk(trap), keep_last=1)
    return [what for what, _ in trap.events]


def test_stopped_after_any_event_a_complete_checkpoint_loads_and_the_rest_is_cleaned_up(tmp_path: Path) -> None:
    events = events_of_a_save(tmp_path / "all")
    committed = events.index("rename")
    for at in range(len(events)):
        root = tmp_path / str(at)
        save_one(root, 1)
        with pytest.raises(Stopped):
            save_one(root, 2, disk=Disk(Trap(at)), keep_last=1)
        step = 2 if at >= committed else 1
        assert (newest(root).step, value_of(root)) == (step, step), at
        torn = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
        if at < committed:
            assert len(torn) == 1, at
        remarks = prepare_root(root, step)
        assert [
            f"removed {root / name}, left by an interrupted" in remark
            for name, remark in zip(torn, remarks, strict=True)
        ] == [True] * len(torn)
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        assert save_one(root, 3, keep_last=2).remark == ""  # nothing blocks the next save
        assert (newest(root).step, value_of(root)) == (3, 3)


def test_an_error_at_any_event_is_reported_and_removes_what_was_begun(tmp_path: Path) -> None:
    events = events_of_a_save(tmp_path / "all")
    committed = events.index("rename")
    for at in range(committed):
        root = tmp_path / str(at)
        save_one(root, 1)
        with pytest.raises(CheckpointError, match=r"No space left on device \(errno 28\)"):
            save_one(root, 2, disk=Disk(Trap(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))))
        assert value_of(root) == 1
        if at > 0:  # after a failed mkdir, cleaning up is left to the next start
            assert sorted(path.name for path in root.iterdir()) == ["latest", "step_00000001"], at
        assert save_one(root, 2).remark == ""
        assert value_of(root) == 2


def test_an_error_after_the_commit_says_that_the_checkpoint_is_complete(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    at = events_of_a_save(tmp_path / "all").index("rename") + 2
    with pytest.raises(CheckpointError, match=r"step_00000002 is complete, but then .*No space left"):
        save_one(tmp_path, 2, disk=Disk(Trap(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))))
    assert value_of(tmp_path) == 2


def test_latest_names_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        save_one(tmp_path, step)
        assert read_latest(tmp_path) == f"step_0000000{step}"
    assert newest(tmp_path).remarks == ()


def test_saving_never_overwrites(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert "was already saved and is complete" in save_one(tmp_path, 1, torch.zeros(5, 4)).remark
    other = TensorBox("master/w", (1,), Box((0,), (1,)), torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"step_00000001 already exists"):
        save_checkpoint(tmp_path, 1, [other], Extras({"training": {"step": 1, "consumed_samples": 9}}, ""), WORLD)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_of_the_same_step_is_moved_aside(tmp_path: Path) -> None:
    (save_one(tmp_path, 1).path / "config.yaml").unlink()
    save_one(tmp_path, 1)
    assert value_of(tmp_path) == 1
    assert len(list(tmp_path.glob("step_00000001.damaged-*/manifest.json"))) == 1


def test_the_newest_are_kept(tmp_path: Path) -> None:
    reports = [save_one(tmp_path, step, keep_last=2) for step in (1, 2, 3, 10, 11)]
    assert [path.name for path in reports[-1].removed] == ["step_00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000011"]


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    (save_one(tmp_path, 2).path / "manifest.json").unlink()
    save_one(tmp_path, 3, keep_last=2)
    assert [newest(tmp_path).step, (tmp_path / "step_00000001" / "manifest.json").exists()] == [3, True]


def test_a_run_may_not_start_below_checkpoints_it_would_run_into(tmp_path: Path) -> None:
    save_one(tmp_path, 10)
    prepare_root(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"step_00000010, .*step 4"):
        prepare_root(tmp_path, 4)
    (tmp_path / "step_00000010" / "config.yaml").unlink()
    prepare_root(tmp_path, 4)


def test_a_root_that_cannot_be_written_to_is_known_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"--save .*file/checkpoints cannot be written: Not a directory"):
        prepare_root(tmp_path / "file" / "checkpoints", 0)
    with pytest.raises(CheckpointError, match=r"cannot save in .*file/checkpoints: Not a directory"):
        save_one(tmp_path / "file" / "checkpoints", 1)


def test_cleaning_touches_nothing_else(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    names = [".hidden", ".step_00000001.tmp", "step_00000009.damaged-ab", ".latest.tmp-xyz"]
    for name in names:
        (tmp_path / name).mkdir()
    assert remove_leftovers(tmp_path) == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "latest", "step_00000001"])


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    report = save_checkpoint(tmp_path, 1, [], Extras({}, "model:\n", {"a.model": b"pieces"}), WORLD)
    assert (report.path / "tokenizer" / "a.model").read_bytes() == b"pieces"
    assert (report.path / "config.yaml").read_text() == "model:\n"
    assert newest(tmp_path).manifest.files["tokenizer/a.model"].num_bytes == 6


def test_a_read_only_disk_is_named_and_can_be_loaded_from(small_disk: Path) -> None:
    save_one(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        CheckpointError,
        match=r"disk: Read-only file system \(errno 30\)",
    ):
        save_one(small_disk, 2)
    with pytest.raises(CheckpointError, match=r"--save .*disk cannot be written: Read-only file system \(errno 30\)"):
        prepare_root(small_disk, 1)
    assert value_of(small_disk) == 1


# --- multiple ranks


def world_of(rank: int, world_size: int) -> Group:
    return build_process_groups(Topology(tp=1, cp=1, pp=1, dp=world_size), rank, "gloo", 30).world


def row_of(rank: int, world_size: int) -> TensorBox:
    return TensorBox("master/w", (world_size, 4), Box((rank, 0), (1, 4)), torch.full((4,), float(rank)))


def fail_on_one_rank(rank: int, world_size: int, root: str) -> str:
    """Save with a full disk on rank 1 and return the error message of this rank."""
    trap = Trap(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) if rank == 1 else Trap()
    try:
        save_checkpoint(
            Path(root), 2, [row_of(rank, world_size)], Extras({}, ""), world_of(rank, world_size), disk=Disk(trap)
        )
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_full_disk_on_one_rank_is_an_error_on_all(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    messages = set(rank_pools(2).run(fail_on_one_rank, str(tmp_path)))
    (message,) = messages
    assert (
        message.startswith("rank 1 cannot write ")
        and "rank_00001.safetensors: No space left on device (errno 28)" in message
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


class SeparateDisk(Disk):
    """Disk of a node where the same path leads to a different folder, which exists."""

    def create(self, path: Path):  # type: ignore[no-untyped-def]
        path.parent.mkdir(parents=True, exist_ok=True)
        return super().create(path)


def save_in_own_folder(rank: int, world_size: int, root: str, own_disk: bool) -> None:
    """Save to the relative path `checkpoints`, which is a different folder on each rank."""
    folder = Path(root) / f"node{rank}"
    folder.mkdir()
    os.chdir(folder)
    disk = SeparateDisk() if own_disk else Disk()
    save_checkpoint(
        Path("checkpoints"), 1, [row_of(rank, world_size)], Extras({}, ""), world_of(rank, world_size), disk=disk
    )


@pytest.mark.parametrize("own_disk", [False, True], ids=["folder_missing_on_rank_1", "shard_unseen_by_rank_0"])
def test_a_directory_that_is_not_shared_is_recognised(tmp_path: Path, own_disk: bool) -> None:
    with pytest.raises(RankFailure, match=r"not shared between the nodes"):
        run_ranks(save_in_own_folder, 2, str(tmp_path), own_disk)
    assert list((tmp_path / "node0" / "checkpoints").iterdir()) == []
