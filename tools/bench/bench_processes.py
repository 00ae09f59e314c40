"""What the benchmarks have in common: their command line, and processes that answer orders."""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.environment import Environment
from megapipe.errors import MegapipeError
from megapipe.topology import Topology

if TYPE_CHECKING:
    from megapipe.comm.groups import ProcessGroups


class BenchError(Exception):
    """A run that cannot give figures."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the description as it is written, and takes no abbreviated flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter, allow_abbrev=False)


def exit_code(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a benchmark and return its exit code: 2 after an error, which is printed, and 130 after an interrupt."""
    name = Path(sys.argv[0]).stem
    try:
        return main(argv)
    except (BenchError, MegapipeError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130


class Ranks:
    """The processes of one contender, each of which runs `target(connection, rank, number of ranks, port, *arguments)`
    and answers every order until None. A context at whose end they have ended.

    name: for errors. port: for their rendezvous.
    """

    def __init__(self, name: str, count: int, target: Callable[..., None], *arguments: Any) -> None:
        self.name, port = name, free_port()
        context = multiprocessing.get_context("spawn")
        self._ranks = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, rank, count, port, *arguments), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        for process, connection in self._ranks:
            if error is None:
                connection.send(None)
            else:
                process.kill()
        for process, _ in self._ranks:
            process.join(20)

    def answers(self, timeout_seconds: float) -> list[Any]:
        """Return what each rank sends next. Raises BenchError if one is silent for too long or has ended."""
        return [self._answer(connection, timeout_seconds) for _, connection in self._ranks]

    def _answer(self, connection: Connection, timeout_seconds: float) -> Any:
        try:
            if not connection.poll(timeout_seconds):
                raise BenchError(f"{self.name}: no answer for {timeout_seconds:g} s")
            return connection.recv()
        except EOFError:
            raise BenchError(f"{self.name}: a rank died; its error is printed above") from None

    def order(self, order: Any, timeout_seconds: float) -> list[Any]:
        """Give all ranks an order and return their answers."""
        for _, connection in self._ranks:
            connection.send(order)
        return self.answers(timeout_seconds)


def join(rank: int, ranks: int, port: int, topology: Topology, timeout_seconds: float) -> ProcessGroups:
    """Make this process, with one thread, a rank of a gloo job of this machine."""
    import torch

    from megapipe.comm.bootstrap import start
    from megapipe.comm.groups import build_process_groups

    torch.set_num_threads(1)
    here = Environment(rank, ranks, rank, ranks, 1, 0, master_addr="127.0.0.1", master_port=port, launcher="single")
    start(here, "gloo", timeout_seconds, "cpu", facts_of=lambda _: {})
    return build_process_groups(topology, rank, "gloo", timeout_seconds)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def machine_text() -> str:
    """Return the processor and the number of its cores that this process may use."""
    from megapipe.extras.doctor.host import resources  # imports torch

    has = resources()
    return f"{has.cpu}, {has.cores} cores"
