"""The machine of a hardware file: its name, a rank's memory, and the head that tells how it was measured."""

from __future__ import annotations

import os
import shlex
import sys
import time

import torch

from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.calibrate.hardware_file import Machine
from megapipe.extras.calibrate.measure import Found
from megapipe.extras.doctor.resources import Resources, resources


def machine_of(found: Found, environment: Environment) -> Machine:
    """As this rank sees it. Raises ConfigError where the system does not tell how much memory it has."""
    has, threads = resources(), torch.get_num_threads()
    if found.device.type == "cuda":
        properties = torch.cuda.get_device_properties(found.device)
        on_node = environment.local_world_size if environment.is_distributed else torch.cuda.device_count()
        device_name, memory = properties.name, properties.total_memory
    else:
        on_node = environment.local_world_size if environment.is_distributed else max(1, int(_cores(has)) // threads)
        device_name, memory = has.cpu, _host_memory(has) // on_node
    return Machine(device_name, memory, on_node, found.dtype, _told(found, has, threads, environment))


def _cores(has: Resources) -> float:
    return has.cores if has.cpu_limit is None else min(has.cores, has.cpu_limit)


def _host_memory(has: Resources) -> int:
    known = [size for size in (has.memory_bytes, has.memory_limit_bytes) if size is not None]
    if not known:
        raise ConfigError("this system does not tell how much memory it has: megapipe calibrate needs /proc/meminfo")
    return min(known)


def _told(found: Found, has: Resources, threads: int, environment: Environment) -> tuple[str, ...]:
    hosts = list(dict.fromkeys(found.hosts))
    where = (
        f"{environment.world_size} rank(s) at the same time on {environment.num_nodes} node(s), {', '.join(hosts[:8])}"
    )
    on_cpu = f", {threads} thread(s) a rank" if found.device.type == "cpu" else ""
    lines = [
        f"measured by: {shlex.join(['megapipe', *sys.argv[1:]])}",
        f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, torch {torch.__version__}, {found.seconds:.0f} s",
        f"{where}{on_cpu}; {has.cpu}, {_cores(has):g} cores",
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > max(_cores(has), environment.local_world_size * threads):
        lines.append(
            f"BUSY: load {load:.1f} on {_cores(has):g} cores, so that these figures are lower than the machine's own"
        )
    return tuple(lines)
