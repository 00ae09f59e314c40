"""Clocks for a device, the rate of a large GEMM, peak memory, and the kernels of a step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megapipe.comm.round_trips import synchronize
from megapipe.tensor_parallel.fp8_matrix import E4M3, fp8_matmul
from megapipe.tensor_parallel.fp8_scales import tensorwise

GEMM_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
GEMM_SECONDS = {"cuda": 0.4, "cpu": 0.01}
LAUNCH = r"(cuda|cu)Launch\w*Kernel|cudaGraphLaunch"  # calls of the driver that launch kernels


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Return wall-clock seconds, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a square GEMM of random numbers: zeros would need less power and run faster."""
    size = GEMM_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / sustained_seconds(lambda: torch.mm(a, b), device)


def fp8_gemm_rate(device: torch.device) -> float:
    """Return the FLOP/s of the same GEMM with e4m3 operands, one scale a tensor, as in a linear's forward: bf16
    result, fast sums."""
    size = GEMM_SIZE[device.type]
    a, b = (tensorwise(torch.randn(size, size, device=device), E4M3) for _ in range(2))
    return 2.0 * size**3 / sustained_seconds(lambda: fp8_matmul(a, b, torch.bfloat16, fast=True), device)


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second of a copy, read and written."""
    source = torch.randint(256, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / sustained_seconds(lambda: target.copy_(source), device)


def sustained_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one of as many calls as take GEMM_SECONDS: about a step's time, after which the GPU's
    clock has settled at its power limit. A short burst runs faster than any step could."""
    for _ in range(3):
        call()
    once = seconds_of(call, device)
    calls = max(1, round(GEMM_SECONDS[device.type] / once))
    return seconds_of(lambda: _repeat(call, calls), device) / calls


def _repeat(call: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        call()


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Return the most bytes that tensors held at once while `run` ran; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@dataclass(frozen=True)
class StepProfile:
    """The kernels of one run, and the calls that launched them; on a CPU operators, and their calls."""

    seconds: Mapping[str, float]  # by kernel
    launches: int
    launch_seconds: float  # of the host, in the calls that launch kernels; 0 on a CPU

    def longest(self, count: int) -> list[tuple[str, float]]:
        return sorted(self.seconds.items(), key=lambda row: -row[1])[:count]


def profile_of(run: Callable[[], Any], device: torch.device) -> StepProfile:
    """Profile one run. No seconds: the profiler sees no kernels on this machine."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        synchronize(device)
    seconds: dict[str, float] = {}
    launches, launch_seconds = 0, 0.0
    for event in profile.key_averages():
        if on_gpu and re.match(LAUNCH, event.key):
            launches += event.count
            launch_seconds += event.self_cpu_time_total * 1e-6
            continue
        launches += event.count * (not on_gpu)
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent > 0:
            seconds[event.key] = spent * 1e-6
    return StepProfile(seconds, launches, launch_seconds)
