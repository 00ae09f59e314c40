"""What all ranks find out together after a step, and decide alike."""

from __future__ import annotations

import enum
import signal
import time
from dataclasses import dataclass

import torch

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.train.signals import StopRequest


class Trouble(enum.IntEnum):
    """What is wrong with a step, by weight: nothing, a spike (train.spikes), a loss or a gradient norm that is no number."""

    NONE = 0
    SPIKE = 1
    UNSOUND = 2


@dataclass(frozen=True)
class Agreed:
    """reason: to leave, None to go on. save_due: --save-interval-minutes are over. save_ready: the save beside the training waits for no
    rank any more."""

    reason: str | None = None
    save_due: bool = False
    save_ready: bool = False
    trouble: Trouble = Trouble.NONE

    @property
    def goes_on(self) -> bool:
        """With the next step, before anything else."""
        return self.reason is None and not self.save_due and self.trouble is Trouble.NONE


class Agreement:
    """One reduction of what any rank's clock, signals, disk and numbers say. Called by all ranks together."""

    def __init__(self, runtime: TrainingRuntime, stop: StopRequest) -> None:
        self._runtime, self._stop = runtime, stop
        self._started = time.monotonic()

    def after_step(self, step: int, seconds_since_save: float, is_ready: bool, trouble: Trouble) -> Agreed:
        """seconds_since_save: on this rank's clock. is_ready: this rank's part of a save beside the training is done."""
        config = self._runtime.plan.config
        limit, minutes = config.training.exit_duration_in_mins, config.checkpoint.save_interval_minutes
        is_late = limit is not None and time.monotonic() - self._started > 60.0 * limit
        is_due = minutes is not None and seconds_since_save >= 60.0 * minutes
        asked, late, due, not_ready, found = self._largest(self._asked, is_late, is_due, not is_ready, trouble)
        return Agreed(self._reason(asked, bool(late), step), bool(due), not not_ready, Trouble(found))

    def signal(self) -> str | None:
        """The signal that any rank has received, where no step is due: before the first one, between the batches of an evaluation."""
        (asked,) = self._largest(self._asked)
        return f"{signal.Signals(asked).name} received" if asked else None

    @property
    def _asked(self) -> int:
        return 0 if self._stop.signal is None else int(self._stop.signal)

    def _largest(self, *flags: int) -> list[int]:
        tensor = torch.tensor([int(flag) for flag in flags], device=self._runtime.device)
        all_reduce(tensor, self._runtime.groups.world, op="max")
        values: list[int] = tensor.tolist()
        return values

    def _reason(self, asked: int, late: bool, step: int) -> str | None:
        """asked: a signal's number, or 0."""
        training = self._runtime.plan.config.training
        if asked:
            return f"{signal.Signals(asked).name} received"
        if late:
            return f"--exit-duration-in-mins {training.exit_duration_in_mins:g} is over"
        if training.exit_interval is not None and step % training.exit_interval == 0:
            return f"--exit-interval {training.exit_interval}"
        return None
