#!/usr/bin/env python3
"""Compare saving and loading with `dd` on the same disk: a large state written by several ranks, and many small
tensors.

python tools/bench/bench_checkpoint.py --folder /some/disk
python tools/bench/bench_checkpoint.py --folder /some/disk --check --markdown

dd writes and syncs as many bytes (`conv=fsync`) and reads them; the ranks save and load, both reading after the pages
were dropped from the cache. In every other round the ranks come first. --check exits with 1 if saving or loading
reaches less than 80 % of dd (medians).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from bench_processes import Ranks, exit_code, make_parser
from bench_table import as_markdown

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import KEEP_ALL, open_folder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Attempt, BackgroundSave, Extras, Staging, save_checkpoint
from megapipe.checkpoint.shard import BLOCK_BYTES, TensorBox
from megapipe.comm.bootstrap import shutdown, start
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import Group, build_process_groups
from megapipe.environment import Environment
from megapipe.formatting import text_table
from megapipe.sharding.boxes import Box
from megapipe.topology import Topology

MIN_RATIO = 0.8
COLUMNS = 1024  # of a large tensor, fp32
LARGE_BYTES = 64 << 20  # of one large tensor over all ranks
SMALL_SHAPE = (64, 32)
TIMEOUT_SECONDS = 300.0
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Task:
    """A task for the ranks: 'save', 'load' or 'background' (a save in the background) of the large or the small state,
    in or from a folder."""

    kind: str
    folder: Path
    is_small: bool = False


@dataclass(frozen=True)
class Answer:
    """The result of a task on one rank.

    memory_bytes: the rank's peak above what it held before. waited_seconds: of 'background', for the copy.
    """

    seconds: float
    memory_bytes: int
    waited_seconds: float = 0.0


@dataclass
class Figures:
    """Seconds of all rounds by row, and memory by row: the most of any rank and round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def add(self, row: str, seconds: float, memory_bytes: int = 0) -> None:
        self.seconds.setdefault(row, []).append(seconds)
        self.memory[row] = max(self.memory.get(row, 0), memory_bytes)

    def median(self, row: str) -> float:
        return median(self.seconds[row])


class Rank:
    """One rank with a large and a small state, both cut by rows."""

    def __init__(self, rank: int, world: int, port: int, sizes: tuple[int, int]) -> None:
        torch.set_num_threads(1)
        here = Environment(rank, world, rank, world, 1, 0, master_addr="127.0.0.1", master_port=port, launcher="single")
        joined = start(here, "gloo", TIMEOUT_SECONDS, "cpu", facts_of=lambda _: {})
        topology = Topology(tp=1, cp=1, pp=1, dp=world)
        self._group: Group = build_process_groups(topology, rank, joined.backend, TIMEOUT_SECONDS).world
        state_bytes, num_small = sizes
        rows = LARGE_BYTES // (4 * COLUMNS)
        self._states = {
            False: self._boxes(state_bytes // LARGE_BYTES, (rows, COLUMNS)),
            True: self._boxes(num_small, SMALL_SHAPE),
        }
        self._staging = Staging()

    def do(self, task: Task) -> Answer:
        boxes = self._states[task.is_small]
        barrier(self._group)
        before = _reset_peak()
        began = time.perf_counter()
        waited = 0.0
        if task.kind == "save":
            save_checkpoint(task.folder, 1, boxes, Extras({}, ""), self._group)
        elif task.kind == "background":
            attempt = Attempt(Disk(), task.folder, 1, Extras({}, ""), KEEP_ALL, BLOCK_BYTES)
            report = BackgroundSave(attempt, boxes, self._group, self._staging).finish()
            waited = report.waited_seconds or 0.0
        else:
            load_tensors(open_folder(task.folder / "step_00000001"), boxes, self._group)
        return Answer(time.perf_counter() - began, _peak() - before, waited)

    def _boxes(self, count: int, shape: tuple[int, int]) -> list[TensorBox]:
        generator = torch.Generator().manual_seed(self._group.rank)
        rows = shape[0] // self._group.size
        box = Box((self._group.rank * rows, 0), (rows, shape[1]))
        memory = torch.rand(count, rows * shape[1], generator=generator)  # some disks compress zeros
        return [TensorBox(f"master/w{index}", shape, box, memory[index]) for index in range(count)]


def serve(connection: Connection, rank: int, world: int, port: int, sizes: tuple[int, int]) -> None:
    """Run tasks on a rank until None comes."""
    worker = Rank(rank, world, port, sizes)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        connection.send(worker.do(task))
    shutdown(0)


def do(ranks: Ranks, task: Task) -> Answer:
    """Run a task on all ranks; return the seconds of the slowest and the largest memory."""
    answers = ranks.order(task, TIMEOUT_SECONDS)
    return Answer(*map(max, zip(*map(dataclasses.astuple, answers), strict=True)))


def one_round(ranks: Ranks, folder: Path, state_bytes: int, figures: Figures, dd_first: bool) -> None:
    """Run dd and the ranks in turn: the second one finds a disk that has just been written to, so the order
    alternates."""
    raw, saved, small = folder / "dd", folder / "saved", folder / "small"

    def of_dd() -> None:
        figures.add("dd write", dd(f"if=/dev/zero of={raw}", state_bytes, "conv=fsync"))
        drop(raw)
        figures.add("dd read", dd(f"if={raw} of=/dev/null", state_bytes))
        raw.unlink()
        settle()

    def of_ranks() -> None:
        timed(ranks, figures, "save", Task("save", saved))
        timed(ranks, figures, "load", Task("load", saved))
        shutil.rmtree(saved)
        settle()

    for turn in (of_dd, of_ranks) if dd_first else (of_ranks, of_dd):
        turn()
    figures.add("wait", timed(ranks, figures, "save in background", Task("background", saved)).waited_seconds)
    shutil.rmtree(saved)
    timed(ranks, figures, "save small", Task("save", small, is_small=True))
    timed(ranks, figures, "load small", Task("load", small, is_small=True))
    shutil.rmtree(small)
    settle()


def settle() -> None:
    """Wait until the disk is idle."""
    os.sync()
    time.sleep(SETTLE_SECONDS)


def timed(ranks: Ranks, figures: Figures, row: str, task: Task) -> Answer:
    """Time a task; loads find nothing in the page cache."""
    if task.kind == "load":
        for path in task.folder.rglob("*.safetensors"):
            drop(path)
    answer = do(ranks, task)
    figures.add(row, answer.seconds, answer.memory_bytes)
    return answer


def dd(what: str, num_bytes: int, *more: str) -> float:
    command = ["dd", *what.split(), "bs=4M", f"count={num_bytes >> 22}", *more]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def drop(path: Path) -> None:
    """Take the file's pages out of the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def lines(figures: Figures, state_bytes: int, num_small: int, world: int) -> list[tuple[str, ...]]:
    """Return the table: task, median seconds [min, max], rate, share of dd, memory of a rank above its tensors."""
    size = f"{state_bytes / (1 << 30):g} GiB"
    rows = [
        ("dd write", f"`dd conv=fsync`, {size}", state_bytes, None),
        ("save", f"save, {size}, {world} ranks", state_bytes, "dd write"),
        ("save in background", f"save during training, {size}, {world} ranks", state_bytes, "dd write"),
        ("wait", "- of which the training waits", state_bytes, None),
        ("dd read", f"`dd` read, {size}, not in the page cache", state_bytes, None),
        ("load", f"load, {size}, {world} ranks, not in the page cache", state_bytes, "dd read"),
        ("save small", f"save {num_small:,} tensors in {num_small * world:,} pieces", 0, None),
        ("load small", f"load {num_small:,} tensors in {num_small * world:,} pieces", 0, None),
    ]
    table: list[tuple[str, ...]] = []
    for row, title, num_bytes, baseline in rows:
        seconds = figures.seconds[row]
        spread = f"{median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"
        rate = f"{num_bytes / median(seconds) / 1e9:.2f}" if num_bytes else ""
        ratio = "" if baseline is None else f"{ratio_of(figures, row, baseline):.2f}"
        memory = f"{figures.memory[row] / (1 << 20):.0f}" if figures.memory[row] else ""
        table.append((title, spread, rate, ratio, memory))
    return table


def ratio_of(figures: Figures, row: str, baseline: str) -> float:
    """Return the speed of a row as a share of dd's, by medians."""
    return figures.median(baseline) / figures.median(row)


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
    return _peak()


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk to measure; a subfolder is created and removed"
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks that save and load (default: 4)")
    parser.add_argument(
        "--mebibytes", type=int, default=2048, help="size of the large state over all ranks (default: 2048)"
    )
    parser.add_argument("--tensors", type=int, default=5000, help="number of small tensors (default: 5000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, whose medians are printed (default: 5)")
    parser.add_argument(
        "--check", action="store_true", help=f"exit code 1 if saving or loading is below {MIN_RATIO:g} of dd"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    state_bytes = max(1, (arguments.mebibytes << 20) // LARGE_BYTES) * LARGE_BYTES
    folder: Path = arguments.folder / f"bench_checkpoint_{os.getpid()}"
    figures = Figures()
    folder.mkdir(parents=True)
    ranks = Ranks("save and load", arguments.ranks, serve, (state_bytes, arguments.tensors))
    try:
        ranks.answers(TIMEOUT_SECONDS)
        for number in range(arguments.rounds):
            one_round(ranks, folder, state_bytes, figures, dd_first=number % 2 == 0)
        ranks.close(None)
    finally:
        ranks.kill()
        shutil.rmtree(folder)
    heads = ("", "seconds [least, most]", "GB/s", "of dd", "MiB above the tensors")
    rows = [heads, *lines(figures, state_bytes, arguments.tensors, arguments.ranks)]
    print(as_markdown(rows) if arguments.markdown else "\n".join(text_table(rows, left=(0,))))
    worst = min(ratio_of(figures, "save", "dd write"), ratio_of(figures, "load", "dd read"))
    if arguments.check and worst < MIN_RATIO:
        print(f"{worst:.2f} of dd, below the minimum of {MIN_RATIO:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
