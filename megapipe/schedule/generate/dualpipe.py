"""DualPipe and DualPipeV (DeepSeek-V3, arXiv:2412.19437): forwards overlapped with backwards, so that the communication
of one (above all the all-to-all of expert parallelism) hides under the computation of the other.

Both run the same rows. In DualPipe microbatches enter at both ends of the pipeline: rank r holds stages r and p - 1 -
r, even microbatches travel up the ranks, odd ones down, and the ranks r and p - 1 - r hold the same parameters.
DualPipeV is one half of it, folded: rank r holds stages r and 2 p - 1 - r, a microbatch comes down as one of the first
direction and returns as one of the second, and every parameter is held once.
"""

from __future__ import annotations

from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row

NEAR, FAR = 0, 1  # a rank's stage on the side of the input, and the one on the side of the loss


def check_even_ranks(shape: Shape) -> None:
    """Raise ConfigError unless the number of ranks is even."""
    p = shape.num_ranks
    if p % 2:
        raise ConfigError(
            f"schedule dualpipe pairs every rank with the one opposite; {p} pipeline ranks are odd: use "
            f"{max(2, p - 1)} or {p + 1}"
        )


def dualpipe_counts(num_ranks: int, num_microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Return why so many microbatches cannot run ('' if they can), and the nearest numbers that can."""
    least = 2 * num_ranks
    if num_microbatches < least:
        return f"fills the pipeline from both ends and needs at least 2 x {num_ranks} ranks = {least} microbatches", (
            least,
        )
    if num_microbatches % 2:
        return "sends as many microbatches from either end", (num_microbatches - 1, num_microbatches + 1)
    return "", ()


def dualpipe_v_counts(num_ranks: int, num_microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Return why so many microbatches cannot run ('' if they can), and the nearest numbers that can."""
    least = 2 * num_ranks
    if num_microbatches < least:
        return f"needs at least as many microbatches as its {least} stages", (least,)
    return "", ()


class _Lane(NamedTuple):
    """The microbatches that pass one stage of a rank: first, first + stride, ..."""

    stage: int
    first: int
    stride: int


def dualpipe(shape: Shape) -> tuple[Row, ...]:
    """num_ranks stages, half of the microbatches in each direction; num_ranks and num_microbatches are even."""
    p = shape.num_ranks
    rows = []
    for rank in range(p):
        half_rank = min(rank, p - 1 - rank)
        entering = int(rank >= p // 2)  # the direction that enters at this rank's end
        lanes = (_Lane(half_rank, entering, 2), _Lane(p - 1 - half_rank, 1 - entering, 2))
        rows.append(_Writer(lanes).write(half_rank, p // 2, shape.num_microbatches // 2))
    return tuple(rows)


def dualpipe_v(shape: Shape) -> tuple[Row, ...]:
    """2 num_ranks stages; num_microbatches is at least the number of stages."""
    p = shape.num_ranks
    return tuple(
        _Writer((_Lane(r, 0, 1), _Lane(2 * p - 1 - r, 0, 1))).write(r, p, shape.num_microbatches) for r in range(p)
    )


class _Writer:
    """A writer of one row that counts forwards, backwards and weight gradients of each lane."""

    def __init__(self, lanes: tuple[_Lane, _Lane]) -> None:
        self.lanes = lanes
        self.row: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.pending: list[Action] = []  # W of every I so far, oldest first

    def write(self, rank: int, num_ranks: int, count: int) -> Row:
        """Return the row of `rank` for `count` >= 2 num_ranks microbatches per lane; rank num_ranks - 1 is at
        the turn.
        """
        to_turn = num_ranks - 1 - rank
        for _ in range(2 * to_turn):
            self.forward(NEAR)
        for _ in range(rank + 1):
            self.forward(NEAR)
            self.forward(FAR)
        for _ in range(to_turn):
            self.input_gradient(FAR)
            self.weight_gradient()
            self.forward(FAR)
        for turn in range(count - 2 * num_ranks + rank + 1):
            if turn == 0 and to_turn == 0:
                # the first backward at the turn needs only the forward before this one: unpaired, it starts sooner
                self.forward(NEAR)
                self.backward(FAR)
            else:
                self.overlap(NEAR, FAR)
            self.overlap(FAR, NEAR)
        for _ in range(to_turn):
            self.backward(FAR)
            self.overlap(FAR, NEAR)
        for done in range(2 * (rank + 1)):  # alternate between the lanes; split the second half of these backwards
            lane = (FAR, NEAR)[done % 2]
            if done <= rank:
                self.backward(lane)
            else:
                self.input_gradient(lane)
        for _ in range(to_turn):
            self.weight_gradient()
            self.input_gradient(NEAR)
        while self.pending:
            self.weight_gradient()
        return tuple(self.row)

    def _next(self, counts: list[int], lane: int, op: Op) -> Action:
        stage, first, stride = self.lanes[lane]
        counts[lane] += 1
        return Action(stage, op, first + stride * (counts[lane] - 1))

    def forward(self, lane: int) -> None:
        self.row.append(self._next(self.forwards, lane, Op.F))

    def backward(self, lane: int) -> None:
        self.row.append(self._next(self.backwards, lane, Op.B))

    def input_gradient(self, lane: int) -> None:
        self.row.append(self._next(self.backwards, lane, Op.I))
        self.pending.append(self.row[-1]._replace(op=Op.W))

    def weight_gradient(self) -> None:
        self.row.append(self.pending.pop(0))

    def overlap(self, forward_lane: int, backward_lane: int) -> None:
        forward = self._next(self.forwards, forward_lane, Op.F)
        self.row += (forward._replace(op=Op.OVERLAP), forward, self._next(self.backwards, backward_lane, Op.B))
