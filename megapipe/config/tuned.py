"""The file that `megapipe calibrate --tune` writes and `--tuned FILE` reads: settings, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megapipe.config.config import fields_by_key
from megapipe.config.fields import read_value
from megapipe.config.flags import Setting
from megapipe.config.yaml_file import read_object
from megapipe.errors import ConfigError

TUNABLE = (
    "parallel.pipeline_receive_depth",
    "parallel.tp_comm_overlap",
    "parallel.tp_comm_overlap_chunks",
    "gpu.gemm_sm_carveout",
    "gpu.nccl_settings",
)


@dataclass(frozen=True)
class Tuned:
    """Settings measured on one kind of device: 'cpu', or the driver's name of a GPU."""

    device: str
    settings: Mapping[str, Any]  # 'section.name', one of TUNABLE -> value
    measured: Mapping[str, Any] = field(default_factory=dict)  # versions, grid, and the seconds of every candidate


def read_tuned(path: str) -> Tuned:
    """Read the file. Raises ConfigError if it cannot be read or is not what `calibrate --tune` writes."""
    subject = f"--tuned {path}"
    found = read_object(Path(path), "--tuned", "a file that megapipe calibrate --tune writes")
    if not isinstance(found.get("device"), str):
        raise ConfigError(f"{subject} is not a file of megapipe calibrate --tune: it names no device; measure again")
    settings, measured = found.get("settings"), found.get("measured")
    if not isinstance(settings, dict) or not isinstance(measured, dict):
        raise ConfigError(f"{subject} is not a file of megapipe calibrate --tune: it lacks settings; measure again")
    for key in settings:
        if key not in TUNABLE:
            raise ConfigError(
                f"{subject}: {key} is not a tuned setting; give it in --config, or use {', '.join(TUNABLE)}"
            )
    return Tuned(found["device"], settings, measured)


def tuned_settings(path: str) -> list[Setting]:
    """Return the settings of the file, each checked like a flag's. Raises ConfigError."""
    found = []
    for key, raw in read_tuned(path).settings.items():
        one, subject = fields_by_key()[key], f"{path}: {key}"
        words = [str(word) for word in raw] if isinstance(raw, list) else str(raw)
        found.append(Setting(one, read_value(one, words, subject), f"tuned {path}", subject))
    return found


def to_yaml(tuned: Tuned) -> str:
    """Return the file's text."""
    content = {"device": tuned.device, "settings": dict(tuned.settings), "measured": dict(tuned.measured)}
    head = "# written by megapipe calibrate --tune; give it to a run as --tuned FILE\n"
    return head + yaml.safe_dump(content, sort_keys=False, width=110)
