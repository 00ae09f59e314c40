"""An examination as text for a person and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megapipe.extras.doctor.examination import Examination
from megapipe.extras.doctor.host import HostReport
from megapipe.extras.doctor.hosts import Remark, examine
from megapipe.extras.doctor.resources import ranges
from megapipe.extras.doctor.trials import PAIR
from megapipe.extras.doctor.verdict import Judged, common_cause
from megapipe.plan.hardware import Hardware

GIB, GIGA = 1 << 30, 1e9
MOST_LINES = 12


def host_text(report: HostReport) -> list[str]:
    """Everything about one host."""
    have, r = {name: version for name, version in report.versions.items() if version}, report.resources
    lines = [
        ("host", f"{report.name}, {have.pop('system')}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in have.items())),
        ("not there", ", ".join(name for name, version in report.versions.items() if not version)),
        ("cores", _cores(report)),
        ("memory", _memory(report)),
        ("open files", f"{_or_unlimited(r.open_files)}, at most {_or_unlimited(r.most_open_files)}"),
        *[("GPU", f"{index}: {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB") for index, gpu in enumerate(report.gpus)],
        *(
            []
            if report.gpus
            else [("GPU", "none" + (", though an NVIDIA driver is loaded" if report.has_nvidia_driver else ""))]
        ),
        *[("interface", _interface(report, number)) for number in range(len(report.interfaces))],
        *[("RDMA", f"{p.device} port {p.number}: {p.state}, {p.rate}, {p.layer}") for p in report.rdma_ports],
        *([] if report.rdma_ports else [("RDMA", "no InfiniBand or RoCE device")]),
        ("GPUDirect", report.gpu_direct.seen or f"RDMA not seen: {report.gpu_direct.reason}"),
        *[
            ("fast paths" if first else "", f"{name:<26}{state}")
            for first, (name, state) in _with_first(report.fast_paths.items())
        ],
        (
            "settings",
            ", ".join(f"{name}={value}" for name, value in report.settings.items())
            or "none of NCCL, gloo, OpenMP or torch",
        ),
    ]
    return [f"{name:<11}{text}" for name, text in lines if text]


def single_text(report: HostReport) -> str:
    """One process: its host and what is remarkable about it."""
    return "\n".join(
        [
            *host_text(report),
            "",
            *remark_lines(examine([report]), 1),
            _last_line(not any(_wrong(examine([report]))), None),
        ]
    )


def allocation_text(found: Examination, hardware: Hardware | None, layout: str) -> str:
    """All hosts, every kind of group, and what is slow."""
    lines = [
        f"{layout} on {len(found.reports)} host{'s' if len(found.reports) > 1 else ''}: {', '.join(_hosts(found))}",
        "",
    ]
    lines += [*host_text(found.reports[0]), ""]
    if found.skews:
        lines += [
            f"{'clocks':<11}{', '.join(f'{name} {s:+.4f} s (+- {e:.4f})' for name, (s, e) in found.skews.items())}",
            "",
        ]
    lines += [*measured_table(found), "", *_comparison(found, hardware), ""]
    lines += [
        *slow_lines(found),
        *remark_lines(found.remarks, len(found.reports)),
        _last_line(found.is_fine, found.seconds),
    ]
    return "\n".join(lines)


def measured_table(found: Examination) -> list[str]:
    """One line for each kind of group, inside hosts and between them apart; rates are bytes that a rank sends, by the time."""
    rows = [("measured", "groups", "links", "latency", "rate", "", "expected", "slowest")]
    for (kind, crosses), of_kind in _by_kind(found).items():
        small, large = _at(of_kind, min), _at(of_kind, max)
        middle = sorted(large, key=lambda one: one.seconds)[(len(large) - 1) // 2]
        worst = max(large, key=lambda one: one.seconds)
        expected = middle.expected_seconds
        rows.append(
            (
                kind,
                str(len(large)),
                "between hosts" if crosses else "in a host",
                _time(sorted(one.seconds for one in small)[(len(small) - 1) // 2]),
                _rate(middle.bytes_per_second),
                f"at {_size(middle.num_bytes)}",
                "" if not expected else _rate(middle.bytes_per_second * middle.seconds / expected),
                "" if len(large) == 1 else f"{_rate(worst.bytes_per_second)}: {_who(found, worst)}",
            )
        )
    if len(rows) == 1:
        return ["measured   nothing: the layout has one rank in every group"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def slow_lines(found: Examination) -> list[str]:
    """What is slow and the link to blame, worst first."""
    links, groups = (
        [one for one in found.slow if one.trial.is_message],
        [one for one in found.slow if not one.trial.is_message],
    )
    lines = [f"slow       {text}" for text in blame(found)]
    lines += [f"           {_measured(found, one)}" for one in links[:MOST_LINES]]
    for one in groups[:MOST_LINES]:
        within = [
            link.trial
            for link in found.judged
            if link.trial.is_message and set(one.trial.ranks).issuperset(link.trial.ranks)
        ]
        named = any(link.trial in within for link in links)
        why = (
            ""
            if named or not within
            else "; none of its links is slow by itself: they share one, or its ranks lack cores"
        )
        lines.append(f"slow       {one.trial.kind} of {_measured(found, one)}{why}")
    left = max(0, len(links) - MOST_LINES) + max(0, len(groups) - MOST_LINES)
    return [*lines, *([f"           and {left} more"] if left else [])]


def blame(found: Examination) -> list[str]:
    """The fewest hosts or ranks and directions that account for all slow links."""
    texts = []
    for crosses, word in ((True, ""), (False, "rank ")):
        name = found.hosts if crosses else [str(rank) for rank in range(len(found.hosts))]
        messages = [one for one in found.judged if one.trial.is_message and _crosses(found, one) == crosses]
        ends = {one.trial: (name[one.trial.ranks[0]], name[one.trial.ranks[1]]) for one in messages}
        slow = [ends[one.trial] for one in found.slow if one.trial in ends]
        if len(ends) > 1 and set(slow) == set(ends.values()):
            texts.append("every link between hosts" if crosses else "every link inside hosts")
            continue
        for source, target in common_cause(slow, list(ends.values())):
            where = "" if crosses else f" (on {found.hosts[int(source or target or 0)]})"
            if target is None:
                texts.append(f"all that leaves {word}{source}{where}")
            elif source is None:
                texts.append(f"all that comes to {word}{target}{where}")
            else:
                texts.append(f"the link from {word}{source} to {word}{target}{where}")
    return texts


def remark_lines(remarks: Sequence[Remark], num_hosts: int) -> list[str]:
    """Wrong ones first."""
    lines = []
    for remark in sorted(remarks, key=lambda remark: not remark.is_wrong):
        everywhere = len(remark.hosts) == num_hosts or remark.kind == "difference"
        where = "" if everywhere else f"{', '.join(remark.hosts[:4])}{', ...' if len(remark.hosts) > 4 else ''}: "
        lines.append(f"{'wrong' if remark.is_wrong else 'note':<11}{where}{remark.text}")
    return lines


def single_json(report: HostReport) -> dict[str, Any]:
    """What `--json` prints for one process."""
    remarks = examine([report])
    return {
        "fine": not any(_wrong(remarks)),
        "hosts": [dataclasses.asdict(report)],
        "remarks": [dataclasses.asdict(remark) for remark in remarks],
    }


def allocation_json(found: Examination, hardware: Hardware | None) -> dict[str, Any]:
    """What `--json` prints for a whole allocation. hardware: what links were compared with, if anything."""
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


def _comparison(found: Examination, hardware: Hardware | None) -> list[str]:
    if not found.judged:
        return []
    if hardware is not None:
        return [f"{'compared':<11}with their like, and with what the hardware table expects of {hardware.name}"]
    alone = [kind for (kind, _), of_kind in _by_kind(found).items() if of_kind[0].num_like < 2]
    lonely = f"; {', '.join(alone)}: the only one, compared with nothing" if alone else ""
    return [
        f"{'compared':<11}with their like alone: this device is not in the hardware table (--gpu NAME or --hardware FILE say more){lonely}"
    ]


def _measured(found: Examination, one: Judged) -> str:
    against = []
    if one.reference_seconds and "like" in one.against:
        against.append(
            f"{one.seconds / one.reference_seconds:.1f} times as long as its like ({_of(one, one.reference_seconds)})"
        )
    if one.expected_seconds and "table" in one.against:
        against.append(
            f"{one.seconds / one.expected_seconds:.1f} times what the hardware table expects ({_of(one, one.expected_seconds)})"
        )
    return f"{_who(found, one)}: {_of(one, one.seconds)} for {_size(one.num_bytes)}, {' and '.join(against)}"


def _of(one: Judged, seconds: float) -> str:
    """A rate where the size makes the time, else the time."""
    return (
        _time(seconds)
        if one.num_bytes == min(one.sample.times)
        else _rate(one.bytes_per_second * one.seconds / seconds)
    )


def _who(found: Examination, one: Judged) -> str:
    ranks, hosts = one.trial.ranks, list(dict.fromkeys(found.hosts[rank] for rank in one.trial.ranks))
    if one.trial.is_message:
        places = [f"rank {rank} ({found.hosts[rank]})" if len(hosts) > 1 else f"rank {rank}" for rank in ranks]
        return f"{places[0]} to {places[1]}" + ("" if len(hosts) > 1 else f" on {hosts[0]}")
    shown = [*map(str, ranks)] if len(ranks) <= 8 else [*map(str, ranks[:4]), "...", str(ranks[-1])]
    return f"ranks {' '.join(shown)} on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}"


def _by_kind(found: Examination) -> dict[tuple[str, bool], list[Judged]]:
    groups: dict[tuple[str, bool], list[Judged]] = {}
    for one in found.judged:
        if one.trial.kind != PAIR:
            groups.setdefault((one.trial.kind, _crosses(found, one)), []).append(one)
    return groups


def _at(judged: Sequence[Judged], which: Any) -> list[Judged]:
    size = which(one.num_bytes for one in judged)
    return [one for one in judged if one.num_bytes == size]


def _crosses(found: Examination, one: Judged) -> bool:
    return len({found.hosts[rank] for rank in one.trial.ranks}) > 1


def _hosts(found: Examination) -> list[str]:
    names = list(dict.fromkeys(found.hosts))
    shown = names if len(names) <= 8 else names[:7]
    texts = [
        f"{name} (ranks {ranges([rank for rank, other in enumerate(found.hosts) if other == name])})" for name in shown
    ]
    return [*texts, *([f"and {len(names) - 7} more"] if len(names) > 8 else [])]


def _cores(report: HostReport) -> str:
    r = report.resources
    limit = "" if r.cpu_limit is None else f", limited to {r.cpu_limit:g} cores' time"
    load = "" if report.load is None else f", load {report.load:.1f}"
    nodes = f", {r.numa_nodes} NUMA nodes" if r.numa_nodes > 1 else ""
    ranks = f"; {report.num_ranks} rank{'s' if report.num_ranks > 1 else ''} of {report.threads_of_a_rank} thread"
    return f"{r.cores} of {r.cores_of_machine} ({r.affinity}), {r.cpu}{nodes}{limit}{load}{ranks}{'s' if report.threads_of_a_rank > 1 else ''}"


def _memory(report: HostReport) -> str:
    r = report.resources
    limit = "" if r.memory_limit_bytes is None else f", limited to {r.memory_limit_bytes / GIB:.1f} GiB"
    shared = f"/dev/shm {_gib(r.shared_memory_bytes)}, {_gib(r.shared_memory_free_bytes)} free"
    return f"{_gib(r.memory_bytes)}, {_gib(r.available_bytes)} available{limit}; {shared}"


def _interface(report: HostReport, number: int) -> str:
    i = report.interfaces[number]
    speed = "" if i.megabits_per_second is None else f", {i.megabits_per_second / 1000:g} Gbit/s by its driver"
    chosen = ": the ranks meet here" if i.name == report.interface else ""
    return f"{i.name} {i.state}, {', '.join(i.addresses) or 'no address'}{speed}{f', {i.driver}' if i.driver else ''}{chosen}"


def _last_line(is_fine: bool, seconds: float | None) -> str:
    took = "" if seconds is None else f" (examined in {seconds:.1f} s)"
    return f"{'fine' if is_fine else 'NOT fine'}{took}"


def _wrong(remarks: Sequence[Remark]) -> list[bool]:
    return [remark.is_wrong for remark in remarks]


def _with_first(items: Any) -> Any:
    return ((index == 0, item) for index, item in enumerate(items))


def _or_unlimited(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


def _size(num_bytes: int) -> str:
    for limit, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:g} {unit}"
    return f"{num_bytes} B"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / GIGA:.3g} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
