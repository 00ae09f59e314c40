"""The rates that `megapipe calibrate` measures on the GPUs of this machine, beside those that the planner assumes."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from card_bench.processes import MEGAPIPE, REPOSITORY
from card_bench.report import Report
from megapipe.errors import MegapipeError
from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.extras.calibrate.rates import GEMM_SIZES, SIZES
from megapipe.plan.attention_rates import FUSED_BACKWARD
from megapipe.plan.hardware import Hardware
from megapipe.schedule.action import Op
from megapipe.trace.traced import CORE_ATTENTION, AttentionWork

TWIN, MOST_RANKS = "--seconds 3", 8
Pair = tuple[float | None, float | None]  # measured here, assumed by the planner


def attention_share(hardware: Hardware, device: str) -> float:
    """Return the share of the peak, forward and backward together, at the sizes that calibrate measures."""
    seq, _, _, head_size = SIZES[device].attention
    # "cudnn": the kernel of --attention-impl sdpa, which calibrate measures too
    core = AttentionWork(CORE_ATTENTION, Op.F, False, "cudnn", seq / 2, head_size, 1, 0)
    forward, backward = (hardware.attention_share_of(core, is_backward) for is_backward in (False, True))
    return (1.0 + FUSED_BACKWARD) / (1.0 / forward + FUSED_BACKWARD / backward)


def rates(found: Hardware, sheet: Hardware | None, device: str, num_ranks: int) -> Iterator[tuple[str, Pair]]:
    """Yield the rates that calibrate measured beside those the planner assumes, where each has them."""
    seq, _, _, head_size = SIZES[device].attention
    attention = f"attention of {seq} tokens, heads of {head_size}"
    size = found.gemm_shares[-1][0] if found.gemm_shares else GEMM_SIZES[-1]  # the largest that there was time for
    ways: dict[str, Callable[[Hardware], float]] = {
        "memory, TB/s": lambda h: h.pointwise_share * h.memory_bytes_per_second / 1e12,
        "peak in bf16, TFLOP/s": lambda h: h.peak("bf16") / 1e12,
        f"GEMM of {size} in bf16, TFLOP/s": lambda h: h.gemm_share(size, size, size) * h.peak("bf16") / 1e12,
        f"{attention}, in bf16, TFLOP/s": lambda h: attention_share(h, device) * h.peak("bf16") / 1e12,
        f"{attention}, of that peak (attention_share)": lambda h: attention_share(h, device),
    }
    if num_ranks > 1:
        ways["link inside the node, GB/s"] = lambda h: h.node.bytes_per_second / 1e9
    for name, rate in ways.items():
        yield name, (_rate(rate, found), _rate(rate, sheet))


def _rate(rate: Callable[[Hardware], float], hardware: Hardware | None) -> float | None:
    try:
        return None if hardware is None else rate(hardware)
    except MegapipeError:
        return None


def calibrate(report: Report) -> None:
    """Run `megapipe calibrate` on as many ranks as GPUs; the hardware file is written next to that of --json."""
    kind = report.device.type
    ranks = min(torch.cuda.device_count(), MOST_RANKS) if report.on_gpu else 1
    start = f"launch --nproc-per-node {ranks} -m megapipe calibrate" if ranks > 1 else "calibrate"
    line = f"{start} --device {kind} --dtype bf16 --force {'' if report.on_gpu else TWIN}"
    with tempfile.TemporaryDirectory() as folder:
        file = report.file.with_suffix(".yaml") if report.file else Path(folder, "hardware.yaml")
        subprocess.run([*MEGAPIPE, *line.split(), "--output", str(file.resolve())], cwd=REPOSITORY, check=True)
        found = read_hardware(file)
    sheet = report.hardware if report.on_gpu else None
    for name, (measured, assumed) in rates(found, sheet, kind, ranks):
        if measured is not None:
            report.figure(name, measured, "", assumed)
