"""A disk that becomes full during a run costs what is written to it, never the run or its checkpoints."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megapipe.train.metrics import Console, EvaluationMetrics, JsonLines
from tests.faults.disks import fill, free
from tests.train.jobs import job, steps_of


@pytest.mark.parametrize("is_freed", [False, True], ids=["full to the end", "freed"])
def test_a_log_disk_that_fills_up_ends_no_training(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_freed: bool
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(small_disk)  # the folder of what no flag names
    plain = Console.write

    def write(self: Console, metrics: Any) -> None:
        plain(self, metrics)
        if metrics.kind == "step" and metrics.step == 2:
            fill(small_disk)
            with (small_disk / "m.jsonl").open("ab", buffering=0) as file, suppress(OSError):
                while file.write(b" "):  # to the end of its last page
                    pass
        if metrics.kind == "step" and metrics.step == 5 and is_freed:
            free(small_disk)

    monkeypatch.setattr(Console, "write", write)
    logs = f"--metrics-file {small_disk}/m.jsonl --tensorboard-dir {small_disk}/board"
    profiles = "--profile --profile-pipeline --profile-step-start 2 --profile-step-end 4 --log-straggler"
    # without --save the traces are written to the full disk too
    code, said = job(f"--train-iters 8 {logs} {profiles} " + f"--save {tmp_path}/saved" * is_freed)
    assert code == 0, said
    assert (tmp_path / "saved" / "step_00000008").is_dir() == is_freed
    printed = said + "".join(capfd.readouterr())
    assert "Traceback" not in printed and "Exception ignored" not in printed, printed
    lost = [line for line in printed.splitlines() if "No space left" in line]
    assert len([line for line in lost if "m.jsonl cannot be written to" in line]) == 1, printed
    for told in ("TensorBoard stopped: ", "trace of steps 2 to 3 could not be written to "):
        assert printed.count(told) == (not is_freed), printed
    steps = [line["step"] for line in steps_of(small_disk / "m.jsonl")] if is_freed else []
    assert steps == ([1, 5, 6, 7, 8] if is_freed else [])


def test_a_disk_that_is_full_from_the_start_ends_no_training(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(small_disk)
    fill(small_disk)
    code, said = job(f"--train-iters 2 --metrics-file {tmp_path}/m.jsonl --tensorboard-dir {small_disk}/board")
    printed = said + "".join(capfd.readouterr())
    assert code == 0 and "Traceback" not in printed, printed
    assert printed.count("No space left on device") == 1 and "TensorBoard stopped: " in printed
    assert [line["step"] for line in steps_of(tmp_path / "m.jsonl")] == [1, 2]


def test_a_wrong_folder_for_tensorboard_is_refused_at_the_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    code, said = job(f"--train-iters 2 --tensorboard-dir {tmp_path}/file/board")
    assert code == 2 and "--tensorboard-dir" in said and "Traceback" not in said


def test_a_torn_line_spoils_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Torn:
        """A disk with room for so many bytes."""

        room, data = 20, b""

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            fits = data[: self.room]
            self.data, self.room = self.data + fits, self.room - len(fits)
            return len(fits)

    lines = JsonLines(tmp_path / "m.jsonl")
    lines._file, disk = Torn(), lines._file  # type: ignore[assignment]
    disk.close()
    for step in (1, 2, 3, 4):
        if step == 3:
            lines._file.room = 10_000  # type: ignore[attr-defined]
        lines.write(EvaluationMetrics("validation", step, 0.5, 64, 0.1))
    torn, *whole = lines._file.data.splitlines()  # type: ignore[attr-defined]
    assert len(torn) == 20 and [json.loads(line)["step"] for line in whole] == [3, 4]
    assert capfd.readouterr().err.count("No space left on device") == 1
