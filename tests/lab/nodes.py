"""Machines in network namespaces: own addresses, host name, process ids and shared memory, joined by a bridge on this
one.

    with Nodes(2) as nodes:
        nodes.run(1, ["hostname"])
        nodes.slow_down(0, "20mbit")     what leaves machine 0
        nodes.cut(1)                     all packets are dropped silently
        nodes.kill(1)                    every process of it, at once

Needs root and iproute2; `why_not()` says what is missing. The files of a disk are shared, as on a cluster.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from tests.launch.scripts import REPOSITORY, Command

LIVES = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; hostname "$1"; touch "$2"; exec sleep 1000000'
PORT = 29400
_numbers = itertools.count()


@cache
def why_not() -> str:
    """Return why such machines cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2 util-linux)"
    try:
        with Nodes(1):
            return ""
    except (RuntimeError, OSError) as error:
        return f"no network namespaces here: {str(error).splitlines()[-1]}"


class Nodes:
    """Machines named node-a, node-b, ...; gone, with everything that runs on them, when the context is left."""

    def __init__(self, count: int) -> None:
        self.count = count
        number = os.getpid() % 60000 * 16 + next(_numbers) % 16
        self._prefix = f"mp{number:x}"  # interfaces have 15 letters at most
        self._network = f"10.{77 + number % 16}.{number // 16 % 250}"
        self._lives: list[subprocess.Popen[bytes]] = []
        self._inits: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(len(self._lives)):
            self.kill(node)
        for node in range(self.count):
            _quietly("ip", "link", "del", self._outside(node))
            _quietly("ip", "netns", "del", self._space(node))
        _quietly("ip", "link", "del", self._bridge)

    def name(self, node: int) -> str:
        return f"node-{chr(ord('a') + node)}"

    def address(self, node: int) -> str:
        return f"{self._network}.{node + 1}"

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on a machine."""
        return ["nsenter", "--target", str(self._inits[node]), "--net", "--uts", "--mount", "--pid", "--", *command]

    def run(self, node: int, command: Sequence[str]) -> str:
        """Run a command and return its output; it has to succeed."""
        return subprocess.run(
            self.inside(node, command), check=True, capture_output=True, text=True, timeout=60, cwd=REPOSITORY
        ).stdout

    def launch(self, node: int, folder: Path, ranks: int, *words: str, flags: Sequence[str] = ()) -> Command:
        """Start `megapipe launch` on one of the machines. words: the script, or -m and a module, with their flags.
        flags: of the launcher."""
        meeting = [
            "--nnodes",
            str(self.count),
            "--node-rank",
            str(node),
            "--master-addr",
            self.address(0),
            "--master-port",
            str(PORT),
        ]
        command = [
            sys.executable,
            "-m",
            "megapipe",
            "launch",
            *(flags or meeting),
            "--nproc-per-node",
            str(ranks),
            *words,
        ]
        own = folder / self.name(node)
        own.mkdir(exist_ok=True)
        return Command(self.inside(node, command), own)

    def slow_down(self, node: int, rate: str) -> None:
        """Limit the rate at which a machine sends. rate: in tc's format, "20mbit"."""
        _run(
            "ip",
            "netns",
            "exec",
            self._space(node),
            "tc",
            *f"qdisc add dev eth0 root tbf rate {rate} burst 32kb latency 400ms".split(),
        )

    def free(self, node: int) -> None:
        """Undo `slow_down`."""
        _run("ip", "netns", "exec", self._space(node), "tc", *["qdisc", "del", "dev", "eth0", "root"])

    def cut(self, node: int) -> None:
        """Drop all packets to and from a machine from now on."""
        _run("ip", "link", "set", self._outside(node), "nomaster")

    def join(self, node: int) -> None:
        """Undo `cut`."""
        _run("ip", "link", "set", self._outside(node), "master", self._bridge)

    def kill(self, node: int) -> None:
        """Kill all processes of a machine, as in a power failure; its addresses do not answer any more."""
        _quietly("ip", "link", "set", self._outside(node), "nomaster")
        with suppress(ProcessLookupError, IndexError):
            os.kill(self._inits[node], signal.SIGKILL)  # the kernel kills all others in its process namespace
        self._lives[node].kill()
        self._lives[node].wait()

    def restart(self, node: int) -> None:
        """Bring a killed machine back, with nothing running on it."""
        self.join(node)
        self._live(node)

    def _up(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        for node in range(self.count):
            space, outside = self._space(node), self._outside(node)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outside, "master", self._bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", space, "link", "set", device, "up")
            self._live(node)

    def _live(self, node: int) -> None:
        """Start the first process of a machine, whose end is the machine's."""
        mark = Path(f"/tmp/{self._prefix}{node}.lives")
        command = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [
            "ip",
            "netns",
            "exec",
            self._space(node),
            *command,
            "sh",
            "-c",
            LIVES,
            "sh",
            self.name(node),
            str(mark),
        ]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._lives[node : node + 1] = [process]
        until = time.monotonic() + 10
        while not mark.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    (process.stderr.read() if process.stderr and process.poll() is not None else b"").decode()
                    or "no start"
                )
            time.sleep(0.01)
        mark.unlink()
        self._inits[node : node + 1] = [_only_child(process.pid)]

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}br"

    def _outside(self, node: int) -> str:
        """Return the outer end of a machine's cable."""
        return f"{self._prefix}h{node}"

    def _space(self, node: int) -> str:
        return f"{self._prefix}n{node}"


def _only_child(process_id: int) -> int:
    """Return the only child of unshare: the first process of the new namespace."""
    return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()[0])


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _quietly(*words: str) -> None:
    with suppress(RuntimeError, OSError, subprocess.TimeoutExpired):
        _run(*words)
