"""A hardware file from what was measured: `megapipe.plan.hardware.read_hardware` reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.extras.calibrate.links import NETWORK, NODE, MeasuredLink
from megapipe.extras.calibrate.rates import Rates
from megapipe.plan.hardware import GIGA, Hardware, Link, hardware_of, read_hardware

# where no link was measured and the device is in no table: gloo inside a host, and over 10 Gbit/s Ethernet
ASSUMED_LINKS = {NODE: Link(1.0 * GIGA, 100e-6), NETWORK: Link(1.0 * GIGA, 100e-6)}


@dataclass(frozen=True)
class Machine:
    """What was measured on. device_name: the driver's, or the processor's. memory_bytes: of one rank's device, or its part of the host's
    memory. dtype: of all rates but the peaks. told: lines for the head of the file."""

    device_name: str
    memory_bytes: int
    ranks_per_node: int
    dtype: str
    told: tuple[str, ...]


def hardware_measured(name: str | None, machine: Machine, rates: Rates, links: Sequence[MeasuredLink]) -> Hardware:
    """What the file will say. name: None for the device's own."""
    peak = rates.flops[machine.dtype]
    row = hardware_of(machine.device_name)
    known = ASSUMED_LINKS if row is None else {NODE: row.node, NETWORK: row.network}
    found = {**known, **{link.name: _rounded_link(link.all_reduce) for link in links}}
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


def _rounded_link(link: Link) -> Link:
    return Link(_rounded(link.bytes_per_second), _rounded(link.latency_seconds))


def to_yaml(hardware: Hardware, machine: Machine, links: Sequence[MeasuredLink]) -> str:
    """The file: a head that says how it was measured, a comment on whatever was not."""
    measured, is_known = {link.name: link for link in links}, hardware_of(machine.device_name) is not None
    source = "that of the table of `megapipe plan --gpu`" if is_known else "assumed"
    origins = {
        name: f"all-reduce over {measured[name].ranks} ranks" if name in measured else f"NOT measured: {source}"
        for name in (NODE, NETWORK)
    }
    shares = ", ".join(f"[{size}, {share:g}]" for size, share in hardware.gemm_shares)
    lines = [
        *(f"# {line}" for line in machine.told),
        f"name: {json.dumps(hardware.name)}",
        f"driver_name: {json.dumps(hardware.driver_name)}",
        f"flops: {_mapping(hardware.flops)}",
        f"memory_bytes: {hardware.memory_bytes}  # of one rank",
        f"memory_bytes_per_second: {_number(hardware.memory_bytes_per_second)}",
        *(f"{name}: {_mapping(vars(getattr(hardware, name)))}  # {origins[name]}" for name in (NODE, NETWORK)),
        f"ranks_per_node: {hardware.ranks_per_node}",
        f"memory_share: {hardware.memory_share:g}  # NOT measured: what a plan may fill",
        f"gemm_shares: [{shares}]  # in {machine.dtype}, as the next two",
        f"attention_share: {hardware.attention_share:g}",
        f"pointwise_share: {hardware.pointwise_share:g}  # norm, activation and addition, of memory_bytes_per_second",
    ]
    return "\n".join(lines) + "\n"


def _mapping(values: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{key}: {_number(value)}" for key, value in values.items()) + "}"


def _number(value: float) -> str:
    """1.5e+10: with point and sign, without which YAML 1.1 reads a text."""
    mantissa, exponent = f"{value:.5e}".split("e")
    return f"{mantissa.rstrip('0')}{'0' * mantissa.endswith('.00000')}e{exponent}"


def refuse_taken(path: Path, force: bool) -> None:
    """Raises ConfigError where a file would be overwritten, or cannot be written at all."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise ConfigError(f"--output {path} is there already: give another name, or --force to replace it")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: {path.parent} is not there, or may not be written to")


def write(path: Path, text: str, force: bool) -> Hardware:
    """The file whole or not at all; what reading it gives. Raises ConfigError."""
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        hardware = read_hardware(partial)
        refuse_taken(path, force)
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return hardware
