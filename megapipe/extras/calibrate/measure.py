"""Measures this world of ranks for a hardware file: each rank's device, and the links between them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megapipe.comm.bootstrap import start
from megapipe.comm.collectives import barrier, gather_objects
from megapipe.comm.groups import build_process_groups
from megapipe.environment import Environment
from megapipe.extras.calibrate.links import MeasuredLink, measure_links
from megapipe.extras.calibrate.rates import Rates, measure_rates, slowest
from megapipe.extras.calibrate.stopwatch import Stopwatch
from megapipe.monitor.process import host
from megapipe.topology import Topology

LINKS = 0.15  # of the seconds, where there are several ranks
DTYPES = {"cpu": "fp32", "cuda": "bf16"}  # where none is asked for


@dataclass(frozen=True)
class Found:
    """The same on all ranks. rates: of the slowest rank. hosts: by global rank. seconds: that it took."""

    device: torch.device
    dtype: str
    rates: Rates
    links: tuple[MeasuredLink, ...]
    hosts: tuple[str, ...]
    seconds: float


def measure(environment: Environment, device: str, dtype: str | None, seconds: float, timeout_seconds: float) -> Found:
    """All ranks at the same time. device: 'auto', 'cpu', 'cuda'. dtype: None for that of the device. seconds: about what it takes.

    Raises ConfigError, CommunicationError. On GPUs it has not run so far.
    """
    world = start(environment, "auto", timeout_seconds, device)
    if world.device.type == "cpu":
        torch.set_num_threads(environment.num_threads or 1)
    began = time.perf_counter()
    kind = dtype or DTYPES[world.device.type]
    everyone = build_process_groups(
        Topology(dp=world.world_size), world.global_rank, world.backend, timeout_seconds
    ).world
    barrier(everyone)
    share = 1 - LINKS * environment.is_distributed
    rates = slowest(gather_objects(measure_rates(kind, Stopwatch(world.device), share * seconds), everyone))
    links = measure_links(world, environment.local_world_size, LINKS * seconds) if environment.is_distributed else []
    return Found(
        world.device, kind, rates, tuple(links), tuple(gather_objects(host(), everyone)), time.perf_counter() - began
    )
