"""`megapipe status`: show what every rank of a run does now."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe.extras.cli.frame import command, option
from megapipe.monitor.diagnosis import doing, summary, table, waits_for
from megapipe.monitor.roster import Sighting, newest_run, read_folder

OPTIONS = (
    option("run", "the run's folder (default: the newest run)", type=Path, metavar="RUN", nargs="?"),
    option("--json", "one JSON object instead of a table", action="store_true"),
    option("--watch", "repeat every SECONDS seconds, until Ctrl-C", type=float, above=0.0, metavar="SECONDS"),
)


@command("megapipe status", OPTIONS, needs_words=False)
def main(own: argparse.Namespace) -> None:
    """Show what every rank of a run does now: step, action, which ranks it waits for, and for how long.

    RUN is the folder given as --save (or that of --metrics-file). Without it, the run that was started last is shown,
    of those below the current folder and of yours on this host. Ranks of this host are read live, those of other hosts
    from a copy that is about a second old. After a crash it shows the last records. Changes nothing and needs no torch.
    """
    run = own.run or newest_run(Path())
    if own.run is None and not own.json:
        print(f"the newest run is {run}")
    try:
        show(run, own.json)
        while own.watch:
            time.sleep(own.watch)
            print()
            show(run, own.json)
    except KeyboardInterrupt:  # the usual end of --watch
        pass


def show(run: Path, as_json: bool) -> None:
    """Print the state of all ranks. Raises ConfigError, DataError."""
    roster, sightings = read_folder(run)
    edges = {sighting.member.rank: waits_for(sighting, sightings, roster) for sighting in sightings if sighting.waits}
    if as_json:
        ranks = [_as_dict(sighting, edges.get(sighting.member.rank, ())) for sighting in sightings]
        print(json.dumps({"run": str(run), "time": time.time(), "ranks": ranks}))
    else:
        print("\n".join([summary(run.name, sightings), *table(sightings, edges)]), flush=True)


def _as_dict(sighting: Sighting, waits_for_ranks: Sequence[int]) -> dict[str, Any]:
    member, record, snapshot = sighting.member, sighting.record, sighting.snapshot
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
        "step_seconds": snapshot.elapsed_ns / 1e9 if snapshot else None,
        "computing_seconds": snapshot.computing_ns / 1e9 if snapshot else None,
        "number": record.number,
        "waits_for": list(waits_for_ranks),
    }
