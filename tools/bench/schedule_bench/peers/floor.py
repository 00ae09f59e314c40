"""The floor: the schedule in a bare gloo loop. No engine on these stages over gloo can lose less time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.schedule.action import Action, Op
from megapipe.schedule.lower import without_pairs
from schedule_bench.work import Work

Key = tuple[int, int | None]  # stage, microbatch


def new_group(num_ranks: int, timeout_seconds: float) -> Any:
    """Return a gloo group of all ranks, with its own connections and threads; called by all of them in one order."""
    return dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=timeout_seconds), backend="gloo")


class Floor:
    """All receives are posted when the step starts, and outputs are sent at once. Beside autograd there is nothing more
    than a dictionary of what F keeps for I."""

    def __init__(self, work: Work, rank: int, group: Any) -> None:
        schedule = work.schedule()
        self.schedule = replace(schedule, rows=tuple(map(without_pairs, schedule.rows)))
        self._rank, self._group, self._loss = rank, group, work.loss
        self._row = self.schedule.rows[rank]
        self._routes = {action: (self._comes_from(action), self._goes_to(action)) for action in self._row}
        self._buffers = {
            action: torch.empty(work.message.shape, dtype=work.message.dtype)
            for action in self._row
            if self._routes[action][0] is not None
        }
        placement = self.schedule.placement
        self.stages = work.stages(placement.stages_of(rank), placement.num_stages)
        self._microbatches = work.microbatches()
        self._last = placement.num_stages - 1
        self._kept: dict[Key, tuple[Tensor, Tensor]] = {}
        self._replays: dict[Key, list[Callable[[], None]]] = {}
        self._local: dict[tuple[Key, bool], Tensor] = {}  # outputs of a stage of this rank for another of its stages
        self._parts: dict[Op, Callable[[Action, Tensor | None], Tensor]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.RECOMPUTE: self._recompute,
        }

    def begin_step(self) -> None:
        self.stages.begin_step()

    def step(self) -> None:
        receives = {}
        for action, buffer in self._buffers.items():
            peer, tag = self._routes[action][0]  # type: ignore[misc]
            receives[action] = dist.irecv(buffer, group=self._group, group_src=peer, tag=tag)
        sends = []
        for action in self._row:
            if action in receives:
                receives[action].wait()  # type: ignore[union-attr]  # None outside the group
            made = self._parts[action.op](action, self._buffers.get(action))
            route = self._routes[action][1]
            if route is not None:
                sends.append((dist.isend(made, group=self._group, group_dst=route[0], tag=route[1]), made))
        for handle, _ in sends:
            handle.wait()  # type: ignore[union-attr]

    def _forward(self, action: Action, received: Tensor | None) -> Tensor:
        stage, microbatch = key = action.stage, action.microbatch
        inputs, label = self._microbatches[microbatch]  # type: ignore[index]
        if stage > 0:
            inputs = (self._local.pop((key, True)) if received is None else received).detach().requires_grad_()
        output = self.stages[stage](inputs)
        if stage == self._last:
            output = self._loss(output, label)
        self._kept[key] = inputs, output
        replays = self.stages.replays[stage]
        self._replays[key] = [*replays]
        replays.clear()
        made = output.detach()
        self._local[(stage + 1, microbatch), True] = made
        return made

    def _recompute(self, action: Action, received: Tensor | None) -> Tensor:
        with torch.enable_grad():
            for replay in self._replays.pop((action.stage, action.microbatch)):
                replay()
        return torch.empty(0)  # nothing is sent

    def _backward(self, action: Action, received: Tensor | None) -> Tensor:
        stage, microbatch = key = action.stage, action.microbatch
        inputs, output = self._kept.pop(key)
        self._replays.pop(key, None)
        gradient = received
        if stage == self._last:
            gradient = None
        elif received is None:
            gradient = self._local.pop((key, False))
        torch.autograd.backward(output, gradient)
        made = inputs.grad if stage > 0 else inputs
        assert made is not None
        self._local[(stage - 1, microbatch), False] = made
        return made

    def _backward_input(self, action: Action, received: Tensor | None) -> Tensor:
        queue = self.stages.queues[action.stage]
        queue.defer(action.microbatch)
        made = self._backward(action, received)
        queue.immediate()
        return made

    def _backward_weight(self, action: Action, received: Tensor | None) -> Tensor:
        self.stages.queues[action.stage].run(action.microbatch)
        return torch.empty(0)  # nothing is sent

    def _comes_from(self, action: Action) -> tuple[int, int] | None:
        step = {Op.F: -1, Op.B: 1, Op.I: 1}.get(action.op, 0)
        return self._route(action, action.stage + step, action.stage) if step else None

    def _goes_to(self, action: Action) -> tuple[int, int] | None:
        step = {Op.F: 1, Op.B: -1, Op.I: -1}.get(action.op, 0)
        return self._route(action, action.stage + step, action.stage + step) if step else None

    def _route(self, action: Action, other: int, to_stage: int) -> tuple[int, int] | None:
        """Return (peer, tag) of the message between an action and that of stage `other`; None within the rank or at an
        end."""
        microbatch, count = action.microbatch, self.schedule.num_stages
        assert microbatch is not None
        if not 0 <= other < count:
            return None
        peer = self.schedule.placement.rank_of(other, microbatch)
        return None if peer == self._rank else (peer, (microbatch * count + to_stage) * 2 + (action.op is Op.F))
