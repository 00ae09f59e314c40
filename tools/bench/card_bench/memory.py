"""Bytes of a step: planned, counted by a dry run, allocated by torch, reserved by its allocator, used on the card."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from card_bench.contenders import Job, whole_step
from card_bench.jobs import EAGER_BLOCKS, LLAMA, STEPS, TINY, plan_of, predicted_ms
from card_bench.report import Report
from card_bench.timing import seconds_of
from megapipe.comm.groups import ProcessGroups, Traffic, fake_process_groups
from megapipe.config.load import load_config
from megapipe.extras.dry_run.rank import count_rank, count_step, random_reader
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.trace.meta import LiveBytes

WITHIN = 0.03
GIB, MIB = 1 << 30, 1 << 20
SIZES = {
    "cuda": "--num-layers 6 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
    "--seq-length 2048 --vocab-size 32000 --micro-batch-size 4 --global-batch-size 8",
    "cpu": f"{TINY} --ffn-hidden-size 256 --hidden-size 128 --micro-batch-size 2 --global-batch-size 4",
}
EAGER = "--no-compile-loss --optimizer-impl torch"
OFFLOAD = "--cpu-offloading-num-layers 4 --min-offloaded-tensor-size 1"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OF_DEVICE = {  # values of flags that fit the sizes
    "cuda": {
        "latent": "--q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128",
        "chunk": 1024,
    },
    "cpu": {
        "latent": "--q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16",
        "chunk": 16,
    },
}
GROUPS = "--group-query-attention --num-query-groups 4"  # latent attention has none
CONFIGURATIONS = {
    "bf16": EAGER,
    "bf16, compiled loss and AdamW": "",
    "fp32": f"--dtype fp32 {EAGER}",
    "full recompute": f"{FULL} {EAGER}",
    "full recompute but attention": f"{FULL} --recompute-keep-attention {EAGER}",
    "selective recompute": f"--recompute-granularity selective --recompute-modules layernorm activation {EAGER}",
    "offload": f"{OFFLOAD} {EAGER}",
    "loss in chunks": f"--cross-entropy-chunk-size {{chunk}} {EAGER}",
    "fp8 by tensor": f"--fp8-format hybrid --fp8-recipe tensorwise {EAGER}",
    "experts": f"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 {EAGER}",
    "latent attention": f"--multi-latent-attention --qk-layernorm {{latent}} {EAGER}",
    "Muon": f"--optimizer muon {EAGER}",
}
GRIDS = {  # ranks, and the flags of a grid of which rank 0 runs
    "cuda": (
        8,
        "--config llama3_8b --mock-data --train-iters 100000 --micro-batch-size 1 --global-batch-size 8 "
        "--tensor-model-parallel-size 2",
    ),
    "cpu": (
        4,
        f"{LLAMA} {STEPS} {TINY} --micro-batch-size 2 --global-batch-size 8 --tensor-model-parallel-size 2 "
        "--sequence-parallel",
    ),
}
RANK_STEPS = 3


def memory(report: Report) -> None:
    """Twelve configurations; on a CPU a count of real tensors stands for torch's allocator."""
    worst: dict[str, float] = {}
    if report.on_gpu:  # cuBLAS allocates its workspace with the first product, and keeps it
        a = torch.ones(1024, 1024, dtype=torch.bfloat16, device=report.device)
        torch.mm(a, a)
    for name in CONFIGURATIONS:
        with report.attempt(name):
            worst[name] = _one(report, name, plan_for(report, name))
    if worst:
        name = max(worst, key=worst.__getitem__)
        report.bar(f"planned and allocated bytes differ, at most ({name})", worst[name], WITHIN, at_most=True)


def plan_for(report: Report, name: str) -> RunPlan:
    """Return the plan of a configuration at the sizes of the device."""
    kind = report.device.type
    flags = CONFIGURATIONS[name].format(**OF_DEVICE[kind])
    groups = "" if "--multi-latent-attention" in flags else GROUPS
    return plan_of(report, SIZES[kind], groups, flags, EAGER_BLOCKS)


def _one(report: Report, name: str, plan: RunPlan) -> float:
    """Add the figures of a configuration and return how far the plan is from the allocated bytes, as a share."""
    read, device = random_reader(plan), report.device
    planned = rank_memory(plan, 0).total
    counted = count_rank(plan, 0, read, device.type).peak
    if report.on_gpu:
        allocated, rest = _allocated(lambda: _two_steps(plan, device), device)
        for what, number in rest.items():
            report.figure(f"{name}.{what}", number / MIB, "MiB")
        report.figure(f"{name}.allocated but not counted", (allocated - counted) / MIB, "MiB")
    else:
        with LiveBytes() as live:
            allocated = count_step(plan, ProcessGroups.alone(), device, live, read)[0].peak
    report.figure(f"{name}.allocated", allocated / GIB, "GiB", planned / GIB, ("counted", counted / GIB))
    return abs(planned / allocated - 1)


def _two_steps(plan: RunPlan, device: torch.device) -> None:
    job = Job(plan, device)
    for _ in range(2):
        whole_step(job)


def _allocated(run: Callable[[], None], device: torch.device) -> tuple[int, dict[str, int]]:
    """Return the most bytes that a run allocates, and what is beyond: of the allocator, and of the CUDA context."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    most, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    return most - before, {"reserved but not allocated": reserved - most, "used outside the allocator": context}


def rank(report: Report) -> None:
    """Steps of rank 0 of Llama-3 8B on eight GPUs: its kernels and memory, over process groups that move nothing.

    The planned step has bubbles and collectives; this one has neither.
    """
    plan = rank_plan(report)
    seconds: list[float] = []
    if report.on_gpu:
        allocated, rest = _allocated(lambda: seconds.extend(_steps_of_a_rank(plan, report.device)), report.device)
        report.figure("allocated", allocated / GIB, "GiB", rank_memory(plan, 0).total / GIB)
        for what, number in rest.items():
            report.figure(what, number / MIB, "MiB")
    else:
        seconds.extend(_steps_of_a_rank(plan, report.device))
    report.figure("first step", 1e3 * seconds[0], "ms")
    report.figure("step", 1e3 * min(seconds[1:]), "ms", predicted_ms(report, plan))


def rank_plan(report: Report) -> RunPlan:
    """Return the plan of the grid of which rank 0 runs."""
    world, flags = GRIDS[report.device.type]
    words = f"{flags} --pipeline-model-parallel-size 2 {EAGER_BLOCKS} --device {report.device.type}"
    return resolve(load_config(words.split()).config, world)


def _steps_of_a_rank(plan: RunPlan, device: torch.device) -> list[float]:
    """Return the seconds of each step of rank 0."""

    def draw(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:  # on the device, faster than the run's own draw
        shape = spec.local_shape(tp_rank, tp)
        return torch.ones(shape, device=device) if len(shape) < 2 else torch.randn(shape, device=device) * 0.02

    torch.manual_seed(0)
    job = Job(plan, device, draw, fake_process_groups(plan.topology, 0, Traffic()))

    def step() -> None:
        job.step()
        job.runtime.stores.finish_weights()

    return [seconds_of(step, device) for _ in range(RANK_STEPS)]
