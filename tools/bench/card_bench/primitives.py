"""What megapipe asks of a GPU, one primitive after another: whether it runs, whether it is right, and its rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from card_bench.report import Report
from card_bench.timing import copy_rate, fp8_gemm_rate, gemm_rate, sustained_seconds
from megapipe.gpu.device_clock import EventClock
from megapipe.gpu.kernels import compiled
from megapipe.gpu.streams import HostCopy
from megapipe.model.attention import fused_attention
from megapipe.optimizer.update_rule import adamw_pass
from megapipe.pipeline.graphs import CudaRecorder
from megapipe.tensor_parallel.cross_entropy import sum_of_exponentials, write_gradient
from megapipe.tensor_parallel.gemms import leaving_sms
from megapipe.tensor_parallel.gradients import GradientSlot, gemm_adds_to_fp32

Found = dict[str, Any]  # numbers are figures, texts remarks
Primitive = Callable[[torch.device], Found]
CLOSE = 0.02  # relative error of bf16 products


class WrongResult(Exception):
    """A primitive that runs and computes something else."""


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative error. Raises WrongResult if it is more than rounding to bf16 explains."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < CLOSE:
        raise WrongResult(f"relative error {error:.3g}; rounding to bf16 explains less than {CLOSE}")
    return error


def normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def context(device: torch.device) -> Found:
    torch.zeros(1, device=device)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu": f"{properties.name}, sm_{properties.major}{properties.minor}",
        "built for": " ".join(torch.cuda.get_arch_list()),
        "CUDA": str(torch.version.cuda),
        "cuDNN and NCCL": f"{torch.backends.cudnn.version()}, {torch.cuda.nccl.version()}",
        "sms": properties.multi_processor_count,
        "l2 MiB": properties.L2_cache_size / 2**20,
        "total GiB": total / 2**30,
        "taken by the context, GiB": (total - free) / 2**30,
    }


def expandable_segments(device: torch.device) -> Found:
    """megapipe asks for them; card.py has set that before CUDA started."""
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    found = {"expandable": float(any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()))}
    del held
    return found


def copy(device: torch.device) -> Found:
    return {"TB/s": copy_rate(device) / 1e12}


def gemm(device: torch.device) -> Found:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"TFLOP/s": gemm_rate(dtype, device) / 1e12}


def weight_gradient(device: torch.device) -> Found:
    """The GEMM that adds to fp32, and a plain one in bf16."""
    tokens, outputs, inputs = (4096, 14336, 4096) if device.type == "cuda" else (64, 48, 32)
    gradient, x = normal(device, tokens, outputs), normal(device, tokens, inputs)
    slot = GradientSlot(torch.zeros(outputs, inputs, device=device))
    slot.add_outer(gradient, x)
    slot.add_outer(gradient, x)
    rows = slice(0, min(outputs, 256))
    found: Found = {
        "added in the GEMM": float(gemm_adds_to_fp32(torch.device(device.type, 0), torch.bfloat16)),
        "error": error_of(slot.main_grad[rows], 2 * (gradient[:, rows].double().t() @ x.double())),
    }
    for name, call in {
        "add": lambda: slot.add_outer(gradient, x),
        "plain": lambda: torch.mm(gradient.t(), x),
    }.items():
        took = sustained_seconds(call, device)
        found |= {f"{name} ms": 1e3 * took, f"{name} TFLOP/s": 2 * tokens * outputs * inputs / took / 1e12}
    return found


def attention_choice(device: torch.device) -> Found:
    """Which kernel torch takes for grouped queries in bf16, and in fp32."""
    query = torch.empty(1, 32, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    key = torch.empty(1, 8, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    grouped = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)
    single = torch._fused_sdp_choice(query.float(), query.float(), query.float(), None, 0.0, True)
    return {"bf16": SDPBackend(grouped).name, "fp32": SDPBackend(single).name}


def attention(device: torch.device) -> Found:
    """Causal, with four queries for a key; counted half."""
    seq, batch, groups, queries, size = (4096, 2, 8, 4, 128) if device.type == "cuda" else (32, 2, 2, 2, 16)
    qkv = normal(device, seq, batch, groups, queries + 2, size).requires_grad_()
    query, key, value = qkv.split((queries, 1, 1), dim=3)
    y = fused_attention(query, key, value, None, size**-0.5)
    dy = torch.randn_like(y)
    flops = 2 * batch * groups * queries * seq * seq * size
    forward = sustained_seconds(lambda: fused_attention(query, key, value, None, size**-0.5), device)
    backward = sustained_seconds(lambda: torch.autograd.grad(y, qkv, dy, retain_graph=True), device)
    return {"forward TFLOP/s": flops / forward / 1e12, "backward TFLOP/s": 2.5 * flops / backward / 1e12}


def grouped_gemm(device: torch.device) -> Found:
    """The first product of 128 experts of Qwen3-30B, 4,096 tokens for 8 of them each."""
    experts, rows, outputs, inputs = 128, 4096 * 8, 768, 2048
    x, weights = normal(device, rows, inputs), normal(device, experts, outputs, inputs)
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)
    product = torch.nn.functional.grouped_mm(x, weights.mT, offs=ends)
    first = rows // experts
    error = error_of(product[:first], x[:first].float() @ weights[0].float().t())
    took = sustained_seconds(lambda: torch.nn.functional.grouped_mm(x, weights.mT, offs=ends), device)
    return {"TFLOP/s": 2 * rows * outputs * inputs / took / 1e12, "error": error}


def fp8_gemm(device: torch.device) -> Found:
    return {"TFLOP/s": fp8_gemm_rate(device) / 1e12}


def as_on(device: torch.device, function: Any) -> Any:
    """Return a function as megapipe compiles it on a GPU; on a CPU as it is."""
    return compiled(function) if device.type == "cuda" else function


def adam(device: torch.device) -> Found:
    """The compiled update, 34 bytes an element."""
    count = 1 << (28 if device.type == "cuda" else 12)
    states = [torch.randn(count, device=device) for _ in range(4)]
    states[2].abs_()
    weights = torch.empty(count, device=device, dtype=torch.bfloat16)
    scalars = [torch.tensor(value) for value in (1.0, 0.99, 1e-4, 1.0)]
    kernel, began = as_on(device, adamw_pass), time.monotonic()
    kernel(*states, weights, *scalars, 0.9, 0.95, 1e-8)
    compile_seconds = time.monotonic() - began
    took = sustained_seconds(lambda: kernel(*states, weights, *scalars, 0.9, 0.95, 1e-8), device)
    return {"compile s": compile_seconds, "TB/s": 34 * count / took / 1e12}


def loss(device: torch.device) -> Found:
    """The compiled passes over logits: 2 bytes an element read in the forward, 4 moved in the backward."""
    rows, words = (8192, 32768) if device.type == "cuda" else (64, 128)
    labels, ones = torch.randint(words, (rows,), device=device), torch.ones(rows, device=device)
    total, gradient = as_on(device, sum_of_exponentials), as_on(device, write_gradient)
    logits = normal(device, rows, words)
    top, expected = logits.amax(-1).float(), torch.logsumexp(logits.float(), -1)
    began = time.monotonic()
    error = error_of(total(logits, top).log() + top, expected)
    gradient(logits.clone(), expected, ones, labels, ones, None, words)
    compile_seconds = time.monotonic() - began
    forward = sustained_seconds(lambda: total(logits, top), device)
    backward = sustained_seconds(lambda: gradient(logits, expected, ones, labels, ones, None, words), device)
    return {
        "error": error,
        "compile s": compile_seconds,
        "forward TB/s": 2 * rows * words / forward / 1e12,
        "backward TB/s": 4 * rows * words / backward / 1e12,
    }


def clock(device: torch.device) -> Found:
    """CUDA events on the host's clock."""
    events = EventClock(device)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    events.begin()
    mark = events.mark()
    events.end()
    return {"error us": events.error_ns / 1e3, "mark after its request, us": (events.time_of(mark) - int(mark)) / 1e3}


def host_copy(device: torch.device) -> Found:
    """A small tensor reaches the host, and asking for it waits for nothing."""
    x = torch.ones(4, device=device)
    HostCopy(x).values()
    torch.cuda.set_sync_debug_mode("error")
    try:
        asked = HostCopy(x + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if asked.values() != [2.0] * 4:
        raise WrongResult(f"the host read {asked.values()}, the device holds 2.0")
    return {}


def sm_carveout(device: torch.device) -> Found:
    """A GEMM that leaves 16 SMs to kernels of other streams."""
    size = 8192 if device.type == "cuda" else 64
    x = normal(device, size, size)
    whole = sustained_seconds(lambda: x @ x, device)
    with leaving_sms(16, x):
        left = sustained_seconds(lambda: x @ x, device)
        error = error_of((x @ x)[:64], x[:64].double() @ x.double())
    return {"ms": 1e3 * left, "of the time with all SMs": left / whole, "error": error}


def cuda_graph(device: torch.device) -> Found:
    """A replayed graph adds the gradients of a launch. It is the last: a failed capture spoils the process."""
    gradient, x = normal(device, 256, 128), normal(device, 256, 64)
    launched, replayed = (GradientSlot(torch.zeros(128, 64, device=device)) for _ in range(2))
    launched.add_outer(gradient, x)
    recorder = CudaRecorder()
    replay, _ = recorder.record(lambda: replayed.add_outer(gradient, x), recorder.pool())
    replay()
    torch.cuda.synchronize()
    if not torch.equal(launched.main_grad, replayed.main_grad):
        raise WrongResult("a replay computes other bits than a launch")
    return {}


ON_CPUS: tuple[Primitive, ...] = (copy, gemm, weight_gradient, attention, adam, loss, sm_carveout)
ON_GPUS: tuple[Primitive, ...] = (
    *(context, expandable_segments, *ON_CPUS, attention_choice, grouped_gemm, fp8_gemm, clock, host_copy, cuda_graph),
)


def primitives(report: Report) -> None:
    """Try each primitive; on a CPU tiny ones, without those that only a GPU has."""
    for function in ON_GPUS if report.on_gpu else ON_CPUS:
        name = function.__name__
        with report.attempt(name):
            for key, value in function(report.device).items():
                if isinstance(value, str):
                    report.say(f"{name}, {key}: {value}")
                else:
                    report.figure(f"{name} {key}", value, "")
