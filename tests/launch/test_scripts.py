"""launch/torchrun.sh and the SLURM job script, with fake python, srun and SLURM commands: arguments, settings,
decisions."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY
from tests.tables import rows

LAUNCH = REPOSITORY / "launch"
SCRIPTS = REPOSITORY / "megapipe" / "extras" / "launch"
JOBS = rows(Path(__file__).with_name("jobs.tsv"))
HARMFUL = ("a b", "$(touch pwned)", "`touch pwned`", "x;touch pwned", "it's", '"', "*", "")

STAND_INS = {
    "python": """\
[ "$3" = progress ] || { printf '%s\\0' "$@" >"$STUB/python.words"; exit 0; }
read -r step <"$STUB/progress"
echo "step $step of 10, somewhere"
""",
    "srun": """\
case " $* " in *" --overlap "*) while [ "$1" != python3 ]; do shift; done; shift; exec "$STUB/python3" "$@" ;; esac
printf '%s\\0' "$@" >"$STUB/srun.words"
env >"$STUB/environment"
for task in $(seq 0 $((STUB_TASKS - 1))); do : >"$MEGAPIPE_LOGS/started-$task"; done
echo "$STUB_AFTER" >"$STUB/progress"
if [ -n "$STUB_ASKED" ]; then
    kill -USR1 "$(ps -o ppid= -p "$PPID")"
    while [ ! -e "$STUB/scancel.words" ]; do :; done
fi
exit "$STUB_CODE"
""",
    "scontrol": """\
case $1-$2 in
    show-hostnames) printf '%s\\n' n1 n2 ;;
    show-node) echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.${3#n} State=IDLE" ;;
    requeue-*) echo "$2" >"$STUB/requeued" ;;
esac
""",
    "scancel": """echo "$@" >"$STUB/scancel.words"\n""",
    "sleep": """exec /bin/sleep 0.02\n""",
    "nvidia-smi": """exit 1\n""",
}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    folder: Path

    def words(self, program: str) -> list[str]:
        return (self.folder / f"{program}.words").read_text().split("\0")[:-1]

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


def run(script: str, *arguments: str, folder: Path, **settings: str) -> Ended:
    """Run a script of launch/, or by its path, with the fake commands and no other settings."""
    stub = folder / "stand-ins"
    stub.mkdir()
    for name, text in STAND_INS.items():
        (stub / name).write_text("#!/bin/bash\n" + text)
        (stub / name).chmod(0o755)
    shutil.copy(stub / "python", stub / "python3")
    (stub / "progress").write_text(settings.pop("BEFORE", "0") + "\n")
    environment = {"PATH": f"{stub}:{os.environ['PATH']}", "STUB": str(stub), "PYTHON": str(stub / "python")} | settings
    environment = {name: value for name, value in environment.items() if value != "unset"}
    ended = subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert not (folder / "pwned").exists() and not (REPOSITORY / "pwned").exists()
    return Ended(ended.returncode, ended.stdout, stub)


def submit(folder: Path, *arguments: str, script: str = "slurm/pretrain.sbatch", **settings: str) -> Ended:
    slurm = {
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "LOG_FOLDER": str(folder / "logs"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "megapipe",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_CPUS_PER_TASK": "3",
    }
    stub = {"STUB_TASKS": "8", "STUB_AFTER": "5", "STUB_CODE": "0", "STUB_ASKED": ""}
    return run(script, *arguments, folder=folder, **(slurm | stub | settings))


def test_arguments_reach_every_rank_unchanged(tmp_path: Path) -> None:
    ended = submit(tmp_path, *HARMFUL)
    words = ended.words("srun")
    assert ended.code == 0 and tuple(words[-len(HARMFUL) :]) == HARMFUL
    at = words.index(str(SCRIPTS / "slurm" / "rank.sh"))
    assert words[at + 1 : at + 5] == [str(ended.folder / "python"), "-m", "megapipe", "pretrain"]
    assert {
        "--ntasks-per-node=4",
        "--cpus-per-task=3",
        "--gpus-per-node=4",
        "--distribution=block",
        "--kill-on-bad-exit=1",
    } <= set(words[:at])


def test_each_setting_has_a_default_that_the_environment_overrides(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    found = (submit(tmp_path / "one").folder / "environment").read_text().splitlines()
    assert {
        "OMP_NUM_THREADS=3",
        "NCCL_DEBUG=WARN",
        "NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr,br-,cni",
        "MASTER_ADDR=10.0.0.1",
    } <= set(found)
    assert not any(line.startswith("GLOO_SOCKET_IFNAME") for line in found)
    given = {
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "INFO",
        "INTERFACE": "ib0",
        "GLOO_SOCKET_IFNAME": "eth1",
        "MASTER_ADDR": "first",
    }
    found = (submit(tmp_path / "two", **given).folder / "environment").read_text().splitlines()
    assert {
        "OMP_NUM_THREADS=1",
        "NCCL_DEBUG=INFO",
        "NCCL_SOCKET_IFNAME=ib0",
        "GLOO_SOCKET_IFNAME=eth1",
        "MASTER_ADDR=first",
    } <= set(found)


def test_one_launcher_per_node_gets_the_nodes_and_all_their_cores(tmp_path: Path) -> None:
    ended = submit(tmp_path, "--lr", "1", LAUNCHER="launch", STUB_TASKS="2")
    words = ended.words("srun")
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12"} <= set(words)
    assert words[-4:] == ["bash", str(SCRIPTS / "torchrun.sh"), "--lr", "1"]
    assert {"HOSTS=n1 n2", "NPROC_PER_NODE=4"} <= set((ended.folder / "environment").read_text().splitlines())


def test_containers_are_options_of_srun_or_a_prefix_of_the_rank(tmp_path: Path) -> None:
    for name in ("pyxis", "apptainer"):
        (tmp_path / name).mkdir()
    mounts = f"{REPOSITORY}:{REPOSITORY},/a b:/c"
    pyxis = submit(tmp_path / "pyxis", CONTAINER_IMAGE="my image", CONTAINER_MOUNTS="/a b:/c", PYTHON="unset")
    logs = tmp_path / "pyxis" / "logs"
    words = pyxis.words("srun")
    assert {"--container-image=my image", f"--container-mounts={mounts},{logs}:{logs}"} <= set(words), pyxis.out
    assert words[words.index(str(SCRIPTS / "slurm" / "rank.sh")) + 1] == "python3"
    STAND_INS["apptainer"] = 'while [ "$1" != python3 ]; do shift; done; exec "$@"\n'
    apptainer = submit(tmp_path / "apptainer", APPTAINER_IMAGE="my.sif", CONTAINER_MOUNTS="/a b:/c", PYTHON="unset")
    del STAND_INS["apptainer"]
    words = apptainer.words("srun")
    at = words.index(str(SCRIPTS / "slurm" / "rank.sh"))
    assert words[at + 1 : at + 8] == ["apptainer", "exec", "--nv", "--bind", mounts, "my.sif", "python3"], apptainer.out


@pytest.mark.parametrize(("words", "requeued", "says"), [row[1:] for row in JOBS], ids=[row[0] for row in JOBS])
def test_a_job_is_requeued_only_if_it_made_progress(words: str, requeued: str, says: str, tmp_path: Path) -> None:
    settings = dict(word.split("=") for word in words.split())
    ended = submit(tmp_path, **settings)
    assert (ended.requeued, ended.code) == (requeued == "yes", int(settings.get("STUB_CODE", "0"))), ended.out
    assert says in ended.out
    assert (ended.folder / "scancel.words").exists() == ("STUB_ASKED" in settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun is neither srun nor launch"),
        ({"REQUEUE": "yes"}, "REQUEUE=yes must be progress, signal or never"),
        ({"CONTAINER_IMAGE": "a", "APPTAINER_IMAGE": "b"}, "are both set; choose one"),
        ({"SLURM_NTASKS_PER_NODE": "unset"}, "--ntasks-per-node is not set"),
        ({"MEGAPIPE_ROOT": "/nowhere"}, "/nowhere does not hold the package megapipe"),
    ],
    ids=["launcher", "requeue", "images", "tasks", "root"],
)
def test_wrong_settings_of_a_job_are_refused(settings: dict[str, str], says: str, tmp_path: Path) -> None:
    ended = submit(tmp_path, **settings)
    assert ended.code == 2 and says in ended.out


def test_torchrun_sh_gives_each_node_its_rank(tmp_path: Path) -> None:
    ended = run(
        "torchrun.sh",
        *HARMFUL,
        folder=tmp_path,
        HOSTS=f"first {socket.gethostname()}",
        NPROC_PER_NODE="3",
        LOG_DIR="lo gs",
    )
    assert ended.code == 0, ended.out
    expected = [
        "-m",
        "megapipe",
        "launch",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "first",
        "--master-port",
        "29500",
    ]
    expected += [
        "--nproc-per-node",
        "3",
        "--log-dir",
        "lo gs/node-1",
        "--redirects",
        "1:3,2:3",
        *("--module", "megapipe", "pretrain"),
    ]
    assert ended.words("python") == [*expected, *HARMFUL]


def test_torchrun_sh_without_slurm_is_one_node(tmp_path: Path) -> None:
    words = run("torchrun.sh", folder=tmp_path, NPROC_PER_NODE="1", AGENT="torchrun").words("python")
    assert words[:6] == ["-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0"]


def test_elastic_nodes_are_numbered_as_c10d_numbers_them(tmp_path: Path) -> None:
    settings = {"NPROC_PER_NODE": "1", "ELASTIC": "1:2", "NODE_RANK": "1"}
    ended = run("torchrun.sh", folder=tmp_path, HOSTS="n10 n2", **settings)
    words = ended.words("python")
    for flag, value in (
        ("--nnodes", "1:2"),
        ("--rdzv-endpoint", "n10:29500"),
        ("--local-addr", "n2"),
        ("--rdzv-conf", "is_host=0"),
    ):
        assert words[words.index(flag) + 1] == value
    (tmp_path / "again").mkdir()
    refused = run("torchrun.sh", folder=tmp_path / "again", HOSTS="n2 n10", **settings)
    assert refused.code == 2 and "c10d numbers nodes by their names as text, which gives n10 n2" in refused.out


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"HOSTS": "one two", "NPROC_PER_NODE": "1"}, "none of HOSTS (one two) is a name or address of this machine"),
        ({"HOSTS": "one two", "NODE_RANK": "2", "NPROC_PER_NODE": "1"}, "NODE_RANK=2, but HOSTS lists 2: 0 .. 1"),
        ({"NODE_RANK": "x"}, "NODE_RANK=x is not a non-negative integer"),
        ({}, "shows no GPUs; set NPROC_PER_NODE"),
        ({"AGENT": "mpirun", "NPROC_PER_NODE": "1"}, "AGENT=mpirun is neither megapipe nor torchrun"),
    ],
    ids=["unknown host", "node rank", "no number", "no GPUs", "agent"],
)
def test_wrong_settings_of_torchrun_sh_are_refused(settings: dict[str, str], says: str, tmp_path: Path) -> None:
    ended = run("torchrun.sh", folder=tmp_path, **settings)
    assert ended.code == 2 and says in ended.out
