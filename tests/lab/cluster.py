"""A real SLURM of a few nodes on this one machine: own key, own ports, own folder; gone when left.

    with SlurmCluster(folder, num_nodes=2) as cluster:
        cluster.run("sbatch", "--parsable", "job.sh")

To try things by hand, as root, with Debian's slurm-wlm, slurmctld, slurmd and munge installed:

    python -m tests.lab.cluster FOLDER           brings it up, prints what to export, takes it down at Ctrl-C

Nodes are called n1, n2, ...; each has 4 CPUs and 2 GPUs, which are made up, and all share this machine's. No cgroups
and no systemd are needed. A requeued job waits for the life of a credential, 120 seconds unless slurm.conf says
otherwise; here it says 5, SLURM's least.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "scancel", "sinfo", "squeue")
CPUS, GPUS = 4, 2  # of a node
SRUN_PORTS = 40
UP_SECONDS, DOWN_SECONDS = 20.0, 5.0
DEBIAN_PLUGINS = "/usr/lib/{machine}-linux-gnu/slurm-wlm"

CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text()


def missing() -> str | None:
    """Return why SLURM cannot run here, None if it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if lacking:
        return (
            f"SLURM is not installed ({', '.join(lacking)} not found); launch/test.sh --lab installs it on Debian "
            "and Ubuntu, or by hand: "
            "apt-get install --no-install-recommends slurm-wlm slurmctld slurmd munge"
        )
    if os.geteuid() != 0:
        return "bringing up SLURM's daemons needs root"
    return None


class SlurmCluster:
    """SLURM's daemons under `folder`; every process that they started is gone after the block."""

    def __init__(self, folder: Path, num_nodes: int = 2, cpus: int = CPUS, gpus: int = GPUS) -> None:
        self._root, self._num_nodes = folder.resolve(), num_nodes
        self._cpus, self._gpus = cpus, gpus  # of a node; both are only declared
        self._daemons: list[subprocess.Popen[bytes]] = []
        # a job has a socket here, whose path may have 107 characters; with a longer one slurmd leaves the job pending
        self._spool = Path(tempfile.mkdtemp(prefix="slurmd-"))

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which SLURM's commands find this cluster only, without variables of an outer
        job."""
        outer = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        }
        return outer | {"SLURM_CONF": str(self._root / "slurm.conf"), "PATH": _search_path()}

    def __enter__(self) -> Self:
        for name in ("munge", "state"):
            (self._root / name).mkdir(parents=True)
        self._write_configuration()
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-f", str(self._root / "slurm.conf"))
            for node in range(1, self._num_nodes + 1):
                (self._spool / f"n{node}").mkdir()
                self._start("slurmd", "-D", "-N", f"n{node}", "-f", str(self._root / "slurm.conf"))
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            jobs = subprocess.run(
                ["squeue", "--noheader", "--format=%A"], env=self.environment, capture_output=True, text=True
            )
            if jobs.stdout.split():
                subprocess.run(["scancel", *jobs.stdout.split()], env=self.environment, capture_output=True)
                self._wait_for(
                    lambda: not self.run("squeue", "--noheader"), "the end of all jobs", 2 * DOWN_SECONDS, must=False
                )
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(DOWN_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for process_id in self.left_over():
            os.kill(process_id, signal.SIGKILL)
        shutil.rmtree(self._spool, ignore_errors=True)

    def run(self, *words: str, folder: Path | None = None, **settings: str) -> str:
        """Run one of SLURM's commands and return its stripped output. Raises AssertionError with the output if it
        fails."""
        environment = self.environment | settings
        ended = subprocess.run(
            words, cwd=folder or self._root, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr.strip() or ended.stdout.strip()}"
        return ended.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return scontrol's fields of a job."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return {key: value for key, is_there, value in (word.partition("=") for word in words) if is_there}

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]

    def left_over(self) -> list[int]:
        """Return the processes of jobs of this cluster, found by their environment variables."""
        mark = f"SLURM_CONF={self._root / 'slurm.conf'}".encode()
        found = ((process_id, _environment_of(process_id)) for process_id in _all_processes())
        return [
            process_id
            for process_id, variables in found
            if mark in variables and any(v.startswith(b"SLURM_JOB_ID=") for v in variables)
        ]

    def logs(self) -> str:
        """Return the last lines of the daemons' logs, for a test that fails."""
        parts = (
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self._root.glob("*.log"), key=lambda path: "slurmctld" not in path.name)
        )
        return "\n".join(parts)

    def _write_configuration(self) -> None:
        first = _free_block(2 + self._num_nodes + SRUN_PORTS)
        plugins = Path(DEBIAN_PLUGINS.format(machine=os.uname().machine))
        text = CONFIGURATION.format(
            root=self._root,
            spool=self._spool,
            host=socket.gethostname().partition(".")[0],
            user="root",
            controller_port=first,
            first_node_port=first + 1,
            last_node_port=first + self._num_nodes,
            first_srun_port=first + self._num_nodes + 1,
            last_srun_port=first + self._num_nodes + SRUN_PORTS,
            first_job=random.SystemRandom().randrange(
                1000, 60_000_000
            ),  # the ranks' port depends on it: two clusters must not use the same
            num_nodes=self._num_nodes,
            # ranks can only be bound to cores that this machine has
            task_plugin="task/affinity" if self._cpus <= CPUS else "task/none",
            node=f"CPUs={self._cpus} Sockets=1 CoresPerSocket={self._cpus} ThreadsPerCore=1 Gres=gpu:{self._gpus} "
            "State=UNKNOWN",
            plugins=f"PluginDir={plugins}" if plugins.is_dir() else "",
        )
        (self._root / "slurm.conf").write_text(text)
        devices = [self._root / f"gpu{index}" for index in range(self._gpus)]  # any files
        for device in devices:
            device.touch()
        (self._root / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))

    def _start_munge(self) -> None:
        folder = self._root / "munge"
        folder.chmod(0o755)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        words = [
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/socket",
            f"--pid-file={folder}/pid",
        ]
        self._start("munged", *words, f"--log-file={folder}/log", f"--seed-file={folder}/seed")
        self._wait_for((folder / "socket").exists, "munged")

    def _start(self, program: str, *words: str) -> None:
        with (self._root / f"{program}-{len(self._daemons)}.out.log").open("wb") as out:
            daemon = subprocess.Popen(
                [program, *words], env=self.environment, stdout=out, stderr=out, start_new_session=True
            )
        self._daemons.append(daemon)

    def _wait_until_idle(self) -> None:
        def is_idle() -> bool:
            shown = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%T"], env=self.environment, capture_output=True, text=True
            )
            return shown.stdout.split() == ["idle"] * self._num_nodes

        self._wait_for(is_idle, "idle nodes")

    def _wait_for(self, is_so: object, what: str, seconds: float = UP_SECONDS, must: bool = True) -> None:
        assert callable(is_so)
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds:
                if must:
                    raise AssertionError(f"waited {seconds:g} s in vain for {what}\n{self.logs()}")
                return
            time.sleep(0.1)


def _search_path() -> str:
    """Return a path with the daemons, which a user's PATH does not contain."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _free_block(size: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(100):
        first = random.SystemRandom().randrange(41000, 60000)
        if all(_is_free(port) for port in range(first, first + size)):
            return first
    raise AssertionError(f"no {size} consecutive free ports were found")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _all_processes() -> Iterable[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _environment_of(process_id: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    reason = missing()
    if reason is not None or len(sys.argv) != 2:
        sys.exit(reason or "python -m tests.lab.cluster FOLDER (a new one)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), SlurmCluster(Path(sys.argv[1])) as cluster:
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        print(cluster.run("sinfo"), flush=True)
        signal.pause()
