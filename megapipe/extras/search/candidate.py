"""The goal and the result of a search: layouts with their predicted time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megapipe.extras.search.layout import Layout
from megapipe.plan.hardware import Hardware
from megapipe.plan.memory import RankMemory, all_rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, predict_step

OBJECTIVES = ("time", "gpus", "cost")
SECONDS_OF_AN_HOUR = 3600.0


@dataclass(frozen=True)
class Objective:
    """The goal of a search: the fastest step on all accelerators, the fewest accelerators, or the cheapest tokens."""

    kind: str = "time"  # one of OBJECTIVES
    tokens_per_second: float | None = None  # that 'gpus' and 'cost' have to reach
    price_per_hour: float | None = None  # of one accelerator, for 'cost'


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction. plan: the plan that training would use."""

    layout: Layout
    plan: RunPlan = field(repr=False)
    time: StepTime = field(repr=False)
    memory: tuple[RankMemory, ...] = field(repr=False)

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs the most memory."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def peak_bytes(self) -> int:
        return self.fullest.total


def predict_plan(layout: Layout, plan: RunPlan, hardware: Hardware) -> Candidate:
    """Predict a plan over a whole step. layout: the layout that it was made from."""
    return Candidate(layout, plan, predict_step(plan, hardware), all_rank_memory(plan))


@dataclass(frozen=True)
class Found:
    """The result of a search on one number of accelerators."""

    num_gpus: int
    best: tuple[Candidate, ...]  # the fastest layouts that fit, fastest first
    misses: tuple[Candidate, ...]  # layouts faster than the best, but slightly too large, fastest first
    num_tried: int  # layouts whose bound was computed
    num_predicted: int  # layouts that were simulated
    rival: Candidate | None  # the fastest layout with a pipeline, if none of `best` has one
    least_bytes: Mapping[int, float]  # for each pp a lower bound of the fullest rank's bytes, over all other choices
    least_bytes_of_cp: Mapping[int, float] = field(default_factory=dict)  # the same for each cp

    def cost(self, price_per_hour: float | None) -> float | None:
        """Return the price of a billion tokens with the best layout; None without one or a price of an accelerator."""
        if price_per_hour is None or not self.best:
            return None
        return self.num_gpus * price_per_hour / SECONDS_OF_AN_HOUR / self.best[0].time.tokens_per_second * 1e9
