"""CUDA graphs, compiled blocks and offload: each on and off in turns, for what it is there for."""

from __future__ import annotations

from functools import partial

import torch

from card_bench.contenders import TRACED, Job, whole_step
from card_bench.features import EXPERTS, TINY_EXPERTS
from card_bench.jobs import EAGER_BLOCKS, OF_8B, QWEN_05B, TINY, job_of, predicted_ms
from card_bench.report import Report
from card_bench.timing import peak_bytes, profile_of
from card_bench.turns import take_turns
from megapipe.plan.memory import rank_memory
from megapipe.train.compiled_blocks import agreed_trial, compiler_of, use

ONE_BATCH = "--micro-batch-size 1 --global-batch-size 2"
TINY_BATCH = f"{TINY} {ONE_BATCH}"
SMALL = (  # many short kernels: the host's launches limit it
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --vocab-size 32768 "
    "--micro-batch-size 1 --global-batch-size 8"
)
LAYERS_OF_8B = f"{OF_8B} {ONE_BATCH}"
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
OFFLOAD = "--cpu-offloading-num-layers 8 --min-offloaded-tensor-size 1048576"
BLOCKS_OF = {
    "8B": f"--num-layers 2 --seq-length 8192 {LAYERS_OF_8B}",
    "0.5B": QWEN_05B.replace("--num-layers 24", "--num-layers 4") + " --micro-batch-size 8 --global-batch-size 16",
    "experts": EXPERTS,
}
MIB = 1 << 20


def _on_and_off(report: Report, sizes: str, flags: str) -> tuple[dict[str, Job], float]:
    """Let jobs with and without flags take turns; add their steps, and return how much faster one is with them."""
    jobs = {"off": job_of(report, sizes, EAGER_BLOCKS), "on": job_of(report, sizes, flags, EAGER_BLOCKS)}
    measured = take_turns(report, jobs)
    for name, job in jobs.items():
        report.figure(f"step {name}", 1e3 * measured.step_seconds(name), "ms", predicted_ms(report, job.plan))
    gain = measured.speedup("on", "off")
    report.figure("off to on", gain, "times the speed")
    return jobs, gain


def graphs(report: Report) -> None:
    """Steps of a small model, whose kernels are short, with and without CUDA graphs."""
    sizes, flags = (SMALL, GRAPHS) if report.on_gpu else (TINY_BATCH, "")
    if not report.on_gpu:
        report.say("no CUDA graphs on a CPU: both sides are without")
    jobs, gain = _on_and_off(report, sizes, flags)
    report.bar("off to on", gain, 1.0, is_goal=True)
    for name, job in jobs.items():
        profile = profile_of(partial(whole_step, job), report.device)
        report.figure(f"launches {name}", profile.launches, "a step")


def compile_blocks(report: Report) -> None:
    """What the trial of --compile-blocks auto decides for a kind of layer, and what compiled blocks gain in steps."""
    kinds = BLOCKS_OF if report.on_gpu else {"tiny": TINY_BATCH, "experts": TINY_EXPERTS}
    for name, sizes in kinds.items():
        with report.attempt(name):
            _trial(report, name, sizes)


def _trial(report: Report, name: str, sizes: str) -> None:
    jobs = {on: job_of(report, sizes, EAGER_BLOCKS) for on in ("off", "on")}
    runtime = jobs["on"].runtime
    compiler = compiler_of(runtime, None if report.on_gpu else TRACED)
    trial = agreed_trial(runtime, compiler)
    report.say(f"{name}, the trial: {trial.describe()}")
    if not trial.is_equal:
        raise RuntimeError(f"compiled blocks are not equal: {trial.describe()}")
    use(runtime, compiler)
    gain = take_turns(report, jobs).speedup("on", "off")
    report.figure(f"{name}.steps, off to on", gain, "times the speed")
    report.figure(f"{name}.trial, eager to compiled", trial.eager_seconds / trial.compiled_seconds, "times the speed")
    report.figure(f"{name}.compilation", trial.compile_seconds, "s")
    report.bar(f"{name}.steps, off to on", gain, 1.0, is_goal=True)
    if (trial.compiled_seconds < trial.eager_seconds) is not (gain > 1.0):
        report.say(f"{name}: the trial decides otherwise than whole steps show")


def offload(report: Report) -> None:
    """The memory that offloaded activations free, and the time that it takes."""
    sizes = f"--num-layers 8 --seq-length 4096 {LAYERS_OF_8B}" if report.on_gpu else TINY_BATCH
    flags = OFFLOAD if report.on_gpu else "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1"
    jobs, _ = _on_and_off(report, sizes, flags)
    peaks = {}
    for name, job in jobs.items():
        before = torch.cuda.memory_allocated(report.device) if report.on_gpu else 0
        peaks[name] = (peak_bytes(partial(whole_step, job), report.device) or 0) - before
    freed = peaks["off"] - peaks["on"]
    planned = rank_memory(jobs["off"].plan, 0).total - rank_memory(jobs["on"].plan, 0).total
    report.figure("memory freed", freed / MIB, "MiB", planned / MIB)
    if report.on_gpu:
        report.bar("memory freed, of the plan's", freed / planned, 0.9, is_goal=True)
