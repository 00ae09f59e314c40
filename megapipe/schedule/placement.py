"""Placement: which pp_rank holds which stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """A map of stages to pp_ranks: stage s is on pp_rank rank_of_stage[s].

    With a second direction (DualPipe) every stage is on two ranks: even microbatches travel over `rank_of_stage`, odd
    ones over `second_direction`, and both ranks hold the stage's parameters. The second direction is the mirror of the
    first: gradients are summed, and optimizer state is divided, over the opposite pp_ranks r and num_ranks - 1 - r.
    Raises ConfigError for another one, and for ranks that do not exist or hold no stage.
    """

    num_ranks: int
    rank_of_stage: tuple[int, ...]
    second_direction: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for ranks in self.directions:
            if len(ranks) != len(self.rank_of_stage):
                raise ConfigError(
                    f"the two directions of a placement differ: {len(self.rank_of_stage)} and {len(ranks)} stages"
                )
            if any(not 0 <= rank < self.num_ranks for rank in ranks):
                raise ConfigError(f"the placement {ranks} names a pp_rank outside 0..{self.num_ranks - 1}")
        mirror = tuple(self.num_ranks - 1 - rank for rank in self.rank_of_stage)
        if self.second_direction not in (None, mirror):
            raise ConfigError(
                f"the second direction {self.second_direction} of the placement {self.rank_of_stage} is not its "
                "mirror: gradients of a stage are summed over the opposite pp_ranks r and num_ranks - 1 - r; use "
                f"{mirror}"
            )
        idle = [rank for rank in range(self.num_ranks) if not self.stages_of(rank)]
        if self.num_ranks < 1 or idle:
            raise ConfigError(
                f"pp_ranks {idle} of {self.num_ranks} hold no stage; every pipeline rank must hold at least one"
            )

    @cached_property
    def directions(self) -> tuple[tuple[int, ...], ...]:
        """`rank_of_stage` of each direction; microbatch m takes direction m % len(directions)."""
        return (self.rank_of_stage,) if self.second_direction is None else (self.rank_of_stage, self.second_direction)

    @property
    def is_mirrored(self) -> bool:
        """True if opposite pp_ranks hold the same stages, whose gradients are then summed over both."""
        return self.second_direction is not None

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        held: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for ranks in self.directions:
            for stage, rank in enumerate(ranks):
                held[rank].add(stage)
        return tuple(tuple(sorted(stages)) for stages in held)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that pp_rank holds, in model order."""
        return self._stages[pp_rank]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the pp_rank that runs `stage` for `microbatch`."""
        return self.directions[microbatch % len(self.directions)][stage]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return all pp_ranks that hold `stage`: one, or up to two with two directions."""
        return tuple(sorted({ranks[stage] for ranks in self.directions}))

    @property
    def num_chunks(self) -> int:
        """The most stages that any rank holds."""
        return max(len(stages) for stages in self._stages)


def linear(num_ranks: int) -> Placement:
    """0 1 2 3: stage s on pp_rank s."""
    return Placement(num_ranks, tuple(range(num_ranks)))


def loop(num_ranks: int, num_chunks: int) -> Placement:
    """0 1 2 3 0 1 2 3: stage s on pp_rank s % num_ranks (Narayanan et al. 2021, arXiv:2104.04473)."""
    return Placement(num_ranks, tuple(range(num_ranks)) * num_chunks)


def v_shape(num_ranks: int, num_chunks: int = 2) -> Placement:
    """0 1 2 3 3 2 1 0: pp_rank r holds stages r and 2 num_ranks - 1 - r (Qi et al. 2024, arXiv:2405.15362).

    With more chunks, an even number, again and again: the waves of Hanayo (Liu et al. 2023, arXiv:2308.15762).
    """
    down = tuple(range(num_ranks))
    return Placement(num_ranks, (down + down[::-1]) * (num_chunks // 2))


def two_directions(num_ranks: int, num_chunks: int = 1) -> Placement:
    """Chimera (arXiv:2107.06925), DualPipe (arXiv:2412.19437): rank r holds stages r and num_ranks - 1 - r.

    Even microbatches enter at rank 0, odd ones at the last rank. With more chunks, each direction is a loop.
    """
    down = tuple(range(num_ranks))
    return Placement(num_ranks, down * num_chunks, down[::-1] * num_chunks)
