"""--profile: a trace of some steps by torch's profiler, on some ranks, as Chrome/Perfetto JSON."""

from __future__ import annotations

from pathlib import Path

import torch

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.config.logging import LoggingConfig


class Profile:
    """Records the steps [profile_step_start, profile_step_end) of the ranks in profile_ranks into trace_rank_00000.json in --save, or where
    the run was started."""

    def __init__(self, logging: LoggingConfig, runtime: TrainingRuntime) -> None:
        rank = runtime.groups.world.global_rank
        self._active = logging.profile and rank in logging.profile_ranks
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        self._path = Path(runtime.plan.config.checkpoint.save or ".") / f"trace_rank_{rank:05}.json"
        self._first = self._start
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Called before each step; a run resumed inside the span starts there."""
        if self._active and self._start <= step < self._end and self._profiler is None:
            self._first = step
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        if self._profiler is not None and step + 1 >= self._end:
            self._write(step)

    def finish(self, num_steps: int) -> None:
        """The run ended after num_steps steps: write what there is, or say that there is nothing."""
        if self._profiler is not None:
            self._write(num_steps - 1)
        elif self._active:
            print(
                f"--profile: nothing was traced, for the run did not come to step {self._start} (--profile-step-start)",
                flush=True,
            )

    def _write(self, last: int) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        print(f"trace of steps {self._first} to {last} written to {self._path}", flush=True)
        self._profiler, self._active = None, False
