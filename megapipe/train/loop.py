"""`Training`: steps, evaluation, saving and leaving, on one rank; all ranks take the same decisions."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

from megapipe.assembly.datasets import RunData
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.errors import CheckpointError, TrainingError
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.topology import GROUP_NAMES
from megapipe.train.agreement import Agreed, Agreement, Trouble
from megapipe.train.asynchronous_step import step_of
from megapipe.train.copies_check import CopiesCheck
from megapipe.train.evaluation import Evaluation
from megapipe.train.faults import OutputWatch
from megapipe.train.metrics import StepMetrics
from megapipe.train.pace import Pace
from megapipe.train.pipeline_profile import PipelineProfiler
from megapipe.train.profile import Profile
from megapipe.train.reading import Reader
from megapipe.train.recovery import Launched, Recovery
from megapipe.train.saving import Saves
from megapipe.train.schedules import Schedules
from megapipe.train.signals import StopRequest
from megapipe.train.state import TrainingState
from megapipe.train.step import StepResult
from megapipe.train.stragglers import StragglerLog
from megapipe.train.timers import Timers
from megapipe.train.writers import Writers, run_folder


@dataclass(frozen=True)
class Ending:
    """Why the loop ended, for the last line of the log."""

    reason: str
    early: bool = False  # before the end of what was asked for


class Training:
    """One rank's run from `state` to the end, or to the first reason to leave.

    schedules: None only where nothing is trained. saves: None without --save. stop: what signals asked
    for; ranks agree on it after every step.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        data: RunData,
        state: TrainingState,
        schedules: Schedules | None,
        writers: Writers,
        stop: StopRequest,
        saves: Saves | None = None,
    ) -> None:
        config = runtime.plan.config
        self.runtime, self.data, self.state, self.writers = runtime, data, state, writers
        self._saves = saves
        self._agreement = Agreement(runtime, stop)
        self._config, self._training = config, config.training
        self._step = step_of(runtime, config.logging.log_num_zeros_in_grad)
        self._heartbeat = runtime.groups.world.heartbeat or Heartbeat(GROUP_NAMES)
        self._timers = Timers(
            config.logging.timing_log_level, runtime.device, runtime.tracer, self._heartbeat, runtime.marks
        )
        self._pace = Pace(runtime)
        self._profile = Profile(config.logging, runtime)
        self._pipeline_profile = PipelineProfiler(runtime, run_folder(config), writers.say)
        self._copies = CopiesCheck(runtime, self._heartbeat)
        self._stragglers = StragglerLog(runtime, self._heartbeat, writers)
        self._watch = OutputWatch(runtime) if self._training.check_for_nan_in_loss_and_grad else None
        self._reader = Reader(runtime, self._heartbeat)
        self._recovery = Recovery(runtime, state, data.train, self._reader, writers, self._heartbeat)
        self._evaluation = Evaluation(runtime, self._step, self._reader, self._agreement, writers, self._heartbeat)
        self._schedules = schedules
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._launched: Launched | None = None
        self._agreed = Agreed()  # after the last step whose result is known
        self._rolled_back = 0

    def run(self) -> Ending:
        """Train, save, then evaluate on validation and test data. Raises TrainingError at a NaN."""
        try:
            ending = Ending("evaluation only") if self._training.skip_train else self._train()
        except TrainingError as error:
            if self._saves is not None:
                try:
                    with self._heartbeat.phase("saving", PATIENCE):
                        self._saves.finish(is_last=False)  # what came before the NaN is what the next run starts from
                except CheckpointError as failure:
                    raise TrainingError(f"{error}; and the save under way failed: {failure}") from failure
            raise
        self._save_now()  # first: an evaluation that fails must not cost the last steps
        if self._saves is not None:
            with self._heartbeat.phase("saving", PATIENCE):
                self._saves.finish(is_last=True)
        if not ending.early:
            asked = self._evaluate("validation") or self._evaluate("test")
            ending = ending if asked is None else Ending(asked, early=True)
        self.runtime.gather.finish()
        self._profile.finish(self.state.step)
        self._pipeline_profile.finish(self.state.step)
        return ending

    def _train(self) -> Ending:
        train_iters = self._training.train_iters
        assert train_iters is not None
        first = self.state.step
        self._copies.compare(first)  # what was loaded or drawn
        self._pace.start(self.state)
        if self.state.step < train_iters and (asked := self._agreement.signal()) is not None:
            self._saved_step = first  # nothing was added to it
            return Ending(asked, early=True)
        while self.state.step < train_iters:
            # in the first step kernels are compiled and connections made
            with self._heartbeat.patient() if self.state.step == first else nullcontext():
                self._one_step()
            if not self._step.is_ahead or self._something_is_due():
                self._settle()
            if self._is_due(self._copies.interval) and not self._agreed.trouble:
                self._copies.compare(self.state.step)
            agreed, self._agreed = self._agreed, Agreed()
            if agreed.trouble is Trouble.UNSOUND or (agreed.trouble and agreed.reason is None):
                if self._recovery.recover(self._saves):
                    self._saved_step = self.state.step
                self._pace.start(self.state)
                continue
            if agreed.reason is not None:
                return Ending(agreed.reason, early=self.state.step < train_iters)
            if self._is_due(self._training.eval_interval) and self.state.step < train_iters:
                asked = self._evaluate("validation")
                if asked is not None:
                    return Ending(asked, early=True)
                self._pace.start(self.state)
            if self._is_due(self._config.checkpoint.save_interval) or agreed.save_due:
                self._save_now()
                self._pace.start(self.state)
        return Ending(f"all {train_iters} steps done")

    def _one_step(self) -> None:
        """Launch a step, which settles the one before if that is still to be done, and gives this one up if ranks then agree on something
        else to do first."""
        state, plan = self.state, self.runtime.plan
        assert self.data.train is not None and self._schedules is not None
        self._heartbeat.step(state.step + 1)
        self._stragglers.begins(state.step + 1)
        consumed = state.consumed_samples
        count = plan.batch.num_microbatches_at(consumed)
        microbatches = self._reader.microbatches(self.data.train, consumed, count, state.step)
        rates = self._schedules.rates(consumed)
        self._profile.before(state.step)
        self._pipeline_profile.before(state.step)
        if not self._step.launch(microbatches, rates, self._timers, self._settled):
            return
        samples = plan.batch.size_at(consumed)
        state.advance(samples, samples * plan.config.model.seq_length)
        sums = None if self._watch is None else self._watch.take()
        self._launched = Launched(count, samples, rates, microbatches.sample_ids, sums)
        if self._step.is_ahead:
            self._has_updated(self._launched)

    def _something_is_due(self) -> bool:
        """What comes after this step needs its result first."""
        training = self._training
        evaluations = training.eval_interval if training.eval_iters else None
        intervals = evaluations, self._config.checkpoint.save_interval, training.exit_interval, self._copies.interval
        return self.state.step == training.train_iters or any(map(self._is_due, intervals))

    def _has_updated(self, launched: Launched) -> None:
        """Where a step ends for the profiles. Before its line in the log, which clears the tracer."""
        self._pipeline_profile.after(self.state.step - 1, launched.num_microbatches)
        self._profile.after(self.state.step - 1)

    def _settle(self) -> None:
        launched, was_ahead = self._launched, self._step.is_ahead
        if launched is None:
            return
        result = self._step.settle(self._timers)
        if not was_ahead:
            self._has_updated(launched)
        self._settled(result)

    def _settled(self, result: StepResult) -> bool:
        """The result of the last launched step is there: check, count and log it. Returns whether to go on."""
        launched, self._launched = self._launched, None
        assert launched is not None
        if self._recovery.is_unsound(result, launched):
            self._agreed = self._agree(Trouble.UNSOUND)
            return False
        self.state.skipped_steps += result.update.skipped
        self._rolled_back += result.update.rolled_back
        self._pace.step(launched.num_microbatches, launched.samples)
        if result.update.remark:
            self.writers.say(f"step {self.state.step}: {result.update.remark}")
        if self._is_due(self._config.logging.log_interval) or self.state.step == self._training.train_iters:
            self._log(result, launched)
            self._stragglers.report(self.state.step, launched.num_microbatches)
        spiked = self._recovery.has_spiked(result) and self.runtime.groups.world.rank == 0
        self._agreed = agreed = self._agree(Trouble.SPIKE if spiked else Trouble.NONE)
        if agreed.save_ready and self._saves is not None:
            with self._heartbeat.phase("saving", PATIENCE):
                self._saves.advance()
        return agreed.goes_on

    def _log(self, result: StepResult, launched: Launched) -> None:
        train_iters, rates = self._training.train_iters, launched.rates
        assert train_iters is not None
        phases = self._timers.take(self.runtime.tracer, self._pace.num_steps)
        pace = self._pace.take(self.state, train_iters)
        norm = self.runtime.optimizer.parameters_norm() if self._config.logging.log_params_norm else None
        self.writers.step(
            StepMetrics(
                step=self.state.step,
                train_iters=train_iters,
                consumed_samples=self.state.consumed_samples,
                consumed_tokens=self.state.consumed_tokens,
                global_batch_size=launched.samples,
                loss=result.loss,
                lr=rates.lr,
                grad_norm=result.update.grad_norm,
                weight_decay=rates.weight_decay,
                loss_scale=result.update.loss_scale,
                skipped_steps=self.state.skipped_steps,
                rolled_back_steps=self._rolled_back if self._config.optimizer.optimizer_post_validation else None,
                params_norm=norm,
                num_zeros=result.update.num_zeros,
                spike_rollbacks=self.state.account.rollbacks,
                skipped_samples=self.state.num_skipped_samples,
                discarded_tokens=self.state.account.discarded_tokens,
                phases=phases,
                **pace,
            )
        )

    def _evaluate(self, split: str) -> str | None:
        loader = {"validation": self.data.valid, "test": self.data.test}[split]
        return self._evaluation.run(split, loader, self.state.step)

    def _save_now(self) -> None:
        if self._saves is None or self._saved_step == self.state.step or self._training.skip_train:
            return
        self._copies.compare(self.state.step)
        self._recovery.keep_state()
        with self._heartbeat.phase("saving", PATIENCE):
            self._saves.save(self.state)
        self._saved_step = self.state.step
        self._saved_at = time.monotonic()

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.state.step % interval == 0

    def _agree(self, trouble: Trouble) -> Agreed:
        is_ready = self._saves is not None and self._saves.is_ready
        return self._agreement.after_step(self.state.step, time.monotonic() - self._saved_at, is_ready, trouble)
