"""What hosts lack and in what they differ, from their reports alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megapipe.extras.doctor.host import HostReport

MIB = 1 << 20
LEAST_SHARED_MEMORY = 64 * MIB
LEAST_OPEN_FILES = 4096
MOST_SKEW_SECONDS = 1.0
# a difference in these breaks runs or makes them differ; in others it is only told
MUST_AGREE = ("megapipe", "python", "torch", "numpy", "cuda", "nccl", "cudnn")


@dataclass(frozen=True)
class Remark:
    """is_wrong: the exit code tells. kind: a word for programs. hosts: whom it is about."""

    is_wrong: bool
    kind: str
    text: str
    hosts: tuple[str, ...] = ()


def examine(reports: Sequence[HostReport]) -> list[Remark]:
    """All remarks, those on single hosts first; what several hosts have in common is told once."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    for report in reports:
        for kind, (is_wrong, rule) in RULES.items():
            if text := rule(report):
                found.setdefault((is_wrong, kind, text), []).append(report.name)
    remarks = [Remark(is_wrong, kind, text, tuple(names)) for (is_wrong, kind, text), names in found.items()]
    return [*remarks, *_differences(reports)]


def clock_remarks(skews: dict[str, tuple[float, float]], first: str) -> list[Remark]:
    """skews: host -> (seconds ahead of the first, error)."""
    return [
        Remark(
            True, "clock", f"the clock of {host} is {seconds:+.3f} s off that of {first} (+- {error:.3f} s)", (host,)
        )
        for host, (seconds, error) in skews.items()
        if abs(seconds) - error > MOST_SKEW_SECONDS
    ]


def _differences(reports: Sequence[HostReport]) -> list[Remark]:
    found = []
    kinds: dict[str, Callable[[HostReport], object]] = {
        "GPUs": lambda report: ", ".join(sorted({gpu.name for gpu in report.gpus})) or "none",
        "CPU": lambda report: f"{report.resources.cpu}, {report.resources.cores} cores",
        **{
            f"setting {name}": _setting(name)
            for name in dict.fromkeys(name for report in reports for name in report.settings)
        },
        **{name: _version(name) for name in dict.fromkeys(name for report in reports for name in report.versions)},
    }
    for what, value in kinds.items():
        by_value: dict[str, list[str]] = {}
        for report in reports:
            by_value.setdefault(str(value(report)), []).append(report.name)
        if len(by_value) > 1:
            text = "; ".join(f"{value} on {_listed(names)}" for value, names in by_value.items())
            found.append(
                Remark(
                    what in MUST_AGREE, "difference", f"hosts differ in {what}: {text}", tuple(r.name for r in reports)
                )
            )
    return found


def _version(name: str) -> Callable[[HostReport], object]:
    return lambda report: report.versions.get(name) or "none"


def _setting(name: str) -> Callable[[HostReport], object]:
    return lambda report: report.settings.get(name, "not set")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... ({len(names)} in all)"])


def _no_gpu_seen(report: HostReport) -> str:
    if not report.has_nvidia_driver or report.gpus or report.versions.get("cuda"):
        return ""
    return "an NVIDIA driver is loaded, but this torch is built without CUDA: install a CUDA build, or the ranks stay on the CPU"


def _few_gpus(report: HostReport) -> str:
    if not report.gpus or report.num_ranks <= len(report.gpus):
        return ""
    return f"{report.num_ranks} ranks and {len(report.gpus)} GPUs: start at most one rank a GPU"


def _threads(report: HostReport) -> str:
    wanted = report.num_ranks * report.threads_of_a_rank
    if report.gpus or wanted <= report.cores or report.threads_of_a_rank == 1:
        return ""
    threads = max(1, int(report.cores // report.num_ranks))
    return f"{report.num_ranks} ranks of {report.threads_of_a_rank} threads on {report.cores:g} cores: set OMP_NUM_THREADS={threads}"


def _crowded(report: HostReport) -> str:
    if not report.is_oversubscribed:
        return ""
    return f"{report.num_ranks} ranks on {report.cores:g} cores: they take turns; small differences of measured times mean nothing"


def _busy(report: HostReport) -> str:
    if report.is_oversubscribed or not report.is_busy:
        return ""
    return f"load {report.load:.1f} on {report.cores:g} cores: others compute here too; small differences of measured times mean nothing"


def _shared_memory(report: HostReport) -> str:
    size = report.resources.shared_memory_bytes
    if size is None or size >= LEAST_SHARED_MEMORY:
        return ""
    return f"/dev/shm holds {size / MIB:.0f} MiB: heartbeats and NCCL's exchange inside a host need it (docker run --shm-size 1g)"


def _open_files(report: HostReport) -> str:
    limit = report.resources.open_files
    if limit is None or limit >= LEAST_OPEN_FILES:
        return ""
    return f"a process may have {limit} files open, and a rank has one for each peer: ulimit -n {report.resources.most_open_files or 65536}"


def _no_direct(report: HostReport) -> str:
    if not report.gpus or not report.rdma_ports or report.gpu_direct.seen:
        return ""
    return f"GPUDirect RDMA not seen, so what GPUs send to other hosts goes through host memory: {report.gpu_direct.reason}"


def _ports_down(report: HostReport) -> str:
    down = [f"{port.device}/{port.number}" for port in report.rdma_ports if "ACTIVE" not in port.state]
    return f"RDMA ports that are not active: {', '.join(down)}" if down else ""


def _slow_paths(report: HostReport) -> str:
    lacking = [f"{name} {state}" for name, state in report.fast_paths.items() if state.startswith("not active")]
    return "; ".join(lacking) if report.gpus and lacking else ""


# kind -> (whether it is wrong, what it says of a host; "" for nothing)
RULES: dict[str, tuple[bool, Callable[[HostReport], str]]] = {
    "torch without CUDA": (True, _no_gpu_seen),
    "ranks without a GPU": (True, _few_gpus),
    "threads": (False, _threads),
    "oversubscribed": (False, _crowded),
    "busy": (False, _busy),
    "shared memory": (False, _shared_memory),
    "open files": (False, _open_files),
    "GPUDirect": (False, _no_direct),
    "RDMA ports": (False, _ports_down),
    "slow kernels": (False, _slow_paths),
}
