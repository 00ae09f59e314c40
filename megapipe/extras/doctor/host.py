"""`HostReport`: what one host has and runs with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megapipe import __version__
from megapipe.comm.network import Interface, interface_towards, interfaces
from megapipe.environment import Environment, library_settings
from megapipe.extras.doctor.fabric import GpuDirect, Port, gpu_direct, rdma_ports
from megapipe.extras.doctor.fast_paths import fast_paths
from megapipe.extras.doctor.packages import versions
from megapipe.extras.doctor.resources import Resources, resources
from megapipe.monitor.process import host


@dataclass(frozen=True)
class Gpu:
    """A card as the driver names it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class HostReport:
    """One host as its first rank sees it. interface: over which the ranks meet and gloo sends, None where the name of the host decides.

    has_nvidia_driver: of the kernel, whether or not torch sees a GPU. settings: of libraries, from the environment. load: processes that
    wanted to run during the last minute.
    """

    name: str
    num_ranks: int
    versions: Mapping[str, str | None]
    resources: Resources
    threads_of_a_rank: int
    load: float | None
    gpus: tuple[Gpu, ...]
    has_nvidia_driver: bool
    interfaces: tuple[Interface, ...]
    interface: str | None
    rdma_ports: tuple[Port, ...]
    gpu_direct: GpuDirect
    fast_paths: Mapping[str, str]
    settings: Mapping[str, str]

    @property
    def cores(self) -> float:
        """Cores' worth of time that the ranks can have."""
        limit = self.resources.cpu_limit
        return self.resources.cores if limit is None else min(self.resources.cores, limit)

    @property
    def is_oversubscribed(self) -> bool:
        """More ranks than cores: their times tell as much of the scheduler as of the links."""
        return self.num_ranks > self.cores

    @property
    def is_busy(self) -> bool:
        """Somebody else computes here, or there are more ranks than cores."""
        return self.is_oversubscribed or (self.load is not None and self.load > self.cores)


def examine_host(environment: Environment, device: torch.device) -> HostReport:
    """This host, from one of its ranks."""
    packages = versions()
    has_cuda = device.type == "cuda"
    return HostReport(
        name=host(),
        num_ranks=environment.local_world_size,
        versions={"megapipe": __version__, **packages, **_libraries()},
        resources=resources(),
        threads_of_a_rank=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())) if has_cuda else (),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        interfaces=interfaces(),
        interface=interface_towards(environment.master_addr, environment.num_nodes)
        if environment.is_distributed
        else None,
        rdma_ports=rdma_ports(),
        gpu_direct=gpu_direct(),
        fast_paths=fast_paths(device, packages),
        settings=library_settings(),
    )


def _libraries() -> dict[str, str | None]:
    """What torch was built with, or finds: None for what is not there."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() and torch.version.cuda else None
    return {"cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn), "nccl": nccl}


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, found.total_memory)
