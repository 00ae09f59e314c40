"""How fast a run goes: tokens, FLOPs and idle pipeline per second since the last log line."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from typing import Any

import torch

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.comm.trace import Event
from megapipe.plan.bubble import expected_bubble
from megapipe.plan.flops import step_flops
from megapipe.plan.hardware import peak_flops
from megapipe.schedule.action import BUSY_OPS, parse_action
from megapipe.train.state import TrainingState


class Pace:
    """Rates between two log lines. Evaluation and saving are not counted: `start` begins anew after them."""

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._runtime = runtime
        plan, device = runtime.plan, runtime.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, plan.config.precision.dtype)
        self._note = bubble_note(runtime)
        self._predicted: dict[int, float] = {}
        self._num_microbatches = 0
        self._samples = self._steps = 0
        self._since = time.perf_counter()

    def start(self, state: TrainingState) -> None:
        """Begin to count after `state`."""
        self._samples = self._steps = 0
        self._since = time.perf_counter()
        if self._runtime.tracer is not None:
            self._runtime.tracer.clear()

    def step(self, num_microbatches: int, samples: int) -> None:
        """One more step was taken."""
        self._num_microbatches = num_microbatches
        self._samples += samples
        self._steps += 1

    @property
    def num_steps(self) -> int:
        """Steps since the last line."""
        return self._steps

    def take(self, state: TrainingState, train_iters: int) -> dict[str, Any]:
        """The fields of StepMetrics about speed, and start anew. A collective: every rank calls it."""
        plan = self._runtime.plan
        seconds = max(time.perf_counter() - self._since, 1e-9)
        flops = step_flops(plan.config.model, self._samples, causal=True) / seconds / plan.topology.world_size
        per_step = seconds / max(self._steps, 1)
        taken: dict[str, Any] = {
            "step_seconds": per_step,
            "tokens_per_second": self._samples * plan.config.model.seq_length / seconds,
            "seconds_left": per_step * (train_iters - state.step),
            "memory_bytes": self._memory(),
            "bubble": self._bubble(),
            "predicted_bubble": self._prediction() if self._note == "" else None,
            "bubble_note": self._note,
        }
        if plan.config.logging.log_throughput or self._peak is not None:
            taken["tflops"] = flops / 1e12
        if self._peak is not None:
            taken["mfu"] = flops / self._peak
        self.start(state)
        return taken

    def _bubble(self) -> float | None:
        """Idle share of the pipeline in the steps since the last line: 1 - computation / time in the row, of all ranks of the world."""
        tracer = self._runtime.tracer
        if self._note or tracer is None or self._steps == 0:
            return None
        waits = _total_ns(tracer.of_kind("wait"))
        computing = _total_ns(event for event in tracer.of_kind("action") if parse_action(event.name).op in BUSY_OPS)
        in_row = _total_ns(tracer.of_kind("row"))
        times = torch.tensor(
            [float(computing - waits), float(in_row)], dtype=torch.float64, device=self._runtime.device
        )
        busy = times[:1].clone()
        all_reduce(busy, self._runtime.groups.world)
        longest = times[1:].clone()
        all_reduce(longest, self._runtime.groups.world, op="max")
        return max(0.0, 1.0 - float(busy) / max(float(longest) * self._runtime.groups.world.size, 1.0))

    def _prediction(self) -> float:
        count = self._num_microbatches
        if count not in self._predicted:
            self._predicted[count] = expected_bubble(self._runtime.plan, count).share
        return self._predicted[count]

    def _memory(self) -> int:
        """Largest over all ranks: allocated on the GPU since the last line, else the process's peak."""
        held = torch.tensor([_memory_here(self._runtime.device)], device=self._runtime.device)
        all_reduce(held, self._runtime.groups.world, op="max")
        return int(held)


def bubble_note(runtime: TrainingRuntime) -> str:
    """Why no bubble is measured; empty where it is."""
    if runtime.plan.topology.pp == 1:
        return "n/a: no pipeline"
    if runtime.tracer is None:
        return "n/a: actions are not traced"
    if runtime.device.type == "cuda":
        return "n/a: times of the host say nothing about a GPU"
    ranks = runtime.plan.topology.ranks_per_node or runtime.plan.topology.world_size
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks > cores:
        return f"n/a: {ranks} ranks share {cores} cores, so a rank also waits for its core"
    return ""


def _total_ns(events: Iterable[Event]) -> int:
    return sum(event.end_ns - event.start_ns for event in events)


def _memory_here(device: torch.device) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
