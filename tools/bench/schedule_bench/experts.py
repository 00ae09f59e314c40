"""Stages with experts, whose all-to-alls block or overlap with computation: what --overlap-moe-expert-parallel-comm
saves.

Runtime, engine and messages are those of pretrain_gpt.py on a tiny model whose router is forced to balance, so that all
splits are equal. Every part of a stage is stretched to its seconds by sleeping. An all-to-all is a real one of few
bytes that ends no earlier than its seconds after it was issued, and after the one before it on the rank: network time
is emulated, since messages of real size would compete for the cores. In the serial step all-to-alls block; in the other
they run under the parts of pairs and under weight gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.config.load import load_config
from megapipe.data.batch import Batch, DocumentRules
from megapipe.pipeline.deliveries import deliveries_for
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.parts import Exchange, part_runners
from megapipe.plan.resolve import resolve
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Seconds
from megapipe.schedule.experts import ExpertModel
from megapipe.schedule.lower import lower, without_pairs
from megapipe.schedule.parts import expand
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import simulate
from schedule_bench.cases import ExpertCase
from schedule_bench.devices import Stopwatch

MODEL = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --make-vocab-size-divisible-by 4 "
    "--micro-batch-size 1 --lr 1e-3 --clip-grad 0 --mock-data --train-iters 1000 --device cpu --disable-bias-linear "
    "--pipeline-balance even --untie-embeddings-and-output-weights --num-experts 4 --moe-ffn-hidden-size 8 "
    "--moe-router-force-load-balancing --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
)
CALLS = {Op.F: "forward", Op.B: "backward", Op.I: "backward_input", Op.W: "backward_weight"}


class ExpertWork:
    """The runtime of a case on one rank, which both of its contenders use, and the batch of a step."""

    def __init__(self, case: ExpertCase, rank: int, timeout_seconds: float) -> None:
        flags = f"{MODEL} --num-layers {case.layers} --expert-model-parallel-size {case.ep}"
        flags += f" --pipeline-model-parallel-size {case.ranks // case.ep} --pipeline-schedule {case.schedule}"
        flags += f" --global-batch-size {case.microbatches * case.ep}"
        flags += f" --num-virtual-stages-per-pipeline-rank {case.chunks}" * (case.chunks > 1)
        self.case, self.plan = case, resolve(load_config(flags.split()).config, case.ranks)
        groups = build_process_groups(self.plan.topology, rank, "gloo", timeout_seconds)
        self.runtime = TrainingRuntime(self.plan, groups, torch.device("cpu"))
        attention, mlp, head = (Seconds(*seconds) for seconds in (case.attention, case.mlp, case.head))
        kinds = (True,) * case.layers
        self.model = ExpertModel(kinds, attention, mlp, mlp, head, case.all_to_all, case.all_to_all)
        self.watch = Stopwatch(0.0)
        self._tokens = np.random.RandomState(0).randint(0, 32, (case.microbatches, 9))
        self._has_run = False

    def begin_step(self) -> None:
        """Reduce the gradients of the step before, outside of the measured time, and begin the next."""
        if self._has_run:
            self.runtime.stores.finish_gradients()
        self._has_run = True
        self.runtime.stores.begin_step(self.case.microbatches)

    def step(self) -> Step:
        def read(k: int) -> Batch:
            return Batch.of(self._tokens[k : k + 1], (k,), DocumentRules())

        microbatches = Microbatches(self.case.microbatches, read, Keys(1, 0, 0, 1), self.runtime.device)
        return Step(microbatches, self.runtime.message, lambda output, _: (output.loss_sum, output.loss_sum.detach()))


class ExpertSide:
    """The engine on its own row of parts, with stretched parts. overlaps: all-to-alls do not block."""

    def __init__(self, work: ExpertWork, overlaps: bool) -> None:
        plan, runtime, parts = work.plan, work.runtime, work.plan.parts
        assert parts is not None
        costs, link = work.model.part_costs(parts, overlaps), Link()
        self.schedule = plan.part_schedule(work.case.microbatches) if overlaps else serial_schedule(work)
        self.simulated_seconds = simulate(self.schedule, costs).makespan_seconds
        runners: dict[int, Any] = {}
        for stage, module in runtime.stages.items():
            runners |= part_runners(parts, stage, module, runtime.runners[stage], frees_weights=False)
        for index, part in runners.items():
            for op, name in CALLS.items():
                if index not in parts.network:
                    setattr(part, name, lasting(getattr(part, name), costs.seconds[index, op]))
                elif op in (Op.F, Op.B):
                    setattr(part, name, exchanging(getattr(part, name), costs.seconds[index, op], link, not overlaps))
        rank, deliveries = runtime.coordinates.pp_rank, deliveries_for(runtime.device, None)
        self._engine = Engine(self.schedule, rank, runners, runtime.channels, parts=parts, deliveries=deliveries)
        self._work = work

    def begin_step(self) -> None:
        self._work.begin_step()

    def step(self) -> None:
        self._engine.run(self._work.step())


def serial_schedule(work: ExpertWork) -> Schedule:
    """Return the row of parts in which no pair of microbatches shares a slot."""
    parts, whole = work.plan.parts, work.plan.schedule(work.case.microbatches).compute_only()
    assert parts is not None
    serial = replace(whole, rows=tuple(map(without_pairs, whole.rows)))
    depth = 4 * max(map(len, parts.of_stage))  # of receives, as in the plan of a run on CPUs
    return lower(expand(serial, parts, delay_weights=False), depth)


def lasting(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Make a computation last its seconds."""

    def call(*arguments: Any) -> Any:
        end = time.perf_counter() + seconds
        result = function(*arguments)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return call


class Link:
    """The emulated network of a rank: one all-to-all at a time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def lasting(self, work: Any, seconds: float) -> Any:
        """Return the handle of an all-to-all issued now that also lasts its seconds."""
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        return LastingWork(work, self._free_at)


class LastingWork:
    """A handle that is complete when the all-to-all is, and not before its time."""

    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


def exchanging(function: Callable[..., Any], seconds: float, link: Link, is_blocking: bool) -> Callable[..., Any]:
    """Make an all-to-all last its seconds. is_blocking: the rank waits for it."""

    def call(*arguments: Any) -> Any:
        exchange = function(*arguments)
        assert isinstance(exchange, Exchange)
        *others, last = exchange._works
        exchange._works = (*others, link.lasting(last, seconds))
        return exchange.wait() if is_blocking else exchange

    return call
