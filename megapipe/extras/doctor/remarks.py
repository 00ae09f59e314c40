"""Remarks about hosts, from their reports alone: missing resources, and differences between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        for is_wrong, remarks in ((True, _errors(report)), (False, _notes(report))):
            for kind, text in remarks:
                found.setdefault((is_wrong, kind, text), []).append(report.name)
    about_hosts = [Remark(is_wrong, kind, text, tuple(names)) for (is_wrong, kind, text), names in found.items()]
    return [*about_hosts, *_differences(reports)]


def _errors(report: HostReport) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of everything that is wrong on a host."""
    if report.has_nvidia_driver and not report.gpus and not report.versions.get("cuda"):
        yield (
            "torch without CUDA",
            "an NVIDIA driver is loaded, but this torch is built without CUDA: install a CUDA build, or the ranks stay "
            "on the CPU",
        )
    if report.gpus and report.num_ranks > len(report.gpus):
        text = f"{report.num_ranks} ranks and {len(report.gpus)} GPUs: start at most one rank a GPU"
        yield "ranks without a GPU", text


def _notes(report: HostReport) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of everything that slows a run down or makes measurements unreliable."""
    has, ranks, threads, cores = report.resources, report.num_ranks, report.threads_of_a_rank, report.cores
    if not report.gpus and threads > 1 and ranks * threads > cores:
        fitting = max(1, int(cores // ranks))
        yield "threads", f"{ranks} ranks of {threads} threads on {cores:g} cores: set OMP_NUM_THREADS={fitting}"
    unreliable = "small differences of measured times mean nothing"
    if report.is_oversubscribed:
        yield "oversubscribed", f"{ranks} ranks on {cores:g} cores take turns; {unreliable}"
    elif report.is_busy:
        yield "busy", f"load {report.load:.1f} on {cores:g} cores: other programs run here too; {unreliable}"
    if has.shared_memory_bytes is not None and has.shared_memory_bytes < MIN_SHARED_MEMORY:
        yield (
            "shared memory",
            f"/dev/shm holds {has.shared_memory_bytes / MIB:.0f} MiB: heartbeats and NCCL's transport within a host "
            "need it (docker run --shm-size 1g)",
        )
    if has.open_files is not None and has.open_files < MIN_OPEN_FILES:
        yield (
            "open files",
            f"a process may have {has.open_files} files open, and a rank has one for each peer: "
            f"ulimit -n {has.most_open_files or 65536}",
        )
    if report.gpus and report.rdma_ports and not report.gpu_direct.seen:
        yield (
            "GPUDirect",
            "GPUDirect RDMA not found, so messages of GPUs to other hosts go through host memory: "
            f"{report.gpu_direct.reason}",
        )
    down = [f"{port.device}/{port.number}" for port in report.rdma_ports if "ACTIVE" not in port.state]
    if down:
        yield "RDMA ports", f"RDMA ports that are not active: {', '.join(down)}"
    inactive = [f"{name} {state}" for name, state in report.fast_paths.items() if state.startswith("not active")]
    if report.gpus and inactive:
        yield "slow kernels", "; ".join(inactive)


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
