"""`megapipe status`: what every rank of a run does now, or last did.

Reads the run's folder and changes nothing. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe.errors import MegapipeError
from megapipe.monitor.diagnosis import doing, summary, table, waits_for
from megapipe.monitor.roster import Sighting, read_folder


def main(arguments: Sequence[str]) -> int:
    """Print the table or JSON and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="megapipe status",
        description="Show what every rank of a run does now: step, action, which ranks it waits for, and for how long. "
        "RUN is the folder given as --save (or that of --metrics-file). Ranks of this host are read live, "
        "those of other hosts from a copy that is about a second old. After a crash it shows the last "
        "records.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--watch", metavar="SECONDS", type=float, help="repeat every SECONDS seconds, until Ctrl-C")
    options = parser.parse_args(list(arguments))
    try:
        show(options.run, options.json)
        while options.watch:
            time.sleep(options.watch)
            print()
            show(options.run, options.json)
    except MegapipeError as error:
        print(f"status: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


def show(run: Path, as_json: bool) -> None:
    """Print the state of all ranks. Raises ConfigError, DataError."""
    roster, sightings = read_folder(run)
    edges = {sighting.member.rank: waits_for(sighting, sightings, roster) for sighting in sightings if sighting.waits}
    if as_json:
        print(
            json.dumps(
                {
                    "run": str(run),
                    "time": time.time(),
                    "ranks": [_as_dict(s, edges.get(s.member.rank, ())) for s in sightings],
                }
            )
        )
        return
    print("\n".join([summary(run.name, sightings), *table(sightings, edges)]), flush=True)


def _as_dict(sighting: Sighting, waits_for_ranks: Sequence[int]) -> dict[str, Any]:
    member, record = sighting.member, sighting.record
    found: dict[str, Any] = {
        "rank": member.rank,
        "host": member.host,
        "pid": member.pid,
        "place": member.place,
        "stages": list(member.stages),
        "process": None if sighting.process is None else str(sighting.process),
        "answers": sighting.answers,
    }
    if record is None:
        return found
    return found | {
        "step": record.step,
        "phase": record.phase,
        "action": record.action,
        "does": doing(record),
        "seconds": round(sighting.age_seconds, 3),
        "wait": record.wait.name.lower(),
        "what": record.what,
        "step_seconds": sighting.snapshot.elapsed_ns / 1e9 if sighting.snapshot else None,
        "computing_seconds": sighting.snapshot.computing_ns / 1e9 if sighting.snapshot else None,
        "number": record.number,
        "waits_for": list(waits_for_ranks),
    }
