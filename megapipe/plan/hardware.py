"""The table of accelerators and their links that predictions of time and memory use; a file can replace it.

Rates are those of the makers' data sheets, for matrices without sparsity: NVIDIA A100 (2021), H100 SXM, H800 and H200
(2023), B200 and GB200 (2024), B300 and GB300 (2025), AMD MI300X (2023). H800 is H100 with slower links within a node.
NVIDIA gives fp8 with sparsity, twice the dense rate; A100 has no fp8. Links are counted in one direction for one
device. How much of a peak GEMMs reach is not in data sheets: tools/fit_efficiency.py fits it to published steps in 16
bits, of A100 and of H100, and later devices are taken to be like H100. In fp8 GEMMs are taken to reach the same share
as in 16 bits: units twice as fast are fed by operands of half the bytes. Attention on NVIDIA's GPUs since H100 has the
rates of `attention_rates`; on others its share is an estimate, as are those of the memory's rate and of links.
docs/time_model.md compares what comes of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megapipe.config.yaml_file import read_object
from megapipe.dtypes import FP8
from megapipe.errors import ConfigError
from megapipe.layers.table import AttentionWork
from megapipe.plan.attention_rates import BLACKWELL, HOPPER, Rates

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30
FP32_NAMES = ("fp32", "fp64")


def saturating(highest: float, half_at: float) -> tuple[tuple[int, float], ...]:
    """Return the shares of the peak that GEMMs reach, as (smallest of the three sizes n, highest n / (n + half_at)).

    `Hardware.gemm_share` interpolates between rows.
    """
    sizes = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    return tuple((size, round(highest * size / (size + half_at), 3)) for size in sizes)


HALF_AT = 284.0
GEMM_SHARES = saturating(0.80, HALF_AT)  # A100
SINCE_H100 = saturating(0.568, HALF_AT)
ATTENTION_SINCE_H100 = 0.35  # by kernels that `attention_rates` does not know: those that take masks
# gigabytes a second in one direction of 16 lanes (the data sheets: 64 and 128 for both directions together)
PCIE_4, PCIE_5 = 32.0, 64.0
NVL72 = 72  # GPUs of a rack, all joined by NVLink
HOST_SHARE = 0.8  # of that rate, what copies between pinned memory and a device are taken to reach


@dataclass(frozen=True)
class Link:
    """A link of one device, in one direction."""

    bytes_per_second: float
    latency_seconds: float  # of one message


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator and how its nodes are built."""

    name: str
    driver_name: str  # part of the name that the driver gives it
    flops: Mapping[str, float]  # peak by configuration dtype, and of "fp8" operands; others have no matrix units
    memory_bytes: int
    memory_bytes_per_second: float
    node: Link  # between devices of one node
    network: Link  # between nodes
    ranks_per_node: int = 8
    memory_share: float = 0.92  # that a plan may fill: the rest is CUDA context, kernel workspace, allocator slack
    gemm_shares: tuple[tuple[int, float], ...] = GEMM_SHARES
    attention_share: float = 0.45  # of the peak, by an attention kernel without a curve, forward and backward
    pointwise_share: float = 0.9  # of the memory's rate, by kernels that only move memory
    nccl_bytes: int | None = None  # measured on a rank, in place of the model of what NCCL holds (plan.nccl_memory)
    price_per_hour: float | None = None  # of one accelerator, in any currency
    host_bytes_per_second: float = HOST_SHARE * PCIE_4 * GIGA  # to or from the host's memory, in one direction
    attention_rates: Rates = field(default_factory=dict)  # by kernel; none if attention_share was measured

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s in a configuration dtype, or in "fp8". Raises ConfigError where the table has no rate."""
        if dtype not in self.flops:
            way_out = "leave --fp8-format out" if dtype == FP8 else "give --bf16"
            raise ConfigError(
                f"no matrix rate of {self.name} is known for {dtype}; there are {', '.join(self.flops)}: {way_out}, "
                "or a file with flops"
            )
        return self.flops[dtype]

    def on(self, world_size: int) -> Hardware:
        """Return it with nodes that a number of GPUs fills: of a rack joined by NVLink as many GPUs as divide them."""
        if self.ranks_per_node < NVL72 or world_size % self.ranks_per_node == 0:
            return self
        most = min(self.ranks_per_node, world_size)
        return replace(self, ranks_per_node=max(size for size in range(1, most + 1) if world_size % size == 0))

    def attention_share_of(self, work: AttentionWork, is_backward: bool) -> float:
        """Return the share of the peak that the kernel of core attention reaches."""
        rate = self.attention_rates.get(work.kernel)
        return self.attention_share if rate is None else rate.share(work.keys, work.head_size, is_backward)

    def gemm_share(self, smallest: int) -> float:
        """Return the share of the peak that a GEMM with this smallest size reaches, interpolated over its logarithm."""
        rows = self.gemm_shares
        if smallest <= rows[0][0]:
            return rows[0][1] * smallest / rows[0][0]
        for (low, low_share), (high, high_share) in itertools.pairwise(rows):
            if smallest <= high:
                return low_share + (high_share - low_share) * math.log(smallest / low) / math.log(high / low)
        return rows[-1][1]

    @property
    def pointwise_bytes_per_second(self) -> float:
        """Memory rate of norms, activation functions, dropout and softmax."""
        return self.memory_bytes_per_second * self.pointwise_share

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.memory_share)


def _row(
    name: str,
    driver_name: str,
    tera: tuple[float, ...],  # TFLOP/s in 16 bits, and in fp8 where there is any
    memory: float,  # GiB
    terabytes: float,  # a second, of that memory
    node: float,  # GB/s in one direction, of the links in a node
    network: float,  # of a device's network card
    host: float,  # of its slot
    shares: tuple[tuple[int, float], ...] = SINCE_H100,
    rates: Rates = HOPPER,
    attention: float = ATTENTION_SINCE_H100,
    ranks_per_node: int = 8,
) -> Hardware:
    """Return a row of the table from figures in the units of data sheets."""
    return Hardware(
        name,
        driver_name,
        {"bf16": tera[0] * TERA, "fp16": tera[0] * TERA} | ({FP8: tera[1] * TERA} if len(tera) > 1 else {}),
        int(memory * GIB),
        terabytes * TERA,
        Link(0.75 * node * GIGA, 10e-6),  # three quarters of the rate is what rings of NCCL reach
        Link(0.85 * network * GIGA, 20e-6),
        ranks_per_node,
        gemm_shares=shares,
        attention_share=attention,
        host_bytes_per_second=HOST_SHARE * host * GIGA,
        attention_rates=rates,
    )


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _row("a100-40", "A100-SXM4-40GB", (312,), 40, 1.555, 300, 25, PCIE_4, GEMM_SHARES, {}, 0.45),
        _row("a100-80", "A100", (312,), 80, 2.039, 300, 25, PCIE_4, GEMM_SHARES, {}, 0.45),
        _row("h100", "H100", (989, 1979), 80, 3.35, 450, 50, PCIE_5),
        _row("h800", "H800", (989, 1979), 80, 3.35, 200, 50, PCIE_5),
        _row("h200", "H200", (989, 1979), 141, 4.8, 450, 50, PCIE_5),
        _row("b200", "B200", (2250, 4500), 180, 8.0, 900, 50, PCIE_5, rates=BLACKWELL),
        _row("b300", "B300", (2250, 4500), 251, 8.0, 900, 100, PCIE_5, rates=BLACKWELL),
        _row("gb200", "GB200", (2500, 5000), 173, 8.0, 900, 50, PCIE_5, rates=BLACKWELL, ranks_per_node=NVL72),
        _row("gb300", "GB300", (2500, 5000), 259, 8.0, 900, 100, PCIE_5, rates=BLACKWELL, ranks_per_node=NVL72),
        _row("mi300x", "MI300X", (1307, 2615), 192, 5.3, 448, 50, PCIE_5, rates={}),
    )
}
# cards whose driver name contains a row's, with another peak
OTHER_PEAKS = {"H100 PCIe": 756 * TERA}


def hardware_named(name: str) -> Hardware:
    """Return a row of the table. Raises ConfigError for an unknown name."""
    if name.lower() not in HARDWARE:
        known = ", ".join(HARDWARE)
        raise ConfigError(f"--gpu {name} is not in the table: there are {known}; describe others in --hardware FILE")
    return HARDWARE[name.lower()]


def hardware_of(device_name: str) -> Hardware | None:
    """Return the row of a device by the name its driver gives; None if it is not in the table."""
    if any(part in device_name for part in OTHER_PEAKS):
        return None
    rows = (row for row in HARDWARE.values() if row.driver_name in device_name)
    return max(rows, key=lambda row: len(row.driver_name), default=None)


def read_hardware(path: Path) -> Hardware:
    """Read a YAML file with the fields of `Hardware`; `like: h100` takes missing fields from the table.

    Links are written as {bytes_per_second: ..., latency_seconds: ...}, gemm_shares as pairs. Raises ConfigError.
    """
    found = read_object(path, "--hardware", "keys and values, such as `like: h100`")
    values: dict[str, Any] = vars(hardware_named(str(found.pop("like")))) if "like" in found else {}
    known = {each.name: each.default for each in dataclasses.fields(Hardware) if each.name != "attention_rates"}
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"--hardware {path}: {', '.join(unknown)} is not a key; there are like, {', '.join(sorted(known))}"
        )
    values = values | {key: _value(path, key, value) for key, value in found.items()}  # a new dict: not the table's
    if "attention_share" in found:  # measured
        values["attention_rates"] = {}
    missing = sorted(key for key in known.keys() - values.keys() if known[key] is dataclasses.MISSING)
    if missing:
        raise ConfigError(
            f"--hardware {path} lacks {', '.join(missing)}; add them, or `like: h100` for those of a row of the table"
        )
    return Hardware(**values)


def _value(path: Path, key: str, value: Any) -> Any:
    try:
        if key in ("node", "network"):
            return Link(float(value["bytes_per_second"]), float(value["latency_seconds"]))
        if key == "flops":
            return {str(dtype): float(rate) for dtype, rate in value.items()}
        if key == "gemm_shares":
            return tuple(sorted((int(size), float(share)) for size, share in value))
        if key in ("memory_bytes", "ranks_per_node", "nccl_bytes"):
            return int(float(value))
        return str(value) if key in ("name", "driver_name") else float(value)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ConfigError(
            f"--hardware {path}: {key} {value!r} is not what the key holds; see docs/planner.md"
        ) from None


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the FLOP/s of a device by its driver name; None if it is not in the table (CPUs, fp32, fp64)."""
    if dtype in FP32_NAMES:
        return None  # the matrix units know only TF32, which is not used
    for part, peak in OTHER_PEAKS.items():
        if part in device_name:
            return peak
    hardware = hardware_of(device_name)
    return None if hardware is None else hardware.flops.get(dtype)
