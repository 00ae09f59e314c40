"""The ports of a job on one machine are on the loopback device only, with and without the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.test_bootstrap import free_port
from tests.launch.scripts import environment, launch

LISTENING = "0A"  # in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
MEETS = """
import time
from megapipe.comm.bootstrap import start
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import build_process_groups
from megapipe.environment import read_environment
from megapipe.topology import Topology
world = start(read_environment(), device="cpu", facts_of=lambda _: {})
barrier(build_process_groups(Topology(dp=2), world.global_rank, world.backend, 60.0).dp)
import sys
sys.stdout.write("met\\n")
sys.stdout.flush()
time.sleep(100)
"""


def listening(process_id: int) -> list[str]:
    """Return the addresses on which a process listens, in the kernel's format."""
    held = set()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            held.add(os.readlink(link))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in held:
                found.append(fields[1].partition(":")[0])
    return found


def test_launcher_and_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    with launch(tmp_path, 2, script=script) as command:
        command.wait_for("met\nmet")
        ranks = command.ranks()
        assert len(ranks) == 2
        assert listening(command.process.pid), "the launcher keeps the store"
        assert all(listening(rank) for rank in ranks), "gloo listens"
        assert {address for process in (command.process.pid, *ranks) for address in listening(process)} <= LOOPBACK


SRUN = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "here",
    "SLURM_JOB_ID": str(os.getpid() % 20000),
}
BY_HAND = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}  # torchrun's variables, without its agent


@pytest.mark.parametrize(
    ("step", "of_rank"),
    [
        pytest.param(SRUN, ("SLURM_PROCID", "SLURM_LOCALID"), id="as srun starts them"),
        pytest.param(BY_HAND, ("RANK", "LOCAL_RANK"), id="with the variables of torchrun"),
    ],
)
def test_ranks_without_a_launcher_listen_on_loopback_only(step: dict[str, str], of_rank: tuple[str, ...]) -> None:
    """Start ranks on one node."""
    variables = {**environment(), **step}
    if "WORLD_SIZE" in step:
        variables["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEETS],
            env={**variables, **dict.fromkeys(of_rank, rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "met\n"
            assert listening(rank.pid)
        assert {address for rank in ranks for address in listening(rank.pid)} <= LOOPBACK
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
