"""The floor: the schedule's sleeps and messages in a bare gloo loop. What it loses, no engine over gloo gets back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megapipe.schedule.action import Op
from megapipe.schedule.schedule import Schedule
from schedule_bench.work import Work


class Floor:
    """All receives are posted when the step starts, what is made is sent at once, and nothing else is done: no autograd, no buffers."""

    def __init__(self, work: Work, rank: int, group: Any) -> None:
        self.schedule: Schedule = work.schedule()
        self._rank, self._group, self._watch = rank, group, work.watch
        self._row = self.schedule.rows[rank]
        self._outgoing = torch.ones(work.message.shape, dtype=work.message.dtype)
        self._incoming = [message for action in self._row if (message := self._message(action.stage, action.op, action.microbatch))]
        self._buffers = {message: torch.empty_like(self._outgoing) for message in self._incoming}

    def begin_step(self) -> None:
        pass

    def step(self) -> None:
        placement, last = self.schedule.placement, self.schedule.num_stages - 1
        receives = {
            message: dist.irecv(self._buffers[message], group=self._group, group_src=message[0], tag=message[1])
            for message in self._incoming
        }
        sends = []
        numbers: dict[tuple[int, str], int] = {}
        for stage, op, microbatch in self._row:
            if op is Op.OVERLAP:
                continue
            message = self._message(stage, op, microbatch)
            if message is not None:
                receives[message].wait()
            for part in ("I", "W") if op is Op.B else (op.value,):
                number = numbers[stage, part] = numbers.get((stage, part), -1) + 1
                self._watch.pass_time(stage, part, number)
            to_stage = stage + 1 if op is Op.F else stage - 1
            if op is not Op.W and 0 <= to_stage <= last:
                peer = placement.rank_of(to_stage, microbatch)
                if peer != self._rank:
                    tag = self._tag(to_stage, op, microbatch)
                    sends.append(dist.isend(self._outgoing, group=self._group, group_dst=peer, tag=tag))
        for send in sends:
            send.wait()

    def _message(self, stage: int, op: Op, microbatch: Any) -> tuple[int, int] | None:
        """(sender, tag) of what an action waits for from another rank."""
        from_stage = {Op.F: stage - 1, Op.B: stage + 1, Op.I: stage + 1}.get(op, -1)
        if not 0 <= from_stage < self.schedule.num_stages:
            return None
        peer = self.schedule.placement.rank_of(from_stage, microbatch)
        return None if peer == self._rank else (peer, self._tag(stage, op, microbatch))

    def _tag(self, to_stage: int, op: Op, microbatch: int) -> int:
        return (microbatch * self.schedule.num_stages + to_stage) * 2 + (op is Op.F)
