#!/usr/bin/env python3
"""Measure one card: each figure beside what the planner predicts and beside a peer that ran in the same call.

    python tools/bench/card.py layer-bf16 layer-peers --device cuda --json figures.json
    python tools/bench/card.py layer-peers --shape 1.3b            layers of other sizes
    python tools/bench/card.py all --device cpu                    tiny twins, only to try the tool
    python tools/bench/card.py --list                              what there is, with seconds on an H100

Contenders take turns; figures are medians of synchronized clocks, warm-up left out. A measurement that fails is
recorded and does not stop the others. Exits with 1 if one failed, with --check also if a bar was missed that is not a
goal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(REPOSITORY), str(Path(__file__).parent)) if path not in sys.path]

import torch  # noqa: E402
from bench_processes import make_parser  # noqa: E402
from card_bench import calibrate, features, layers, memory, primitives, switches, training  # noqa: E402
from card_bench.jobs import SHAPES  # noqa: E402
from card_bench.report import Report  # noqa: E402

from megapipe.environment import set_for_libraries  # noqa: E402


class Part(NamedTuple):
    """A part: what measures it, and its seconds on an H100, compilation included."""

    measure: Callable[[Report], None]
    seconds: int


PARTS = {
    "layer-bf16": Part(layers.layer_bf16, 90),
    "layer-fp8": Part(layers.layer_fp8, 80),
    "layer-peers": Part(layers.layer_peers, 80),
    "train-0.5b": Part(training.train_05b, 60),
    "train-1.5b": Part(training.train_15b, 80),
    "experts": Part(features.experts, 50),
    "latent": Part(features.latent, 40),
    "ring": Part(features.ring, 60),
    "muon": Part(features.muon, 40),
    "optimizer": Part(features.optimizer, 40),
    "memory": Part(memory.memory, 80),
    "rank": Part(memory.rank, 45),
    "graphs": Part(switches.graphs, 40),
    "compile": Part(switches.compile_blocks, 50),
    "offload": Part(switches.offload, 40),
    "calibrate": Part(calibrate.calibrate, 40),
    "primitives": Part(primitives.primitives, 70),  # the last: a failed capture of a graph spoils the process
}
ALL = "all"


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{ALL}, or: {' '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the tool")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of layer-*, by default 8b-8k; the bars are set for 8B")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every measurement")
    parser.add_argument("--list", action="store_true", help="print the parts with their seconds on an H100")
    return parser


def refusal(arguments: argparse.Namespace) -> str | None:
    """Return why a call cannot run; None if it can."""
    unknown = [name for name in arguments.names if name not in (ALL, *PARTS)]
    if unknown:
        return f"unknown part {', '.join(unknown)}; the parts are {', '.join(PARTS)}, or {ALL}"
    if not arguments.names:
        return f"no part was named; the parts are {', '.join(PARTS)}, or {ALL}"
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        return f"--json {arguments.json}: {arguments.json.resolve().parent} is no folder"
    if arguments.check and arguments.device == "cpu":
        return "--check: bars are set for GPUs; omit it with --device cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU (--device cpu only tries the tool)"
    return None


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.list:
        print("\n".join(f"{name:<12}{part.seconds:>4} s" for name, part in PARTS.items()))
        return 0
    refused = refusal(arguments)
    if refused is not None:
        print(f"card: {refused}", file=sys.stderr)
        return 2
    # as in a run; before anything is allocated on the GPU
    set_for_libraries(PYTORCH_ALLOC_CONF="expandable_segments:True")
    names = list(PARTS) if ALL in arguments.names else list(dict.fromkeys(arguments.names))
    report = Report(arguments.device, arguments.json, arguments.shape)
    # twins try the paths, and compile nothing
    stance = torch.compiler.set_stance("default" if report.on_gpu else "force_eager")
    with stance:
        for name in names:
            report.run(name, PARTS[name].measure)
    report.save()
    print(report.text(), flush=True)
    missed = [bar for bar in report.bars if not (bar.met or bar.is_goal)] if arguments.check else []
    return int(bool(report.failed or missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
