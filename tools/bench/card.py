#!/usr/bin/env python3
"""Measure one card: each figure beside what the planner predicts and beside a peer that ran in the same call.

    python tools/bench/card.py layer-bf16 layer-peers --device cuda --json figures.json
    python tools/bench/card.py layer-peers --shape 1.3b            layers of other sizes
    python tools/bench/card.py all --device cpu                    tiny twins, only to try the tool
    python tools/bench/card.py --list                              what there is

Contenders take turns; figures are medians of synchronized clocks, warm-up left out. A measurement that fails is
recorded and does not stop the others. Exits with 1 if one failed, with --check also if a bar was missed that is not a
goal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(REPOSITORY), str(Path(__file__).parent)) if path not in sys.path]

import torch  # noqa: E402
from bench_processes import make_parser  # noqa: E402
from card_bench import calibrate, features, layers, memory, primitives, switches, training  # noqa: E402
from card_bench.jobs import SHAPES  # noqa: E402
from card_bench.report import Report  # noqa: E402

from megapipe.environment import set_for_libraries  # noqa: E402

PARTS: dict[str, Callable[[Report], None]] = {
    "layer-bf16": layers.layer_bf16,
    "layer-fp8": layers.layer_fp8,
    "layer-peers": layers.layer_peers,
    "train-0.5b": training.train_05b,
    "train-1.5b": training.train_15b,
    "experts": features.experts,
    "latent": features.latent,
    "ring": features.ring,
    "muon": features.muon,
    "optimizer": features.optimizer,
    "memory": memory.memory,
    "rank": memory.rank,
    "graphs": switches.graphs,
    "compile": switches.compile_blocks,
    "offload": switches.offload,
    "calibrate": calibrate.calibrate,
    "primitives": primitives.primitives,  # the last: a failed capture of a graph spoils the process
}
ALL = "all"


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{ALL}, or: {' '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the tool")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of layer-*, by default 8b-8k; the bars are set for 8B")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every measurement")
    parser.add_argument("--list", action="store_true", help="print the parts")
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
        print("\n".join(f"{name:<13}{(measure.__doc__ or '').splitlines()[0]}" for name, measure in PARTS.items()))
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
            report.run(name, PARTS[name])
    report.save()
    print(report.text(), flush=True)
    missed = [bar for bar in report.bars if not (bar.met or bar.is_goal)] if arguments.check else []
    return int(bool(report.failed or missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
