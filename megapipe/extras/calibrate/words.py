"""What was measured, as a table for people and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megapipe.extras.calibrate.hardware_file import Machine
from megapipe.extras.calibrate.links import NETWORK, NODE, MeasuredLink
from megapipe.extras.calibrate.measure import Found
from megapipe.plan.hardware import GIB, GIGA, Hardware, Link


def as_text(hardware: Hardware, machine: Machine, links: Sequence[MeasuredLink]) -> str:
    """A line a figure; those of a rank's device first."""
    measured = {link.name: link for link in links}
    lines = [*machine.told, ""]
    lines += [f"{'peak ' + dtype:<22}{rate / GIGA:>10,.1f} GFLOP/s" for dtype, rate in hardware.flops.items()]
    for size, share in hardware.gemm_shares:
        lines.append(f"{f'GEMM, smallest {size}':<22}{share:>10.0%} of {machine.dtype}")
    lines += [
        f"{'attention':<22}{hardware.attention_share:>10.0%} of {machine.dtype}",
        f"{'memory':<22}{hardware.memory_bytes_per_second / GIGA:>10,.1f} GB/s, {hardware.memory_bytes / GIB:,.1f} GiB a rank",
        f"{'norm, activation':<22}{hardware.pointwise_share:>10.0%} of it",
    ]
    for name in (NODE, NETWORK):
        if name not in measured:
            lines.append(f"{name:<22}not measured: needs ranks {'in one node' if name == NODE else 'on several nodes'}")
            continue
        lines.append(f"{f'{name}, all-reduce':<22}{_link(measured[name].all_reduce)}, {measured[name].ranks} ranks")
        lines.append(f"{f'{name}, message':<22}{_link(measured[name].message)}")
    return "\n".join(lines)


def _link(link: Link) -> str:
    return f"{link.bytes_per_second / GIGA:>10,.2f} GB/s, {link.latency_seconds * 1e6:,.0f} us"


def as_data(hardware: Hardware, machine: Machine, found: Found) -> dict[str, Any]:
    """The file's keys, and under 'measured' how, with the links that were."""
    links = {
        link.name: {"ranks": link.ranks, "all_reduce": vars(link.all_reduce), "message": vars(link.message)}
        for link in found.links
    }
    values = vars(hardware) | {
        "node": vars(hardware.node),
        "network": vars(hardware.network),
        "flops": dict(hardware.flops),
    }
    return values | {
        "measured": {"how": machine.told, "dtype": machine.dtype, "links": links, "seconds": found.seconds}
    }
