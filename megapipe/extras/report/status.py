"""`megapipe status`: the ranks of a run and what they do, from the live records of this host and copies of others'."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError, DataError
from megapipe.formatting import duration_text, text_table
from megapipe.monitor.diagnosis import doing, wait_text
from megapipe.monitor.heartbeat import FILE_BYTES, Snapshot, read_snapshot
from megapipe.monitor.process import process_space
from megapipe.monitor.roster import NAME, ROSTER, Roster, Sighting, base_folder, read_bytes, sight


def read_folder(run: Path) -> tuple[Roster, list[Sighting]]:
    """Return the ranks of a run and what they do, or last did.

    Raises ConfigError if the folder has no records, DataError if they are damaged.
    """
    path = run / NAME / ROSTER
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        roster, live = Roster.from_dict(values), Path(values["live"])
    except FileNotFoundError:
        raise ConfigError(
            f"{run} holds no {NAME}/{ROSTER}: give the folder of the run's --save (or the one of its --metrics-file)"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    copies = dict(_copies(run / NAME))
    sightings = []
    for member in roster.members:
        is_here = member.space == process_space()
        sighting = sight(member, live) if is_here else Sighting(member, None)
        if sighting.snapshot is None and member.rank in copies:
            snapshot, copy_age = copies[member.rank]
            age = (time.time_ns() - snapshot.record.since_ns) / 1e9
            if not is_here:  # its clock is not ours
                age = max(0.0, (snapshot.pulse_ns - snapshot.record.since_ns) / 1e9) + copy_age
            sighting = replace(sighting, snapshot=snapshot, age_seconds=age)
        sightings.append(sighting)
    return roster, sightings


def newest_run(below: Path) -> Path:
    """Return the folder of the run that was started last, of those below a folder and of this user's on this host.

    Raises ConfigError if there is none.
    """
    started: list[tuple[float, Path]] = []
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        started += [(path.stat().st_mtime, path.parent.parent) for path in below.glob(f"{depth}{NAME}/{ROSTER}")]
    for path in base_folder().glob(f"megapipe-{os.getuid()}-*/{ROSTER}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            run = json.loads(path.read_text(encoding="utf-8"))["run"]
            if run is not None and (Path(run) / NAME / ROSTER).is_file():
                started.append((path.stat().st_mtime, Path(run)))
    if not started:
        raise ConfigError(f"no run was found below {below.resolve()} or on this host; name the folder of its --save")
    return max(started)[1]


def _copies(folder: Path) -> Iterator[tuple[int, tuple[Snapshot, float]]]:
    """Yield (rank, (snapshot, seconds since it was copied))."""
    for path in sorted(folder.glob("host_*.bin")):
        data, age = read_bytes(path), max(0.0, time.time() - path.stat().st_mtime)
        for start in range(0, len(data) - 8 - FILE_BYTES + 1, 8 + FILE_BYTES):
            snapshot = read_snapshot(data[start + 8 : start + 8 + FILE_BYTES])
            if snapshot is not None:
                yield int.from_bytes(data[start : start + 8], "little"), (snapshot, age)


def summary(name: str, sightings: Sequence[Sighting]) -> str:
    """Return the line above the table of `megapipe status`."""
    counts = {
        "alive": sum(s.process is not None and not s.process.has_ended and not s.has_left for s in sightings),
        "stopped": sum(s.is_stopped for s in sightings),
        "gone": sum(s.is_gone for s in sightings),
        "left": sum(s.has_left for s in sightings),
        "on other hosts": sum(s.process is None and not s.has_left for s in sightings),
    }
    listed = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{name}: {len(sightings)} rank{'s' if len(sightings) > 1 else ''}, {listed}"


def table(sightings: Sequence[Sighting], edges: Mapping[int, Sequence[int]]) -> list[str]:
    """Return the table of `megapipe status`, one line per rank.

    computes: seconds of the last whole step in which the rank neither waited nor read data. for: how long it does this.
    """
    rows = [("rank", "where", "step", "computes", "for", "does")]
    for sighting in sightings:
        member, record, snapshot = sighting.member, sighting.record, sighting.snapshot
        if record is None or snapshot is None:
            unknown = f"nothing is known of it (process {member.pid} on {member.host})"
            rows.append((str(member.rank), member.place, "", "", "", unknown))
            continue
        waits = wait_text(record, edges.get(member.rank, ()))
        parts = (doing(record), f"waits {waits}" if waits else "")
        does = ", ".join(part for part in parts if part) or "between phases"
        if sighting.is_gone or sighting.is_stopped:
            does += f"; {sighting.process}"
        measured = f"{snapshot.computing_ns / 1e9:.2f} of {snapshot.elapsed_ns / 1e9:.2f} s"
        computes = measured if snapshot.elapsed_ns else ""
        step = str(record.step) if record.step >= 0 else ""
        rows.append((str(member.rank), member.place, step, computes, duration_text(sighting.age_seconds), does))
    return list(text_table(rows, left=(1, 5), indent=0))
