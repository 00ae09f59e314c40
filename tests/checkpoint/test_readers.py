"""Readers of a directory in which a run saves and removes checkpoints find a complete one every time."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megapipe.api.language_model import load
from megapipe.checkpoint.folder import find_checkpoint, open_folder, steps_in
from megapipe.environment import read_environment
from megapipe.errors import CheckpointError
from megapipe.extras.cli import convert, inference
from megapipe.extras.inference.saved_model import SavedModel, open_model
from tests.checkpoint.conftest import RUN
from tests.train.jobs import job

REPOSITORY = Path(__file__).resolve().parents[2]
# saves the same content as the next step, and removes the one before as --keep-last 1 does, so many seconds after each
# line that says how many
WRITER = """
import json, shutil, sys, time, zlib
from pathlib import Path
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import Retention, folder_name, remove_old
root, disk, step = Path(sys.argv[1]), Disk(), 2
source = root / folder_name(step)
whole = json.loads((source / "manifest.json").read_text())
kept = root.parent / "kept"
shutil.copytree(source, kept)
for line in sys.stdin:
    time.sleep(float(line))
    step += 1
    new = root / ".new"
    shutil.copytree(kept, new)
    training = whole["content"]["state"]["training"]
    whole["content"]["step"], training["step"], training["consumed_samples"] = step, step, 8 * step
    whole["crc32"] = zlib.crc32(json.dumps(whole["content"], sort_keys=True, separators=(",", ":")).encode())
    (new / "manifest.json").write_text(json.dumps(whole))
    new.rename(root / folder_name(step))
    (root / "latest.new").write_text(folder_name(step) + "\\n")
    (root / "latest.new").rename(root / "latest")
    remove_old(disk, root, Retention(1), step)
    print(step, flush=True)
"""
Pruned = tuple[Path, subprocess.Popen[str]]


@pytest.fixture
def pruned(saved: Path, tmp_path: Path) -> Iterator[Pruned]:
    """Return a directory of checkpoints and another process that saves in it."""
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True, bufsize=1) as writer:
        yield root, writer


def opened(root: Path, *words: str) -> SavedModel:
    own = inference.evaluate.parser().parse_args(["--load", str(root), "--data", "unread", "--device", "cpu", *words])
    environment = read_environment({})
    return open_model(inference.model_asked(own, environment), environment, micro_batch_size=1)


def read_on_ranks(root: Path) -> None:
    opened(root).runtime()


def read_by_api(root: Path) -> None:
    load(root, device="cpu")


def export(root: Path) -> None:
    target = root.parent / "exported"
    assert convert.main([str(root), str(target), "--to", "megatron", "--from", "megapipe"]) == 0
    shutil.rmtree(target)


def resume(root: Path) -> None:
    code, said = job(f"{RUN} --train-iters 1000 --load {root} --exit-interval 1")
    assert code == 0, said


READERS: dict[str, tuple[Callable[[Path], object], int]] = {
    "found": (find_checkpoint, 40),
    "on ranks": (read_on_ranks, 25),
    "api": (read_by_api, 25),
    "convert": (export, 15),
    "training": (resume, 5),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_beside_a_run_that_removes_checkpoints_is_never_refused(pruned: Pruned, reader: str) -> None:
    (root, writer), (read, times) = pruned, READERS[reader]
    assert writer.stdin is not None and writer.stdout is not None
    draw, failures, seconds = random.Random(1), [], 0.01
    for number in range(times):  # a checkpoint is removed at a random moment of each read
        writer.stdin.write(f"{draw.uniform(0, seconds)}\n")
        began = time.perf_counter()
        try:
            read(root)
        except CheckpointError as error:
            failures.append(str(error))
        seconds = time.perf_counter() - began
        assert int(writer.stdout.readline()) == 3 + number
    writer.stdin.close()
    assert not failures, f"{len(failures)} of {times}: {failures[0]}"
    assert steps_in(root) == [2 + times]


def test_a_step_that_was_asked_for_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    for step_given in (False, True):
        root = tmp_path / str(step_given)
        shutil.copytree(saved, root)
        words = ["--ckpt-step", "2"] if step_given else []
        model = opened(root, *words)
        assert model.folder == root / "step_00000002"
        shutil.rmtree(model.folder)
        with pytest.raises(CheckpointError, match="step_00000002"):
            model.runtime()


def test_deleted_checkpoints_are_named_and_not_replaced_by_a_fresh_start(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    shutil.rmtree(root / "step_00000002")
    code, said = job(f"{RUN} --load {root} --save {root}")
    assert code == 1 and f"{root}/latest names step_00000002" in said and f"remove {root}/latest" in said
    assert (root / "latest").is_file() and steps_in(root) == []
    (root / "latest").unlink()
    code, said = job(f"{RUN} --load {root} --save {root}")
    assert code == 0 and "starting from step 0" in said and open_folder(root / "step_00000004")
