"""The arguments of generators and of the simulator: Shape, Costs and the AutoGoal of the automatic scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from megapipe.schedule.action import Op


class Seconds(NamedTuple):
    """Seconds of one stage, or of one slice of a model."""

    forward: float
    input_gradient: float
    weight_gradient: float


def seconds_of_stages(stages: Iterable[Seconds], transfer_seconds: float) -> dict[tuple[int, Op], float]:
    """Return the seconds of every op and message; a full backward takes as long as its two halves, without replay."""
    seconds: dict[tuple[int, Op], float] = {}
    for stage, (forward, input_gradient, weight_gradient) in enumerate(stages):
        seconds[stage, Op.F], seconds[stage, Op.B] = forward, input_gradient + weight_gradient
        seconds[stage, Op.I], seconds[stage, Op.W] = input_gradient, weight_gradient
        seconds[stage, Op.RECOMPUTE] = 0.0
        seconds[stage, Op.SEND_F] = seconds[stage, Op.SEND_B] = transfer_seconds
    return seconds


@dataclass(frozen=True)
class Costs:
    """Seconds of each op of each stage.

    seconds: for (stage, F | B | I | W) the computation; for (stage, SEND_F | SEND_B) the time a message of that stage
    occupies its channel; for (stage, RECOMPUTE) what this takes and the B or I after it takes less; for (stage,
    UNSHARD) the gather of its weights, for (stage, REDUCE_GRAD) a reduction, which a rank runs one at a time in the
    order of its row; for (stage, OFFLOAD | RELOAD) a copy to the host, or back, likewise one at a time. Those not named
    take no time.
    """

    seconds: Mapping[tuple[int, Op], float]
    latency_seconds: float = 0.0  # from the end of a message's transfer to its use
    overlap: bool = True  # messages and reductions overlap with computation; otherwise a rank blocks for them
    # (stage of the forward, stage of the backward) -> an overlapped pair; if missing, the sum of its halves
    pair_seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    rank_speeds: tuple[float, ...] = ()  # relative speed of each pp_rank's computation, 1: the given seconds; (): all 1
    # stages that occupy the network of a rank, not its computation: the all-to-alls of a schedule of parts
    network: frozenset[int] = frozenset()
    # of a schedule with slices: the share that each slice has in `seconds`, which are those of a whole microbatch;
    # where missing, all have the same
    slice_shares: Mapping[tuple[int, Op], tuple[float, ...]] = field(default_factory=dict)

    def of_slice(self, stage: int, op: Op, index: int, num_slices: int) -> float:
        """Return the seconds of a slice; 0 for what has no cost."""
        shares = self.slice_shares.get((stage, op))
        share = 1.0 / num_slices if shares is None else shares[index]
        return self.seconds.get((stage, op), 0.0) * share

    @staticmethod
    def equal(
        num_stages: int,
        forward_seconds: float = 1.0,
        input_gradient_seconds: float = 0.5,
        weight_gradient_seconds: float = 0.5,
        transfer_seconds: float = 0.0,
        latency_seconds: float = 0.0,
        pair_seconds: float | None = None,
    ) -> Costs:
        """Return equal costs for every stage; a full backward takes as long as its two halves."""
        of_stage = Seconds(forward_seconds, input_gradient_seconds, weight_gradient_seconds)
        seconds = seconds_of_stages([of_stage] * num_stages, transfer_seconds)
        pairs = product(range(num_stages), range(num_stages))
        of_pairs = {} if pair_seconds is None else dict.fromkeys(pairs, pair_seconds)
        return Costs(seconds, latency_seconds, pair_seconds=of_pairs)


@dataclass(frozen=True)
class AutoGoal:
    """The goal of the automatic scheduler (zb-auto)."""

    costs: Costs  # seconds of F, I, W and of messages, by stage
    max_microbatches: float  # the most that any rank may keep alive at once
    kept_for_weights: float = 1.0  # the part of the activations kept from I to W; 1: all, as peak_live_chunks counts
    tries: int | None = None  # rules tried beyond the coarse grid; None: as many as take a few seconds


class Shape(NamedTuple):
    """The size of a schedule: group_size microbatches run through one of a rank's chunks before the next chunk.

    With num_slices > 1, the slices take the place of microbatches: group_size of them are a group, and actions carry
    the numbers of slices (`Schedule.num_units`).
    """

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int
    goal: AutoGoal | None = None  # for the automatic scheduler
    num_slices: int = 1
    num_steps: int = 1  # that the microbatches make up; several only of asynchronous schedules

    @property
    def step_size(self) -> int:
        """Microbatches of a step."""
        return self.num_microbatches // self.num_steps

    @property
    def forward_order(self) -> list[int]:
        """The microbatches, or slices, in the order of their forwards on a stage."""
        return list(range(self.num_microbatches * self.num_slices))

    @property
    def backward_order(self) -> list[int]:
        """The microbatches in the order of their backwards on a stage; of slices, each one's last comes first."""
        k = self.num_slices
        return [m * k + j for m in range(self.num_microbatches) for j in reversed(range(k))]
