"""A script, with steps that take as long as a test wants, and a fault in one of them. Run by the Python that the test
gives to a job.

    python -m tests.lab.paced SCRIPT [arguments]

In a job's first attempt, by the environment: PACE, the least seconds of a step; FAULT, "RANK:STEP" where a rank raises.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any


def slow_down() -> None:
    from megapipe.train.loop import Training

    next_batch = Training._next_batch
    seconds, fault = float(os.environ.get("PACE", "0")), os.environ.get("FAULT", "")

    def paced(self: Any) -> Any:
        if fault == f"{self.runtime.groups.world.rank}:{self.state.step + 1}":
            raise RuntimeError(f"planted in step {self.state.step + 1}")
        time.sleep(seconds)
        return next_batch(self)

    Training._next_batch = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        slow_down()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
