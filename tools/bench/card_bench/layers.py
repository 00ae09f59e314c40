"""Layers of Llama-3 8B's sizes: in bf16 eager and compiled, in fp8 by tensor and by blocks, and beside peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import torch

from card_bench.agreement import agreement
from card_bench.contenders import (
    Contender,
    Job,
    draw_weights,
    dtype_of,
    job_with,
    plain,
    transformers_llama,
    whole_step,
)
from card_bench.jobs import SHAPES, plan_of, predicted_ms
from card_bench.megatron import megatron_llama
from card_bench.report import Report
from card_bench.timing import fp8_gemm_rate, gemm_rate, profile_of
from card_bench.turns import FP8_GEMM, GEMM, Measured, build, take_turns
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.run_plan import RunPlan

MODEL_TERAFLOPS, OF_GEMM, FP8_TO_BF16 = 400.0, 0.75, 1.25
COMPILED = "--compile-blocks on"
VARIANTS = {  # a run on a GPU compiles loss and AdamW, and blocks if its trial finds them faster
    "eager": "--no-compile-loss --optimizer-impl torch --compile-blocks off",
    "compiled loss and AdamW": "--compile-blocks off",
    "compiled blocks": COMPILED,
}
FP8 = {
    "bf16": COMPILED,
    "fp8 by tensor": f"{COMPILED} --fp8-format hybrid --fp8-recipe tensorwise --compile-pointwise",
    "fp8 by blocks": f"{COMPILED} --fp8-format e4m3 --fp8-recipe blockwise --compile-pointwise",
}
PEERS = {  # with the bar of megapipe's speed to theirs, and the module that may not be installed
    "torch.compile": (plain, 1.0, "torch"),
    "transformers": (transformers_llama, 1.15, "transformers"),
    "Megatron-Core": (megatron_llama, 1.0, "megatron.core"),
}
Makers = Mapping[str, Callable[[dict[str, torch.Tensor]], Contender]]  # from weights


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def shape_plan(report: Report, *flags: str) -> RunPlan:
    """Return the plan of the shape of --shape, in bf16; that of a twin in fp32, in which contenders agree closely."""
    dtype = () if report.on_gpu else ("--dtype fp32",)
    return plan_of(report, SHAPES[report.shape], *dtype, *flags)


def ours(report: Report, options: Mapping[str, str], *sizes: str) -> Makers:
    plans = {name: shape_plan(report, flags, *sizes) for name, flags in options.items()}
    return {name: partial(job_with, plan, report.device) for name, plan in plans.items()}


def compare(
    report: Report, plan: RunPlan, makers: Makers, with_fp8: bool = False
) -> tuple[Measured, dict[str, Contender]]:
    """Build contenders on the same weights, check that they train the same model, and let them take turns."""
    device, weights = report.device, draw_weights(plan, report.device)
    layers = f"{plan.config.model.num_layers} layers"
    contenders = build(report, {name: partial(make, weights) for name, make in makers.items()}, f"{layers}, ")
    weights.clear()
    for one in agreement(contenders, plan.config.precision.dtype):
        if not one.holds:
            report.failed[f"agreement of {layers}, {one.name}"] = str(one)
    rates: dict[str, Callable[[], float]] = {GEMM: lambda: gemm_rate(dtype_of(plan), device)}
    if with_fp8:
        rates[FP8_GEMM] = lambda: fp8_gemm_rate(device)
    flops = step_flops(plan.config.model, plan.batch.full, causal=True)
    return take_turns(report, contenders, flops, rates, rounds=6), contenders


def write_rows(
    report: Report, plan: RunPlan, measured: Measured, contenders: Mapping[str, Contender]
) -> dict[str, float]:
    """Add the figures of every contender and return the model TFLOP/s of its whole step."""
    model, teraflops = plan.config.model, {}
    layers, tokens = f"{model.num_layers} layers", plan.batch.full * model.seq_length
    report.figure(f"{layers}.{GEMM}", measured.rate(GEMM) / 1e12, "TFLOP/s")
    for name, contender in contenders.items():
        prefix = f"{layers}.{name}"
        teraflops[name] = measured.flops / measured.step_seconds(name) / 1e12
        step_ms = update_ms = None
        if isinstance(contender, Job):
            step_ms, update_ms = (predicted_ms(report, contender.plan, part) for part in (None, "optimizer"))
        expected = None if step_ms is None else measured.flops / step_ms / 1e9
        report.figure(f"{prefix}.model", teraflops[name], "TFLOP/s", expected)
        report.figure(f"{prefix}.tokens a second", tokens / measured.step_seconds(name), "")
        report.figure(f"{prefix}.share of the {GEMM}", measured.ratio(name, GEMM), "")
        report.figure(f"{prefix}.update", 1e3 * measured.update_seconds(name), "ms", update_ms)
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
    """One layer and all layers of the shape, eager and compiled."""
    for name, sizes in (("one layer", "--num-layers 1"), ("all layers", "")):
        with report.attempt(name):
            _layers_in_bf16(report, sizes, has_bars=not sizes)


def _layers_in_bf16(report: Report, sizes: str, has_bars: bool) -> None:
    plan = shape_plan(report, sizes)
    measured, contenders = compare(report, plan, ours(report, VARIANTS, sizes))
    teraflops = write_rows(report, plan, measured, contenders)
    best = max(teraflops, key=teraflops.__getitem__)
    if has_bars:
        report.bar(f"model TFLOP/s, {best}", teraflops[best], MODEL_TERAFLOPS)
        report.bar(f"share of the {GEMM}, {best}", measured.ratio(best, GEMM), OF_GEMM)
    layers = f"{plan.config.model.num_layers} layers"
    for name in {"eager", best} & contenders.keys():
        with report.attempt(f"{layers}, kernels of {name}"):
            write_kernels(report, f"{layers}.{name}", contenders[name])


def layer_fp8(report: Report) -> None:
    """All layers of the shape in fp8 by tensor and by blocks, and in bf16."""
    plan = shape_plan(report)
    measured, contenders = compare(report, plan, ours(report, FP8), with_fp8=True)
    write_rows(report, plan, measured, contenders)
    report.figure(FP8_GEMM, measured.rate(FP8_GEMM) / 1e12, "TFLOP/s")
    for name in list(contenders)[1:] if "bf16" in contenders else ():
        ratio = measured.ratio(name, "bf16")
        report.figure(f"{name} to bf16", ratio, "")
        report.bar(f"{name} to bf16", ratio, FP8_TO_BF16, is_goal=True)
        with report.attempt(f"kernels of {name}"):
            write_kernels(report, name, contenders[name])


def layer_peers(report: Report) -> None:
    """All layers of the shape beside torch.compile of a plain model, transformers and Megatron-Core."""
    plan, makers = shape_plan(report), dict(ours(report, {"megapipe": COMPILED}))
    for name, (make, _, module) in PEERS.items():
        if is_installed(module):
            makers[name] = partial(make, plan, report.device)
        else:
            report.say(f"{name} is not installed")
    measured, contenders = compare(report, plan, makers)
    write_rows(report, plan, measured, contenders)
    for name in list(contenders)[1:] if "megapipe" in contenders else ():
        ratio = measured.ratio("megapipe", name)
        report.figure(f"megapipe to {name}", ratio, "")
        report.bar(f"megapipe to {name}", ratio, PEERS[name][1])
