"""Restarted jobs: the checkpoint that they resume from, and when a restart is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.train.step import TrainStep
from tests.train.jobs import job


class Crash(BaseException):
    """An exception that the program does not expect."""


def crash_in_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, taken = TrainStep.run, []

    def one_step(self: TrainStep, *arguments: object) -> bool:
        taken.append(1)
        if len(taken) == number:
            raise Crash
        return launch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainStep, "run", one_step)


def crashing_job(flags: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        crash_in_step(number, patch)
        with pytest.raises(Crash):
            job(flags)


def flip_a_byte(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


def test_a_third_start_from_one_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--train-iters 6 --save {tmp_path}/c --save-interval 2"
    for restarts, step in enumerate((4, 1, 1)):  # each run crashes in its step number ...
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        crashing_job(flags, step, monkeypatch)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    code, said = job(flags)
    assert code == 3, said
    assert "start number 3 from step 2" in said
    assert job(flags)[0] == 3, "it stays so"
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    code, said = job(f"{flags} --load {tmp_path}/c")  # started by hand, without a launcher
    assert code == 0 and "continuing after step 2" in said
    assert not (tmp_path / "c" / "starts.json").exists()


def test_a_restart_resumes_its_own_checkpoint_whatever_the_first_start_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job(f"--train-iters 2 --save {tmp_path}/base")[0] == 0
    flags = (
        f"--train-iters 5 --load {tmp_path}/base --finetune --save {tmp_path}/c --save-interval 3 "
        f"--lr-decay-style constant"
    )
    crashing_job(flags, 5, monkeypatch)
    code, said = job(flags)
    assert code == 1 and "use --load to resume from the newest" in said, (
        "not started by a launcher: never over what is there"
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, said = job(flags)
    assert code == 0
    assert f"a restart: continuing from --save {tmp_path}/c" in said and "continuing after step 3" in said


def test_a_restart_is_not_refused_what_its_first_start_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job(f"--train-iters 2 --save {tmp_path} --lr-decay-style constant")[0] == 0
    flags = f"--train-iters 3 --load {tmp_path} --save {tmp_path} --lr-decay-style constant --adam-beta2 0.9"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    crashing_job(f"{flags} --no-load-optim", 1, monkeypatch)  # before it has saved anything itself
    code, said = job(f"{flags} --no-load-optim")
    assert code == 0 and "continuing from --save" in said and "--adam-beta2: 0.999 in the checkpoint, 0.9" in said


def test_a_folder_of_damaged_checkpoints_is_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--train-iters 2 --save {tmp_path}/c"
    assert job(flags)[0] == 0
    flip_a_byte(tmp_path / "c" / "step_00000002" / "rank_00000.safetensors")
    code, said = job(f"{flags} --load {tmp_path}/c")
    assert code == 1 and "holds no complete checkpoint" in said and "is damaged" in said
    (tmp_path / "c" / "step_00000002" / "manifest.json").unlink()
    assert job(f"{flags} --load {tmp_path}/c")[0] == 1
    code, said = job(flags)
    assert code == 1 and "holds only damaged checkpoints" in said
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert job(flags)[0] == 1
