"""The result of an examination as text for a person and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megapipe.extras.doctor.examination import (
    PAIR,
    PEERS,
    TABLE,
    Examination,
    Judged,
    Remark,
    common_cause,
    host_remarks,
)
from megapipe.extras.doctor.host import HostReport, ranges
from megapipe.formatting import bytes_text, count_text, seconds_text, text_table
from megapipe.plan.hardware import Hardware

MAX_LINES = 12


def host_text(report: HostReport) -> list[str]:
    """Return the lines about one host."""
    r = report.resources
    installed = {name: version for name, version in report.versions.items() if version}
    nodes = f", {r.numa_nodes} NUMA nodes" if r.numa_nodes > 1 else ""
    cpu_limit = "" if r.cpu_limit is None else f", limited to {r.cpu_limit:g} cores' time"
    load = "" if report.load is None else f", load {report.load:.1f}"
    ranks = f"{count_text(report.num_ranks, 'rank')} of {count_text(report.threads_of_a_rank, 'thread')}"
    sizes = (r.memory_bytes, r.available_bytes, r.shared_memory_bytes, r.shared_memory_free_bytes)
    memory, available, shared, free = ("unknown" if size is None else bytes_text(size) for size in sizes)
    memory_limit = "" if r.memory_limit_bytes is None else f", limited to {bytes_text(r.memory_limit_bytes)}"
    files, most_files = ("unlimited" if n is None else f"{n:,}" for n in (r.open_files, r.most_open_files))
    lines = [
        ("host", f"{report.name}, {installed.pop('system')}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in installed.items())),
        ("missing", ", ".join(name for name, version in report.versions.items() if not version)),
        ("cores", f"{r.cores} of {r.cores_of_machine} ({r.affinity}), {r.cpu}{nodes}{cpu_limit}{load}; {ranks}"),
        ("memory", f"{memory}, {available} available{memory_limit}; /dev/shm {shared}, {free} free"),
        ("open files", f"{files}, at most {most_files}"),
    ]
    lines += [("GPU", f"{i}: {gpu.name}, {bytes_text(gpu.memory_bytes)}") for i, gpu in enumerate(report.gpus)]
    if not report.gpus:
        lines.append(("GPU", "none" + (", though an NVIDIA driver is loaded" if report.has_nvidia_driver else "")))
    for i in report.interfaces:
        speed = "" if i.megabits_per_second is None else f", {i.megabits_per_second / 1000:g} Gbit/s by its driver"
        driver = f", {i.driver}" if i.driver else ""
        chosen = ": used for the rendezvous" if i.name == report.interface else ""
        text = f"{i.name} {i.state}, {', '.join(i.addresses) or 'no address'}{speed}{driver}{chosen}"
        lines.append(("interface", text))
    lines += [("RDMA", f"{p.device} port {p.number}: {p.state}, {p.rate}, {p.layer}") for p in report.rdma_ports]
    if not report.rdma_ports:
        lines.append(("RDMA", "no InfiniBand or RoCE device"))
    lines.append(("GPUDirect", report.gpu_direct.seen or f"RDMA not found: {report.gpu_direct.reason}"))
    paths = [f"{name:<26}{state}" for name, state in report.fast_paths.items()]
    lines += [("fast paths" if number == 0 else "", path) for number, path in enumerate(paths)]
    settings = ", ".join(f"{name}={value}" for name, value in report.settings.items())
    lines.append(("settings", settings or "none of NCCL, gloo, OpenMP or torch"))
    return [f"{name:<11}{text}" for name, text in lines if text]


def single_text(report: HostReport) -> str:
    """Return the text for one process: its host and the remarks about it."""
    remarks = host_remarks([report])
    is_fine = not any(remark.is_wrong for remark in remarks)
    return "\n".join([*host_text(report), "", *_remark_lines(remarks, 1), "fine" if is_fine else "NOT fine"])


def allocation_text(found: Examination, hardware: Hardware | None, layout: str) -> str:
    """Return the text for an allocation: all hosts, every kind of group, and what is slow."""
    names = list(dict.fromkeys(found.hosts))
    shown = names if len(names) <= 8 else names[:7]
    hosts = [f"{name} (ranks {ranges([r for r, other in enumerate(found.hosts) if other == name])})" for name in shown]
    if len(names) > 8:
        hosts.append(f"and {len(names) - 7} more")
    lines = [f"{layout} on {count_text(len(found.reports), 'host')}: {', '.join(hosts)}", ""]
    lines += [*host_text(found.reports[0]), ""]
    if found.skews:
        clocks = ", ".join(f"{name} {s:+.4f} s (+- {e:.4f})" for name, (s, e) in found.skews.items())
        lines += [f"{'clocks':<11}{clocks} against {found.hosts[0]}", ""]
    lines += _measured_table(found)
    if found.judged and hardware is not None:
        lines += ["", f"compared   with their peers, and with what the hardware table expects of {hardware.name}"]
    elif found.judged:
        alone = [kind for (kind, _), of_kind in _by_kind(found).items() if of_kind[0].num_peers < 2]
        without = f"; {', '.join(alone)}: without peers, compared with nothing" if alone else ""
        why = "this device is not in the hardware table (--gpu NAME or --hardware FILE give expected rates)"
        lines += ["", f"compared   with their peers only: {why}{without}"]
    else:
        lines.append("")
    lines += ["", *_slow_lines(found), *_remark_lines(found.remarks, len(found.reports))]
    lines.append(f"{'fine' if found.is_fine else 'NOT fine'} (examined in {found.seconds:.1f} s)")
    return "\n".join(lines)


def _measured_table(found: Examination) -> Iterable[str]:
    """Return one line for each kind of group, in hosts and between them apart; rates are those of a rank's sends."""
    rows = [("measured", "groups", "links", "latency", "rate", "", "expected", "slowest")]
    for (kind, crosses), of_kind in _by_kind(found).items():
        small, large = _at(of_kind, min), _at(of_kind, max)
        middle, worst = large[(len(large) - 1) // 2], max(large, key=lambda one: one.seconds)
        expected = middle.expected_seconds
        rows.append(
            (
                kind,
                str(len(large)),
                "between hosts" if crosses else "in a host",
                seconds_text(small[(len(small) - 1) // 2].seconds),
                rate_text(middle.bytes_per_second),
                f"at {bytes_text(middle.num_bytes)}",
                "" if not expected else rate_text(middle.bytes_per_second * middle.seconds / expected),
                "" if len(large) == 1 else f"{rate_text(worst.bytes_per_second)}: {_ranks(found, worst)}",
            )
        )
    if len(rows) == 1:
        return ["measured   nothing: the layout has one rank in every group"]
    return text_table(rows, left=range(len(rows[0])), indent=0)


def _by_kind(found: Examination) -> dict[tuple[str, bool], list[Judged]]:
    groups: dict[tuple[str, bool], list[Judged]] = {}
    for one in found.judged:
        if one.trial.kind != PAIR:
            groups.setdefault((one.trial.kind, one.trial.crosses_hosts(found.hosts)), []).append(one)
    return groups


def _at(judged: Sequence[Judged], which: Callable[[Iterable[int]], int]) -> list[Judged]:
    """Return the trials at the smallest or the largest size, the fastest first. which: min or max."""
    size = which(one.num_bytes for one in judged)
    return sorted((one for one in judged if one.num_bytes == size), key=lambda one: one.seconds)


def _slow_lines(found: Examination) -> list[str]:
    """Return what is slow and the links that cause it, the worst first."""
    links = [one for one in found.slow if one.trial.is_message]
    groups = [one for one in found.slow if not one.trial.is_message]
    measured_links = [one.trial for one in found.judged if one.trial.is_message]
    slow_links = {one.trial for one in links}
    lines = [f"slow       {text}" for text in blame(found)]
    lines += [f"           {_comparison_of(found, one)}" for one in links[:MAX_LINES]]
    for one in groups[:MAX_LINES]:
        within = {link for link in measured_links if set(link.ranks) <= set(one.trial.ranks)}
        why = ""
        if within and not within & slow_links:
            why = "; none of its links is slow alone: they share one, or its ranks lack cores"
        lines.append(f"slow       {one.trial.kind} of {_comparison_of(found, one)}{why}")
    left = max(0, len(links) - MAX_LINES) + max(0, len(groups) - MAX_LINES)
    if left:
        lines.append(f"           and {left} more")
    return lines


def blame(found: Examination) -> list[str]:
    """Return the fewest hosts or ranks and directions that account for all slow links."""
    texts = []
    for crosses, word in ((True, ""), (False, "rank ")):
        name = found.hosts if crosses else [str(rank) for rank in range(len(found.hosts))]
        links = [one.trial for one in found.judged if one.trial.is_message]
        links = [link for link in links if link.crosses_hosts(found.hosts) == crosses]
        ends = {link: (name[link.ranks[0]], name[link.ranks[1]]) for link in links}
        slow = [ends[one.trial] for one in found.slow if one.trial in ends]
        if len(ends) > 1 and set(slow) == set(ends.values()):
            texts.append("every link between hosts" if crosses else "every link inside hosts")
            continue
        for source, target in common_cause(slow, list(ends.values())):
            where = "" if crosses else f" (on {found.hosts[int(source or target or 0)]})"
            if target is None:
                texts.append(f"everything that {word}{source} sends{where}")
            elif source is None:
                texts.append(f"everything that {word}{target} receives{where}")
            else:
                texts.append(f"the link from {word}{source} to {word}{target}{where}")
    return texts


def _comparison_of(found: Examination, one: Judged) -> str:
    against = []
    for name, limit, seconds in (
        (PEERS, f"as long as {PEERS}", one.reference_seconds),
        (TABLE, TABLE, one.expected_seconds),
    ):
        if seconds and name in one.against:
            against.append(f"{one.seconds / seconds:.1f} times {limit} ({_measure(one, seconds)})")
    measured = f"{_measure(one, one.seconds)} for {bytes_text(one.num_bytes)}"
    return f"{_ranks(found, one)}: {measured}, {' and '.join(against)}"


def _measure(one: Judged, seconds: float) -> str:
    """Return a time at the smallest size, which is all latency, else the rate."""
    if one.num_bytes == min(one.sample.times):
        return seconds_text(seconds)
    return rate_text(one.bytes_per_second * one.seconds / seconds)


def _ranks(found: Examination, one: Judged) -> str:
    ranks, hosts = one.trial.ranks, list(dict.fromkeys(found.hosts[rank] for rank in one.trial.ranks))
    if one.trial.is_message:
        if len(hosts) == 1:
            return f"rank {ranks[0]} to rank {ranks[1]} on {hosts[0]}"
        return " to ".join(f"rank {rank} ({found.hosts[rank]})" for rank in ranks)
    shown = [*map(str, ranks)] if len(ranks) <= 8 else [*map(str, ranks[:4]), "...", str(ranks[-1])]
    return f"ranks {' '.join(shown)} on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}"


def _remark_lines(remarks: Sequence[Remark], num_hosts: int) -> list[str]:
    """Return the remarks, errors first."""
    lines = []
    for remark in sorted(remarks, key=lambda remark: not remark.is_wrong):
        everywhere = len(remark.hosts) == num_hosts or remark.kind == "difference"
        where = "" if everywhere else f"{', '.join(remark.hosts[:4])}{', ...' if len(remark.hosts) > 4 else ''}: "
        lines.append(f"{'wrong' if remark.is_wrong else 'note':<11}{where}{remark.text}")
    return lines


def single_json(report: HostReport) -> dict[str, Any]:
    """Return what `--json` prints for one process."""
    remarks = host_remarks([report])
    return {
        "fine": not any(remark.is_wrong for remark in remarks),
        "hosts": [dataclasses.asdict(report)],
        "remarks": [dataclasses.asdict(remark) for remark in remarks],
    }


def allocation_json(found: Examination, hardware: Hardware | None) -> dict[str, Any]:
    """Return what `--json` prints for an allocation. hardware: the row that links were compared with, if any."""
    return {
        "fine": found.is_fine,
        "seconds": found.seconds,
        "hardware": None if hardware is None else hardware.name,
        "hosts": [dataclasses.asdict(report) for report in found.reports],
        "host_of_rank": list(found.hosts),
        "clock_seconds": {name: {"ahead": skew, "error": error} for name, (skew, error) in found.skews.items()},
        "measured": [_row(found, one) for one in found.judged],
        "slow": [_row(found, one) for one in found.slow],
        "blame": blame(found),
        "remarks": [dataclasses.asdict(remark) for remark in found.remarks],
    }


def _row(found: Examination, one: Judged) -> dict[str, Any]:
    return {
        "kind": one.trial.kind,
        "operation": one.trial.operation,
        "ranks": list(one.trial.ranks),
        "hosts": list(dict.fromkeys(found.hosts[rank] for rank in one.trial.ranks)),
        "bytes": one.num_bytes,
        "seconds": one.seconds,
        "repeats": len(one.sample.times[one.num_bytes]),
        "bytes_per_second": one.bytes_per_second,
        "like_seconds": one.reference_seconds,
        "expected_seconds": one.expected_seconds,
        "slow_against": one.against,
    }


def rate_text(bytes_per_second: float) -> str:
    """Return a bandwidth in GB/s (1e9 bytes) with three digits."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"
