#!/usr/bin/env python3
"""Draw random combinations of features and examine each: planned, counted by the dry run, trained beside one process.

    python tools/draw_combinations.py --count 300 --record combinations.jsonl [--seed 1] [--seconds 600] [--memory-only]
    python tools/draw_combinations.py --number 17 [--seed 1]

A record is a file of JSON lines, one for each draw. Run again with the same record, the pass goes on where it was
interrupted, until `--count` accepted combinations are in it. Ends with the counts; the exit code is 1 if a combination
was wrong, crashed, or takes other memory than planned. tests/combinations.py has the features and what is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.combinations import Pools, drawn, examine  # noqa: E402

GOOD = ("equal", "refused")


def main(arguments: Sequence[str]) -> int:
    """Run a pass, or one draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the pass")
    parser.add_argument("--count", type=int, default=300, help="accepted combinations in a whole pass")
    parser.add_argument("--record", type=Path, help="file of JSON lines to write, and to continue")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end this part of the pass after so long")
    parser.add_argument("--number", type=int, help="examine only this draw and print all that was found")
    parser.add_argument("--memory-only", action="store_true", help="plan and count, but train nothing")
    own = parser.parse_args(arguments)
    pools = Pools()
    try:
        if own.number is not None:
            found = examine(drawn(own.seed, own.number), pools, not own.memory_only)
            print(f"{found.verdict}: {', '.join(found.features)}\n{found.why}")
            return int(found.verdict not in GOOD)
        records = list(run_pass(own, pools))
    finally:
        pools.close()
    print("\n".join(summary(records)))
    return int(any(record["verdict"] not in GOOD for record in records))


def run_pass(own: argparse.Namespace, pools: Pools) -> Iterator[dict[str, Any]]:
    """Yield the records of a pass: those of the file, then new ones, which are appended to it."""
    ends, known = time.monotonic() + own.seconds, set()
    lines = own.record.read_text().splitlines() if own.record is not None and own.record.exists() else []
    accepted = 0
    for line in lines:
        record = json.loads(line)
        if record["seed"] == own.seed:
            known.add(record["number"])
            accepted += record["verdict"] != "refused"
            yield record
    number = 0
    while accepted < own.count and time.monotonic() < ends:
        if number not in known:
            found = examine(drawn(own.seed, number), pools, not own.memory_only)
            accepted += found.verdict != "refused"
            record = {"seed": own.seed, **dataclasses.asdict(found)}
            if own.record is not None:
                with own.record.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if found.verdict not in GOOD:
                print(f"draw {number}: {found.verdict}: {', '.join(found.features)}", flush=True)
            yield record
        number += 1


def summary(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the counts of a pass."""
    verdicts = Counter(record["verdict"] for record in records)
    accepted = [record for record in records if record["verdict"] != "refused"]
    yield f"{len(records)} drawn, {verdicts['refused']} refused by the plan, {len(accepted)} accepted"
    yield from (f"  {count:4} {verdict}" for verdict, count in verdicts.most_common() if verdict != "refused")
    compared = Counter(way for record in accepted for way in record["compared"])
    for way, count in compared.most_common():
        yield f"  {count:4} passed the comparison of {way}"
    differences = [abs(record["memory"]) for record in accepted if record["memory"] is not None]
    if differences:
        yield f"  largest difference between counted and planned memory {max(differences):.1%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
