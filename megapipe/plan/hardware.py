"""The table of accelerators and their links that predictions of time and memory use; a file can replace it.

Rates are those of the makers' data sheets, for matrices without sparsity: NVIDIA A100 (2021), H100 SXM, H800 and H200
(2023), B200 and GB200 (2024), B300 and GB300 (2025), AMD MI300X (2023). H800 is H100 with slower links within a node.
NVIDIA gives fp8 with sparsity, twice the dense rate; A100 has no fp8. Links are counted in one direction for one
device. How much of a peak large GEMMs reach is not in data sheets: `HIGHEST` has it by device, from benchmarks or,
where training reaches less than those, fitted to published steps (tools/fit_efficiency.py). Attention on NVIDIA's GPUs
has the rates of `attention_rates`; on others its share is an estimate, as is that of the memory's rate.
docs/time_model.md compares what comes of them.

Workstation and older cards: NVIDIA's white papers GA102 (2021: RTX 3090, A6000), Ada (2023: RTX 4090, RTX 6000 Ada, L4,
L40S) and RTX Blackwell (2025: RTX 5090), and the data sheets of A10 (2021), L4, L40S (2023), T4 (2018) and V100 (2020).
Rates are those with sums in fp32, which GeForce cards reach at half the rate of sums in fp16. T4 and V100 have fp16
alone. With ECC, as A10, L4, L40S and T4 are delivered, GDDR6 gives a sixteenth of the memory to it. Their GEMMs and
attention have no benchmark here: shares are those of a file that measures none. The link of a node is PCIe, which
NVLink bridges between two cards (RTX 3090, A6000) exceed, and which GeForce cards, without peer-to-peer copies, do not
reach.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from megapipe.dtypes import FP8
from megapipe.errors import ConfigError
from megapipe.plan.attention_rates import AMPERE, BLACKWELL, HOPPER, Rates
from megapipe.plan.stacks import STACKS, Stack
from megapipe.trace.traced import AttentionWork

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30
FP32_NAMES = ("fp32", "fp64")

# Share of the peak that a large GEMM reaches: in 16 bits, and in fp8. Benchmarks: stas00/ml-engineering (best shape of
# each GPU) for A100, B300, GB300 and MI300X; deepseek-ai/DeepGEMM for fp8 on H100. H100 in 16 bits, B200 and GB200 are
# fitted; in 16 bits these are taken to reach the same share as in fp8.
HIGHEST = {
    "a100": (0.87, 0.87),
    "h100": (0.626, 0.72),
    "b200": (0.573, 0.573),
    "gb200": (0.53, 0.53),
    "b300": (0.786, 0.763),
    "gb300": (0.73, 0.723),
    "mi300x": (0.514, 0.514),
    "": (0.8, 0.8),  # not benchmarked
}
# A GEMM of depth k reaches k / (k + half) of that: it starts and ends with reads and writes that no product hides.
# From the shapes in DeepGEMM's first README, in fp8 on H800, each within 10 %; 16 bits take twice as long a product.
HALF_DEPTH = 375.0  # in 16 bits; in fp8 twice that
ALIGNED = 8  # elements of 16 bits: the matrix units read 16 bytes at a time
WITHOUT_MATRIX_UNITS = 16  # times slower than 16 bits: fp32 in A100's data sheet; GEMMs in fp32 use no TF32
MANY = 1 << 14  # rows and columns whose tiles fill their waves
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93))  # rows and columns of a result, relative speed
ATTENTION_SINCE_H100 = 0.35  # by kernels that `attention_rates` does not know: those that take masks
# gigabytes a second in one direction of 16 lanes (the data sheets: 64 and 128 for both directions together)
PCIE_3, PCIE_4, PCIE_5 = 16.0, 32.0, 64.0
# Of the rates of data sheets, what rings of NCCL reach, and the seconds that each hop adds: from all-reduces of 16 MiB
# to 16 GiB over 8 A100, H200 and B200 and over 32 B200 on 4 nodes (stas00/ml-engineering, network/README.md, 744d01e)
NODE_SHARE, HOP_SECONDS = 0.78, 8e-6
NETWORK_SHARE, NETWORK_HOP_SECONDS = 0.9, 20e-6
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
    driver_name: str  # part of the name that the driver gives it; in the table a regular expression
    flops: Mapping[str, float]  # peak by configuration dtype, and of "fp8" operands; others have no matrix units
    memory_bytes: int
    memory_bytes_per_second: float
    node: Link  # between devices of one node
    network: Link  # between nodes
    ranks_per_node: int = 8
    memory_share: float = 0.92  # that a plan may fill: the rest is CUDA context, kernel workspace, allocator slack
    gemm_highest: tuple[float, float] = (0.8, 0.8)  # share of the peak of a large GEMM in 16 bits, and in fp8
    num_sms: int = 132  # tiles of a GEMM's result that are computed at a time
    gemm_shares: tuple[tuple[int, float], ...] = ()  # measured: (smallest of the three sizes, share), in place of these
    attention_share: float = 0.45  # of the peak, by an attention kernel without a curve, forward and backward
    pointwise_share: float = 0.9  # of the memory's rate, by kernels that only move memory
    nccl_bytes: int | None = None  # measured on a rank, in place of the model of what NCCL holds (plan.nccl_memory)
    price_per_hour: float | None = None  # of one accelerator, in any currency
    host_bytes_per_second: float = HOST_SHARE * PCIE_4 * GIGA  # to or from the host's memory, in one direction
    attention_rates: Rates = field(default_factory=dict)  # by kernel; none if attention_share was measured
    stack: Stack = STACKS["megapipe"]  # the software that runs there

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s in a configuration dtype, or in "fp8". Raises ConfigError where the table has no rate."""
        if dtype not in self.flops:
            way_out = "leave --fp8-format out" if dtype == FP8 else f"give --{next(iter(self.flops))}"
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
        if not work.kernel:
            return self._written_out_share(work, is_backward)
        rate = self.attention_rates.get(work.kernel)
        return self.attention_share if rate is None else rate.share(work.keys, work.head_size, is_backward)

    def _written_out_share(self, work: AttentionWork, is_backward: bool) -> float:
        """Return the share of products of the depth of a head, one in a forward and one of four in a backward, and of
        the depth of all keys. Heads that are no multiple of `ALIGNED` channels do not use the matrix units.
        """
        if work.head_size % ALIGNED:
            return 1.0 / WITHOUT_MATRIX_UNITS
        # of all heads together, so that tiles fill the device
        of_head, of_keys = (self.gemm_share(MANY, MANY, depth) for depth in (work.head_size, int(work.keys)))
        products = 4 if is_backward else 2
        return products / (1 / of_head + (products - 1) / of_keys)

    def gemm_share(self, rows: int, columns: int, depth: int, is_fp8: bool = False) -> float:
        """Return the share of the peak that a product [rows, depth] x [depth, columns] reaches.

        Its tiles are computed in waves, as many at a time as there are multiprocessors: the last wave is seldom full.
        Measured shares are interpolated over the logarithm of the smallest size.
        """
        if self.gemm_shares:
            return self._measured_share(min(rows, columns, depth))
        half = HALF_DEPTH * (2 if is_fp8 else 1)
        return self.gemm_highest[is_fp8] * depth / (depth + half) * wave_share(rows, columns, self.num_sms)

    def _measured_share(self, smallest: int) -> float:
        table = self.gemm_shares
        if smallest <= table[0][0]:
            return table[0][1] * smallest / table[0][0]
        for (low, low_share), (high, high_share) in itertools.pairwise(table):
            if smallest <= high:
                return low_share + (high_share - low_share) * math.log(smallest / low) / math.log(high / low)
        return table[-1][1]

    @property
    def pointwise_bytes_per_second(self) -> float:
        """Memory rate of norms, activation functions, dropout and softmax."""
        return self.memory_bytes_per_second * self.pointwise_share

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.memory_share)


@cache
def wave_share(rows: int, columns: int, num_sms: int) -> float:
    """Return the share of multiprocessors that the waves of tiles of a result keep busy, with the best of `TILES`."""

    def busy(height: int, width: int, speed: float) -> float:
        waves = math.ceil(math.ceil(rows / height) * math.ceil(columns / width) / num_sms)
        return speed * rows * columns / (waves * num_sms * height * width)

    return max(busy(*tile) for tile in TILES)


def _row(
    name: str,
    driver_name: str,
    tera: tuple[float, ...],  # TFLOP/s in 16 bits, and in fp8 where there is any
    memory: float,  # GiB
    terabytes: float,  # a second, of that memory
    node: float,  # GB/s in one direction, of the links in a node
    network: float,  # of a device's network card
    host: float,  # of its slot
    sms: int,
    highest: str,
    rates: Rates = HOPPER,
    attention: float = ATTENTION_SINCE_H100,
    ranks_per_node: int = 8,
    dtypes: tuple[str, ...] = ("bf16", "fp16"),
) -> Hardware:
    """Return a row of the table from figures in the units of data sheets."""
    return Hardware(
        name,
        driver_name,
        dict.fromkeys(dtypes, tera[0] * TERA) | ({FP8: tera[1] * TERA} if len(tera) > 1 else {}),
        int(memory * GIB),
        terabytes * TERA,
        Link(NODE_SHARE * node * GIGA, HOP_SECONDS),
        Link(NETWORK_SHARE * network * GIGA, NETWORK_HOP_SECONDS),
        ranks_per_node,
        gemm_highest=HIGHEST[highest],
        num_sms=sms,
        attention_share=attention,
        host_bytes_per_second=HOST_SHARE * host * GIGA,
        attention_rates=rates,
    )


SLOW = 1.5625  # GB/s of a card: eight share a network card of 100 Gbit/s, an assumption
FP16 = ("fp16",)
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _row("a100-40", "A100-SXM4-40GB", (312,), 40, 1.555, 300, 25, PCIE_4, 108, "a100", AMPERE, 0.45),
        _row("a100-80", "A100", (312,), 80, 2.039, 300, 25, PCIE_4, 108, "a100", AMPERE, 0.45),
        _row("h100", "H100", (989, 1979), 80, 3.35, 450, 50, PCIE_5, 132, "h100"),
        _row("h800", "H800", (989, 1979), 80, 3.35, 200, 50, PCIE_5, 132, "h100"),
        _row("h200", "H200", (989, 1979), 141, 4.8, 450, 50, PCIE_5, 132, "h100"),
        _row("b200", "B200", (2250, 4500), 180, 8.0, 900, 50, PCIE_5, 148, "b200", BLACKWELL),
        _row("b300", "B300", (2250, 4500), 251, 8.0, 900, 100, PCIE_5, 148, "b300", BLACKWELL),
        _row("gb200", "GB200", (2500, 5000), 173, 8.0, 900, 50, PCIE_5, 148, "gb200", BLACKWELL, ranks_per_node=NVL72),
        _row("gb300", "GB300", (2500, 5000), 259, 8.0, 900, 100, PCIE_5, 148, "gb300", BLACKWELL, ranks_per_node=NVL72),
        _row("mi300x", "MI300X", (1307, 2615), 192, 5.3, 448, 50, PCIE_5, 304, "mi300x", {}),
        _row("rtx-3090", "RTX 3090$", (71,), 24, 0.936, PCIE_4, SLOW, PCIE_4, 82, "", {}, 0.45),
        _row("rtx-4090", "RTX 4090$", (165.2, 330.3), 24, 1.008, PCIE_4, SLOW, PCIE_4, 128, "", {}, 0.45),
        _row("rtx-5090", "RTX 5090$", (209.5, 419), 32, 1.792, PCIE_5, SLOW, PCIE_5, 170, "", {}, 0.45),
        _row("a6000", "RTX A6000$", (154.8,), 48, 0.768, PCIE_4, SLOW, PCIE_4, 84, "", {}, 0.45),
        _row("rtx-6000-ada", "RTX 6000 Ada", (364.2, 728.5), 48, 0.96, PCIE_4, SLOW, PCIE_4, 142, "", {}, 0.45),
        _row("l4", r"\bL4$", (121, 242), 22.5, 0.3, PCIE_4, SLOW, PCIE_4, 58, "", {}, 0.45),
        _row("l40s", r"\bL40S$", (362, 733), 45, 0.864, PCIE_4, SLOW, PCIE_4, 142, "", {}, 0.45),
        _row("a10", r"\bA10$", (125,), 22.5, 0.6, PCIE_4, SLOW, PCIE_4, 72, "", {}, 0.45),
        _row("t4", r"\bT4$", (65,), 15, 0.3, PCIE_3, SLOW, PCIE_3, 40, "", {}, 0.45, dtypes=FP16),
        # the network of a DGX-1: four cards of 100 Gbit/s
        _row("v100-16", "V100-SXM2-16GB", (125,), 16, 0.9, 150, 6.25, PCIE_3, 80, "", {}, 0.45, dtypes=FP16),
        _row("v100-32", "V100-SXM[23]-32GB", (125,), 32, 0.9, 150, 6.25, PCIE_3, 80, "", {}, 0.45, dtypes=FP16),
    )
}
# cards whose driver name contains a row's, with another peak
OTHER_PEAKS = {"H100 PCIe": 756 * TERA}


def hardware_named(name: str) -> Hardware:
    """Return a row of the table; case, blanks and dashes do not count. Raises ConfigError for an unknown name."""
    found = {_plain(row): hardware for row, hardware in HARDWARE.items()}.get(_plain(name))
    if found is None:
        known = ", ".join(HARDWARE)
        raise ConfigError(f"--gpu {name} is not in the table: there are {known}; describe others in --hardware FILE")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def hardware_of(device_name: str) -> Hardware | None:
    """Return the row of a device by the name its driver gives; None if it is not in the table."""
    if any(part in device_name for part in OTHER_PEAKS):
        return None
    rows = (row for row in HARDWARE.values() if re.search(row.driver_name, device_name))
    return max(rows, key=lambda row: len(row.driver_name), default=None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the FLOP/s of a device by its driver name; None if it is not in the table (CPUs, fp32, fp64)."""
    if dtype in FP32_NAMES:
        return None  # the matrix units know only TF32, which is not used
    for part, peak in OTHER_PEAKS.items():
        if part in device_name:
            return peak
    hardware = hardware_of(device_name)
    return None if hardware is None else hardware.flops.get(dtype)
