"""Remarks about hosts, from their reports alone: missing resources, and differences between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megapipe.extras.doctor.host import HostReport

MIB = 1 << 20
MIN_SHARED_MEMORY = 64 * MIB
MIN_OPEN_FILES = 4096
MAX_SKEW_SECONDS = 1.0
# hosts that differ in one of these break a run or change its results; other differences are only noted
MUST_AGREE = ("megapipe", "python", "torch", "numpy", "cuda", "nccl", "cudnn")


@dataclass(frozen=True)
class Remark:
    """One finding about hosts."""

    is_wrong: bool  # an error, which the exit code reports; else a note
    kind: str  # a key for programs
    text: str
    hosts: tuple[str, ...] = ()


def host_remarks(reports: Sequence[HostReport]) -> list[Remark]:
    """Return all remarks, those about single hosts first. What holds for several hosts is one remark."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    for report in reports:
        for kind, (is_wrong, rule) in RULES.items():
            if text := rule(report):
                found.setdefault((is_wrong, kind, text), []).append(report.name)
    remarks = [Remark(is_wrong, kind, text, tuple(names)) for (is_wrong, kind, text), names in found.items()]
    return [*remarks, *_differences(reports)]


def clock_remarks(skews: dict[str, tuple[float, float]], first: str) -> list[Remark]:
    """Return a remark for each clock that is off. skews: host -> (seconds ahead of the first host, error)."""
    return [
        Remark(
            True, "clock", f"the clock of {host} is {seconds:+.3f} s off that of {first} (+- {error:.3f} s)", (host,)
        )
        for host, (seconds, error) in skews.items()
        if abs(seconds) - error > MAX_SKEW_SECONDS
    ]


def _differences(reports: Sequence[HostReport]) -> list[Remark]:
    tables: list[dict[str, str]] = []  # of each host: property -> value
    for report in reports:
        table = {
            "GPUs": ", ".join(sorted({gpu.name for gpu in report.gpus})) or "none",
            "CPU": f"{report.resources.cpu}, {report.resources.cores} cores",
        }
        settings = dict.fromkeys(name for other in reports for name in other.settings)
        table |= {f"setting {name}": report.settings.get(name, "not set") for name in settings}
        versions = dict.fromkeys(name for other in reports for name in other.versions)
        tables.append(table | {name: report.versions.get(name) or "none" for name in versions})
    found = []
    names = tuple(report.name for report in reports)
    for what in tables[0]:
        hosts_with: dict[str, list[str]] = {}
        for name, table in zip(names, tables, strict=True):
            hosts_with.setdefault(table[what], []).append(name)
        if len(hosts_with) > 1:
            text = "; ".join(f"{value} on {_listed(hosts)}" for value, hosts in hosts_with.items())
            found.append(Remark(what in MUST_AGREE, "difference", f"hosts differ in {what}: {text}", names))
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... ({len(names)} in all)"])


def _torch_without_cuda(report: HostReport) -> str:
    if not report.has_nvidia_driver or report.gpus or report.versions.get("cuda"):
        return ""
    return (
        "an NVIDIA driver is loaded, but this torch is built without CUDA: install a CUDA build, or the ranks stay on "
        "the CPU"
    )


def _ranks_without_gpu(report: HostReport) -> str:
    if not report.gpus or report.num_ranks <= len(report.gpus):
        return ""
    return f"{report.num_ranks} ranks and {len(report.gpus)} GPUs: start at most one rank a GPU"


def _too_many_threads(report: HostReport) -> str:
    wanted = report.num_ranks * report.threads_of_a_rank
    if report.gpus or wanted <= report.cores or report.threads_of_a_rank == 1:
        return ""
    threads = max(1, int(report.cores // report.num_ranks))
    return (
        f"{report.num_ranks} ranks of {report.threads_of_a_rank} threads on {report.cores:g} cores: "
        f"set OMP_NUM_THREADS={threads}"
    )


def _oversubscribed(report: HostReport) -> str:
    if not report.is_oversubscribed:
        return ""
    return (
        f"{report.num_ranks} ranks on {report.cores:g} cores take turns; small differences of measured times mean "
        "nothing"
    )


def _busy(report: HostReport) -> str:
    if report.is_oversubscribed or not report.is_busy:
        return ""
    return (
        f"load {report.load:.1f} on {report.cores:g} cores: other programs run here too; "
        "small differences of measured times mean nothing"
    )


def _shared_memory(report: HostReport) -> str:
    size = report.resources.shared_memory_bytes
    if size is None or size >= MIN_SHARED_MEMORY:
        return ""
    return (
        f"/dev/shm holds {size / MIB:.0f} MiB: heartbeats and NCCL's transport within a host need it "
        "(docker run --shm-size 1g)"
    )


def _open_files(report: HostReport) -> str:
    limit = report.resources.open_files
    if limit is None or limit >= MIN_OPEN_FILES:
        return ""
    return (
        f"a process may have {limit} files open, and a rank has one for each peer: "
        f"ulimit -n {report.resources.most_open_files or 65536}"
    )


def _no_gpu_direct(report: HostReport) -> str:
    if not report.gpus or not report.rdma_ports or report.gpu_direct.seen:
        return ""
    return (
        "GPUDirect RDMA not found, so messages of GPUs to other hosts go through host memory: "
        f"{report.gpu_direct.reason}"
    )


def _ports_down(report: HostReport) -> str:
    down = [f"{port.device}/{port.number}" for port in report.rdma_ports if "ACTIVE" not in port.state]
    return f"RDMA ports that are not active: {', '.join(down)}" if down else ""


def _slow_kernels(report: HostReport) -> str:
    inactive = [f"{name} {state}" for name, state in report.fast_paths.items() if state.startswith("not active")]
    return "; ".join(inactive) if report.gpus and inactive else ""


# kind -> (is_wrong, text for a host or "")
RULES: dict[str, tuple[bool, Callable[[HostReport], str]]] = {
    "torch without CUDA": (True, _torch_without_cuda),
    "ranks without a GPU": (True, _ranks_without_gpu),
    "threads": (False, _too_many_threads),
    "oversubscribed": (False, _oversubscribed),
    "busy": (False, _busy),
    "shared memory": (False, _shared_memory),
    "open files": (False, _open_files),
    "GPUDirect": (False, _no_gpu_direct),
    "RDMA ports": (False, _ports_down),
    "slow kernels": (False, _slow_kernels),
}
