"""The search for the fastest layouts of a configuration on a number of accelerators, with their time and memory.

A candidate is a configuration that training accepts too: nothing is predicted that `resolve` refuses. Candidates are
tried in order of a lower bound of their time, and the search ends when no remaining bound is below the times of the
best. The result is therefore the best by the model of `step_time`, not by a heuristic.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.extras.search.bounds import Bound, Bounds
from megapipe.extras.search.layout import Layout, layouts, takes_any_chunks
from megapipe.plan.hardware import Hardware
from megapipe.plan.memory import RankMemory, all_rank_memory, rank_memory
from megapipe.plan.resolve import resolve, vary
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, predict_step
from megapipe.schedule.action import Op

MOST_MISSES = 3
FILLS = 4  # a short step has about this many times pp microbatches
NEAR_MISS = 1.25  # layouts that need more than this times the usable memory are not reported


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction. plan: the plan that training would use."""

    layout: Layout
    plan: RunPlan = field(repr=False)
    time: StepTime = field(repr=False)
    memory: tuple[RankMemory, ...] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The bytes of the fullest rank."""
        return max(rank.total for rank in self.memory)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    best: the fastest layouts that fit, fastest first.
    misses: layouts faster than the best, but slightly too large, fastest first.
    num_tried: layouts whose bound was computed.
    num_predicted: layouts that were simulated.
    rival: the fastest layout with a pipeline, if none of `best` has one.
    least_bytes: for each pp a lower bound of the fullest rank's bytes, over all other choices.
    """

    best: tuple[Candidate, ...]
    misses: tuple[Candidate, ...]
    num_tried: int
    num_predicted: int
    rival: Candidate | None = None
    least_bytes: Mapping[int, float] = field(default_factory=dict)


def search(
    config: Config,
    world_size: int,
    hardware: Hardware,
    pinned: Callable[[Layout], bool] = lambda _: True,
    num_best: int = 10,
) -> Found:
    """Return the `num_best` fastest layouts of `config` on `world_size` accelerators.

    config: with a vocabulary size and a global batch size.
    pinned: returns True for the layouts to consider (default: all).
    Raises ConfigError without a global batch size, if no layout is legal, and if none nearly fits.
    """
    if config.training.global_batch_size is None:
        raise ConfigError(
            "--global-batch-size is missing: the number of sequences in a step limits the parallelism; set it"
        )
    walk = _Walk(config, world_size, hardware, num_best)
    bounds = Bounds(config, world_size, hardware)
    wanted = [(bounds.of(layout), layout) for layout in layouts(config, world_size, hardware) if pinned(layout)]
    bounded = sorted(
        ((bound, layout) for bound, layout in wanted if bound is not None), key=lambda pair: pair[0].seconds
    )
    walk.along(bounded)
    if not walk.best and not walk.too_large:
        least = min((bound.least_bytes for bound, _ in bounded), default=None)
        raise ConfigError(_nothing_found(config, world_size, hardware, walk.refused, least))
    found = sorted((walk.in_full(layout) for _, layout in walk.best), key=lambda each: each.time.seconds)
    misses = walk.misses(found[0].time.seconds if found else math.inf)
    rival = None
    if found and all(each.layout.pp == 1 for each in found):
        piped = _Walk(config, world_size, hardware, 1, walk)
        piped.along([(bound, layout) for bound, layout in bounded if layout.pp > 1])
        rival = next((piped.in_full(layout) for _, layout in piped.best), None)
    least_bytes: dict[int, float] = {}
    for bound, layout in bounded:
        least_bytes[layout.pp] = min(bound.least_bytes, least_bytes.get(layout.pp, math.inf))
    return Found(tuple(found), misses, len(bounded), walk.num_predicted, rival, least_bytes)


class _Walk:
    """The state of a search: the best layouts found so far, and those that are slightly too large."""

    def __init__(
        self, config: Config, world_size: int, hardware: Hardware, num_best: int, before: _Walk | None = None
    ) -> None:
        self._config, self._world_size, self._hardware, self._num_best = config, world_size, hardware, num_best
        self._steps: ShortSteps = before._steps if before else ShortSteps(config, world_size, hardware)
        self.best: list[tuple[float, Layout]] = []
        self.too_large: list[tuple[float, Layout]] = []  # seconds, or a lower bound of them
        self.num_predicted, self.refused = 0, ""

    @property
    def slowest(self) -> float:
        """The seconds that a layout has to beat."""
        return self.best[-1][0] if len(self.best) == self._num_best else math.inf

    def along(self, bounded: Sequence[tuple[Bound, Layout]]) -> None:
        """Look at the layouts in the order of their bounds, until no bound beats the best."""
        usable = self._hardware.usable_bytes
        for bound, layout in bounded:
            if bound.seconds >= self.slowest:
                break
            if bound.least_bytes > usable:
                if bound.least_bytes <= NEAR_MISS * usable:
                    self.too_large.append((bound.seconds, layout))
                continue
            try:
                seconds, need = self._steps.of(layout, self.slowest, usable)
            except ConfigError as error:
                self.refused = f"{layout}: {error}"
                continue
            self.num_predicted += 1
            if need > usable:
                if need <= NEAR_MISS * usable:
                    self.too_large.append((seconds if seconds < math.inf else bound.seconds, layout))
            elif seconds < self.slowest:
                bisect.insort(self.best, (seconds, layout), key=lambda pair: pair[0])
                del self.best[self._num_best :]

    def in_full(self, layout: Layout) -> Candidate:
        return predict(self._config, layout, self._world_size, self._hardware)

    def misses(self, fastest: float) -> tuple[Candidate, ...]:
        """Return the fastest of the layouts that are slightly too large, if faster than `fastest`."""
        most, found = int(NEAR_MISS * self._hardware.usable_bytes), list[tuple[float, Layout]]()
        for bound, layout in sorted(self.too_large, key=lambda pair: pair[0]):
            slowest = min(fastest, found[MOST_MISSES - 1][0] if len(found) >= MOST_MISSES else math.inf)
            if bound >= slowest:
                break
            try:
                seconds, need = self._steps.of(layout, slowest, most)
            except ConfigError:
                continue
            self.num_predicted += 1
            if seconds < slowest and need <= most:
                bisect.insort(found, (seconds, layout), key=lambda pair: pair[0])
        return tuple(self.in_full(layout) for _, layout in found[:MOST_MISSES])


class ShortSteps:
    """Short-step predictions of a configuration's layouts.

    Beyond `FILLS` pipeline fills only the steady middle of a step grows, by the same time for every pp microbatches;
    the peak memory stays the same. Plans that differ only in microbatch size and recompute share the rest.
    """

    def __init__(self, config: Config, world_size: int, hardware: Hardware) -> None:
        self._config, self._world_size, self._hardware = config, world_size, hardware
        self._plans: dict[Hashable, RunPlan] = {}

    def of(self, layout: Layout, slowest: float, most_bytes: float) -> tuple[float, int]:
        """Return (seconds of a step, bytes of the fullest rank). Raises ConfigError.

        If the first rank already needs more than `most_bytes`: (inf, its bytes). If the step takes `slowest` seconds or
        more, the bytes are only a lower bound.
        """
        batch, dp = self._config.training.global_batch_size, self._world_size // layout.tp // layout.pp
        assert batch is not None
        count = batch // dp // layout.micro_batch_size
        few = count if count <= (FILLS + 1) * layout.pp else FILLS * layout.pp + count % layout.pp
        plan = self._plan(layout, few * dp * layout.micro_batch_size)
        need = _in_a_whole_step(rank_memory(plan, 0), count, few)
        if need > most_bytes:
            return math.inf, need
        time = predict_step(plan, self._hardware)
        seconds = time.seconds + (count - few) // layout.pp * _period(time, layout.pp)
        if seconds < slowest:
            need = max(_in_a_whole_step(rank, count, few) for rank in all_rank_memory(plan))
        return seconds, need

    def _plan(self, layout: Layout, batch: int) -> RunPlan:
        training = dataclasses.replace(self._config.training, global_batch_size=batch, rampup_batch_size=None)
        config = layout.applied_to(dataclasses.replace(self._config, training=training))
        key = dataclasses.replace(layout, micro_batch_size=1, recompute=None)  # type: ignore[arg-type]
        if key in self._plans:
            return vary(self._plans[key], config)
        self._plans[key] = resolve(config, self._world_size, self._hardware.ranks_per_node)
        return self._plans[key]


def _in_a_whole_step(rank: RankMemory, count: int, few: int) -> int:
    """Return the rank's bytes in a whole step, which holds the inputs of all `count` microbatches instead of `few`."""
    return rank.total + rank.items["microbatches"] // few * (count - few)


def _period(time: StepTime, pp: int) -> float:
    """Return the seconds that pp more microbatches take in the middle of a step.

    Measured between two input gradients of the last stage that are pp microbatches apart.
    """
    timeline = time.timeline
    last = timeline.schedule.num_stages - 1
    rank = timeline.schedule.placement.rank_of_stage[last]
    row = timeline.schedule.rows[rank]
    ends = [
        timeline.ends[rank][slot] for slot, (stage, op, _) in enumerate(row) if stage == last and op in (Op.B, Op.I)
    ]
    middle = len(ends) - 1 - pp - (pp // 2 if takes_any_chunks(timeline.schedule.name) else 0)
    return ends[middle] - ends[middle - pp] if middle >= pp else max(timeline.work_seconds) * pp / len(ends)


def predict(config: Config, layout: Layout, world_size: int, hardware: Hardware) -> Candidate:
    """Predict one layout over a whole step. Raises ConfigError if training would refuse it."""
    plan = resolve(layout.applied_to(config), world_size, hardware.ranks_per_node)
    return predict_plan(layout, plan, hardware)


def predict_plan(layout: Layout, plan: RunPlan, hardware: Hardware) -> Candidate:
    """Predict a plan over a whole step. layout: the layout that it was made from."""
    return Candidate(layout, plan, predict_step(plan, hardware), all_rank_memory(plan))


def _nothing_found(config: Config, world_size: int, hardware: Hardware, refused: str, least: float | None) -> str:
    if refused:
        return f"no layout on {world_size} {hardware.name} is legal; the last one tried: {refused}"
    if least is None:
        return (
            f"no layout on {world_size} {hardware.name}: --global-batch-size {config.training.global_batch_size} must "
            "be a multiple of the data-parallel size for some tensor- and pipeline-parallel size that the flags allow; "
            "change the batch size, the number of accelerators or the flags"
        )
    return (
        f"the model does not fit on {world_size} {hardware.name}: any layout needs {least / 2**30:.1f} GiB or more of "
        f"the {hardware.usable_bytes / 2**30:.1f} GiB of each that can be used; use more accelerators, or another kind"
    )
