"""How fast a run goes: tokens, FLOPs and idle pipeline per second since the last log line."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from typing import Any

import torch

from megapipe.assembly.machines import Machines
from megapipe.comm.collectives import all_reduce
from megapipe.comm.trace import Event
from megapipe.plan.bubble import expected_bubble
from megapipe.plan.flops import step_flops
from megapipe.plan.hardware import peak_flops
from megapipe.schedule.action import BUSY_OPS, parse_action
from megapipe.train.state import TrainingState


class Pace:
    """Rates between two log lines. Evaluation and saving are not counted: `start` begins anew after them."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        plan, device = machines.plan, machines.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, plan.config.precision.dtype)
        self._note = bubble_note(machines)
        self._predicted: dict[int, float] = {}
        self._num_microbatches = 0
        self._samples = self._steps = 0
        self._since = time.perf_counter()

    def start(self, state: TrainingState) -> None:
        """Begin to count after `state`."""
        self._samples = self._steps = 0
        self._since = time.perf_counter()
        if self._machines.tracer is not None:
            self._machines.tracer.clear()

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
        plan = self._machines.plan
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
        tracer = self._machines.tracer
        if self._note or tracer is None or self._steps == 0:
            return None
        waits = _total_ns(tracer.of_kind("wait"))
        computing = _total_ns(event for event in tracer.of_kind("action") if parse_action(event.name).op in BUSY_OPS)
        in_row = _total_ns(tracer.of_kind("row"))
        times = torch.tensor(
            [float(computing - waits), float(in_row)], dtype=torch.float64, device=self._machines.device
        )
        busy = times[:1].clone()
        all_reduce(busy, self._machines.groups.world)
        longest = times[1:].clone()
        all_reduce(longest, self._machines.groups.world, op="max")
        return max(0.0, 1.0 - float(busy) / max(float(longest) * self._machines.groups.world.size, 1.0))

    def _prediction(self) -> float:
        count = self._num_microbatches
        if count not in self._predicted:
            self._predicted[count] = expected_bubble(self._machines.plan, count).share
        return self._predicted[count]

    def _memory(self) -> int:
        """Largest over all ranks: allocated on the GPU since the last line, else the process's peak."""
        held = torch.tensor([_memory_here(self._machines.device)], device=self._machines.device)
        all_reduce(held, self._machines.groups.world, op="max")
        return int(held)


def bubble_note(machines: Machines) -> str:
    """Why no bubble is measured; empty where it is."""
    if machines.plan.topology.pp == 1:
        return "n/a: no pipeline"
    if machines.tracer is None:
        return "n/a: actions are not traced"
    if machines.device.type == "cuda":
        return "n/a: times of the host say nothing about a GPU"
    ranks = machines.plan.topology.ranks_per_node or machines.plan.topology.world_size
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
