"""--profile: a trace of some steps by torch's profiler, on some ranks, as Chrome/Perfetto JSON."""

from __future__ import annotations

from pathlib import Path

import torch

from megapipe.build.machines import Machines
from megapipe.config.logging import LoggingConfig


class Profile:
    """Records the steps [profile_step_start, profile_step_end) of the ranks in profile_ranks into trace_rank_00000.json beside the run."""

    def __init__(self, logging: LoggingConfig, machines: Machines) -> None:
        rank = machines.groups.world.global_rank
        self._active = logging.profile and rank in logging.profile_ranks
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        self._path = Path(machines.plan.config.checkpoint.save or ".") / f"trace_rank_{rank:05}.json"
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if self._active and step == self._start:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        if self._profiler is None or step + 1 < self._end:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        print(f"trace of steps {self._start} to {step} written to {self._path}", flush=True)
        self._profiler = None
