#!/usr/bin/env python3
"""Run `megapipe calibrate` on the GPUs of this machine, and print its rates beside those that the planner assumes.

python tools/bench/measured_rates.py --gpus 8 --yaml links.yaml
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_table import as_markdown

from megapipe.errors import MegapipeError
from megapipe.extras.calibrate.rates import GEMM_SIZES, SIZES
from megapipe.plan.attention_rates import FUSED_BACKWARD
from megapipe.plan.hardware import Hardware, hardware_of, read_hardware
from megapipe.schedule.action import Op
from megapipe.trace.traced import CORE_ATTENTION, AttentionWork

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


def calibrate(arguments: argparse.Namespace) -> int:
    """Write the hardware file, on as many ranks as GPUs."""
    start = [sys.executable, "-m", "megapipe"]
    if arguments.gpus > 1:
        start += ["launch", "--nproc-per-node", str(arguments.gpus), "-m", "megapipe"]
    flags = ["--device", arguments.device, "--dtype", "bf16", "--force", "--output", str(arguments.yaml)]
    seconds = [] if arguments.seconds is None else ["--seconds", str(arguments.seconds)]
    return subprocess.run([*start, "calibrate", *flags, *seconds]).returncode


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the tool")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--yaml", type=Path, required=True, metavar="FILE", help="the hardware file to write")
    parser.add_argument("--seconds", type=float, metavar="S", help="as of calibrate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rates")
    arguments = parser.parse_args(argv)
    code = calibrate(arguments)
    if code:
        return code
    found = read_hardware(arguments.yaml)
    sheet = hardware_of(found.name) if arguments.device == "cuda" else None
    rows = list(rates(found, sheet, arguments.device, arguments.gpus))
    texts = [(name, *("" if value is None else f"{value:.3g}" for value in pair)) for name, pair in rows]
    print(as_markdown([("rate", "measured", "assumed by the planner"), *texts]))
    if arguments.json is not None:
        figures = {name: pair[0] for name, pair in rows if pair[0] is not None}
        figures |= {f"planned {name}": pair[1] for name, pair in rows if pair[1] is not None}
        arguments.json.write_text(json.dumps({"figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
