"""The wheel: it carries the commands and configurations, and works outside the repository."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.extras.streams import device
from tests.launch.scripts import REPOSITORY
from tests.launch.test_scripts import submit


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what it is made of, and unpack it into a folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("megapipe", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        subprocess.run(["cp", "-r", "--no-dereference", REPOSITORY / name, source], check=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", target / "site", wheel], check=True, capture_output=True)
    return target / "site"


def run(installed: Path, folder: Path, *words: str) -> str:
    """Run a command of the installed package in a folder, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "megapipe", *words]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, f"{words}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    return ended.stdout


def test_the_wheel_trains_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = [sys.executable, "-P", "-c", "import megapipe; print(megapipe.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(installed))
    assert "(commit" not in run(installed, tmp_path, "--version")
    copied = sorted(path.name for path in (REPOSITORY / "configs").glob("*.yaml"))
    listed = run(installed, tmp_path, "configs")
    assert all(name in listed for name in copied)
    run(installed, tmp_path, "configs", "--copy", "configs")
    assert sorted(path.name for path in (tmp_path / "configs").iterdir()) == copied
    plan = ["--world-size", "16384", "--ranks-per-node", "8", "--config", "configs/llama3_405b.yaml"]
    assert "tp 8 x pp 16 x 8 chunks x dp 128" in run(installed, tmp_path, "plan", *plan)
    model = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data"
    job = f"{model} --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --log-interval 1 --device cpu"
    words = ["--nproc-per-node", "2", "pretrain", *job.split(), "--pipeline-model-parallel-size", "2"]
    assert "step 2/2 |" in run(installed, tmp_path, "launch", *words, "--save", "run", "--eval-iters", "0")
    assert (tmp_path / "run" / "step_00000002").is_dir()
    run(installed, tmp_path, "report", "run")
    if device.missing() is None:
        assert run(
            installed, tmp_path, "verify", "--streams", "--world-size", "1", *job.replace("--device cpu", "").split()
        ).endswith("no race\n")


@pytest.mark.parametrize("launcher", ["srun", "launch"])
def test_the_printed_job_runs_outside_the_repository(launcher: str, installed: Path, tmp_path: Path) -> None:
    """The command of sbatch names files of the wheel, and its script starts the ranks without a clone."""
    training = ["--config", "quickstart", "--vocab-size", "257", "--mock-data"]
    words = ["--dry-run", "--slurm", "--nnodes", "2", "--nproc-per-node", "4", "pretrain", *training]
    shown = next(line for line in run(installed, tmp_path, "launch", *words).splitlines() if "sbatch" in line)
    root, sbatch, *options, script = shlex.split(shown)[: -len(training)]
    assert (root, sbatch) == (f"MEGAPIPE_ROOT={installed}", "sbatch") and "--nodes=2" in options
    tasks = {"srun": "8", "launch": "2"}[launcher]
    settings = {"MEGAPIPE_ROOT": str(installed), "LAUNCHER": launcher, "STUB_TASKS": tasks}
    ended = submit(tmp_path, *training, script=script, SLURM_SUBMIT_DIR=str(tmp_path), **settings)
    assert ended.code == 0, ended.out
    files = [Path(word) for word in ended.words("srun") if word.endswith(".sh")]
    assert files and all(path.is_file() and path.is_relative_to(installed) for path in files)
    assert ended.words("srun")[-len(training) :] == training
