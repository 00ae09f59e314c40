"""Power cuts during a save, over every state in which it may leave the disk.

Unlike a killed process, a power cut also loses the page cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import disk as disk_module
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import Retention, find_checkpoint, prepare_root
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Attempt, Extras, SaveReport
from megapipe.checkpoint.shard import TensorBox
from megapipe.errors import CheckpointError
from megapipe.extras.inspect.checkpoint import damage
from megapipe.sharding.boxes import Box
from tests.checkpoint.crash_states import Operation, Recorder, Tree, crash_states, put, tree_of
from tests.checkpoint.layouts import WORLD, save_one

NUM_RANKS, COLUMNS = 2, 12


def save_of_two_ranks(root: Path, step: int, keep: Retention) -> None:
    """Write the shards of both ranks and commit, in an order that one process can execute."""
    attempt = Attempt(Disk(), root, step, Extras({"training": {"step": step}}, f"# {step}\n"), keep, 1 << 22)
    temporary = attempt.begin()
    assert isinstance(temporary, Path)
    written = [
        attempt.write(temporary, [row(rank, torch.full((COLUMNS,), float(step)))], rank) for rank in range(NUM_RANKS)
    ]
    assert isinstance(attempt.finish(temporary, written), SaveReport)


def row(rank: int, values: torch.Tensor) -> TensorBox:
    return TensorBox("master/w", (NUM_RANKS, COLUMNS), Box((rank, 0), (1, COLUMNS)), values)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tree, list[Operation]]:
    """Return the tree with step 1 and the log of a save of step 2 that removes step 1.

    Every write is split into small ones.
    """
    root = tmp_path / "recorded"
    save_of_two_ranks(root, 1, Retention())
    before = tree_of(root)
    recorder = Recorder(root)
    with monkeypatch.context() as patched:
        patched.setattr(disk_module, "WRITE_BYTES", 3000)
        recorder.patch(patched)
        save_of_two_ranks(root, 2, Retention(last=1))
    return before, at_once(recorder.log)


def at_once(log: list[Operation]) -> list[Operation]:
    """Interleave the writes of the two shards, which were recorded one after the other."""
    shards = [
        [entry for entry in log if entry[1].endswith(f"rank_{rank:05d}.safetensors")] for rank in range(NUM_RANKS)
    ]
    shards = [[entry for entry in shard if entry[0] != "remove"] for shard in shards]
    first = log.index(shards[0][0])
    assert len({len(shard) for shard in shards}) == 1 and log[first : first + sum(map(len, shards))] == [
        *shards[0],
        *shards[1],
    ]
    together = [entry for pair in zip(*shards, strict=True) for entry in pair]
    return [*log[:first], *together, *log[first + len(together) :]]


def commit_of(log: list[Operation]) -> tuple[int, int]:
    """Return the numbers of operations after which the checkpoint has its name and after which the name is durable."""
    named = next(number for number, entry in enumerate(log) if entry[0] == "rename" and entry[2] == "step_00000002")
    return named + 1, log.index(("sync", "."), named) + 1


def trouble(root: Path, allowed: tuple[int, ...]) -> str | None:
    """Return a description of the error in a state of the disk, or None.

    The state is correct if an allowed checkpoint loads bit-exactly and all leftovers are reported and removed.
    """
    torn = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    try:
        found = find_checkpoint(root)
        if found is None or found.step not in allowed:
            return f"step {None if found is None else found.step} is found, not one of {allowed}"
        if found.remarks != () and not all("latest names" in remark for remark in found.remarks):
            return f"a folder with a good name is skipped: {found.remarks}"
        values = torch.zeros(NUM_RANKS * COLUMNS)
        box = TensorBox("master/w", (NUM_RANKS, COLUMNS), Box((0, 0), (NUM_RANKS, COLUMNS)), values)
        load_tensors(found, [box], WORLD)
        if not torch.equal(values, torch.full_like(values, float(found.step))) or list(damage(found)):
            return "what is loaded is not what was saved"
        remarks = prepare_root(root, found.step)
    except CheckpointError as error:
        return str(error)
    if len(remarks) != len(torn) or not all(any(name in remark for remark in remarks) for name in torn):
        return f"of {torn} only this is named: {remarks}"
    left = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    return f"{left} is left" if left else None


def troubles(
    before: Tree, log: list[Operation], root: Path, commit: tuple[int, int], first: int = 0
) -> Iterator[str | None]:
    """Yield the error, or None, for each state after at least `first` operations."""
    named, certain = commit
    for done, tree in crash_states(before, log):
        if done >= first:
            shutil.rmtree(root, ignore_errors=True)
            put(tree, root)
            wrong = trouble(root, (1,) if done < named else (1, 2) if done < certain else (2,))
            yield None if wrong is None else f"after {done} operations: {wrong}"


def test_every_state_after_a_crash_loads_the_newest_complete_checkpoint(
    recorded: tuple[Tree, list[Operation]], tmp_path: Path
) -> None:
    before, log = recorded
    found = list(troubles(before, log, tmp_path / "state", commit_of(log)))
    assert [wrong for wrong in found if wrong is not None] == []
    assert len(found) > 1000


def is_sync_of(end: str) -> Callable[[Operation], bool]:
    return lambda entry: entry[0] == "sync" and entry[1].endswith(end)


def is_sync_of_the_folder(entry: Operation) -> bool:
    return entry[0] == "sync" and entry[1].startswith(".step_") and "/" not in entry[1]


@pytest.mark.parametrize(
    "is_left_out",
    [
        is_sync_of("rank_00001.safetensors"),
        is_sync_of("manifest.json"),
        is_sync_of("config.yaml"),
        is_sync_of_the_folder,
    ],
    ids=["shard", "manifest", "configuration", "folder"],
)
def test_a_sync_that_is_left_out_is_noticed(
    recorded: tuple[Tree, list[Operation]], tmp_path: Path, is_left_out: Callable[[Operation], bool]
) -> None:
    before, log = recorded
    lacking = [entry for entry in log if not is_left_out(entry)]
    assert len(lacking) == len(log) - 1
    commit = commit_of(lacking)
    assert any(troubles(before, lacking, tmp_path / "state", commit, first=commit[0]))


def test_a_root_that_is_not_synced_after_the_commit_is_noticed(
    recorded: tuple[Tree, list[Operation]], tmp_path: Path
) -> None:
    before, log = recorded
    _, certain = commit_of(log)
    lacking = [*log[: certain - 1], *log[certain : certain + 1]]
    found = troubles(before, lacking, tmp_path / "state", (certain - 1, certain - 1), first=certain - 1)
    assert any("step 1 is found, not one of (2,)" in str(wrong) for wrong in found)


def test_a_new_root_survives_with_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    with monkeypatch.context() as patched:
        recorder.patch(patched)
        save_one(tmp_path / "runs" / "new", 1)
    final = [tree for done, tree in crash_states({}, recorder.log) if done == len(recorder.log)]
    assert final and all("runs/new/step_00000001/manifest.json" in tree for tree in final)
