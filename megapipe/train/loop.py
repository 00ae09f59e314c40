"""`Training`: steps, evaluation, saving and leaving, on one rank; all ranks take the same decisions.

Also how far an evaluation is (`EvaluationClock`), and Python's garbage collection at fixed steps (--manual-gc): a rank
that collects while the others compute makes all of them wait in the next collective, each time another one. With
collections at the same steps on all ranks they wait once.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from megapipe.assembly.datasets import RunData
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.config.training import TrainingConfig
from megapipe.errors import CheckpointError, TrainingError
from megapipe.monitor.heartbeat import PATIENCE
from megapipe.monitor.progress import reported
from megapipe.train.copies_check import DataCheck
from megapipe.train.guard import Decision, Guard, StepHealth, StopRequest
from megapipe.train.journal import Journal
from megapipe.train.metrics import EvaluationMetrics, Observer, StepMetrics, StepSummary, TrainingResult
from megapipe.train.profiling import Profiling
from megapipe.train.saving import Saving
from megapipe.train.state import Schedules, TrainingState
from megapipe.train.step import Routed, StepBatch, StepResult, read_microbatches
from megapipe.train.stream import train_step

FORWARD_SHARE = 1 / 3  # of a step's time, of which the backward takes two thirds: until one evaluation is measured


@dataclass(frozen=True)
class Ending:
    """The reason why the loop ended."""

    reason: str
    early: bool = False  # before all steps that were asked for


class Training:
    """One rank's run from `state` to the end, or to the first reason to stop.

    schedules: None only if nothing is trained. stop: what signals have asked for; ranks agree on it after every step.
    observer: is told of steps and evaluations.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        data: RunData,
        state: TrainingState,
        schedules: Schedules | None,
        saving: Saving,
        journal: Journal,
        stop: StopRequest,
        observer: Observer,
    ) -> None:
        self.runtime, self.data, self.state = runtime, data, state
        self._config, self._training, self._schedules = runtime.plan.config, runtime.plan.config.training, schedules
        self._saving, self._journal, self._observer = saving, journal, observer
        self._profiling = Profiling(runtime, journal, observer)
        self._step = train_step(runtime, self._profiling.timers)
        self._guard = Guard(runtime, state, data.train, saving, journal, stop, observer)
        self._files = DataCheck(runtime, data.files, journal.say)
        self._stop = stop
        self._measured: dict[str, Any] | None = None  # time and memory of the steps since the last line
        self._losses: dict[str, float] = {}  # the last one of 'train', 'validation' and 'test'
        splits = {"validation": data.valid, "test": data.test}
        self._clock = EvaluationClock(
            self._training, tuple(name for name, loader in splits.items() if loader is not None), journal.progress
        )

    def run(self) -> TrainingResult:
        """Train, save, then evaluate on validation and test data. Raises TrainingError at a NaN or infinity."""
        state = self.state
        self._observer.on_start(state.step)
        self._stop.begin()
        try:
            with collector_off(self._training.manual_gc):
                ending = Ending("evaluation only") if self._training.skip_train else self._train()
        except TrainingError as error:
            try:
                self._saving.finish(is_last=False)  # the next run starts from what was saved before the NaN
            except CheckpointError as failure:
                raise TrainingError(f"{error}; and the save in flight failed: {failure}") from failure
            raise
        self._save()  # first: an evaluation that fails must not cost the last steps
        self._saving.finish(is_last=True)
        if not ending.early:
            stopped = self._evaluate("validation") or self._evaluate("test")
            ending = ending if stopped is None else Ending(stopped, early=True)
        self.runtime.stores.finish_weights()
        self._profiling.finish(state.step)
        losses = (self._losses.get(name) for name in ("train", "validation", "test"))
        return TrainingResult(state.step, ending.reason, not ending.early, *losses)

    def _train(self) -> Ending:
        state, train_iters, first = self.state, self._training.train_iters, self.state.step
        self._guard.copies.compare(first)  # what was loaded or drawn
        self._profiling.restart()
        if state.step < train_iters and (stopped := self._guard.stop_signal()) is not None:
            self._saving.saved_step = first  # nothing was trained since
            return Ending(stopped, early=True)
        following: StepBatch | None = None
        decided = Decision()
        while state.step < train_iters:
            batch = following or self._next_batch()
            following = self._following(batch, decided)
            self._profiling.before(batch.step)
            # the first step compiles kernels and makes connections, and may take long
            with self.runtime.heartbeat.phase("", PATIENCE) if batch.step == first + 1 else nullcontext():
                finished = self._step.advance(batch, following)  # forward-backward, reduce, update
                self._profiling.after(batch.step, len(batch.microbatches), batch.num_samples)
                self._measured = None
                for each in finished:
                    decided = decided.joined(self._finish_step(*each))  # judge, log, agree
            self._collect_garbage(self._is_due(self._training.manual_gc_interval))
            if following is not None:  # what was decided waits until the pipeline has drained
                continue
            decision, decided = decided, Decision()
            if self._is_due(self._guard.copies.interval) and decision.health is StepHealth.FINE:
                self._guard.copies.compare(state.step)
            is_spike = decision.health is StepHealth.SPIKE and decision.stop_reason is None
            if decision.health is StepHealth.NONFINITE or is_spike:
                if self._guard.recover():
                    self._saving.saved_step = state.step
                self._profiling.restart()
                continue
            if decision.stop_reason is not None:
                return Ending(decision.stop_reason, early=state.step < train_iters)
            if self._is_due(self._training.eval_interval) and state.step < train_iters:
                if (stopped := self._evaluate("validation") or self._guard.stop_signal()) is not None:
                    return Ending(stopped, early=True)
                self._profiling.restart()
            if self._is_due(self._config.checkpoint.save_interval) or decision.save_due:
                self._save()
                self._profiling.restart()
        return Ending(f"all {train_iters} steps done")

    def _following(self, batch: StepBatch, decided: Decision) -> StepBatch | None:
        """Return the step that begins before a step has ended, None if the pipeline drains first.

        decided: after the steps of this stream.
        """
        plan, is_asked = self.runtime.plan, decided.stop_reason or decided.save_due or decided.health != StepHealth.FINE
        if plan.is_synchronous or is_asked or batch.step == self._training.train_iters:
            return None
        if any(batch.step % interval == 0 for interval in self._config.drain_intervals.values()):
            return None
        following = self._next_batch(batch)
        return following if len(following.microbatches) == len(batch.microbatches) else None

    def _next_batch(self, after: StepBatch | None = None) -> StepBatch:
        """Return the next step, or the one after another: its samples, which are read when the engine asks for them,
        and its rates.
        """
        assert self.data.train is not None and self._schedules is not None
        step, consumed = self.state.step + 1, self.state.consumed_samples
        if after is not None:
            step, consumed = after.step + 1, after.first_sample + after.num_samples
        count = self.runtime.plan.batch.num_microbatches_at(consumed)
        microbatches = read_microbatches(self.runtime, self.data.train, consumed, count, step - 1)
        rates, num_samples = self._schedules.rates(consumed), self.runtime.plan.batch.size_at(consumed)
        return StepBatch(step, consumed, num_samples, microbatches, rates)

    def _finish_step(self, batch: StepBatch, result: StepResult) -> Decision:
        """Count, judge and log a step, and agree with all ranks on what follows."""
        state, guard, count = self.state, self._guard, len(batch.microbatches)
        state.advance(batch.num_samples, batch.num_samples * self.runtime.plan.config.model.seq_length)
        health = guard.judge(batch, result)
        if health is StepHealth.NONFINITE:
            return guard.decide(health)
        state.skipped_steps += result.update.skipped
        if self._is_due(self._config.logging.log_interval) or state.step == self._training.train_iters:
            self._files.look()
            self._journal.write(self._metrics(batch, result))
            self._profiling.stragglers.report(state.step, count)
        self._losses["train"] = result.loss
        consumed = state.consumed_samples, state.consumed_tokens
        numbers = result.loss, batch.rates.lr, result.update.grad_norm, result.update.skipped
        self._observer.on_step_end(StepSummary(state.step, *numbers, *consumed))
        decision = guard.decide(health)
        if decision.save_ready:
            self._saving.advance()
        return decision

    def _metrics(self, batch: StepBatch, result: StepResult) -> StepMetrics:
        state, update, train_iters = self.state, result.update, self._training.train_iters
        measured = self._measured or self._profiling.take(train_iters - state.step)
        self._measured = dict(measured)  # of the steps that end together where a pipeline drains
        measured["seconds_left"] += self._clock.seconds_left(state.step, measured["step_seconds"])
        norm = self.runtime.optimizer.parameters_norm() if self._config.logging.log_params_norm else None
        return StepMetrics(
            **state.to_dict(),
            train_iters=train_iters,
            global_batch_size=batch.num_samples,
            loss=result.loss,
            mtp_losses=result.ahead,
            lr=batch.rates.lr,
            grad_norm=update.grad_norm,
            norm_before=update.norm_before,
            weight_decay=batch.rates.weight_decay,
            loss_scale=update.loss_scale,
            params_norm=norm,
            num_zeros=update.num_zeros,
            spike_rollbacks=state.account.rollbacks,
            skipped_samples=state.account.skipped.index(state.consumed_samples) - state.consumed_samples,
            discarded_tokens=state.account.discarded_tokens,
            **self._of_experts(result.routed, len(batch.microbatches)),
            **measured,
        )

    def _of_experts(self, routed: Sequence[Routed], num_microbatches: int) -> dict[str, Any]:
        """Return the entries of StepMetrics about experts; nothing without them. num_microbatches: of a dp rank."""
        plan = self.runtime.plan
        report = self._step.expert_loads.report(routed, num_microbatches * plan.topology.dp)
        if report is None:
            return {}
        has_capacity, names = plan.config.model.moe_expert_capacity_factor is not None, list(map(str, report.layers))
        found: dict[str, Any] = {
            "expert_imbalance": max(report.imbalance),
            "dropped_share": statistics.fmean(report.dropped) if has_capacity else None,
            "router_losses": {name: statistics.fmean(losses) for name, losses in report.losses.items()},
        }
        if self._config.logging.moe_per_layer_logging:
            rounded = ([round(load, 3) for load in loads] for loads in report.load)
            found["expert_load"] = dict(zip(names, rounded, strict=True))
            by_layer = {name: dict(zip(names, losses, strict=True)) for name, losses in report.losses.items()}
            found["router_losses_by_layer"] = by_layer
        return found

    def _evaluate(self, split: str) -> str | None:
        """Report the loss over --eval-iters global batches of 'validation' or 'test', by forwards in the same engine.

        Returns the signal that cut it short, for which ranks look before every batch; then nothing is reported.
        """
        training, after_step = self._training, self.state.step
        loader = self.data.valid if split == "validation" else self.data.test
        if loader is None or not training.eval_iters:
            return None
        samples, count = training.global_batch_size, self.runtime.plan.batch.num_microbatches
        first = 0
        if split == "validation" and training.eval_interval:
            # every validation of a run sees other samples, as in Megatron
            first = max(0, after_step - 1) // training.eval_interval * training.eval_iters * samples
        started = time.perf_counter()
        weighted = weights = tokens = 0.0
        ahead = [0.0] * (self.runtime.plan.config.model.mtp_num_layers or 0)
        self._collect_garbage(training.manual_gc_eval)
        with self.runtime.heartbeat.phase(split):
            for i in self._clock.batches(split, after_step):
                signal = self._guard.stop_signal()
                if signal is not None:
                    return signal
                result = self._step.evaluate(read_microbatches(self.runtime, loader, first + i * samples, count, None))
                # the mean of the batches' losses, under a loss mask of all their tokens
                is_over_tokens = training.calculate_per_token_loss or self.runtime.plan.config.data.masks_loss
                weight = result.num_tokens if is_over_tokens else 1.0
                weighted += result.loss * weight
                ahead = [total + loss * weight for total, loss in zip(ahead, result.ahead, strict=True)]
                weights += weight
                tokens += result.num_tokens
        self._collect_garbage(training.manual_gc_eval)
        loss, seconds = weighted / max(weights, 1.0), time.perf_counter() - started
        mtp_losses = tuple(total / max(weights, 1.0) for total in ahead)
        metrics = EvaluationMetrics(split, after_step, loss, round(tokens), seconds, mtp_losses)
        self._losses[split] = loss
        self._journal.write(metrics)
        self._observer.on_evaluation(metrics)
        return None

    def _save(self) -> None:
        if self._saving.is_needed(self.state.step):
            self._files.compare()
            self._guard.prepare_save()
            self._saving.save(self.state)

    def _is_due(self, interval: int | None) -> bool:
        return self.state.step % interval == 0 if interval else False

    def _collect_garbage(self, is_due: bool) -> None:
        if self._training.manual_gc and is_due:
            gc.collect()


class EvaluationClock:
    """The evaluations of a run. splits: the parts that have data, 'validation' and 'test'. report: prints a line.

    The test part is evaluated once, after the last step, and the validation part also every --eval-interval steps.
    """

    def __init__(self, training: TrainingConfig, splits: tuple[str, ...], report: Callable[[str], None]) -> None:
        self._training, self._report = training, report
        self._splits = splits if training.eval_iters else ()
        self._seconds: dict[str, float] = {}  # of the last evaluation of each part

    def batches(self, split: str, after_step: int, now: Callable[[], float] = time.perf_counter) -> Iterator[int]:
        """Yield the index of each batch of an evaluation, and report how far it is every ten seconds."""
        count, began = self._training.eval_iters, now()

        def report(number: int, left: str) -> None:
            self._report(f"{split} after step {after_step}: batch {number} of {count} | {left} left")

        yield from reported(range(count), report, now)
        self._seconds[split] = now() - began

    def seconds_left(self, step: int, step_seconds: float) -> float:
        """Return the seconds of all evaluations after a step, of which none has run yet. step_seconds: of one step."""
        training, total = self._training, 0.0
        for split in self._splits:
            num_left = 1
            if split == "validation" and training.eval_interval and training.train_iters:
                # the one at the end comes after the last step in any case
                num_left += (training.train_iters - 1) // training.eval_interval - (step - 1) // training.eval_interval
            expected = training.eval_iters * step_seconds * FORWARD_SHARE
            total += num_left * self._seconds.get(split, expected)
        return total


@contextmanager
def collector_off(is_manual: bool) -> Iterator[None]:
    """Collect once and turn Python's own collector off inside the block, with --manual-gc."""
    was_enabled = gc.isenabled()
    if is_manual:
        gc.disable()
        gc.collect()
    try:
        yield
    finally:
        if is_manual and was_enabled:
            gc.enable()
