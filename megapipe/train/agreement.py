"""Decisions that all ranks take alike after a step: stop signals, time limits, saves that are due, bad steps."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.errors import CommunicationError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """The first stop signal that this rank received. Ranks agree on the step after which they stop (`Agreement`)."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A second SIGINT restores Python's own behaviour and raises KeyboardInterrupt."""
        if number == signal.SIGINT and self.signal is signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)


@contextmanager
def stop_requests(handle_termination: bool) -> Iterator[StopRequest]:
    """Handle SIGINT, and with handle_termination SIGTERM and SIGUSR1, inside the block; then restore old handlers."""
    request = StopRequest()
    handled = STOP_SIGNALS if handle_termination else (signal.SIGINT,)
    before = {number: signal.signal(number, request.receive) for number in handled}
    try:
        yield request
    except CommunicationError:
        if request.signal is signal.SIGTERM:
            # the launcher terminates this rank because a peer has failed: die of the signal without a message,
            # as only the peer's message helps
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StepHealth(enum.IntEnum):
    """The state of a step's numbers, by severity: fine, a spike, a NaN or infinite loss or gradient norm."""

    FINE = 0
    SPIKE = 1
    NONFINITE = 2


@dataclass(frozen=True)
class Decision:
    """A decision of all ranks after a step.

    stop_reason: None to continue. save_due: --save-interval-minutes have passed. save_ready: the asynchronous save can
    proceed without waiting for any rank.
    """

    stop_reason: str | None = None
    save_due: bool = False
    save_ready: bool = False
    health: StepHealth = StepHealth.FINE

    @property
    def goes_on(self) -> bool:
        """True if the next step comes before anything else."""
        return self.stop_reason is None and not self.save_due and self.health is StepHealth.FINE


class Agreement:
    """One all-reduce of what any rank's clock, signals, disk and numbers say. Called by all ranks together."""

    def __init__(self, runtime: TrainingRuntime, stop: StopRequest) -> None:
        self._runtime, self._stop = runtime, stop
        self._started = time.monotonic()

    def after_step(self, step: int, seconds_since_save: float, is_save_ready: bool, health: StepHealth) -> Decision:
        """Decide what follows.

        seconds_since_save: on this rank's clock. is_save_ready: this rank's part of a save has been written.
        """
        config = self._runtime.plan.config
        limit, minutes = config.training.exit_duration_in_mins, config.checkpoint.save_interval_minutes
        is_late = limit is not None and time.monotonic() - self._started > 60.0 * limit
        is_due = minutes is not None and seconds_since_save >= 60.0 * minutes
        signal_number, late, due, not_ready, worst = self._maxima(
            self._signal, is_late, is_due, not is_save_ready, health
        )
        if signal_number:
            reason = _received(signal_number)
        elif late:
            reason = f"--exit-duration-in-mins {limit:g} is over"
        elif config.training.exit_interval is not None and step % config.training.exit_interval == 0:
            reason = f"--exit-interval {config.training.exit_interval}"
        else:
            reason = None
        return Decision(reason, bool(due), not not_ready, StepHealth(worst))

    def stop_signal(self) -> str | None:
        """Return the signal that any rank has received, as a reason to stop; for use where no step has ended."""
        (signal_number,) = self._maxima(self._signal)
        return _received(signal_number) if signal_number else None

    @property
    def _signal(self) -> int:
        return 0 if self._stop.signal is None else int(self._stop.signal)

    def _maxima(self, *values: int) -> list[int]:
        """Return the largest of each value over all ranks."""
        tensor = torch.tensor([int(value) for value in values], device=self._runtime.device)
        all_reduce(tensor, self._runtime.groups.world, op="max")
        found: list[int] = tensor.tolist()
        return found


def _received(signal_number: int) -> str:
    return f"{signal.Signals(signal_number).name} received"
