"""Layers of Llama-3 8B's sizes: in bf16 eager and compiled, in fp8 by tensor and by blocks, and beside peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from gpu_bench.agreement import agreement
from gpu_bench.contenders import Contender, Megapipe, Options, draw_weights, plain, transformers_llama, whole_step
from gpu_bench.figures import FP8_GEMM, GEMM, Measured, flops_of_step
from gpu_bench.shapes import SHAPES, Shape
from gpu_bench.timing import fp8_gemm_rate, gemm_rate, profile_of
from gpu_bench.turns import take_turns

from card_bench.jobs import predicted_ms, step_seconds
from card_bench.megatron import megatron_llama
from card_bench.report import Report

MODEL_TERAFLOPS, OF_GEMM, FP8_TO_BF16 = 400.0, 0.75, 1.25
VARIANTS = {  # a run on a GPU compiles loss and AdamW, and blocks if its trial finds them faster
    "eager": Options(compiles=False),
    "compiled loss and AdamW": Options(compile_blocks="off"),
    "compiled blocks": Options(compile_blocks="on"),
}
BEST = VARIANTS["compiled blocks"]
FP8 = {
    "bf16": BEST,
    "fp8 by tensor": replace(BEST, fp8_format="hybrid", fp8_recipe="tensorwise", compile_pointwise=True),
    "fp8 by blocks": replace(BEST, fp8_format="e4m3", fp8_recipe="blockwise", compile_pointwise=True),
}
MODULES = {"transformers": "transformers", "Megatron-Core": "megatron.core"}  # peers that may not be installed
Makers = Mapping[str, Callable[[dict[str, torch.Tensor]], Contender]]


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def shape_of(report: Report, layers: int) -> Shape:
    """Return one or four layers at sequence 8,192; on a CPU tiny ones."""
    return replace(SHAPES["8b-8k" if report.on_gpu else "tiny"], layers=layers if report.on_gpu else min(layers, 2))


def ours(report: Report, shape: Shape, options: Mapping[str, Options]) -> Makers:
    return {
        name: partial(lambda each, weights: Megapipe(shape, "bf16", report.device, weights, each), each)
        for name, each in options.items()
    }


def compare(
    report: Report, shape: Shape, makers: Makers, with_fp8: bool = False
) -> tuple[Measured, dict[str, Contender]]:
    """Build contenders on the same weights, check that they train the same model, and let them take turns."""
    device, contenders = report.device, dict[str, Contender]()
    weights = draw_weights(shape, device)
    for name, make in makers.items():
        with report.attempt(f"{shape.layers} layers, {name}"):
            contenders[name] = make(weights)
    weights.clear()
    if not contenders:
        raise RuntimeError("no contender could be built")
    for one in agreement(contenders, "bf16"):
        if not one.holds:
            report.failed[f"agreement of {shape.layers} layers, {one.name}"] = str(one)
    rates: dict[str, Callable[[], float]] = {
        GEMM: lambda: gemm_rate(torch.bfloat16 if report.on_gpu else torch.float32, device)
    }
    if with_fp8:
        rates[FP8_GEMM] = lambda: fp8_gemm_rate(device)
    flops = flops_of_step(shape, causal=True)
    rounds, until = 6 if report.on_gpu else 1, report.deadline - 0.2 * report.left
    return take_turns(contenders, rates, flops, device, rounds, int(report.on_gpu), until), contenders


def write_rows(
    report: Report, shape: Shape, measured: Measured, contenders: Mapping[str, Contender]
) -> dict[str, float]:
    """Add the figures of every contender and return the model TFLOP/s of its whole step."""
    teraflops = {}
    report.figure(f"{shape.layers} layers.{GEMM}", statistics.median(measured.rates[GEMM]) / 1e12, "TFLOP/s")
    for name, contender in contenders.items():
        prefix = f"{shape.layers} layers.{name}"
        step = step_seconds(measured.turns[name])
        teraflops[name] = measured.flops / step / 1e12
        step_ms = update_ms = None
        if isinstance(contender, Megapipe):
            step_ms, update_ms = (predicted_ms(report, contender.plan, part) for part in (None, "optimizer"))
        expected = None if step_ms is None else measured.flops / step_ms / 1e9
        of_gemm = measured.ratio(name, GEMM)
        assert of_gemm is not None
        report.figure(f"{prefix}.model", teraflops[name], "TFLOP/s", expected)
        report.figure(f"{prefix}.share of the {GEMM}", of_gemm.median, "")
        update = statistics.median(turn.update for turn in measured.turns[name])
        report.figure(f"{prefix}.update", 1e3 * update, "ms", update_ms)
    return teraflops


def write_kernels(report: Report, prefix: str, contender: Contender) -> None:
    """Add the five longest kernels of a step, its launches, and the share of the step in which no kernel runs."""
    profile = profile_of(partial(whole_step, contender), report.device)
    busy = sum(profile.seconds.values())
    if not busy:
        raise RuntimeError("torch's profiler sees no kernels (CUPTI is missing, or another process uses it)")
    report.figure(f"{prefix}.launches a step", profile.launches, "")
    report.figure(f"{prefix}.host in launches", 1e3 * profile.launch_seconds, "ms a step")
    report.figure(f"{prefix}.kernels", 1e3 * busy, "ms a step")
    longest = "; ".join(f"{1e3 * seconds:.2f} ms {name[:60]}" for name, seconds in profile.longest(5))
    report.say(f"{prefix}, the longest kernels of a step: {longest}")


def layer_bf16(report: Report) -> None:
    """One and four layers, eager and compiled."""
    for layers in (1, 4):
        with report.attempt(f"{layers} layers"):
            _layers_in_bf16(report, shape_of(report, layers), layers == 4)


def _layers_in_bf16(report: Report, shape: Shape, has_bars: bool) -> None:
    measured, contenders = compare(report, shape, ours(report, shape, VARIANTS))
    teraflops = write_rows(report, shape, measured, contenders)
    best = max(teraflops, key=teraflops.__getitem__)
    if has_bars:
        of_gemm = measured.ratio(best, GEMM)
        assert of_gemm is not None
        report.bar(f"model TFLOP/s, {best}", teraflops[best], MODEL_TERAFLOPS)
        report.bar(f"share of the {GEMM}, {best}", of_gemm.median, OF_GEMM)
    for name in {"eager", best} & contenders.keys():
        with report.attempt(f"{shape.layers} layers, kernels of {name}"):
            write_kernels(report, f"{shape.layers} layers.{name}", contenders[name])


def layer_fp8(report: Report) -> None:
    """Four layers in fp8 by tensor and by blocks, and in bf16."""
    shape = shape_of(report, 4)
    if not report.on_gpu:
        shape = replace(shape, hidden=128, ffn=256)  # that blocks divide
    measured, contenders = compare(report, shape, ours(report, shape, FP8), with_fp8=True)
    write_rows(report, shape, measured, contenders)
    report.figure(FP8_GEMM, statistics.median(measured.rates[FP8_GEMM]) / 1e12, "TFLOP/s")
    for name in contenders:
        ratio = measured.ratio(name, "bf16") if name != "bf16" else None
        if ratio is not None:
            report.figure(f"{name} to bf16", ratio.median, "")
            report.bar(f"{name} to bf16", ratio.median, FP8_TO_BF16, is_goal=True)
            with report.attempt(f"kernels of {name}"):
                write_kernels(report, name, contenders[name])


def layer_peers(report: Report) -> None:
    """Four layers beside torch.compile of a plain model, transformers and Megatron-Core."""
    shape, device = shape_of(report, 4), report.device
    peers: Makers = {
        "torch.compile": lambda weights: plain(shape, torch.bfloat16, device, weights, True),
        "transformers": lambda weights: transformers_llama(shape, torch.bfloat16, device, weights),
        "Megatron-Core": lambda weights: megatron_llama(shape, device, weights),
    }
    found = {name: make for name, make in peers.items() if name not in MODULES or is_installed(MODULES[name])}
    for name in peers.keys() - found.keys():
        report.say(f"{name} is not installed")
    measured, contenders = compare(report, shape, {**ours(report, shape, {"megapipe": BEST}), **found})
    write_rows(report, shape, measured, contenders)
    for name in found:
        ratio = measured.ratio("megapipe", name) if name in contenders else None
        if ratio is not None:
            report.figure(f"megapipe to {name}", ratio.median, "")
            report.bar(f"megapipe to {name}", ratio.median, 1.0)
