"""InfiniBand and RoCE ports, and what is seen of GPUDirect RDMA: network cards that read and write the memory of GPUs themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("sys/class/infiniband")
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. state, rate: the driver's words, "4: ACTIVE", "200 Gb/sec (4X HDR)". layer: InfiniBand or Ethernet."""

    device: str
    number: int
    state: str
    rate: str
    layer: str


@dataclass(frozen=True)
class GpuDirect:
    """seen: by which way, "" for none. reason: what was looked for and is missing, "" where something was seen."""

    seen: str
    reason: str = ""


def rdma_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """All of this machine, ordered by name."""
    ports = sorted((root / INFINIBAND).glob("*/ports/*"))
    return tuple(
        Port(p.parent.parent.name, int(p.name), _text(p / "state"), _text(p / "rate"), _text(p / "link_layer"))
        for p in ports
        if p.name.isdigit()
    )


def gpu_direct(root: Path = Path("/")) -> GpuDirect:
    """Whether the kernel has one of the two ways: the driver's peer-memory module, or dma-buf between its open module and RDMA."""
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
    return GpuDirect("", f"neither {PEER_MODULES[0]} is loaded nor {missing} there; `modprobe {PEER_MODULES[0]}`")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
