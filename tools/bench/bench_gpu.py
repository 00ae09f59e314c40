#!/usr/bin/env python3
"""Measure training speed on one GPU: megapipe in bf16 and fp8 against large GEMMs, a plain model under torch.compile,
and transformers' Llama.

python tools/bench/bench_gpu.py                                8B-shaped layers at sequence 4096 and 8192, the bars
python tools/bench/bench_gpu.py --shapes 125m 350m 1.3b        other sizes
python tools/bench/bench_gpu.py --contenders megapipe          without fp8 and peers
python tools/bench/bench_gpu.py --kernels --json figures.json  where the time goes, and every number

All contenders train the same weights on the same tokens; losses and gradient norms of the first two steps are compared.
Then they take turns, in the opposite order every second round, with GEMMs in every round; ratios are formed within a
round. Times are the host's between two synchronizations, so that gaps between kernels count. Attention is counted half
(causal), and the full count is shown too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from bench_processes import BenchError
from bench_table import as_markdown
from gpu_bench.agreement import Agreement, agreement
from gpu_bench.contenders import Contender, Job, Megapipe, Options, draw_weights, plain, transformers_llama
from gpu_bench.figures import BARRED_SHAPES, FP8_GEMM, GEMM, Measured, flops_of_step, remarks, table, verdicts
from gpu_bench.shapes import SHAPES, Shape
from gpu_bench.timing import fp8_gemm_rate, gemm_rate, kernel_shares, peak_bytes
from gpu_bench.turns import take_turns

from megapipe.config.model import FP8_FORMATS, OWN_FP8_RECIPES
from megapipe.environment import set_for_libraries
from megapipe.errors import MegapipeError
from megapipe.plan.hardware import peak_flops
from megapipe.plan.memory import rank_memory
from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason

OURS = ("megapipe", "megapipe-fp8")
CONTENDERS = (*OURS, "plain", "transformers")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMPILED = {"none": (), "fp8": ("megapipe-fp8",), "all": OURS}  # --compile-pointwise
GIB = 1 << 30


def options_of(arguments: argparse.Namespace, name: str) -> Options:
    compiles = name in COMPILED[arguments.compile_pointwise] and not arguments.no_compile
    fp8 = arguments.fp8 if name == "megapipe-fp8" else None
    return Options(fp8, arguments.fp8_recipe, compiles, not arguments.no_compile)


def make(name: str, shape: Shape, arguments: argparse.Namespace, weights: dict[str, torch.Tensor]) -> Contender:
    """Build a contender. Raises BenchError if it is not installed."""
    device, dtype = torch.device(arguments.device), arguments.dtype
    makers: dict[str, Callable[[], Contender]] = {
        **{ours: lambda: Megapipe(shape, dtype, device, weights, options_of(arguments, name)) for ours in OURS},
        "plain": lambda: plain(shape, DTYPES[dtype], device, weights, not arguments.no_compile),
        "transformers": lambda: transformers_llama(shape, DTYPES[dtype], device, weights),
    }
    try:
        return makers[name]()
    except ImportError as error:
        raise BenchError(f"{name}: {error}; pip install transformers, or omit it from --contenders") from error


def agreements(contenders: Mapping[str, Contender], dtype: str) -> list[Agreement]:
    """Compare all contenders with the first. Raises BenchError if losses or gradient norms show that they do not
    train the same model."""
    found = agreement(contenders, dtype)
    for one in found:
        if not one.holds:
            raise BenchError(f"{one}: they are not the same model")
    return found


def measure(contenders: dict[str, Contender], shape: Shape, arguments: argparse.Namespace) -> Measured:
    device = torch.device(arguments.device)
    gemms: dict[str, Callable[[], float]] = {GEMM: lambda: gemm_rate(DTYPES[arguments.dtype], device)}
    if "megapipe-fp8" in contenders:
        gemms[FP8_GEMM] = lambda: fp8_gemm_rate(device)
    flops = flops_of_step(shape, causal=True)
    return take_turns(contenders, gemms, flops, device, arguments.rounds, arguments.warm_ups)


def describe_memory(name: str, contender: Contender, device: torch.device) -> str | None:
    """Return the peak of a step and the plan's; the other contenders' tensors are not counted."""
    if not isinstance(contender, Megapipe) or device.type != "cuda":
        return None
    planned = rank_memory(contender.plan, 0)
    own = sum(planned.items[item] for item in ("weights", "gradients", "optimizer", "fp8 weights"))
    before = torch.cuda.memory_allocated(device)
    peak = peak_bytes(lambda: (contender.gradients(), contender.update()), device)
    assert peak is not None
    counted = own + peak - before
    return (
        f"{name}, peak memory: planned {planned.total / GIB:.2f} GiB, measured {counted / GIB:.2f} GiB, ratio "
        f"{planned.total / counted:.3f}"
    )


def run(key: str, shape: Shape, arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any], bool]:
    """Measure one shape; return the text, the data, and True if all bars are met."""
    device, started = torch.device(arguments.device), time.perf_counter()
    weights = draw_weights(shape, device)
    contenders = {name: make(name, shape, arguments, weights) for name in arguments.contenders}
    weights.clear()
    _progress(key, "made", started)
    agreed = agreements(contenders, arguments.dtype)
    _progress(key, "compiled, and agree", started)
    measured = measure(contenders, shape, arguments)
    _progress(key, "timed", started)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    lines = [as_markdown(table(shape, measured, peak_flops(card, arguments.dtype))), ""]
    lines.append(f"- median [quartiles] of {arguments.rounds} rounds; {arguments.dtype}")
    lines += [f"- {name}: {options_of(arguments, name)}" for name in OURS if name in contenders]
    lines += [f"- {name}: {made.choice}" for name, made in contenders.items() if isinstance(made, Job) and made.choice]
    lines += [f"- {name} {sum(rates) / len(rates) / 1e12:.1f} TFLOP/s" for name, rates in measured.rates.items()]
    lines += [f"- {said}" for said in (*map(str, agreed), *remarks(measured))]
    said = verdicts(measured) if is_barred(key, arguments) else []
    lines += [f"- {sentence}" for sentence, _ in said]
    memory = [describe_memory(name, contender, device) for name, contender in contenders.items()]
    lines += [f"- {sentence}" for sentence in memory if sentence]
    if arguments.kernels:
        for name in OURS:
            lines += kernels_of(name, contenders[name], device) if name in contenders else []
    data = {
        "shape": dataclasses.asdict(shape),
        "rates": measured.rates,
        "turns": {name: [dataclasses.asdict(turn) for turn in turns] for name, turns in measured.turns.items()},
        "wishes": {name: str(options_of(arguments, name)) for name in OURS if name in contenders},
        "agreement": [dataclasses.asdict(one) for one in agreed],
        "bars": [{"sentence": sentence, "passed": passed} for sentence, passed in said],
    }
    _progress(key, "done", started)
    return lines, data, all(passed for _, passed in said)


def is_barred(key: str, arguments: argparse.Namespace) -> bool:
    """Return True for the shape, device and dtype that the bars are set for."""
    return key in BARRED_SHAPES and arguments.device == "cuda" and arguments.dtype == "bf16"


def kernels_of(name: str, contender: Contender, device: torch.device) -> list[str]:
    shares = kernel_shares(lambda: (contender.gradients(), contender.update()), device)
    if not shares:
        return [
            f"- kernels of {name}: torch's profiler finds none on this machine (CUPTI is missing, or another "
            "process uses it)"
        ]
    rows = [(kind, f"{share:.1%}", "; ".join(kernel[:60] for kernel in longest)) for kind, share, longest in shares]
    return ["", as_markdown([(f"kernels of a step of {name}", "share", "longest"), *rows])]


def _progress(key: str, what: str, started: float) -> None:
    print(f"bench_gpu: {key}: {what}, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=["8b-4k", "8b-8k"], help="default: 8b-4k 8b-8k"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers, instead of the shape's")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help=f"default: {' '.join(CONTENDERS)}"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument(
        "--fp8", choices=FP8_FORMATS, default="hybrid", help="--fp8-format of megapipe-fp8 (default: hybrid)"
    )
    parser.add_argument(
        "--fp8-recipe", choices=OWN_FP8_RECIPES, default="tensorwise", help="of megapipe-fp8 (default: tensorwise)"
    )
    parser.add_argument(
        "--compile-pointwise",
        choices=tuple(COMPILED),
        default="fp8",
        help="rows of megapipe that use this flag (default: fp8)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the tool")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument(
        "--warm-ups", type=int, default=3, metavar="N", help="steps of each before the first round (default: 3)"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="do not use torch.compile, not even for the plain model"
    )
    parser.add_argument("--kernels", action="store_true", help="also print the kernels of megapipe's steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn's numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met (a goal may be missed)")
    return parser


def refuse(arguments: argparse.Namespace) -> None:
    """Raise BenchError for requests that cannot be met here."""
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise BenchError("torch sees no GPU (--device cpu only tries the tool)")
        why = fp8_unsupported_reason(torch.device("cuda")) if "megapipe-fp8" in arguments.contenders else None
        if why is not None:
            raise BenchError(f"{why}; omit megapipe-fp8 from --contenders")
    if arguments.check and not any(is_barred(key, arguments) for key in arguments.shapes):
        raise BenchError(
            f"--check has nothing to check: bars are set for --shapes {' '.join(BARRED_SHAPES)} on a GPU in bf16"
        )


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    # as in a run; before anything is allocated on the GPU
    set_for_libraries(PYTORCH_ALLOC_CONF="expandable_segments:True")
    found: dict[str, Any] = {}
    all_met = True
    try:
        refuse(arguments)
        card = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        print(f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}\n", flush=True)
        for key in arguments.shapes:
            shape = (
                SHAPES[key] if arguments.layers is None else dataclasses.replace(SHAPES[key], layers=arguments.layers)
            )
            lines, found[key], met = run(key, shape, arguments)
            all_met &= met
            print(f"## {key}: {shape}\n\n" + "\n".join(lines) + "\n", flush=True)
            if arguments.json is not None:  # after every shape, so that an error in the next one loses nothing
                arguments.json.write_text(
                    json.dumps({"device": card, "torch": torch.__version__, "shapes": found}, indent=1) + "\n"
                )
            torch._dynamo.reset()  # otherwise the next shape would be compiled for dynamic sizes, which is slower
            gc.collect()
    except (BenchError, MegapipeError) as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"bench_gpu: {error}\nuse fewer --layers, or one of --contenders at a time", file=sys.stderr)
        return 2
    except torch._dynamo.exc.TorchDynamoException as error:
        print(f"bench_gpu: torch.compile fails on this machine: {error}\nuse --no-compile", file=sys.stderr)
        return 2
    return int(arguments.check and not all_met)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
