#!/usr/bin/env python3
"""Try and time what megapipe asks of a GPU, one primitive after another; one that fails does not stop the others.

    python tools/bench/gpu_primitives.py
    python tools/bench/gpu_primitives.py --only gemm attention

Times are medians of CUDA events. Exits with 1 if a primitive failed. With --device cpu primitives are tiny, and those
that only a GPU has are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

BEGAN = time.monotonic()
import torch  # noqa: E402

IMPORT_SECONDS = time.monotonic() - BEGAN
from gpu_bench.timing import fp8_gemm_rate, gemm_rate  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

from megapipe.environment import set_for_libraries  # noqa: E402
from megapipe.gpu.device_clock import EventClock  # noqa: E402
from megapipe.gpu.kernels import compiled  # noqa: E402
from megapipe.gpu.streams import HostCopy  # noqa: E402
from megapipe.model.attention import fused_attention  # noqa: E402
from megapipe.optimizer.update_rule import adamw_pass  # noqa: E402
from megapipe.pipeline.graphs import CudaRecorder  # noqa: E402
from megapipe.tensor_parallel.cross_entropy import sum_of_exponentials, write_gradient  # noqa: E402
from megapipe.tensor_parallel.gemms import leaving_sms  # noqa: E402
from megapipe.tensor_parallel.gradients import GradientSlot, gemm_adds_to_fp32  # noqa: E402

Found = dict[str, Any]  # numbers are figures, texts remarks
Primitive = Callable[[torch.device], Found]
PRIMITIVES: dict[str, Primitive] = {}
ONLY_ON_GPUS: set[str] = set()
WARM_UPS, FEWEST, MOST, SECONDS = 3, 5, 20, 0.3
CLOSE = 0.02  # relative error of bf16 products


class WrongResult(Exception):
    """A primitive that runs and computes something else."""


def primitive(function: Primitive) -> Primitive:
    PRIMITIVES[function.__name__] = function
    return function


def on_gpus(function: Primitive) -> Primitive:
    ONLY_ON_GPUS.add(function.__name__)
    return primitive(function)


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median of some calls by events; on a CPU the time of one."""
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(times) < MOST and (len(times) < FEWEST or time.perf_counter() < until):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative error. Raises WrongResult if it is more than rounding to bf16 explains."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < CLOSE:
        raise WrongResult(f"relative error {error:.3g}; rounding to bf16 explains less than {CLOSE}")
    return error


def normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


@on_gpus
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


@on_gpus
def expandable_segments(device: torch.device) -> Found:
    """megapipe asks for them; main has set that before CUDA started."""
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    found = {"expandable": float(any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()))}
    del held
    return found


@primitive
def copy(device: torch.device) -> Found:
    size = 1 << (30 if device.type == "cuda" else 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    took = milliseconds(lambda: target.copy_(source), device)
    return {"ms": took, "TB/s": 2 * size / took / 1e9}


@primitive
def gemm(device: torch.device) -> Found:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"TFLOP/s": gemm_rate(dtype, device) / 1e12}


@primitive
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
        took = milliseconds(call, device)
        found |= {f"{name} ms": took, f"{name} TFLOP/s": 2 * tokens * outputs * inputs / took / 1e9}
    return found


@on_gpus
def attention_choice(device: torch.device) -> Found:
    """Which kernel torch takes for grouped queries in bf16, and in fp32."""
    query = torch.empty(1, 32, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    key = torch.empty(1, 8, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    grouped = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)
    single = torch._fused_sdp_choice(query.float(), query.float(), query.float(), None, 0.0, True)
    return {"bf16": SDPBackend(grouped).name, "fp32": SDPBackend(single).name}


@primitive
def attention(device: torch.device) -> Found:
    """Causal, with four queries for a key; counted half."""
    seq, batch, groups, queries, size = (4096, 2, 8, 4, 128) if device.type == "cuda" else (32, 2, 2, 2, 16)
    qkv = normal(device, seq, batch, groups, queries + 2, size).requires_grad_()
    query, key, value = qkv.split((queries, 1, 1), dim=3)
    y = fused_attention(query, key, value, None, size**-0.5)
    dy = torch.randn_like(y)
    flops = 2 * batch * groups * queries * seq * seq * size
    forward = milliseconds(lambda: fused_attention(query, key, value, None, size**-0.5), device)
    backward = milliseconds(lambda: torch.autograd.grad(y, qkv, dy, retain_graph=True), device)
    return {
        "forward ms": forward,
        "forward TFLOP/s": flops / forward / 1e9,
        "backward ms": backward,
        "backward TFLOP/s": 2.5 * flops / backward / 1e9,
    }


@on_gpus
def grouped_gemm(device: torch.device) -> Found:
    """The first product of 128 experts of Qwen3-30B, 4,096 tokens for 8 of them each."""
    experts, rows, outputs, inputs = 128, 4096 * 8, 768, 2048
    x, weights = normal(device, rows, inputs), normal(device, experts, outputs, inputs)
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)
    product = torch.nn.functional.grouped_mm(x, weights.mT, offs=ends)
    first = rows // experts
    error = error_of(product[:first], x[:first].float() @ weights[0].float().t())
    took = milliseconds(lambda: torch.nn.functional.grouped_mm(x, weights.mT, offs=ends), device)
    return {"ms": took, "TFLOP/s": 2 * rows * outputs * inputs / took / 1e9, "error": error}


@on_gpus
def fp8_gemm(device: torch.device) -> Found:
    return {"TFLOP/s": fp8_gemm_rate(device) / 1e12}


def compiled_ways(device: torch.device, function: Any) -> dict[str, Any]:
    """Return a function as megapipe compiles it and for fixed shapes; on a CPU as it is."""
    if device.type == "cpu":
        return {"eager": function}
    return {"megapipe": compiled(function), "static": torch.compile(function, fullgraph=True, dynamic=False)}


@primitive
def adam(device: torch.device) -> Found:
    """The compiled update, 34 bytes an element."""
    count = 1 << (28 if device.type == "cuda" else 12)
    states = [torch.randn(count, device=device) for _ in range(4)]
    states[2].abs_()
    weights = torch.empty(count, device=device, dtype=torch.bfloat16)
    scalars = [torch.tensor(value) for value in (1.0, 0.99, 1e-4, 1.0)]
    found: Found = {}
    for name, kernel in compiled_ways(device, adamw_pass).items():
        began = time.monotonic()
        kernel(*states, weights, *scalars, 0.9, 0.95, 1e-8)
        found[f"{name} compile s"] = time.monotonic() - began
        took = milliseconds(lambda: kernel(*states, weights, *scalars, 0.9, 0.95, 1e-8), device)  # noqa: B023
        found |= {f"{name} ms": took, f"{name} TB/s": 34 * count / took / 1e9}
    return found


@primitive
def loss(device: torch.device) -> Found:
    """The compiled passes over logits: 2 bytes an element read in the forward, 4 moved in the backward."""
    rows, words = (8192, 32768) if device.type == "cuda" else (64, 128)
    found: Found = {}
    labels, ones = torch.randint(words, (rows,), device=device), torch.ones(rows, device=device)
    sums, gradients = (compiled_ways(device, each) for each in (sum_of_exponentials, write_gradient))
    for name in sums:
        logits = normal(device, rows, words)
        top, expected = logits.amax(-1).float(), torch.logsumexp(logits.float(), -1)
        began = time.monotonic()
        found[f"{name} error"] = error_of(sums[name](logits, top).log() + top, expected)
        gradients[name](logits.clone(), expected, ones, labels, ones, None, words)
        found[f"{name} compile s"] = time.monotonic() - began
        forward = milliseconds(lambda: sums[name](logits, top), device)  # noqa: B023
        backward = milliseconds(lambda: gradients[name](logits, expected, ones, labels, ones, None, words), device)  # noqa: B023
        found |= {
            f"{name} forward TB/s": 2 * rows * words / forward / 1e9,
            f"{name} backward TB/s": 4 * rows * words / backward / 1e9,
        }
    return found


@on_gpus
def clock(device: torch.device) -> Found:
    """CUDA events on the host's clock."""
    events = EventClock(device)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    events.begin()
    mark = events.mark()
    events.end()
    return {"error us": events.error_ns / 1e3, "mark after its request, us": (events.time_of(mark) - int(mark)) / 1e3}


@on_gpus
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


@primitive
def sm_carveout(device: torch.device) -> Found:
    """A GEMM that leaves 16 SMs."""
    size = 8192 if device.type == "cuda" else 64
    x = normal(device, size, size)
    whole = milliseconds(lambda: x @ x, device)
    with leaving_sms(16, x):
        left = milliseconds(lambda: x @ x, device)
        if not bool((x @ x).isfinite().all()):
            raise WrongResult("the product is not finite")
    return {"ms": left, "of all SMs": left / whole}


@on_gpus
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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(PRIMITIVES), metavar="NAME", help=", ".join(PRIMITIVES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, after each primitive")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_primitives: torch sees no GPU (--device cpu only tries the tool)", file=sys.stderr)
        return 2
    set_for_libraries(PYTORCH_ALLOC_CONF="expandable_segments:True")  # as in a run, before CUDA starts
    figures, sentences, failed = {"import torch s": IMPORT_SECONDS}, [], []
    for name, function in PRIMITIVES.items():
        if name not in (arguments.only or PRIMITIVES) or (name in ONLY_ON_GPUS and device.type == "cpu"):
            continue
        began = time.monotonic()
        try:
            found = function(device)
        except Exception as error:
            traceback.print_exc()
            failed.append(name)
            found = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        print(f"{time.monotonic() - began:6.1f} s  {name}: {found}", flush=True)
        figures |= {f"{name} {key}": value for key, value in found.items() if not isinstance(value, str)}
        sentences += [f"{name}, {key}: {value}" for key, value in found.items() if isinstance(value, str)]
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"figures": figures, "sentences": sentences}, indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
