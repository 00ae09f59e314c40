"""launch/slurm/pretrain.sbatch on a real SLURM: asked to exit, requeued, resumed bit-exactly; failures reported,
nothing left running."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs_commands import commands_of, training_of
from tests.lab.cluster import SlurmCluster, missing
from tests.launch.scripts import REPOSITORY

REASON = missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(600)]

SCRIPT = REPOSITORY / "launch" / "slurm" / "pretrain.sbatch"
NODES = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
STEPS = 30
TRAINING = (
    *"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --lr 1e-3".split(),
    *"--micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2 --use-distributed-optimizer".split(),
    *"--make-vocab-size-divisible-by 8 --device cpu --mock-data --log-interval 1 --eval-iters 0".split(),
    *f"--hidden-dropout 0.1 --train-iters {STEPS}".split(),
    *("--save", "run with a space", "--load", "run with a space"),
)
PYTHON = """\
#!/bin/sh
[ "$1 $2 $3" = "-m megapipe pretrain" ] || exec "{python}" "$@"
shift 3
exec "{python}" -m tests.lab.paced "{script}" "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=4) as started:
        yield started


@dataclass
class Job:
    """A submitted job in a separate folder."""

    cluster: SlurmCluster
    folder: Path
    number: str

    @property
    def log(self) -> str:
        path = self.folder / f"megapipe-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def run(self) -> Path:
        return self.folder / "run with a space"

    def wait_for(self, text: str, seconds: float = 250.0) -> None:
        """Wait until the log matches a regular expression."""
        began = time.monotonic()
        while not re.search(text, self.log):
            assert time.monotonic() - began < seconds, f"{text!r} never came\n{self.log[-4000:]}\n{self.cluster.logs()}"
            time.sleep(0.1)

    def ended(self, seconds: float = 400.0) -> str:
        """Wait for the end and return SLURM's state."""
        began = time.monotonic()
        while (state := self.cluster.state(self.number)) in (
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "SIGNALING",
            "CONFIGURING",
            "REQUEUED",
        ):
            assert time.monotonic() - began < seconds, (
                f"{self.cluster.job(self.number)}\n{self.log[-4000:]}\n{self.cluster.logs()}"
            )
            time.sleep(0.2)
        return state

    def ask_to_leave(self) -> None:
        """Send the signal that --signal=B:USR1 sends, at a moment of the test's choosing."""
        self.cluster.run("scancel", "--batch", "--signal=USR1", self.number)

    def losses(self) -> dict[int, float]:
        """Return the losses by step; a step that was logged twice has the same loss in both."""
        found: dict[int, float] = {}
        for line in (self.run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if "loss" in record and record.get("kind", "step") == "step":
                assert found.setdefault(record["step"], record["loss"]) == record["loss"], record
        return found

    def weights(self) -> dict[str, bytes]:
        """Return every file of the last checkpoint that holds tensors."""
        return {path.name: path.read_bytes() for path in sorted((self.run / f"step_{STEPS:08d}").glob("*.safetensors"))}


def submit(
    cluster: SlurmCluster, folder: Path, *options: str, training: tuple[str, ...] = TRAINING, **settings: str
) -> Job:
    folder.mkdir(exist_ok=True)
    python = folder / "python of the test"
    python.write_text(PYTHON.format(python=sys.executable, script=REPOSITORY / "pretrain_gpt.py"))
    python.chmod(0o755)
    settings = {"MEGAPIPE_ROOT": str(REPOSITORY), "PYTHON": str(python)} | settings
    options = ("--time=10", "--signal=B:USR1@30", *NODES, *options)
    number = cluster.run("sbatch", "--parsable", *options, str(SCRIPT), *training, folder=folder, **settings)
    return Job(cluster, folder, number)


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training without a disturbance, started in the other way: one launcher for each node."""
    return submit(cluster, tmp_path_factory.mktemp("undisturbed"), LAUNCHER="launch")


def test_a_job_near_its_time_limit_saves_requeues_and_ends_like_an_undisturbed_one(
    cluster: SlurmCluster, undisturbed: Job, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, PACE="0.25")
    job.wait_for("step  6/30")
    job.ask_to_leave()
    assert job.ended() == "COMPLETED", job.log
    assert undisturbed.ended() == "COMPLETED", undisturbed.log
    said = re.search(r"asked to exit after step (\d+) of 30: requeueing the job", job.log)
    assert said is not None and 6 <= int(said[1]) < STEPS, job.log
    assert job.log.count("continuing after step " + said[1]) == 1
    assert "ended after step 30: all 30 steps done" in job.log
    assert job.losses() == undisturbed.losses() and len(job.losses()) == STEPS
    assert job.weights() == undisturbed.weights() and len(job.weights()) == 4
    assert cluster.left_over() == []


@pytest.mark.slow
def test_the_message_of_the_rank_that_failed_first_comes_first(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, REQUEUE="signal", FAULT="3:2")
    assert job.ended() == "FAILED", job.log
    report = job.log[job.log.index("failed first") :]
    assert re.match(r"failed first, with exit code 1; the last lines of .*/attempt-0/rank-3.log:\n", report), report
    assert re.search(r"rank 3 on n[24] failed first", job.log)
    assert report.index("RuntimeError: planted in step 2") < report.index("in order: rank 3 (code 1), rank ")
    assert "not requeued after a failure: REQUEUE=signal" in report
    assert cluster.job(job.number)["ExitCode"] == "1:0"


@pytest.mark.slow
def test_a_failed_job_resumes_from_its_checkpoint(cluster: SlurmCluster, undisturbed: Job, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, training=(*TRAINING, "--save-interval", "4"), FAULT="3:10")
    assert job.ended() == "COMPLETED", job.log
    report = job.log[job.log.index("failed first") :]
    assert "RuntimeError: planted in step 10" in report
    assert "failed after step 8 of 30: requeueing the job" in report
    assert undisturbed.ended() == "COMPLETED", undisturbed.log
    assert job.losses() == undisturbed.losses()
    assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_the_time_limit_itself_sends_the_signal(cluster: SlurmCluster, undisturbed: Job, tmp_path: Path) -> None:
    assert undisturbed.ended() == "COMPLETED", undisturbed.log
    # SLURM checks time limits every 30 seconds: the signal comes after 60 to 90 seconds, with some of the 30 steps done
    job = submit(cluster, tmp_path, "--time=3", "--signal=B:USR1@90", PACE="5")
    job.wait_for("the time limit is near", 200)
    assert job.ended() == "COMPLETED", job.log
    assert re.search(r"asked to exit after step (\d+) of 30: requeueing the job", job.log), job.log
    assert job.weights() == undisturbed.weights()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "launch"])
def test_a_signal_that_comes_before_python_waits_for_it(cluster: SlurmCluster, launcher: str, tmp_path: Path) -> None:
    # the signal is repeated every 5 seconds: one of the repetitions falls into the 30 steps
    job = submit(cluster, tmp_path, LAUNCHER=launcher, REQUEUE="never", PACE="0.5")
    job.wait_for("step 0 of 30")
    job.ask_to_leave()
    assert job.ended() == "COMPLETED", job.log
    said = re.search(r"ended after step (\d+): SIGUSR1 received", job.log)
    assert said is not None and int(said[1]) < STEPS, job.log
    if int(said[1]):  # there is nothing to save before the first step
        assert (job.run / f"step_{int(said[1]):08d}" / "manifest.json").exists()
    assert "not requeued: REQUEUE=never" in job.log


def test_a_cancelled_job_leaves_no_process_and_is_not_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, PACE="0.2")
    job.wait_for("step  3/30")
    cluster.run("scancel", job.number)
    assert job.ended() == "CANCELLED"
    began = time.monotonic()
    while cluster.left_over():
        assert time.monotonic() - began < 100, "processes of the job are still there"
        time.sleep(0.1)
    assert "ended after step" in job.log and "SIGTERM received" in job.log and "requeueing the job" not in job.log, (
        job.log
    )


SHOWN = list(
    dict.fromkeys(
        command.text
        for page in ("README.md", "docs/launch.md")
        for command in commands_of(REPOSITORY / page)
        if re.search(r"sbatch .*pretrain\.sbatch", command.text) and "_IMAGE=" not in command.text
    )
)
PRINTS = """\
#!/bin/sh
[ "$1 $2 $3" = "-m megapipe pretrain" ] || exec "{python}" "$@"
shift 3
echo "rank $SLURM_PROCID of $SLURM_NTASKS: $*"
"""


def test_the_shown_commands_are_jobs_that_start_every_rank(tmp_path: Path) -> None:
    """As shown, from the repository, on nodes of the size shown: only the ranks print their arguments and end."""
    for name in ("configs", "launch", "megapipe", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    python = tmp_path / "python of the test"
    python.write_text(PRINTS.format(python=sys.executable))
    python.chmod(0o755)
    assert len(SHOWN) == 1
    with SlurmCluster(tmp_path / "cluster", num_nodes=16, cpus=64, gpus=8) as large:
        for text in SHOWN:
            said = large.run("bash", "-c", text, folder=tmp_path, PYTHON=str(python))
            number = re.fullmatch(r"Submitted batch job (\d+)", said)[1]
            state = Job(large, tmp_path, number).ended()
            (log,) = tmp_path.glob(f"*-{number}.log")
            assert state == "COMPLETED" and "step 0 of 20000" in log.read_text(), log.read_text()
            wanted = training_of(text)
            ranks = sorted(path.read_text() for path in (tmp_path / "logs").glob(f"*-{number}/attempt-0/rank-*.log"))
            count = wanted.num_ranks
            assert ranks == sorted(f"rank {i} of {count}: {' '.join(wanted.flags)}\n" for i in range(count))


def test_an_impossible_job_is_reported_before_any_rank_starts(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, training=(*TRAINING, "--tensor-model-parallel-size", "3"))
    assert job.ended() == "FAILED"
    assert "error: --tensor-model-parallel-size 3 does not divide" in job.log and "attempt" not in job.log, job.log
    assert cluster.job(job.number)["ExitCode"] == "2:0"
