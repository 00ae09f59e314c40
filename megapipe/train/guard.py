"""`Guard`: judge every step, agree with the other ranks on what follows, and recover from a bad step."""

from __future__ import annotations

import enum
import math
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce, broadcast_object
from megapipe.config.training import TrainingConfig
from megapipe.data.loader import Loader
from megapipe.errors import CommunicationError, TrainingError
from megapipe.gpu.streams import HostCopy
from megapipe.monitor.heartbeat import PATIENCE
from megapipe.monitor.signals import REPEATED, SignalThread, ThisProcess, end, end_text, ended_by_signals, ignore
from megapipe.train.copies_check import CopiesCheck
from megapipe.train.journal import Journal
from megapipe.train.loading import go_back
from megapipe.train.metrics import Observer
from megapipe.train.nonfinite import OutputWatch, Sums, describe_nonfinite, repeat_step
from megapipe.train.saving import Saving
from megapipe.train.state import TrainingState
from megapipe.train.step import LossAverage, StepBatch, StepResult, read_microbatches

WAY_OUT = "Lower --lr, look at the data, or ignore it with --no-check-for-nan-in-loss-and-grad"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
MAX_INTERRUPTS = 2  # the first asks to save and exit, the second to exit without saving, a third ends at once
LEAVE_SECONDS = 3.0  # after the second, for the main thread to exit
INTERRUPTED = 130
MAD_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
# Of a logarithm, that is 0.3 % of the value: a curve steadier than that does not spike because of noise.
LEAST_DEVIATION = 0.003
LEAST_SHARE = 0.5  # of the window that must be filled before anything is judged


class StopRequest:
    """The first stop signal that this rank received. Ranks agree on the step after which they stop (`Guard.decide`).

    handled: the signals that ask to stop from `begin` on; before it, all but SIGUSR1 end the process.
    """

    def __init__(self, handled: Sequence[signal.Signals] = ()) -> None:
        self.signal: signal.Signals | None = None
        self._handled = handled
        self._num_interrupts = 0
        self._stack = ExitStack()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A second SIGINT raises KeyboardInterrupt."""
        if number == signal.SIGINT and self.signal is signal.SIGINT:
            signal.signal(signal.SIGINT, ignore)
            sys.unraisablehook = lambda _: None  # where it cannot be raised, such as in a destructor
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)

    def hold(self) -> None:
        """Let signals end this process, and note SIGUSR1 for the first step."""
        self._stack.enter_context(ended_by_signals())
        if signal.SIGUSR1 in self._handled:
            signal.signal(signal.SIGUSR1, self.receive)

    def begin(self) -> None:
        """Handle signals from here on: training begins."""
        self._stack.close()
        if self._handled:
            self._stack.enter_context(SignalThread(self._receive_at_once))
        for number in self._handled:
            signal.signal(number, self.receive)

    def close(self) -> None:
        """Stop handling signals."""
        self._stack.close()

    def _receive_at_once(self, number: int) -> None:
        """End the process if its main thread does not react to a second SIGINT, at a third, or at a SIGTERM that does
        not ask to stop."""
        if number == signal.SIGTERM and number not in self._handled:
            end(128 + number, end_text(number))
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > MAX_INTERRUPTS:
                end(INTERRUPTED, "")
            elif self._num_interrupts == MAX_INTERRUPTS:
                timer = threading.Timer(LEAVE_SECONDS, end, (INTERRUPTED, ""))
                timer.daemon = True
                timer.start()


@contextmanager
def stop_requests(handle_termination: bool) -> Iterator[StopRequest]:
    """Handle SIGINT, and with handle_termination the other STOP_SIGNALS, inside the block; then restore old handlers.

    SIGHUP is left alone if the parent process had it ignored, as nohup does. If this process is a command that ends
    after the block, and the block has succeeded, only SIGINT can end it earlier.
    """
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    request = StopRequest(tuple(before) if handle_termination else (signal.SIGINT,))
    try:
        request.hold()
        yield request
        if ThisProcess.is_command:
            before |= dict.fromkeys(REPEATED, signal.SIG_IGN)
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
        request.close()


class StepHealth(enum.IntEnum):
    """The state of a step's numbers, by severity: fine, a spike, a NaN or infinite loss or gradient norm."""

    FINE = 0
    SPIKE = 1
    NONFINITE = 2


@dataclass(frozen=True)
class Decision:
    """A decision of all ranks after a step."""

    stop_reason: str | None = None  # None to continue
    save_due: bool = False  # --save-interval-minutes have passed
    save_ready: bool = False  # the asynchronous save can proceed without waiting for any rank
    health: StepHealth = StepHealth.FINE

    def joined(self, later: Decision) -> Decision:
        """Return what follows this step and a later one."""
        reason, due = self.stop_reason or later.stop_reason, self.save_due or later.save_due
        return Decision(reason, due, later.save_ready, max(self.health, later.health))


class SpikeWatch:
    """A detector of spikes from plain numbers, the same on all ranks.

    A step spikes if loss or gradient norm is more than --spike-threshold robust deviations (median absolute
    deviations, scaled to a standard deviation) above the median of the last --spike-window steps, all in logarithms;
    spiking steps do not enter the window.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._threshold, self._patience, window = training.spike_threshold, training.spike_steps, training.spike_window
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=window) for name in ("loss", "gradient norm")}
        self._least = max(4, round(LEAST_SHARE * window))
        self.num_spiking = 0  # steps in a row, the last one included

    def see(self, loss: float, grad_norm: float) -> str:
        """Take note of a step; return a description once --spike-steps steps in a row have spiked, else "".

        A value that is not finite, or 0, is left out.
        """
        pairs = zip(self._seen, (loss, grad_norm), strict=True)
        values = {name: math.log(value) for name, value in pairs if math.isfinite(value) and value > 0}
        why = []
        for name, value in values.items():
            seen = self._seen[name]
            if len(seen) < self._least:
                continue
            median = statistics.median(seen)
            spread = MAD_TO_DEVIATION * statistics.median(abs(other - median) for other in seen)
            deviation = max(LEAST_DEVIATION, spread)
            if value > median + self._threshold * deviation:
                above = f"{(value - median) / deviation:.1f} deviations above the median {math.exp(median):.4g}"
                why.append(f"{name} {math.exp(value):.4g}, {above} of {len(seen)} steps")
        if why:
            self.num_spiking += 1
            return " and ".join(why) if self.num_spiking >= self._patience else ""
        self.num_spiking = 0
        for name, value in values.items():
            self._seen[name].append(value)
        return ""

    def state(self) -> dict[str, Any]:
        """Return plain values for the checkpoint."""
        return {"seen": {name: list(values) for name, values in self._seen.items()}, "num_spiking": self.num_spiking}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore `state`; None starts with an empty window."""
        for name, values in self._seen.items():
            values.clear()
            values.extend(state["seen"][name] if state else ())
        self.num_spiking = int(state["num_spiking"]) if state else 0


class Guard:
    """Checks for NaN and infinity, spikes, changed copies of parameters; stop signals and limits of time."""

    def __init__(
        self,
        runtime: TrainingRuntime,
        state: TrainingState,
        loader: Loader | None,  # of the training data, None if nothing is trained
        saving: Saving,
        journal: Journal,
        stop: StopRequest,
        observer: Observer,
    ) -> None:
        training = runtime.plan.config.training
        self._runtime, self._state, self._loader = runtime, state, loader
        self._saving, self._journal, self._stop, self._observer = saving, journal, stop, observer
        self._started = time.monotonic()
        self.copies = CopiesCheck(runtime)
        self._outputs = OutputWatch(runtime) if training.check_for_nan_in_loss_and_grad else None
        self._spikes = None
        if training.spike_rollback is not None and loader is not None:
            self._spikes = SpikeWatch(training)
            self._spikes.load_state(state.spikes)
        self._spike = ""  # why a step since the last recovery is one
        self._nonfinite: tuple[StepBatch, StepResult, Sums] | None = None  # the last step, if it is to be explained
        self._side = torch.cuda.Stream(runtime.device) if runtime.device.type == "cuda" else None
        # ranks of a stream are not at the same step, and do not wait for one another
        self._asks_ahead = (self._side is not None or not runtime.plan.is_synchronous) and self._spikes is None
        self._asked: HostCopy | None = None  # after the last step; on GPUs
        self._has_saved = False  # since then: what it says of saves is out of date

    def judge(self, batch: StepBatch, result: StepResult) -> StepHealth:
        """Judge the step that has run, and take note of it. Only rank 0 judges spikes."""
        sums, update = None if self._outputs is None else self._outputs.take(), result.update
        # an overflow belongs to the search for a loss scale, until the scale cannot fall any further
        lowest = self._runtime.plan.config.precision.min_loss_scale
        is_searching = self._runtime.optimizer.scaler.is_dynamic and update.loss_scale > lowest
        is_overflow = update.skipped and math.isfinite(result.loss) and is_searching
        is_finite = math.isfinite(result.loss) and math.isfinite(update.grad_norm)
        if sums is not None and not (is_overflow or is_finite):
            self._nonfinite = self._nonfinite or (batch, result, sums)
            return StepHealth.NONFINITE
        spike = "" if self._spikes is None else self._spikes.see(result.loss, update.grad_norm)
        self._spike = self._spike or spike
        return StepHealth.SPIKE if spike and self._runtime.groups.world.rank == 0 else StepHealth.FINE

    def decide(self, health: StepHealth) -> Decision:
        """Agree with all ranks on what follows the last step, by one all-reduce of what any rank's clock, signals, disk
        and numbers say.

        On GPUs and in a stream the host does not wait for that: what was asked after one step is followed after the
        next. A loss or norm that is not finite needs no agreement, as all ranks have the same; spikes, which rank 0
        judges, do.
        """
        config, saving = self._runtime.plan.config, self._saving
        limit, minutes = config.training.exit_duration_in_mins, config.checkpoint.save_interval_minutes
        interval = config.training.exit_interval
        is_late = limit is not None and time.monotonic() - self._started > 60.0 * limit
        is_due = minutes is not None and time.monotonic() - saving.saved_at >= 60.0 * minutes
        asked = is_late, is_due, not saving.is_ready
        if not self._asks_ahead:
            reason, late, due, not_ready, worst = self._agree(*asked, health)
        else:
            agreed = [None, False, False, True] if self._asked is None else _reasons(self._asked.values())
            if self._has_saved:
                agreed[2:] = False, True
            # a save that follows now is not yet seen by what is asked now
            self._asked, self._has_saved = self._ask(*asked), agreed[2:] != [False, True]
            (reason, late, due, not_ready), worst = agreed, health
        if reason is None and late:
            reason = f"--exit-duration-in-mins {limit:g} is over"
        elif reason is None and interval is not None and self._state.step % interval == 0:
            reason = f"--exit-interval {interval}"
        return Decision(reason, bool(due), not not_ready, StepHealth(worst))

    def stop_signal(self) -> str | None:
        """Return what any rank's signals or observer ask for as a reason to stop; for use where no step has ended."""
        reason: str | None = self._agree()[0]
        return reason

    def _agree(self, *values: int) -> list[Any]:
        """Return why any rank's signals or observer ask to stop, or None, then the maximum of each value."""
        return _reasons(self._ask(*values).values())

    def _ask(self, *values: int) -> HostCopy:
        """Start the all-reduce of this rank's signals, observer and values, on a stream that no kernel waits for."""
        own = 0 if self._stop.signal is None else int(self._stop.signal)
        asked, side = list(map(int, (own, self._observer.wants_stop, *values))), self._side
        with nullcontext() if side is None else torch.cuda.stream(side):
            tensor = torch.tensor(asked, pin_memory=side is not None).to(self._runtime.device, non_blocking=True)
            work = all_reduce(tensor, self._runtime.groups.world, op="max", async_op=True)
            return HostCopy(tensor, work)

    def prepare_save(self) -> None:
        """Check the copies of the parameters, and put the state of the spike watch into the state to be saved."""
        self._has_saved = True
        self.copies.compare(self._state.step)
        if self._spikes is not None:
            self._state.spikes = self._spikes.state()

    def recover(self) -> bool:
        """Go back to a checkpoint, as --spike-rollback says, once all ranks have agreed that a step was bad.

        Returns False if there is no checkpoint yet and the run can continue without. Raises TrainingError if going back
        is not asked for, or not possible and the numbers are not finite.
        """
        runtime, loader = self._runtime, self._loader
        why, first_bad, error = self._spike, self._state.step, None  # in a stream, steps may have followed the bad one
        self._spike = ""
        if self._spikes is not None:
            first_bad -= max(0, self._spikes.num_spiking - 1)
        if self._nonfinite is not None:
            (batch, result, sums), self._nonfinite = self._nonfinite, None
            # first, as it reads the gradients, which repeating the step overwrites
            why = describe_nonfinite(runtime, sums, batch.microbatches, result.loss, result.update)
            if runtime.plan.is_synchronous and result.update.skipped and loader is not None:  # no weights have changed
                again = read_microbatches(runtime, loader, batch.first_sample, len(batch.microbatches), batch.step - 1)
                with runtime.heartbeat.phase("searching", PATIENCE):
                    objective = LossAverage.of(runtime.plan).objective(lambda: runtime.optimizer.loss_scale)
                    why += f"; {repeat_step(runtime, again, objective)}"
            error = TrainingError(f"step {batch.step}: {why}. {WAY_OUT}")
        if self._spikes is None or loader is None:
            raise error or TrainingError(why)
        # rank 0 decides, as the last bits of a norm may differ
        why, first_bad = broadcast_object((why, first_bad), runtime.groups.world)
        self._saving.finish(is_last=False)
        with runtime.heartbeat.phase("loading", PATIENCE):
            disk = self._saving.disk
            went_back = go_back(runtime, loader, self._journal, self._state, first_bad, why, disk)
        if not went_back:
            if error is not None:
                raise error
            text = "there is no checkpoint from before it yet: the run continues"
            self._journal.say(f"step {self._state.step}: {why}; {text}")
        self._spikes.load_state(self._state.spikes)
        return went_back


def _reasons(asked: Sequence[float]) -> list[Any]:
    """Return the reason to stop, or None, and the other values of `Guard._ask`."""
    number, is_asked, *largest = map(int, asked)
    reason = "a callback asked to stop" if is_asked else None
    return [f"{signal.Signals(number).name} received" if number else reason, *largest]
