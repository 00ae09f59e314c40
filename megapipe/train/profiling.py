"""`Profiling`: measurements of a run's steps: phases, rates, idle pipeline, stragglers, profiler traces."""

from __future__ import annotations

import errno
import resource
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.gpu.device_clock import Timers
from megapipe.monitor.process import available_cores
from megapipe.plan.hardware import peak_flops
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.step_time import expected_bubble
from megapipe.schedule.action import BUSY_OPS, stage_action
from megapipe.train.journal import Journal
from megapipe.train.metrics import Observer
from megapipe.train.pipeline_profile import NOT_REACHED, PipelineProfiler
from megapipe.train.stragglers import StragglerLog


class Profiling:
    """The measurements of one rank's steps: phases, rates between two lines of the log, traces, stragglers.

    Called alike on every rank; evaluation and saving are not counted (`restart`).
    """

    def __init__(self, runtime: TrainingRuntime, journal: Journal, observer: Observer) -> None:
        plan, device, level = runtime.plan, runtime.device, runtime.plan.config.logging.timing_log_level
        self.timers = Timers(level, device, runtime.tracer, runtime.heartbeat, runtime.marks)
        self._runtime = runtime
        self._trace = TorchTrace(runtime)
        self._pipeline = PipelineProfiler(runtime, journal, observer)
        self.stragglers = StragglerLog(runtime, journal, observer)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, plan.config.precision.dtype)
        self._bubble_note = why_no_bubble(runtime)
        self._expected_bubble = cache(partial(expected_bubble, plan))  # simulates once per number of microbatches
        self._num_microbatches = 0  # of the last step
        self._samples = self._num_steps = 0  # since the last line of the log
        self._since = time.perf_counter()

    def before(self, step: int) -> None:
        """Note that step number `step` (the first is 1) begins."""
        self._runtime.heartbeat.step(step)
        self.stragglers.begins(step)
        self._trace.before(step - 1)
        self._pipeline.before(step - 1)

    def after(self, step: int, num_microbatches: int, num_samples: int) -> None:
        """Note that a step has run. Called before its line in the log, which clears the tracer."""
        self._pipeline.after(step - 1, num_microbatches)
        self._trace.after(step - 1)
        self._num_microbatches = num_microbatches
        self._samples += num_samples
        self._num_steps += 1

    def restart(self) -> None:
        """Restart the measurement: the time since the last step is not counted."""
        self._samples = self._num_steps = 0
        self._since = time.perf_counter()
        if self._runtime.tracer is not None:
            self._runtime.tracer.events.clear()

    def take(self, steps_left: int) -> dict[str, Any]:
        """Return the fields of StepMetrics about time and memory since the last call, and restart. A collective."""
        plan, config = self._runtime.plan, self._runtime.plan.config
        phases = self.timers.take(self._num_steps)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        flops = step_flops(config.model, self._samples, causal=True) / seconds / plan.topology.world_size
        per_step, device = seconds / max(self._num_steps, 1), self._runtime.device
        if device.type == "cuda":  # allocated since the last line
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:  # of the process
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        largest = torch.tensor([peak], device=device)
        all_reduce(largest, self._runtime.groups.world, op="max")
        taken = {
            "phases": phases,
            "step_seconds": per_step,
            "tokens_per_second": self._samples * config.model.seq_length / seconds,
            "seconds_left": per_step * steps_left,
            "memory_bytes": int(largest),
            "bubble": self._bubble(),
            "predicted_bubble": None if self._bubble_note else self._expected_bubble(self._num_microbatches).share,
            "bubble_note": self._bubble_note,
            "tflops": flops / 1e12 if config.logging.log_throughput or self._peak is not None else None,
            "mfu": None if self._peak is None else flops / self._peak,
        }
        self.restart()
        return taken

    def _bubble(self) -> float | None:
        """Return the pipeline's idle share since the last line: 1 - computation / time in the row, over all ranks."""
        tracer, world = self._runtime.tracer, self._runtime.groups.world
        if self._bubble_note or tracer is None or self._num_steps == 0:
            return None
        computing = [event for event in tracer.of_kind("action") if stage_action(event.name).op in BUSY_OPS]
        kinds = computing, tracer.of_kind("wait"), tracer.of_kind("row")
        computed, waited, in_row = (sum(event.end_ns - event.start_ns for event in events) for events in kinds)
        busy = torch.tensor([float(computed - waited)], dtype=torch.float64, device=self._runtime.device)
        longest = torch.tensor([float(in_row)], dtype=torch.float64, device=self._runtime.device)
        all_reduce(busy, world)
        all_reduce(longest, world, op="max")
        return max(0.0, 1.0 - float(busy) / max(float(longest) * world.size, 1.0))

    def finish(self, num_steps: int) -> None:
        """Write the profiles that are not written yet, when the run ends after num_steps steps."""
        self._trace.finish(num_steps)
        self._pipeline.finish()


class TorchTrace:
    """--profile: a trace of the steps [profile_step_start, profile_step_end) by torch's profiler, as Chrome/Perfetto
    JSON.

    Written by the ranks in profile_ranks to trace_rank_00000.json and so on, in --save or the current folder.
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        logging, rank = runtime.plan.config.logging, runtime.groups.world.global_rank
        self._active = logging.profile and rank in logging.profile_ranks
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        self._path = Path(runtime.plan.config.checkpoint.save or ".") / f"trace_rank_{rank:05}.json"
        self._first = self._start
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start before a step (the first is 0) of the span; a run resumed inside the span starts there."""
        if self._active and self._start <= step < self._end and self._profiler is None:
            self._first = step
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        """Write the trace after the last step of the span."""
        if self._profiler is not None and step + 1 >= self._end:
            self._write(self._profiler, step)

    def finish(self, num_steps: int) -> None:
        """Write what there is when the run ends, or say that there is nothing."""
        if self._profiler is not None:
            self._write(self._profiler, num_steps - 1)
        elif self._active:
            print(f"--profile: nothing was traced: {NOT_REACHED.format(self._start)}", flush=True)

    def _write(self, profiler: torch.profiler.profile, last: int) -> None:
        profiler.stop()
        self._profiler, self._active = None, False
        steps = f"trace of steps {self._first} to {last}"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
            # torch does not notice a full disk
            if not self._path.is_file() or not self._path.read_bytes().rstrip().endswith(b"}"):
                raise OSError(errno.ENOSPC, "torch's profiler left no whole file; the disk may be full")
            print(f"{steps} written to {self._path}", flush=True)
        except (OSError, RuntimeError) as error:  # training is worth more than its trace
            print(f"{steps} could not be written to {self._path}: {error}", file=sys.stderr, flush=True)


def why_no_bubble(runtime: TrainingRuntime) -> str:
    """Return why no bubble is measured, or "" where it is."""
    if runtime.plan.topology.pp == 1:
        return "n/a: no pipeline"
    if runtime.tracer is None:
        return "n/a: actions are not traced"
    if runtime.device.type == "cuda":
        return "n/a: host times do not measure a GPU"
    ranks = runtime.plan.topology.ranks_per_node or runtime.plan.topology.world_size
    if ranks > (cores := available_cores()):
        return f"n/a: {ranks} ranks share {cores} cores, so a rank also waits for its core"
    return ""
