#!/usr/bin/env python3
"""Training speed on one card: megapipe beside a large GEMM, a plain model under torch.compile, and transformers' Llama.

python tools/bench_gpu.py                                       8B-shaped layers, bf16, sequence 4096 and 8192, the bars
python tools/bench_gpu.py --shapes 125m 350m 1.3b               other sizes
python tools/bench_gpu.py --contenders megapipe                 without peers
python tools/bench_gpu.py --kernels --json figures.json         where the time goes, and every number

All contenders train the same weights on the same tokens; first losses and gradient norms of two steps are compared. Then they take turns,
in the opposite order every second round, a GEMM in every round; ratios are formed inside a round. Attention is counted half (causal); the
full count stands beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_table import as_markdown
from gpu_bench.contenders import Contender, Megapipe, draw_weights, plain, transformers_llama
from gpu_bench.figures import BARRED_SHAPES, Turn, table, verdicts
from gpu_bench.shapes import SHAPES, Shape
from gpu_bench.timing import gemm_rate, kernel_shares, peak_bytes, seconds_of

from megapipe.errors import MegapipeError
from megapipe.planner.hardware import peak_flops
from megapipe.planner.memory import rank_memory

CONTENDERS = ("megapipe", "plain", "transformers")
CHECKED_STEPS = 2
LARGEST_DIFFERENCE = {"fp32": 1e-4, "bf16": 3e-2}  # of losses and gradient norms, relative
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIB = 1 << 30


class BenchError(Exception):
    """What ends the benchmark, for a person."""


def make(name: str, shape: Shape, dtype: str, device: torch.device, weights: dict[str, torch.Tensor], compiled: bool) -> Contender:
    """Raises BenchError for a contender that is not installed."""
    makers: dict[str, Callable[[], Contender]] = {
        "megapipe": lambda: Megapipe(shape, dtype, device, weights),
        "plain": lambda: plain(shape, DTYPES[dtype], device, weights, compiled),
        "transformers": lambda: transformers_llama(shape, DTYPES[dtype], device, weights),
    }
    try:
        return makers[name]()
    except ImportError as error:
        raise BenchError(f"{name}: {error}; pip install transformers, or leave it out with --contenders") from error


def check_agreement(contenders: dict[str, Contender], dtype: str) -> None:
    """Two steps of each. Raises BenchError where losses or gradient norms say that they do not train the same model."""
    found: dict[str, list[float]] = {}
    for name, contender in contenders.items():
        found[name] = [float(value) for _ in range(CHECKED_STEPS) for value in (contender.gradients(), contender.update())]
    first = next(iter(found))
    for name, values in found.items():
        for number, (mine, theirs) in enumerate(zip(values, found[first], strict=True)):
            if not abs(mine / theirs - 1) <= LARGEST_DIFFERENCE[dtype]:
                what = ("loss", "gradient norm")[number % 2]
                step = number // 2 + 1
                raise BenchError(f"{name} has a {what} of {mine:.6f} in step {step}, {first} {theirs:.6f}: they are not the same model")


def measure(
    contenders: dict[str, Contender], device: torch.device, dtype: str, rounds: int, warm_ups: int
) -> tuple[dict[str, list[Turn]], list[float]]:
    """(turns by contender, FLOP/s of a GEMM), each by round."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    gemm = []
    for contender in contenders.values():
        for _ in range(warm_ups):
            contender.gradients()
            contender.update()
    for number in range(rounds):
        gemm.append(gemm_rate(DTYPES[dtype], device))
        for name in contenders if number % 2 == 0 else reversed(contenders):
            contender = contenders[name]
            turns[name].append(Turn(seconds_of(contender.gradients, device), seconds_of(contender.update, device)))
    return turns, gemm


def describe_memory(contender: Contender, device: torch.device) -> str | None:
    """Peak of a step beside the plan's; the other contenders' tensors are not counted."""
    if not isinstance(contender, Megapipe) or device.type != "cuda":
        return None
    planned = rank_memory(contender.plan, 0)
    own = planned.items["weights"] + planned.items["gradients"] + planned.items["optimizer"]
    before = torch.cuda.memory_allocated(device)
    peak = peak_bytes(lambda: (contender.gradients(), contender.update()), device)
    assert peak is not None
    counted = own + peak - before
    return f"peak memory: planned {planned.total / GIB:.2f} GiB, measured {counted / GIB:.2f} GiB, ratio {planned.total / counted:.3f}"


def run(key: str, shape: Shape, arguments: argparse.Namespace, device: torch.device) -> tuple[list[str], dict[str, Any], bool]:
    """(what to print, data, whether all bars are met) of one shape."""
    weights = draw_weights(shape)
    contenders = {name: make(name, shape, arguments.dtype, device, weights, not arguments.no_compile) for name in arguments.contenders}
    check_agreement(contenders, arguments.dtype)
    turns, gemm = measure(contenders, device, arguments.dtype, arguments.rounds, arguments.warm_ups)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    lines = [as_markdown(table(shape, turns, gemm, peak_flops(name, arguments.dtype))), ""]
    lines.append(f"- GEMM {sum(gemm) / len(gemm) / 1e12:.1f} TFLOP/s; median [quartiles] of {arguments.rounds} rounds; {arguments.dtype}")
    said = verdicts(shape, turns, gemm) if key in BARRED_SHAPES and device.type == "cuda" else []
    lines += [f"- {sentence}" for sentence, _ in said]
    for contender in contenders.values():
        memory = describe_memory(contender, device)
        lines += [f"- {memory}"] if memory else []
    if arguments.kernels:
        shares = kernel_shares(lambda: (contenders["megapipe"].gradients(), contenders["megapipe"].update()), device)
        lines += ["", as_markdown([("kernels of megapipe's step", "share", "longest"), *_rows(shares)])]
    data = {"shape": dataclasses.asdict(shape), "gemm": gemm, "turns": {k: [dataclasses.asdict(t) for t in v] for k, v in turns.items()}}
    return lines, data, all(met for _, met in said)


def _rows(shares: list[tuple[str, float, list[str]]]) -> list[tuple[str, ...]]:
    return [(kind, f"{share:.1%}", "; ".join(name[:60] for name in longest)) for kind, share, longest in shares]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["8b-4k", "8b-8k"], help="default: 8b-4k 8b-8k")
    parser.add_argument("--layers", type=int, metavar="N", help="layers, instead of the shape's")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help=f"default: {' '.join(CONTENDERS)}")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the tool, not to learn anything")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--warm-ups", type=int, default=3, metavar="N", help="steps of each before the first round (default: 3)")
    parser.add_argument("--no-compile", action="store_true", help="the plain model without torch.compile")
    parser.add_argument("--kernels", action="store_true", help="also where the time of megapipe's step goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn's numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu: torch sees no GPU (--device cpu tries the tool)", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}\n", flush=True)
    found, all_met = {}, True
    try:
        for key in arguments.shapes:
            shape = SHAPES[key] if arguments.layers is None else dataclasses.replace(SHAPES[key], layers=arguments.layers)
            lines, found[key], met = run(key, shape, arguments, device)
            all_met &= met
            print(f"## {key}: {shape}\n\n" + "\n".join(lines) + "\n", flush=True)
            gc.collect()
    except (BenchError, MegapipeError) as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"bench_gpu: {error}\nuse fewer --layers, or one of --contenders at a time", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "shapes": found}, indent=1) + "\n")
    return int(arguments.check and not all_met)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
