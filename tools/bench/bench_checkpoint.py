#!/usr/bin/env python3
"""Compare saving and loading a large state by several ranks with `dd` on the same disk.

python tools/bench/bench_checkpoint.py --folder /some/disk
python tools/bench/bench_checkpoint.py --folder /some/disk --check

dd writes and syncs as many bytes (`conv=fsync`) and reads them; the ranks save and load, both reading after the pages
were dropped from the cache. In every other round the ranks come first, since the second finds a disk that has just been
written to. --check exits with 1 if saving or loading reaches less than 80 % of dd (medians).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from bench_processes import Ranks, exit_code, join, make_parser
from bench_table import as_markdown

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import KEEP_ALL, open_folder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Attempt, BackgroundSave, Extras, Staging, save_checkpoint
from megapipe.checkpoint.shard import BLOCK_BYTES, TensorBox
from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import Group
from megapipe.sharding.boxes import Box
from megapipe.topology import Topology

MIN_RATIO = 0.8
COLUMNS = 1024  # of a tensor, fp32
TENSOR_BYTES = 64 << 20  # of one tensor over all ranks
TIMEOUT_SECONDS = 300.0
SETTLE_SECONDS = 1.0
Task = tuple[str, Path]  # 'save', 'load' or 'background' (a save in the background), and the folder
Seconds = dict[str, list[float]]  # by row, of all rounds


def serve(connection: Connection, rank: int, world: int, port: int, state_bytes: int) -> None:
    """Answer tasks on the state of a rank, cut by rows, with (seconds, seconds that a training waits) until None."""
    group = join(rank, world, port, Topology(dp=world), TIMEOUT_SECONDS).world
    count, shape = state_bytes // TENSOR_BYTES, (TENSOR_BYTES // (4 * COLUMNS), COLUMNS)
    box = Box((rank * (shape[0] // world), 0), (shape[0] // world, COLUMNS))
    torch.manual_seed(rank)
    memory = torch.rand(count, box.shape[0] * COLUMNS)  # some disks compress zeros
    boxes = [TensorBox(f"master/w{index}", shape, box, memory[index]) for index in range(count)]
    staging = Staging()
    connection.send("ready")
    while (task := connection.recv()) is not None:
        connection.send(do(task, boxes, group, staging))
    shutdown(0)


def do(task: Task, boxes: Sequence[TensorBox], group: Group, staging: Staging) -> tuple[float, float]:
    kind, folder = task
    barrier(group)
    began, waited = time.perf_counter(), 0.0
    if kind == "save":
        save_checkpoint(folder, 1, boxes, Extras({}, ""), group)
    elif kind == "background":
        attempt = Attempt(Disk(), folder, 1, Extras({}, ""), KEEP_ALL, BLOCK_BYTES)
        waited = BackgroundSave(attempt, boxes, group, staging).finish().waited_seconds or 0.0
    else:
        load_tensors(open_folder(folder / "step_00000001"), boxes, group)
    return time.perf_counter() - began, waited


def one_round(ranks: Ranks, folder: Path, state_bytes: int, found: Seconds, dd_first: bool) -> None:
    """Run dd and the ranks in turn, and then a save in the background."""
    raw, saved = folder / "dd", folder / "saved"

    def of_dd() -> None:
        found["dd write"].append(dd(f"if=/dev/zero of={raw}", state_bytes, "conv=fsync"))
        drop(raw)
        found["dd read"].append(dd(f"if={raw} of=/dev/null", state_bytes))
        raw.unlink()
        settle()

    def of_ranks() -> None:
        found["save"].append(slowest(ranks, ("save", saved))[0])
        for path in saved.rglob("*.safetensors"):
            drop(path)
        found["load"].append(slowest(ranks, ("load", saved))[0])
        shutil.rmtree(saved)
        settle()

    for turn in (of_dd, of_ranks) if dd_first else (of_ranks, of_dd):
        turn()
    seconds, waited = slowest(ranks, ("background", saved))
    found["save in background"].append(seconds)
    found["wait"].append(waited)
    shutil.rmtree(saved)
    settle()


def slowest(ranks: Ranks, task: Task) -> tuple[float, float]:
    """Run a task on all ranks and return the largest of their answers."""
    seconds, waited = zip(*ranks.order(task, TIMEOUT_SECONDS), strict=True)
    return max(seconds), max(waited)


def settle() -> None:
    """Wait until the disk is idle."""
    os.sync()
    time.sleep(SETTLE_SECONDS)


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


def lines(found: Seconds, state_bytes: int, world: int) -> list[tuple[str, ...]]:
    """Return the table: task, median seconds [min, max], rate, share of dd."""
    size = f"{state_bytes / (1 << 30):g} GiB"
    titles = {
        "dd write": (f"`dd conv=fsync`, {size}", None),
        "save": (f"save, {size}, {world} ranks", "dd write"),
        "save in background": (f"save during training, {size}, {world} ranks", "dd write"),
        "wait": ("- of which the training waits", None),
        "dd read": (f"`dd` read, {size}, not in the page cache", None),
        "load": (f"load, {size}, {world} ranks, not in the page cache", "dd read"),
    }
    table: list[tuple[str, ...]] = [("", "seconds [least, most]", "GB/s", "of dd")]
    for row, (title, baseline) in titles.items():
        seconds = found[row]
        spread = f"{median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"
        ratio = "" if baseline is None else f"{ratio_of(found, row, baseline):.2f}"
        table.append((title, spread, f"{state_bytes / median(seconds) / 1e9:.2f}", ratio))
    return table


def ratio_of(found: Seconds, row: str, baseline: str) -> float:
    """Return the speed of a row as a share of dd's, by medians."""
    return median(found[baseline]) / median(found[row])


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk to measure; a subfolder is created and removed"
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks that save and load (default: 4)")
    parser.add_argument(
        "--mebibytes", type=int, default=2048, help="size of the large state over all ranks (default: 2048)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, whose medians are printed (default: 5)")
    parser.add_argument(
        "--check", action="store_true", help=f"exit code 1 if saving or loading is below {MIN_RATIO:g} of dd"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    state_bytes = max(1, (arguments.mebibytes << 20) // TENSOR_BYTES) * TENSOR_BYTES
    folder: Path = arguments.folder / f"bench_checkpoint_{os.getpid()}"
    found: Seconds = defaultdict(list)
    folder.mkdir(parents=True)
    try:
        with Ranks("save and load", arguments.ranks, serve, state_bytes) as ranks:
            ranks.answers(TIMEOUT_SECONDS)
            for number in range(arguments.rounds):
                one_round(ranks, folder, state_bytes, found, dd_first=number % 2 == 0)
    finally:
        shutil.rmtree(folder)
    print(as_markdown(lines(found, state_bytes, arguments.ranks)))
    worst = min(ratio_of(found, "save", "dd write"), ratio_of(found, "load", "dd read"))
    if arguments.check and worst < MIN_RATIO:
        print(f"{worst:.2f} of dd, below the minimum of {MIN_RATIO:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
