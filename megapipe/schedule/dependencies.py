"""The inputs and outputs of every op, from which order, communication, proof, times and memory are derived.

NEEDS and MAKES are tables of (kind of value, stage offset). An input must be on the rank that runs the action, from an
earlier action there or from a message. Two kinds of values travel between stages; between two stages of one rank no
message is needed.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from megapipe.schedule.action import Action, Op
from megapipe.schedule.placement import Placement


class ValueKind(enum.Enum):
    """A kind of value of a (stage, microbatch)."""

    ACT = "activation"  # the stage's output; ACT of stage -1 is the data
    # of the loss by the stage's input; GRAD of stage num_stages is that of the loss, always available
    GRAD = "gradient"
    LEFT = "saved inputs and output gradients"  # kept by I for W
    WGRAD = "weight gradient"
    REPLAY = "recomputed activations"  # kept by RECOMPUTE for B or I, which can do without

    __hash__ = object.__hash__


class Value(NamedTuple):
    """A value of the step."""

    kind: ValueKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.kind.value} of stage {self.stage}, microbatch {self.microbatch}"


NEEDS: dict[Op, tuple[tuple[ValueKind, int], ...]] = {
    Op.F: ((ValueKind.ACT, -1),),
    Op.B: ((ValueKind.ACT, 0), (ValueKind.GRAD, +1)),
    Op.I: ((ValueKind.ACT, 0), (ValueKind.GRAD, +1)),
    Op.W: ((ValueKind.LEFT, 0),),
    Op.RECOMPUTE: ((ValueKind.ACT, 0),),
    Op.SEND_F: ((ValueKind.ACT, 0),),
    Op.SEND_B: ((ValueKind.GRAD, 0),),
    Op.RECV_F: (),
    Op.RECV_B: (),
    Op.REDUCE_GRAD: ((ValueKind.WGRAD, 0),),
    Op.UNSHARD: (),
    Op.RESHARD: (),
    Op.OFFLOAD: ((ValueKind.ACT, 0),),
    Op.RELOAD: (),
    Op.OVERLAP: (),  # its two halves, which follow, have the inputs and outputs
    Op.UPDATE: ((ValueKind.WGRAD, 0),),
    Op.NORM: ((ValueKind.WGRAD, 0),),
}
MAKES: dict[Op, tuple[tuple[ValueKind, int], ...]] = {
    Op.F: ((ValueKind.ACT, 0),),
    Op.B: ((ValueKind.GRAD, 0), (ValueKind.WGRAD, 0)),
    Op.I: ((ValueKind.GRAD, 0), (ValueKind.LEFT, 0)),
    Op.W: ((ValueKind.WGRAD, 0),),
    Op.RECOMPUTE: ((ValueKind.REPLAY, 0),),
    Op.SEND_F: (),
    Op.SEND_B: (),
    Op.RECV_F: ((ValueKind.ACT, -1),),
    Op.RECV_B: ((ValueKind.GRAD, +1),),
    Op.REDUCE_GRAD: (),
    Op.UNSHARD: (),
    Op.RESHARD: (),
    Op.OFFLOAD: (),
    Op.RELOAD: ((ValueKind.ACT, 0),),  # the backward finds what the forward has made on the device again
    Op.OVERLAP: (),
    Op.UPDATE: (),
    Op.NORM: (),
}

# What a slice needs of another one of its microbatch, on its own stage: (kind of value, step to that slice). A forward
# reads the keys and values of the slices before it. A backward completes those of the slices after it: only then are
# the gradients of its keys and values whole.
SLICE_NEEDS: dict[Op, tuple[ValueKind, int]] = {
    Op.F: (ValueKind.ACT, -1),
    Op.B: (ValueKind.GRAD, +1),
    Op.I: (ValueKind.GRAD, +1),
}

# kinds that travel -> (op that sends the value, op that posts its receive, offset from the stage that makes it to the
# one that uses it)
TRAVELS: dict[ValueKind, tuple[Op, Op, int]] = {
    ValueKind.ACT: (Op.SEND_F, Op.RECV_F, +1),
    ValueKind.GRAD: (Op.SEND_B, Op.RECV_B, -1),
}


class Route(NamedTuple):
    """The messages of one kind from one pp_rank to another; they arrive in the order in which they are sent.

    All channels of a route share one in-order connection. Activations and gradients have routes of their own, since
    ranks of a V or of DualPipe send both to the same neighbour, often at the same time.
    """

    sender: int
    receiver: int
    kind: ValueKind

    def __str__(self) -> str:
        return f"{self.kind.value}s from pp_rank {self.sender} to {self.receiver}"


class ChannelPath(NamedTuple):
    """An in-order path of activations or gradients over the boundary between stage `boundary` and `boundary` + 1.

    `direction` separates the two paths of a two-direction placement.
    """

    kind: ValueKind
    boundary: int
    direction: int = 0

    def route(self, placement: Placement) -> Route:
        """Return the route that the channel is part of; its two ends may be one rank."""
        before, after = placement.directions[self.direction][self.boundary : self.boundary + 2]
        return Route(before, after, self.kind) if self.kind is ValueKind.ACT else Route(after, before, self.kind)

    def __str__(self) -> str:
        source, target = self.boundary, self.boundary + 1
        if self.kind is ValueKind.GRAD:
            source, target = target, source
        direction = f", direction {self.direction}" if self.direction else ""
        return f"{self.kind.value}s of stage {source} -> {target}{direction}"


def channel_of(action: Action, num_directions: int = 1) -> ChannelPath:
    """Return the channel of a SEND or RECV action."""
    if action.microbatch is None or action.op not in _BOUNDARY:
        raise ValueError(f"{action} is not a message")
    kind, offset = _BOUNDARY[action.op]
    return ChannelPath(kind, action.stage + offset, action.microbatch % num_directions)


_BOUNDARY = {
    Op.SEND_F: (ValueKind.ACT, 0),
    Op.RECV_F: (ValueKind.ACT, -1),
    Op.SEND_B: (ValueKind.GRAD, -1),
    Op.RECV_B: (ValueKind.GRAD, 0),
}
