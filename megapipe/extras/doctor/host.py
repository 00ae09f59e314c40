"""`HostReport`: what one host has and runs with: packages, cores, memory, limits, GPUs, network cards, fast kernels."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from megapipe.comm.network import Interface, interface_towards, interfaces
from megapipe.environment import Environment, library_settings
from megapipe.formatting import ranges_text
from megapipe.monitor.process import host
from megapipe.version import __version__

PACKAGES = (
    *("torch", "numpy", "safetensors", "pyyaml", "sentencepiece"),
    *("tokenizers", "transformers", "wandb", "tensorboard"),
    *("triton", "flash-attn", "transformer-engine", "apex"),
)
EXTENSIONS = ("transformer-engine", "flash-attn", "apex")  # packages with fast kernels
FAST_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
INFINIBAND = Path("sys/class/infiniband")
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Resources:
    """Bytes and counts; None if the system does not say or sets no limit. Keys of `megapipe doctor --json`.

    In a container or under a scheduler they are fewer than the machine's.
    """

    cores: int  # that this process may run on
    affinity: str  # their numbers as text, such as '0-3,8'
    cores_of_machine: int
    cpu_limit: float | None  # cores' worth of time that the control group allows
    cpu: str
    numa_nodes: int
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory_free_bytes: int | None
    open_files: int | None
    most_open_files: int | None

    @property
    def usable_cores(self) -> float:
        """The cores' worth of time that this process can use."""
        return self.cores if self.cpu_limit is None else min(self.cores, self.cpu_limit)


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver names it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    state: str  # as the driver writes it, such as "4: ACTIVE"
    rate: str  # "200 Gb/sec (4X HDR)"
    layer: str  # InfiniBand or Ethernet


@dataclass(frozen=True)
class GpuDirect:
    """The support for GPUDirect RDMA: network cards that read and write GPU memory directly."""

    seen: str  # the mechanism found, "" if none
    reason: str = ""  # what is missing, "" if nothing


@dataclass(frozen=True)
class HostReport:
    """One host as its first rank sees it. The fields are keys of `megapipe doctor --json`."""

    name: str
    num_ranks: int
    ranks_per_gpu: int
    versions: Mapping[str, str | None]
    resources: Resources
    threads_of_a_rank: int
    load: float | None  # processes that wanted to run, averaged over the last minute
    gpus: tuple[Gpu, ...]
    has_nvidia_driver: bool  # in the kernel, even if torch sees no GPU
    interfaces: tuple[Interface, ...]
    interface: str | None  # the one that the rendezvous and gloo use; None if the host name decides
    rdma_ports: tuple[Port, ...]
    gpu_direct: GpuDirect
    fast_paths: Mapping[str, str]
    settings: Mapping[str, str]  # environment variables of libraries

    @property
    def is_oversubscribed(self) -> bool:
        """True with more ranks than cores: measured times then depend on the scheduler as much as on the links."""
        return self.num_ranks > self.resources.usable_cores

    @property
    def is_busy(self) -> bool:
        """True if other programs use the cores, or there are more ranks than cores."""
        return self.is_oversubscribed or (self.load is not None and self.load > self.resources.usable_cores)


def examine_host(environment: Environment, device: torch.device) -> HostReport:
    """Examine this host from one of its ranks."""
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # from the metadata: nothing is imported, so a broken package is found too
            packages[name] = version(name)
    # libraries that torch is built with or finds
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() and torch.version.cuda else None
    towards = interface_towards(environment.master_addr, environment.num_nodes) if environment.is_distributed else None
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    found = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    return HostReport(
        name=host(),
        num_ranks=environment.local_world_size,
        ranks_per_gpu=environment.ranks_per_gpu,
        versions={
            "megapipe": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            **packages,
            "cuda": torch.version.cuda,
            "cudnn": None if cudnn is None else str(cudnn),
            "nccl": nccl,
        },
        resources=resources(),
        threads_of_a_rank=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        gpus=tuple(Gpu(gpu.name, gpu.total_memory) for gpu in found),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        interfaces=interfaces(),
        interface=towards,
        rdma_ports=rdma_ports(),
        gpu_direct=gpu_direct(),
        fast_paths=fast_paths(device, packages),
        settings=library_settings(),
    )


def resources() -> Resources:
    """Return the resources of this process, now."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    facts: dict[str, str] = {}  # the first value of every 'key : value' line
    for path in ("/proc/meminfo", "/proc/cpuinfo"):
        for line in _text(Path(path)).splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    memory = {key: int(facts[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable") if key in facts}
    shared = shared_free = soft = hard = None
    with suppress(OSError):
        shared, _, shared_free = shutil.disk_usage(SHARED_MEMORY)
    with suppress(ImportError):  # not a Unix
        import resource

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    quota, period = [*_text(CGROUP / "cpu.max").split(), "", ""][:2]  # without a limit the first word is "max"
    memory_limit = _text(CGROUP / "memory.max")
    return Resources(
        cores=len(cores),
        affinity=ranges(cores),
        cores_of_machine=os.cpu_count() or 1,
        cpu_limit=float(quota) / float(period) if quota.isdecimal() and period.isdecimal() else None,
        cpu=facts.get("model name", "") or platform.processor() or platform.machine(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=int(memory_limit) if memory_limit.isdecimal() else None,
        shared_memory_bytes=shared,
        shared_memory_free_bytes=shared_free,
        open_files=soft,
        most_open_files=hard,
    )


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text: '0-3,8' for 0, 1, 2, 3, 8."""
    return ranges_text(numbers).replace(" to ", "-").replace(", ", ",")


def rdma_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """Return the InfiniBand and RoCE ports of this machine, ordered by name."""
    return tuple(
        Port(p.parent.parent.name, int(p.name), _text(p / "state"), _text(p / "rate"), _text(p / "link_layer"))
        for p in sorted((root / INFINIBAND).glob("*/ports/*"))
        if p.name.isdigit()
    )


def gpu_direct(root: Path = Path("/")) -> GpuDirect:
    """Look in the kernel for the driver's peer-memory module, or for dma-buf with the driver's open kernel module."""
    modules = {line.split(" ", 1)[0] for line in _text(root / "proc/modules").splitlines()}
    if not any((root / "proc/driver").glob("nvidia/version")):
        return GpuDirect("", "no NVIDIA driver is loaded")
    if not rdma_ports(root):
        return GpuDirect("", "no RDMA device")
    peer = next((name for name in PEER_MODULES if name in modules), None)
    if peer is not None:
        return GpuDirect(f"kernel module {peer}")
    is_open = "Open Kernel Module" in _text(root / "proc/driver/nvidia/version")
    has_buffers = "ib_umem_dmabuf_get" in _text(root / "proc/kallsyms")
    if is_open and has_buffers:
        return GpuDirect("dma-buf: the driver's open kernel module and RDMA with dma-buf")
    missing = "the driver's open kernel module" if has_buffers else "dma-buf in the kernel's RDMA"
    return GpuDirect("", f"neither the module {PEER_MODULES[0]} nor {missing} is loaded; `modprobe {PEER_MODULES[0]}`")


def _text(path: Path) -> str:
    """Return a file's text, "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def fast_paths(device: torch.device, packages: Mapping[str, str | None]) -> dict[str, str]:
    """Run each fast kernel on a few numbers; return name -> state, which begins with "active", "installed" or "not"."""
    checks: dict[str, Callable[[torch.device], str]] = {
        "fused AdamW": _fused_adamw,
        "fused attention": _attention,
        "bf16 matrix units": _bf16,
        "compiler of torch.compile": _compiler,
    }
    found = {}
    for name, check in checks.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = check(device)
        # a probe: the doctor reports what torch, or a version without the function, raises here
        except (RuntimeError, TypeError, AttributeError, OSError) as error:
            found[name] = f"not active: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    for name in EXTENSIONS:
        installed = packages.get(name)
        found[name] = f"installed {installed}, used where a flag asks for it" if installed else "not installed"
    return found


def _fused_adamw(device: torch.device) -> str:
    weight, gradient, mean, square = (torch.ones(16, device=device) for _ in range(4))
    steps = [torch.ones((), device=device)]
    rates: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    # the kernel itself: creating a torch.optim.AdamW imports torch._dynamo, which takes seconds
    torch._fused_adamw_([weight], [gradient], [mean], [square], [], steps, **rates, amsgrad=False, maximize=False)
    return "active" if float(weight[0]) < 1 else "not active: the kernel does not change the weight"


def _attention(device: torch.device) -> str:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.zeros(1, 2, 64, 64, device=device, dtype=dtype)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True))
    kind, name = str(dtype).removeprefix("torch."), chosen.name.removesuffix("_ATTENTION").lower()
    return f"active: {name} for {kind}" if chosen in FAST_BACKENDS else f"not active: torch uses {name} for {kind}"


def _bf16(device: torch.device) -> str:
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        return "active" if major >= 8 else f"not active: the GPU's compute capability {major} has no bf16 matrix units"
    # torch versions differ in which of these functions exist; bool() is False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_units = any(getattr(torch.cpu, name, bool)() for name in names)
    level = torch.backends.cpu.get_cpu_capability()
    return f"active ({level})" if has_units else f"not active: this CPU ({level}) has no bf16 units"


def _compiler(device: torch.device) -> str:
    if device.type == "cuda":
        return "installed: triton" if find_spec("triton") else "not installed: torch.compile cannot work without triton"
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    return f"installed: {compiler}" if compiler else "not installed: torch.compile cannot work without a C++ compiler"
