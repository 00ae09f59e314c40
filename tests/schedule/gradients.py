"""The proof of a schedule by gradients: one step on simulated ranks in exact integers, compared with a plain loop.

`validate` proves rules about actions. `prove_gradients` computes what the actions are for: it delivers messages by the
SEND and RECV of the rows, keeps what F and I leave behind, and sums weight gradients over the ranks over which the
engine sums them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NoReturn

from megapipe.errors import ScheduleError
from megapipe.schedule.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, with_slices
from megapipe.schedule.dependencies import MAKES, NEEDS, ChannelPath, Value, ValueKind, channel_of
from megapipe.schedule.schedule import Schedule, rows_text

# The model: stage s multiplies its input by an integer weight; with slices, the sum of the inputs of this slice and of
# those before it, as attention reads their keys and values. The loss of an output is (output - target)^2 / 2.
Unit = tuple[int, int]  # (stage, microbatch or slice)


def _weight(stage: int) -> int:
    return 2 * stage + 3


def _data(unit: int) -> int:
    return pow(5, unit + 1, 10007)


def _target(unit: int) -> int:
    return pow(3, unit + 1, 10009)


def plain_gradients(num_stages: int, num_microbatches: int, num_slices: int = 1) -> dict[Unit, int]:
    """Return what each microbatch, or slice, adds to the weight gradient of each stage: a loop without a pipeline."""
    found: dict[Unit, int] = {}
    for start in range(0, num_microbatches * num_slices, num_slices):
        units = range(start, start + num_slices)
        values, read = [_data(unit) for unit in units], []
        for stage in range(num_stages):
            read.append(list(accumulate(values)))
            values = [_weight(stage) * total for total in read[stage]]
        gradients = [value - _target(unit) for unit, value in zip(units, values, strict=True)]
        for stage in reversed(range(num_stages)):
            for unit, gradient, total in zip(units, gradients, read[stage], strict=True):
                found[stage, unit] = gradient * total
            gradients = [_weight(stage) * total for total in accumulate(gradients[::-1])][::-1]
    return found


def prove_gradients(schedule: Schedule, replicas: Sequence[Sequence[int]]) -> None:
    """Check that a valid lowered schedule computes the weight gradients of a plain loop.

    replicas: for each pp_rank, the pp_ranks over which its gradients are summed, itself included. Weights stay the same
    throughout, also in asynchronous schedules. Raises ScheduleError with the first action whose weight gradient
    differs, or with the stage and microbatch that a reduced gradient does not count exactly once.
    """
    step = _Step(schedule)
    step.run()
    everything = Counter(range(schedule.num_units))
    for pp_rank, group in enumerate(replicas):
        totals: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for number, (stage, _) in enumerate(step.reduced[pp_rank]):
            for other in group:  # a collective of all of them: the n-th of each
                there, counted = (step.reduced[other][number : number + 1] or [(-1, Counter[int]())])[0]
                if there != stage:
                    what = f"reduces stage {there}" if there >= 0 else "has no further reduction"
                    step.fail(f"rank {pp_rank} reduces stage {stage} where rank {other}, over which it sums, {what}")
                totals[stage].update(counted)
        for stage in schedule.placement.stages_of(pp_rank):
            wrong = next((unit for unit in everything if totals[stage][unit] != 1), None)
            if wrong is not None:
                step.fail(
                    f"rank {pp_rank}: the gradient of stage {stage}, summed over pp_ranks {' '.join(map(str, group))}, "
                    f"counts microbatch {wrong} {totals[stage][wrong]} times, not once"
                )


class _Step:
    """One step of all ranks. reduced: for each rank its reductions in order, as (stage, how often each unit counts)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, ranks = schedule, range(schedule.num_ranks)
        self.expected: Mapping[Unit, int] = plain_gradients(
            schedule.num_stages, schedule.num_microbatches, schedule.num_slices
        )
        self.reduced: list[list[tuple[int, Counter[int]]]] = [[] for _ in ranks]
        self._positions = [0 for _ in ranks]
        self._values: list[dict[Value, int]] = [{} for _ in ranks]  # made there, or received
        self._posted: list[dict[Value, tuple[ChannelPath, int]]] = [{} for _ in ranks]  # the n-th message of a channel
        self._num_posted: Counter[ChannelPath] = Counter()
        self._sent: defaultdict[ChannelPath, list[int]] = defaultdict(list)
        self._read: list[dict[Unit, int]] = [{} for _ in ranks]  # what the weight multiplied in F
        self._left: list[dict[Unit, int]] = [{} for _ in ranks]  # output gradients that I leaves for W
        self._sums: Counter[tuple[int, Op, int, int]] = Counter()  # over the slices so far: rank, op, stage, microbatch
        self._unreduced: list[defaultdict[int, Counter[int]]] = [defaultdict(Counter) for _ in ranks]

    def run(self) -> None:
        """Run every rank to the end of its row. Raises ScheduleError if a weight gradient is wrong or ranks stop."""
        rows, progress = self.schedule.rows, True
        while progress:
            progress = False
            for rank, row in enumerate(rows):
                while self._positions[rank] < len(row) and self._execute(rank, row[self._positions[rank]]):
                    self._positions[rank] += 1
                    progress = True
        stopped = next((rank for rank, row in enumerate(rows) if self._positions[rank] < len(row)), None)
        if stopped is not None:
            self.fail(f"{rows[stopped][self._positions[stopped]]} waits for a message that is not sent", stopped)

    def fail(self, message: str, *ranks: int) -> NoReturn:
        """Raise ScheduleError with the rows, the current action of `ranks` marked."""
        marks = [(rank, self._positions[rank]) for rank in ranks]
        where = "".join(f"rank {rank}, slot {slot}: " for rank, slot in marks)
        rows = rows_text(self.schedule.rows, marks, num_slices=self.schedule.num_slices)
        named = with_slices(message, self.schedule.num_slices)
        raise ScheduleError(f"schedule {self.schedule} computes wrong gradients: {where}{named}\n{rows}")

    def _execute(self, rank: int, action: Action) -> bool:
        """Execute an action; return False if its message is not there yet."""
        stage, op, unit = action
        if op in COMPUTE_OPS:
            return self._compute(rank, action)
        if op in (Op.REDUCE_GRAD, Op.UPDATE):
            self.reduced[rank].append((stage, self._unreduced[rank].pop(stage, Counter())))
        elif op in SEND_OPS | RECV_OPS:
            assert unit is not None
            channel = channel_of(action, len(self.schedule.placement.directions))
            kind, offset = (NEEDS if op in SEND_OPS else MAKES)[op][0]
            value = Value(kind, stage + offset, unit)
            if op in SEND_OPS:
                self._sent[channel].append(self._values[rank][value])
            else:
                self._posted[rank][value] = channel, self._num_posted[channel]
                self._num_posted[channel] += 1
        return True

    def _input(self, rank: int, kind: ValueKind, stage: int, unit: int) -> int | None:
        """Return the value of a stage, None if it is not there yet."""
        if stage < 0:
            return _data(unit)
        if stage == self.schedule.num_stages:
            return self._values[rank][Value(ValueKind.ACT, stage - 1, unit)] - _target(unit)
        value = Value(kind, stage, unit)
        if value in self._posted[rank]:
            channel, number = self._posted[rank][value]
            return self._sent[channel][number] if number < len(self._sent[channel]) else None
        return self._values[rank].get(value)

    def _compute(self, rank: int, action: Action) -> bool:
        stage, op, unit = action
        assert unit is not None
        here, gradient = (stage, unit), self._left[rank].get((stage, unit))
        if op is not Op.W:
            kind, offset = (ValueKind.ACT, -1) if op is Op.F else (ValueKind.GRAD, 1)
            value = self._input(rank, kind, stage + offset, unit)
            if value is None:
                return False
            direction = Op.F if op is Op.F else Op.B
            key = rank, direction, stage, unit // self.schedule.num_slices
            self._sums[key] += value
            if op is Op.F:
                self._read[rank][here] = self._sums[key]
            self._values[rank][Value(kind, stage, unit)] = _weight(stage) * self._sums[key]
            self._left[rank][here] = gradient = value
        if op in (Op.B, Op.W):
            assert gradient is not None
            found, expected = gradient * self._read[rank][here], self.expected[here]
            if found != expected:
                what = f"the weight gradient of stage {stage}, microbatch {unit}"
                self.fail(f"{action}: {what} is {found}, but {expected} in a plain loop", rank)
            self._unreduced[rank][stage][unit] += 1
        return True
