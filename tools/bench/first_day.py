#!/usr/bin/env python3
"""The first day on a machine with GPUs in one command: the machine, the tests that need a GPU, the figures of
bench_gpu.py, and each figure with the planner's estimate.

    python tools/bench/first_day.py --out first_day

Writes DIR/first_day.md, DIR/bench.json and the output of every part, DIR/NAME.log. A part that fails does not stop the
others. Exits with 1 if one failed or a bar of bench_gpu.py was missed. With two GPUs or more the tests over NCCL run
too. It takes about an hour on one GPU (an estimate: it has not run on one yet).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_table import as_markdown
from gpu_bench.contenders import Options
from gpu_bench.shapes import Shape, configuration

from megapipe.plan.hardware import hardware_of
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = {"megapipe": Options(), "megapipe-fp8": Options("hybrid", "delayed", True)}  # bench_gpu.py's defaults


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of the day and how it ended."""

    name: str
    code: int
    seconds: float
    last_line: str

    @classmethod
    def run(cls, name: str, words: Sequence[str], folder: Path) -> Part:
        """Run a command from the repository's root; its output goes to a log."""
        print(f"first_day: {name}: {' '.join(words)}", file=sys.stderr, flush=True)
        began, log = time.monotonic(), folder / f"{name}.log"
        with log.open("w") as file:
            try:
                code = subprocess.run(words, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT).returncode
            except FileNotFoundError as error:
                code = 127
                file.write(f"{error}\n")
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return cls(name, code, time.monotonic() - began, lines[-1].strip() if lines else "")


def parts(arguments: argparse.Namespace, folder: Path) -> list[Part]:
    """Run the day's commands."""
    python = [sys.executable]
    tests = ["-m", "pytest", "tests/gpu", "tests/cuda", "--gpu", "-q"]
    bench = ["tools/bench/bench_gpu.py", "--json", str(folder / "bench.json"), "--kernels"]
    if arguments.device == "cpu":  # only to try this tool
        tests = ["-m", "pytest", "tests/gpu/test_signatures.py", "-q"]
        bench += ["--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--warm-ups", "1", "--no-compile"]
        bench += ["--shapes", "tiny", "--contenders", "megapipe", "plain"]
    else:
        bench.append("--check")
    commands = {
        "gpus": ["nvidia-smi", "topo", "-m"],
        "doctor": [*python, "-m", "megapipe", "doctor"],
        "tests": [*python, *tests],
        "bench": [*python, *bench],
    }
    return [Part.run(name, words, folder) for name, words in commands.items()]


def comparison(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table of measured and predicted steps from bench_gpu.py's figures; a header alone if there are none."""
    rows = [("shape", "contender", "step measured, ms", "estimate, ms", "measured / estimate", "MFU", "estimate")]
    hardware = hardware_of(figures["device"])
    for key, found in figures["shapes"].items():
        shape = Shape(**found["shape"])
        for name, turns in found["turns"].items():
            if name not in OPTIONS:
                continue
            measured = statistics.median(turn["gradients"] + turn["update"] for turn in turns)
            if hardware is None:
                rows.append((key, name, f"{1e3 * measured:.1f}", "no data sheet of this device", "", "", ""))
                continue
            config = OPTIONS[name].applied_to(configuration(shape, "bf16", "cuda"))
            estimate = predict_step(resolve(config, 1), hardware)
            ratio = measured / estimate.seconds
            shares = f"{estimate.mfu / ratio:.1%}", f"{estimate.mfu:.1%}"
            rows.append((key, name, f"{1e3 * measured:.1f}", f"{1e3 * estimate.seconds:.1f}", f"{ratio:.3f}", *shares))
    return rows


def report(done: Sequence[Part], figures: Mapping[str, Any] | None) -> str:
    """Return first_day.md."""
    rows = [("part", "exit code", "seconds", "last line")]
    rows += [(part.name, str(part.code), f"{part.seconds:.0f}", part.last_line.replace("|", "/")) for part in done]
    lines = ["# The first day on this machine", "", as_markdown(rows), ""]
    if figures is None:
        return "\n".join([*lines, "bench_gpu.py has written no figures: see bench.log.", ""])
    said = [bar["sentence"] for found in figures["shapes"].values() for bar in found["bars"]]
    lines += [
        f"Figures of {figures['device']}, torch {figures['torch']}; estimates of the planner (megapipe plan).",
        "",
    ]
    return "\n".join([*lines, as_markdown(comparison(figures)), "", *(f"- {sentence}" for sentence in said), ""])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("first_day"), metavar="DIR", help="default: first_day")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the tool")
    arguments = parser.parse_args(argv)
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").unlink(missing_ok=True)  # of an earlier day
    done = parts(arguments, folder)
    found = folder / "bench.json"
    text = report(done, json.loads(found.read_text()) if found.exists() else None)
    (folder / "first_day.md").write_text(text)
    print(text)
    print(f"first_day: written to {folder / 'first_day.md'}", file=sys.stderr)
    return int(any(part.code for part in done if part.name != "gpus"))  # topo needs no driver of this machine's


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
