"""Reads a hardware file, which stands for a row of the table of accelerators; needs no torch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from megapipe.config.yaml_file import read_object
from megapipe.errors import ConfigError
from megapipe.plan.hardware import Hardware, Link, hardware_named

NOT_IN_FILES = ("attention_rates", "stack")  # fields of `Hardware` that are no keys of a file


def read_hardware(path: Path) -> Hardware:
    """Read a YAML file with the fields of `Hardware`; `like: h100` takes missing fields from the table.

    Links are written as {bytes_per_second: ..., latency_seconds: ...}, gemm_shares and gemm_highest as lists. Raises
    ConfigError.
    """
    found = read_object(path, "--hardware", "keys and values, such as `like: h100`")
    values: dict[str, Any] = vars(hardware_named(str(found.pop("like")))) if "like" in found else {}
    known = {each.name: each.default for each in dataclasses.fields(Hardware) if each.name not in NOT_IN_FILES}
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
            return Link(_above_zero(value["bytes_per_second"]), float(value["latency_seconds"]))
        if key == "flops":
            return {str(dtype): _above_zero(rate) for dtype, rate in value.items()}
        if key == "gemm_shares":
            return tuple(sorted((int(size), _above_zero(share)) for size, share in value))
        if key == "gemm_highest":
            in_16_bits, in_fp8 = value
            return _above_zero(in_16_bits), _above_zero(in_fp8)
        if key in ("memory_bytes", "ranks_per_node", "nccl_bytes", "num_sms"):
            return int(_above_zero(value))
        return str(value) if key in ("name", "driver_name") else _above_zero(value)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ConfigError(
            f"--hardware {path}: {key} {value!r} is not what the key holds, with numbers above 0; see docs/planner.md"
        ) from None


def _above_zero(value: Any) -> float:
    number = float(value)
    if not 0.0 < number < math.inf:
        raise ValueError
    return number
