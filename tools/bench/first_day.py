#!/usr/bin/env python3
"""The first day on a machine with GPUs: its facts, tests that need a GPU, training runs and measurements, each figure
beside what it should be by the planner, a record of what ran, and an archive for a report.

    python3 tools/bench/first_day.py --minutes 9     what fits into nine minutes, the most valuable first
    python3 tools/bench/first_day.py                 all parts
    python3 tools/bench/first_day.py --list          the parts, what each decides, and how it ended here

Needs no installation, only this Python with torch, numpy, safetensors, sentencepiece, PyYAML and pytest. A part that
fails, hangs or is killed does not stop the others. Parts that the record has as passed on this device and torch are
left out, unless their command has changed; parts that never ran come before those that failed. So the same command
goes on where the last one ended. Parts that need more GPUs than there are do not run.

After each part it writes the record, and DIR/first_day.md, DIR/first_day.tar.gz (logs and figures without names of the
host, the user and paths) and DIR/gpu_record.tsv, a copy of the record. Exits with 1 if a part failed, 2 if nothing
could start, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BEGAN = time.monotonic()
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(REPOSITORY)]

from bench_processes import make_parser  # noqa: E402
from gpu_day import page  # noqa: E402
from gpu_day.figures import figures_of  # noqa: E402
from gpu_day.parts import PARTS, Part  # noqa: E402
from gpu_day.record import Record, RecordError, Row  # noqa: E402
from gpu_day.running import FAILED, GRACE_SECONDS, PASSED, SKIPPED, TIMEOUT, run  # noqa: E402
from gpu_day.summary import ARCHIVE, SUMMARY, pack, summary_text, without_names  # noqa: E402

from megapipe.environment import prefixed  # noqa: E402

RESERVE_SECONDS = GRACE_SECONDS + 3.0  # to end a part that is late, and to write what there is
ASKING_SECONDS = 120.0  # to import torch on a cold machine and start CUDA
COPY = "gpu_record.tsv"
LOG_LINES, LOG_CHARACTERS = 25, 3000
ENVIRONMENT = {  # of all parts; what the user has set wins
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def say(text: str) -> None:
    print(f"first_day: {text}", file=sys.stderr, flush=True)


class DayError(Exception):
    """Why nothing can start."""


@dataclass(frozen=True)
class Machine:
    """Where the parts run. device: cuda or cpu; name: of the first GPU, or CPU."""

    device: str
    name: str
    num_gpus: int
    torch: str
    commit: str

    @classmethod
    def found(cls, device: str, seconds: float) -> Machine:
        """Raises DayError if torch cannot use a GPU."""
        count, name = (0, "CPU") if device == "cpu" else _gpus(seconds)
        try:
            return cls(device, name, count, version("torch"), _commit())
        except PackageNotFoundError as error:
            raise DayError(f"this Python ({sys.executable}) has no torch") from error


def _gpus(seconds: float) -> tuple[int, str]:
    """Return the number of GPUs and the name of the first; a process of its own asks, so this one holds no memory."""
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(0))"
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise DayError(f"torch has not found a GPU within {seconds:.0f} s; nvidia-smi says why") from error
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["?"])[-1]
        raise DayError(f"torch cannot use a GPU: {reason} (--device cpu only tries the tool)")
    count, _, name = asked.stdout.strip().splitlines()[-1].partition(" ")
    return int(count), name


def _commit() -> str:
    """Return the commit of the checkout, with + if other files than pages differ from it."""
    git = ("git", "-c", "safe.directory=*", "-C", str(REPOSITORY))
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", ".", ":!docs", ":!README.md"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else "unknown"


@dataclass
class Day:
    """The parts that run, what they leave behind, and until when."""

    machine: Machine
    parts: Sequence[Part]
    record: Record
    files: Sequence[Path]  # of the record and its copy
    out: Path
    deadline: float  # of time.monotonic
    again: Sequence[str] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def row(self, part: Part) -> Row | None:
        return self.record.find(part.name, self.machine.name, self.machine.torch)

    def order(self) -> Iterator[Part]:
        """Yield the parts to run: those that are repeated, those that never ran or have changed, those that failed.
        Others are noted in `left_out`."""
        repeated, first, then = [], [], []
        for part in self.parts:
            row = self.row(part)
            if part.gpus > max(self.machine.num_gpus, 1) and self.machine.device == "cuda":
                self.left_out[part.name] = f"needs {part.gpus} GPUs"
            elif part.name in self.again:
                repeated.append(part)
            elif row is None or row.command != part.digest(self.machine.device):
                first.append(part)
            elif row.result == PASSED:
                self.left_out[part.name] = f"passed on {row.date[:10]} at {row.commit}"
            else:
                then.append(part)
        yield from (*repeated, *first, *then)

    def run(self, work: Path) -> bool:
        """Run what fits into the time; return True if no part failed."""
        all_passed = True
        for part in self.order():
            left = self.deadline - time.monotonic() - RESERVE_SECONDS
            expected = part.expected(self.machine.device)
            if expected > left:
                self.left_out[part.name] = f"expected to take {expected:.0f} s: no time was left"
                continue
            row = self._run_part(part, work, min(part.most(self.machine.device), left))
            if row is not None:
                self.record.add(row)
                all_passed &= row.result in (PASSED, SKIPPED)
            self.write(work)
        return all_passed

    def _run_part(self, part: Part, work: Path, limit: float) -> Row | None:
        """Run a part and return its row; None if the day ended before the part's own limit."""
        machine, out, log = self.machine, work / part.name, work / f"{part.name}.log"
        words = part.words(machine.device, out)
        say(f"{part.name} (at most {limit:.0f} s): {' '.join(words)}")
        given = prefixed("")
        path = os.pathsep.join(filter(None, [str(REPOSITORY), given.get("PYTHONPATH")]))
        environment = {**ENVIRONMENT, **given, **part.environment, "PYTHONPATH": path}
        ended = run(words, log, limit, environment, REPOSITORY)
        found = figures_of(part, words, out, log, machine.name)
        result, text = ended.result, log.read_text(errors="replace")
        if result == PASSED and found.problem:
            result, text = FAILED, f"{text}\n{found.problem}"
        elif result == PASSED and "pytest" in words and not {"passed", "collected"} & set(found.figures):
            result = SKIPPED
        self.said += [f"{part.name}: {sentence}" for sentence in found.sentences]
        say(f"{part.name}: {result} after {ended.seconds:.0f} s {found.figures}")
        if result == TIMEOUT and limit < part.most(machine.device):
            self.left_out[part.name] = f"the time was up after {ended.seconds:.0f} s; the next call begins with it"
            return None
        tail = "" if result == PASSED else "\n".join(text.rstrip().splitlines()[-LOG_LINES:])[-LOG_CHARACTERS:]
        return Row(
            *(part.name, machine.name, machine.torch, machine.commit, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")),
            *(result, round(ended.seconds, 1), part.digest(machine.device), found.figures),
            log=without_names(tail, (work, "WORK"), (self.out, "OUT")),
        )

    def write(self, work: Path) -> None:
        """Write the record, the summary and the archive."""
        self.record.write(*self.files)
        text = summary_text(self.record, self.parts, self.machine.name, self.machine.torch, self.left_out, self.said)
        (self.out / SUMMARY).write_text(text)
        pack(self.out, work, self.machine.name)


def listing(day: Day) -> str:
    """Return the parts, what each decides, and how it ended on this device."""
    lines = []
    for part in day.parts:
        row = day.row(part)
        state = "not yet" if row is None else row.result
        lines.append(
            f"{part.name:18} {part.expected(day.machine.device):4.0f} s  {part.gpus} GPU  {state:8}  {part.decides}"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=_minutes, default=math.inf, metavar="N", help="run what fits into N minutes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the parts' twins, to try them")
    parser.add_argument("--out", type=Path, default=Path("first_day"), metavar="DIR", help="default: first_day")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help=f"default: {page.RECORD}; with --device cpu a file in DIR"
    )
    names, again = [part.name for part in PARTS], "first repeat these, though they passed; none: all"
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help="no other parts than these")
    parser.add_argument("--again", nargs="*", choices=names, metavar="PART", help=again)
    parser.add_argument("--list", action="store_true", help="run nothing, list the parts")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="run nothing, add the rows of another record")
    return parser


def _minutes(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).isdecimal() else math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of minutes above 0")
    return value


def record_file(arguments: argparse.Namespace) -> Path:
    """Return the file of the record. Raises DayError if a run on CPUs would write that of the repository."""
    own, on_cpus = REPOSITORY / page.RECORD, arguments.device == "cpu" and not arguments.merge
    file: Path = (arguments.record or (arguments.out / COPY if on_cpus else own)).resolve()
    if on_cpus and file == own:
        raise DayError(f"--record {arguments.record}: it records what ran on GPUs, and --device cpu uses none")
    return file


def merge(other: Path, file: Path) -> None:
    """Add the rows of another record to a record, and write the pages if it is the repository's."""
    if not other.exists():
        raise DayError(f"--merge {other}: there is no such file")
    record = Record.read(file)
    print(f"first_day: {record.merge(Record.read(other))} rows of {other} are new in {file}")
    record.write(file)
    write_pages(file)


def write_pages(file: Path) -> None:
    if file == REPOSITORY / page.RECORD:
        for changed in page.write(REPOSITORY):
            say(f"wrote {changed}")


def start(arguments: argparse.Namespace) -> Day:
    """Return the day that was asked for. Raises DayError or RecordError before anything runs."""
    file, out = record_file(arguments), arguments.out.resolve()
    record = Record.read(file)
    deadline = BEGAN + 60.0 * arguments.minutes
    try:
        if not arguments.list:
            out.mkdir(parents=True, exist_ok=True)
            record.write(file, out / COPY)
    except OSError as error:
        raise DayError(f"cannot write {error.filename}: {error.strerror}; see --out and --record") from error
    machine = Machine.found(arguments.device, min(ASKING_SECONDS, max(1.0, deadline - time.monotonic() - 1.0)))
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    again = [part.name for part in parts] if arguments.again == [] else arguments.again or ()
    return Day(machine, parts, record, (file, out / COPY), out, deadline, again)


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.merge:
            merge(arguments.merge, record_file(arguments))
            return 0
        day = start(arguments)
    except (DayError, RecordError) as error:
        say(f"error: {error}")
        return 2
    if arguments.list:
        print(listing(day))
        return 0
    with tempfile.TemporaryDirectory(prefix="first_day_") as folder:
        work = Path(folder)
        try:
            code = 0 if day.run(work) else 1
        except KeyboardInterrupt:
            say("interrupted; the same command goes on")
            code = 130
        day.write(work)
    write_pages(day.files[0])
    print((day.out / SUMMARY).read_text())
    say(f"see {day.out}; for a report: {day.out / ARCHIVE}")
    return code


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored in the background of a script
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
