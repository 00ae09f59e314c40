"""Training steps of all ranks of a pipeline on the fake device, for each line of the standard input, and their races.

    python -m tests.fake_cuda.ordered_steps LIBRARY < LINES

LIBRARY: what `device.build` returned. A line is the JSON of `races_of`'s arguments. For each, prints the JSON of its
result.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from megapipe.extras.streams.device import load

    load(Path(sys.argv[1]))

import json
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megapipe.extras.streams.ranks import check, prepare
from tests.extras.dry_run.grids import make_plan
from tests.fake_cuda.plants import PLANTS

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 96,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "hidden_dropout": 0.0,
    "dtype": "bf16",
    "device": "cuda",
}


def races_of(world_size: int, changes: dict[str, Any], num_steps: int = 2, plant: str = "") -> dict[str, Any]:
    """Return the races of a configuration, with a planted mistake if one is named, and the number of operations."""
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (BASE | changes).items()}
    planted: Callable[[], AbstractContextManager[Any]] = PLANTS[plant] if plant else nullcontext
    try:
        plan = make_plan(world_size, given)
        with planted():
            found = check(plan, num_steps)
    except Exception as error:
        return {"error": "".join(traceback.format_exception(error))}
    races = [str(race) for race in found.races]
    entries, seconds = found.num_operations, round(found.seconds, 1)
    return {"races": races, "overlaps": found.overlaps, "entries": entries, "error": "", "seconds": seconds}


if __name__ == "__main__":
    prepare(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(races_of(**json.loads(line))), flush=True)
