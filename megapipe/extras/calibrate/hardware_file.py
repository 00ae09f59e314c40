"""The hardware file that `megapipe calibrate` writes (`hardware_reader` reads it), and its report."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.calibrate.hardware_reader import NOT_IN_FILES
from megapipe.extras.calibrate.rates import NETWORK, NODE, Found, MeasuredLink, MeasuredRates
from megapipe.extras.doctor.host import resources
from megapipe.plan.hardware import GIB, GIGA, Hardware, Link, hardware_of

# used if a link was not measured and the device is in no table: gloo within a host, and over 10 Gbit/s Ethernet
ASSUMED_LINKS = {NODE: Link(1.0 * GIGA, 100e-6), NETWORK: Link(1.0 * GIGA, 100e-6)}


@dataclass(frozen=True)
class Machine:
    """The machine that was measured."""

    device_name: str  # the driver's, or the processor's
    memory_bytes: int  # of one rank's device, or its part of the host's memory
    ranks_per_node: int
    dtype: str  # of all rates but the peaks
    header: tuple[str, ...]  # lines at the top of the file: how it was measured


def machine_of(found: Found, environment: Environment) -> Machine:
    """Describe the machine as this rank sees it. Raises ConfigError if its memory is unknown."""
    has, threads = resources(), torch.get_num_threads()
    cores, ranks_here = has.usable_cores, environment.local_world_size
    if found.device.type == "cuda":
        properties = torch.cuda.get_device_properties(found.device)
        on_node = ranks_here if environment.is_distributed else torch.cuda.device_count()
        device_name, memory = properties.name, properties.total_memory
    else:
        on_node = ranks_here if environment.is_distributed else max(1, int(cores) // threads)
        known = [size for size in (has.memory_bytes, has.memory_limit_bytes) if size is not None]
        if not known:
            raise ConfigError("this system does not say how much memory it has: megapipe calibrate needs /proc/meminfo")
        device_name, memory = has.cpu, min(known) // on_node
    hosts = ", ".join(list(dict.fromkeys(found.hosts))[:8])
    where = f"{environment.world_size} rank(s) at the same time on {environment.num_nodes} node(s), {hosts}"
    on_cpu = f", {threads} thread(s) a rank" if found.device.type == "cpu" else ""
    header = [
        f"measured by: {shlex.join(['megapipe', *sys.argv[1:]])}",
        f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, torch {torch.__version__}, {found.seconds:.0f} s",
        f"{where}{on_cpu}; {has.cpu}, {cores:g} cores",
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > max(cores, ranks_here * threads):
        header.append(f"BUSY: load {load:.1f} on {cores:g} cores, so these figures are below what the machine can do")
    return Machine(device_name, memory, on_node, found.dtype, tuple(header))


def hardware_measured(
    name: str | None, machine: Machine, rates: MeasuredRates, links: Sequence[MeasuredLink]
) -> Hardware:
    """Return the content of the file. name: None for the device's name."""
    peak = rates.flops[machine.dtype]
    row = hardware_of(machine.device_name)
    found = dict(ASSUMED_LINKS) if row is None else {NODE: row.node, NETWORK: row.network}
    for link in links:
        rate, latency = link.all_reduce.bytes_per_second, link.all_reduce.latency_seconds
        found[link.name] = Link(_rounded(rate), _rounded(latency))
    return Hardware(
        name=name or machine.device_name,
        driver_name=machine.device_name,
        flops={dtype: _rounded(rate) for dtype, rate in rates.flops.items()},
        memory_bytes=machine.memory_bytes,
        memory_bytes_per_second=_rounded(rates.memory),
        node=found[NODE],
        network=found[NETWORK],
        ranks_per_node=machine.ranks_per_node,
        gemm_shares=tuple((size, _rounded(rate / peak)) for size, rate in rates.gemms.items()),
        attention_share=_rounded(rates.attention / peak),
        pointwise_share=_rounded(rates.pointwise / rates.memory),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def to_yaml(hardware: Hardware, machine: Machine, links: Sequence[MeasuredLink]) -> str:
    """Return the file's text, with a comment on every value that was not measured."""
    measured, is_known = {link.name: link for link in links}, hardware_of(machine.device_name) is not None
    source = "from the table of `megapipe plan --gpu`" if is_known else "assumed"
    origins = {
        name: f"all-reduce over {measured[name].ranks} ranks" if name in measured else f"NOT measured: {source}"
        for name in (NODE, NETWORK)
    }
    shares = ", ".join(f"[{size}, {share:g}]" for size, share in hardware.gemm_shares)
    lines = [
        *(f"# {line}" for line in machine.header),
        f"name: {json.dumps(hardware.name)}",
        f"driver_name: {json.dumps(hardware.driver_name)}",
        f"flops: {_mapping(hardware.flops)}",
        f"memory_bytes: {hardware.memory_bytes}  # of one rank",
        f"memory_bytes_per_second: {_number(hardware.memory_bytes_per_second)}",
        *(f"{name}: {_mapping(vars(getattr(hardware, name)))}  # {origins[name]}" for name in (NODE, NETWORK)),
        f"ranks_per_node: {hardware.ranks_per_node}",
        f"memory_share: {hardware.memory_share:g}  # NOT measured: the share that a plan may fill",
        f"gemm_shares: [{shares}]  # in {machine.dtype}, as the next two",
        f"attention_share: {hardware.attention_share:g}",
        f"pointwise_share: {hardware.pointwise_share:g}  # norm, activation and addition, of memory_bytes_per_second",
    ]
    return "\n".join(lines) + "\n"


def _mapping(values: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{key}: {_number(value)}" for key, value in values.items()) + "}"


def _number(value: float) -> str:
    """Return a number such as 1.5e+10. Without the point and the sign YAML 1.1 reads it as a string."""
    mantissa, exponent = f"{value:.5e}".split("e")
    return f"{mantissa.rstrip('0')}{'0' * mantissa.endswith('.00000')}e{exponent}"


def refuse_taken(path: Path, force: bool) -> None:
    """Raise ConfigError if the file exists and force is False, or if it cannot be written."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise ConfigError(f"--output {path} exists: give another name, or --force to replace it")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: {path.parent} does not exist or is not writable")


def as_text(hardware: Hardware, machine: Machine, links: Sequence[MeasuredLink]) -> str:
    """Return one line for each measured figure, those of a rank's device first."""
    measured = {link.name: link for link in links}
    lines = [*machine.header, ""]
    lines += [f"{'peak ' + dtype:<22}{rate / GIGA:>10,.1f} GFLOP/s" for dtype, rate in hardware.flops.items()]
    for size, share in hardware.gemm_shares:
        lines.append(f"{f'GEMM, smallest {size}':<22}{share:>10.0%} of {machine.dtype}")
    memory = f"{hardware.memory_bytes_per_second / GIGA:>10,.1f} GB/s, {hardware.memory_bytes / GIB:,.1f} GiB a rank"
    lines += [
        f"{'attention':<22}{hardware.attention_share:>10.0%} of {machine.dtype}",
        f"{'memory':<22}{memory}",
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
    """Return the file's keys, and under 'measured' how it was measured, with the measured links."""
    links = {
        link.name: {"ranks": link.ranks, "all_reduce": vars(link.all_reduce), "message": vars(link.message)}
        for link in found.links
    }
    values = {"node": vars(hardware.node), "network": vars(hardware.network), "flops": dict(hardware.flops)}
    left_out = {*NOT_IN_FILES, "gemm_highest", "num_sms"}  # gemm_shares are measured in place of the last two
    keys = {name: value for name, value in vars(hardware).items() if name not in left_out}
    measured = {"how": machine.header, "dtype": machine.dtype, "links": links, "seconds": found.seconds}
    return keys | values | {"measured": measured}
