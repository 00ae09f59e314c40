"""Op and Action, the elements of a pipeline schedule, and their text form."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from megapipe.errors import ScheduleError


class Op(enum.Enum):
    """An operation of a rank on one stage s; "output" and "input" below are those of stage s.

    A RECV posts the receive and does not wait; the action that consumes the message waits for it.
    """

    F = "F"  # forward
    B = "B"  # full backward: I and W together
    I = "I"  # input gradient; leaves the weight gradient to a later W (some papers call this "B")  # noqa: E741
    W = "W"  # weight gradient
    # compute again what F has dropped for recompute, ahead of the B or I, which otherwise does it itself
    RECOMPUTE = "RECOMPUTE"
    SEND_F = "SEND_F"  # the output goes to stage s + 1
    RECV_F = "RECV_F"  # the input comes from stage s - 1
    SEND_B = "SEND_B"  # the input gradient goes to stage s - 1
    RECV_B = "RECV_B"  # the output gradient comes from stage s + 1
    # start the data-parallel reduction of the weight gradients of the stage that this rank has computed since the last
    # one: up to those of this microbatch, or without a microbatch all the rest, which are then complete
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"  # start to gather the stage's weights from their shards; a computation waits for its gather
    RESHARD = "RESHARD"  # free the gathered weights of the stage
    # free the device memory of what the stage keeps for its backward of the microbatch, once the copy to host memory is
    # complete, which starts as the forward ends
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"  # start the copy back to the device; the backward waits for it
    # the next two actions, the F of this stage and microbatch and a backward, run side by side (DualPipe)
    OVERLAP = "OVERLAP"
    # asynchronous schedules: one optimizer step with the gradients since the last one, up to this microbatch's; where
    # it comes later than these, REDUCE_GRAD has started to sum them over the replicas, and NORM, when this is done,
    # their squares over the model
    UPDATE = "UPDATE"
    NORM = "NORM"

    __hash__ = object.__hash__  # faster than Enum's own hash, a Python call; members are singletons


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W, Op.RECOMPUTE})
BUSY_OPS = COMPUTE_OPS | {Op.UPDATE}  # ops that occupy a rank
PLANNED_OPS = COMPUTE_OPS | {Op.OVERLAP, Op.UPDATE}  # the ops of a schedule that is not lowered
# ops that always read weights; a W may (Schedule.reads_weights)
WEIGHTS_OPS = frozenset({Op.F, Op.B, Op.I, Op.RECOMPUTE})
SHARDING_OPS = frozenset({Op.UNSHARD, Op.RESHARD})  # ops of a stage, without a microbatch
OFFLOAD_OPS = frozenset({Op.OFFLOAD, Op.RELOAD})
BACKWARD_OPS = frozenset({Op.B, Op.I, Op.W})
COMPLETES_OPS = frozenset({Op.B, Op.W})  # ops that complete the weight gradient
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
RECV_OPS = frozenset({Op.RECV_F, Op.RECV_B})


class Action(NamedTuple):
    """One entry of a row. UNSHARD, RESHARD and the last REDUCE_GRAD of a stage have no microbatch (None).

    In a schedule with num_slices > 1, `microbatch` numbers the slices of all microbatches: slice j of microbatch i is
    i * num_slices + j. `action_text` writes both numbers.
    """

    stage: int
    op: Op
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"


_PATTERN = re.compile(r"(\d+)([A-Z_]+?)(\d*)", re.ASCII)
_IN_MESSAGE = re.compile(rf"\b(\d+(?:{'|'.join(op.value for op in Op)})|microbatch )(\d+)\b")


def action_text(action: Action, num_slices: int = 1) -> str:
    """Return an action as text, with slices as "2F0.3": the forward of slice 3 of microbatch 0 on stage 2."""
    return str(action) if num_slices == 1 else with_slices(str(action), num_slices)


def with_slices(message: str, num_slices: int) -> str:
    """Return a message with microbatch and slice in place of the numbers of slices."""

    def named(found: re.Match[str]) -> str:
        microbatch, number = divmod(int(found[2]), num_slices)
        return f"{found[1]}{microbatch}{', slice ' if found[1].endswith(' ') else '.'}{number}"

    return message if num_slices == 1 else _IN_MESSAGE.sub(named, message)


def parse_action(text: str) -> Action:
    """Parse "2F0", "2SEND_F0", "2UNSHARD", "2REDUCE_GRAD": the inverse of str(action).

    Raises ScheduleError for anything else.
    """
    match = _PATTERN.fullmatch(text.strip())
    names = {op.value: op for op in Op}
    if match is None or match[2] not in names:
        raise ScheduleError(
            f"{text!r} is not an action; write stage, op, microbatch, as in 2F0, where op is one of {', '.join(names)}"
        )
    op = names[match[2]]
    if op is not Op.REDUCE_GRAD and (op in SHARDING_OPS) != (match[3] == ""):
        rule = "takes no microbatch" if op in SHARDING_OPS else f"needs a microbatch, as in {match[1]}{op.value}0"
        raise ScheduleError(f"{text!r} is not an action: {op.value} {rule}")
    return Action(int(match[1]), op, int(match[3]) if match[3] else None)


def stage_action(text: str) -> Action:
    """Parse the text of an action of a stage, or of a part or slice of it: 2F0 for "2F0.5A" (schedule.parts), "2F0.3".

    The microbatch is that of the text.
    """
    return parse_action(text.partition(".")[0])
