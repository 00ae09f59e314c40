"""NCCL settings: environment variables, communicator options by kind of group, and torch's flight recorder.

Channels, priority and CTAs of every communicator come from `NcclSettings.options`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapipe.config.gpu import NCCL_GROUPS, GpuConfig
from megapipe.config.yaml_file import read_object
from megapipe.environment import set_for_libraries, value_for_libraries
from megapipe.errors import ConfigError

COMMUNICATOR_KEYS: dict[str, type] = {"cga_cluster_size": int, "min_ctas": int, "max_ctas": int, "net_name": str}
FLIGHT_RECORDER_EVENTS = 2000
COMMUNICATORS = "--nccl-communicator-config-path"
P2P_CHANNELS, MAX_CTAS = "NCCL_MAX_P2P_NCHANNELS", "NCCL_MAX_CTAS"  # of a whole process


@dataclass(frozen=True)
class NcclSettings:
    """Variables of NCCL's environment, options of communicators by kind of group, kinds of groups of high priority."""

    variables: Mapping[str, str] = field(default_factory=dict)
    communicators: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    high_priority: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: GpuConfig) -> NcclSettings:
        """Read the flags and the file of communicator options. Raises ConfigError."""
        variables: dict[str, str] = {}
        for word in config.nccl_settings or ():
            if not re.fullmatch(r"NCCL_[A-Z0-9_]+=.+", word):
                raise ConfigError(f"--nccl-settings {word}: expected NCCL_NAME=VALUE, such as NCCL_DEBUG=INFO")
            name, _, value = word.partition("=")
            if variables.setdefault(name, value) != value:
                raise ConfigError(f"--nccl-settings sets {name} twice, to {variables[name]} and to {value}")
        path = config.nccl_communicator_config_path
        communicators = {} if path is None else read_communicators(Path(path))
        return cls(variables, communicators, config.high_priority_stream_groups)

    def sets(self, name: str) -> bool:
        """Return True if the flags or the environment set a variable."""
        return name in self.variables or bool(value_for_libraries(name))

    def with_default(self, kind: str, max_ctas: int) -> NcclSettings:
        """Return the settings with max_ctas for a kind of group, unless the user has set a number of CTAs for it."""
        given = self.communicators.get(kind, {})
        if {"min_ctas", "max_ctas"} & given.keys() or self.sets(P2P_CHANNELS) or self.sets(MAX_CTAS):
            return self
        return replace(self, communicators={**self.communicators, kind: {**given, "max_ctas": max_ctas}})

    def options(self, kind: str, timeout: timedelta | None) -> Any:
        """Return torch's options for a communicator of this kind of group; None if nothing is set for it."""
        if kind not in self.high_priority and kind not in self.communicators:
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=kind in self.high_priority)
        if timeout is not None:
            options._timeout = timeout  # torch warns if it differs from new_group's timeout argument
        for key, value in self.communicators.get(kind, {}).items():
            setattr(options.config, key, value)
        return options

    def prepare(self, recorder_folder: Path | None) -> None:
        """Set NCCL's variables and enable the flight recorder; called before torch.distributed is initialized.

        The recorder keeps the last collectives of every rank, which torch writes when an operation times out, to
        recorder_folder or its default path. Raises ConfigError if the environment sets a variable to another value.
        """
        for name, value in self.variables.items():
            present = value_for_libraries(name)
            if present is not None and present != value:
                conflict = f"--nccl-settings {name}={value}, but the environment sets {name}={present}"
                raise ConfigError(f"{conflict}; set it in one place only")
        set_for_libraries(**self.variables)
        # both names of each: torch 2.9 renamed them and kept the old ones
        set_for_libraries(
            TORCH_FR_BUFFER_SIZE=FLIGHT_RECORDER_EVENTS,
            TORCH_NCCL_TRACE_BUFFER_SIZE=FLIGHT_RECORDER_EVENTS,
            TORCH_NCCL_DUMP_ON_TIMEOUT=1,
        )
        if recorder_folder is not None:
            recorder_folder.mkdir(parents=True, exist_ok=True)
            prefix = str(recorder_folder / "rank_")
            set_for_libraries(TORCH_FR_DUMP_TEMP_FILE=prefix, TORCH_NCCL_DEBUG_INFO_TEMP_FILE=prefix)


def channels_of_messages(max_ctas: int) -> int:
    """Return the most channels, one CTA each, of the sends and receives of a communicator with max_ctas.

    max_ctas limits its channels, and for messages NCCL rounds their number up to a power of two (src/graph/connect.cc
    and ncclTopoComputeP2pChannels in src/graph/paths.cc of github.com/NVIDIA/nccl).
    """
    return 1 << max(0, max_ctas - 1).bit_length()


def read_communicators(path: Path) -> dict[str, dict[str, int | str]]:
    """Read the file of --nccl-communicator-config-path. Raises ConfigError."""
    rule = "kinds of groups with options, such as `dp: {max_ctas: 8}`"
    found = read_object(path, COMMUNICATORS, rule)
    flag = f"{COMMUNICATORS} {path}"
    if not all(isinstance(options, dict) for options in found.values()):
        raise ConfigError(f"{flag}: expected {rule}")
    for kind, options in found.items():
        if kind not in NCCL_GROUPS:
            raise ConfigError(f"{flag}: unknown kind of group {kind}; use one of {', '.join(NCCL_GROUPS)}")
        for key, value in options.items():
            expected = COMMUNICATOR_KEYS.get(key)
            if expected is None:
                raise ConfigError(f"{flag}: unknown option {kind}.{key}; use one of {', '.join(COMMUNICATOR_KEYS)}")
            if type(value) is not expected:
                wanted = "an integer" if expected is int else "a string"
                raise ConfigError(f"{flag}: {kind}.{key} is {value!r}; expected {wanted}")
    return found
