"""The search for the fastest layouts of a configuration on a number of accelerators, and for the best such number.

A candidate is a configuration that training accepts too: nothing is predicted that `resolve` refuses. Candidates are
tried in order of a lower bound of their time, and the search ends when no remaining bound is below the times of the
best. Layouts of a group are bounded one by one only once the bound of the group is the least. The result is therefore
the best by the model of `step_time`, not by a heuristic. Recompute memory budgets are not candidates; afterwards each
of the best layouts with recompute is also tried with the largest budget that fits.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from megapipe.config.config import Config, resolve_model
from megapipe.config.parallel import RecomputeConfig, strategy_of
from megapipe.config.problems import divisors
from megapipe.errors import ConfigError
from megapipe.extras.search.bounds import NEAR_MISS, Bound, Bounds
from megapipe.extras.search.layout import Context, Group, Layout, Variant, groups, keeps_all
from megapipe.formatting import bytes_text
from megapipe.plan.expert_load import BALANCED, ExpertLoad
from megapipe.plan.expert_overlap import fill_seconds, hidden_seconds, least_of_rank
from megapipe.plan.hardware import Hardware
from megapipe.plan.memory import RankMemory, all_rank_memory, rank_memory
from megapipe.plan.resolve import resolve, vary
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, most_exchanged, predict_step, stage_seconds, without_exchanges
from megapipe.schedule.action import Op
from megapipe.schedule.schedule import gc_paused
from megapipe.trace.parameters import model_parameters

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
        return max(self.memory, key=lambda rank: rank.device_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.fullest.device_bytes


def predict_plan(layout: Layout, plan: RunPlan, hardware: Hardware) -> Candidate:
    """Predict a plan over a whole step. layout: the layout that it was made from."""
    return Candidate(layout, plan, predict_step(plan, hardware), all_rank_memory(plan, hardware.nccl_bytes))


@dataclass(frozen=True)
class Found:
    """The result of a search on one number of accelerators."""

    num_gpus: int
    best: tuple[Candidate, ...]  # the fastest layouts that fit, fastest first
    misses: tuple[Candidate, ...]  # layouts faster than the best, but slightly too large, fastest first
    num_tried: int  # layouts of the groups, with the variants that are searched
    num_predicted: int  # layouts that were simulated
    rival: Candidate | None  # the fastest layout with a pipeline, if none of `best` has one
    least_bytes: Mapping[int, float]  # for each pp a lower bound of the fullest rank's bytes, over all other choices
    least_bytes_of_cp: Mapping[int, float] = field(default_factory=dict)  # the same for each cp
    steps: ShortSteps | None = field(default=None, repr=False)

    def cost(self, price_per_hour: float | None) -> float | None:
        """Return the price of a billion tokens with the best layout; None without one or a price of an accelerator."""
        if price_per_hour is None or not self.best:
            return None
        return self.num_gpus * price_per_hour / SECONDS_OF_AN_HOUR / self.best[0].time.tokens_per_second * 1e9


UNSHARDED: dict[str, Any] = {"sharding": "", "units": 1, "distributed_optimizer": True, "instances": 1}
Steps = Generator[tuple[float, float | None], None, int]
MOST_MISSES = 3
FILLS = 4  # a short step has about this many times pp microbatches
SHORT_STEP_ERROR = 1.01  # a short step's prediction for a whole one is at most this factor too long
PARTS_ERROR = 0.99  # of the seconds of stages, to which those of their parts, means of kinds of layers, add up
ONCE = ("reduce", "gather", "optimizer")  # parts of a step's time that do not grow with its microbatches
PARTS = 64  # of a recompute memory budget
LEAST_BYTES = 4  # per parameter, over all ranks: weight and gradient, at 2 bytes each


def choose(
    config: Config,
    most: int,
    hardware: Hardware,
    objective: Objective,
    pinned: Callable[[Layout], bool] = lambda _: True,
    load: ExpertLoad = BALANCED,
) -> tuple[Found, list[Found]]:
    """Return the best result on up to `most` accelerators, and those of all numbers of accelerators tried, ascending.

    'gpus' goes up from the fewest: more accelerators can be slower, where they do not divide the batch or the layers.
    'cost' tries `most`, half of it and so on. Raises ConfigError if nothing fits or reaches tokens_per_second.
    """
    if objective.kind == "time":
        found = search(config, most, hardware, pinned, load=load)
        return found, [found]
    tried: dict[int, Found] = {}

    def is_enough(num_gpus: int) -> bool:
        try:
            found = tried[num_gpus] = search(config, num_gpus, hardware, pinned, load=load)
        except ConfigError:  # no layout is legal or nearly fits
            return False
        return bool(found.best) and found.best[0].time.tokens_per_second >= (objective.tokens_per_second or 0.0)

    def is_possible(num_gpus: int) -> bool:
        """Return False if no layout fits and reaches the goal."""
        tokens = (config.training.global_batch_size or 0) * config.model.seq_length
        goal = objective.tokens_per_second
        slowest = tokens / goal * SHORT_STEP_ERROR if goal else math.inf
        here = hardware.on(num_gpus)
        walk = _Walk(ShortSteps(config, num_gpus, here, load), 1, slowest, here.usable_bytes)
        walk.along(Frontier(bounds.at(num_gpus), config, num_gpus, here, pinned))
        return bool(walk.best)

    bounds = Bounds(config, 1, hardware, load)
    elements = sum(math.prod(spec.shape) for spec in model_parameters(resolve_model(config.model, 1), False))
    least, node = math.ceil(elements * LEAST_BYTES / hardware.usable_bytes), hardware.ranks_per_node
    in_a_node = [number for number in divisors(node) if number <= most]
    # from the fewest accelerators that could hold the model
    numbers = [number for number in [*in_a_node, *range(2 * node, most + 1, node)] if number >= least] or [most]
    if objective.kind == "cost":
        halves = [most >> times for times in range(most.bit_length()) if most >> times >= numbers[0]]
        enough = [number for number in halves if is_enough(number)]
    else:
        enough = next(([number] for number in numbers if is_possible(number) and is_enough(number)), [])
    if not enough:
        reach = f" and reaches {objective.tokens_per_second:,.0f} tokens/s" if objective.tokens_per_second else ""
        raise ConfigError(f"no layout on up to {most} {hardware.name} fits{reach}; use more of them, or another kind")
    best = min((tried[number] for number in enough), key=lambda found: found.cost(objective.price_per_hour) or math.inf)
    return best, [tried[number] for number in sorted(tried)]


class Frontier:
    """The layouts of a search in the order of lower bounds of their times.

    A heap of groups, of groups with one setting of recompute, and of layouts. What has the least bound is opened, or is
    the next layout; so that layouts of slow groups are never bounded one by one.
    """

    def __init__(
        self,
        bounds: Bounds,
        config: Config,
        world_size: int,
        hardware: Hardware,
        pinned: Callable[[Layout], bool],
    ) -> None:
        """Raises ConfigError without a global batch size, and with --freeze."""
        if config.optimizer.freeze:
            rule = "the search bounds layouts by the memory of models that are trained whole"
            raise ConfigError(f"--freeze: {rule}; leave it out, and plan the layouts it finds with it")
        if config.training.global_batch_size is None:
            raise ConfigError("--global-batch-size is missing; set it: the sequences of a step limit the parallelism")
        self._bounds, self._pinned, self._most_bytes = bounds, pinned, NEAR_MISS * hardware.usable_bytes
        self.num_layouts, self._numbers = 0, itertools.count()
        self._heap: list[tuple[float, int, Bound, Layout, Group | None]] = []
        self._least: dict[tuple[int, int], float] = {}  # the least bytes of each pp and cp
        self._groups: dict[Layout, Group] = {}  # by their first layout
        self._added: set[Layout] = set()
        every = list(groups(config, world_size, hardware))
        # with experts, sharded weights take three times as long to search: only where nothing else is allowed
        self._add([group for group in every if group.first.etp is None or not group.first.sharding])
        if not self.num_layouts:
            self._add(every)

    def _add(self, every: Iterable[Group]) -> None:
        for group in every:
            first, *others = group.variants
            variants = [first] if self._allows(group, first) else [each for each in others if self._allows(group, each)]
            if variants:
                # several instances are searched only where the first variant is not allowed
                searched = [each for each in group.variants if each.instances == 1] if variants == [first] else variants
                self.num_layouts += group._replace(variants=searched).size
                self._groups[group.first] = group
                bound = self._bounds.of_group(group.first)
                self._push(bound, group.first, group._replace(variants=variants))

    def _allows(self, group: Group, variant: Variant) -> bool:
        return any(map(self._pinned, group.members(variant)))

    def _push(self, bound: Bound | None, layout: Layout, group: Group | None) -> None:
        if bound is not None and bound.least_bytes <= self._most_bytes:
            heapq.heappush(self._heap, (bound.seconds, next(self._numbers), bound, layout, group))
        elif bound is not None:
            self._note(bound, layout)

    def _note(self, bound: Bound, layout: Layout) -> None:
        sizes = layout.pp, layout.context.ranks
        self._least[sizes] = min(bound.least_bytes, self._least.get(sizes, math.inf))

    def __iter__(self) -> Iterator[tuple[Bound, Layout]]:
        """Yield the layouts that may fit, or nearly, least seconds first."""
        while self._heap:
            _, _, bound, layout, group = heapq.heappop(self._heap)
            if group is None:
                self._note(bound, layout)
                yield bound, layout
            elif len(group.recomputes) > 1:
                for recompute in group.recomputes:
                    first = dataclasses.replace(layout, recompute=recompute)
                    self._push(self._bounds.of_group(first), first, group._replace(recomputes=(recompute,)))
            else:
                times = cache(partial(self._bounds.times_of, layout))
                for member in filter(self._pinned, group.members(*group.variants)):
                    self._push(self._bounds.of(member, times), member, None)

    def again(self, bound: Bound, layout: Layout, seconds: float) -> None:
        """Put a layout back with a larger bound."""
        self._push(bound._replace(seconds=max(bound.seconds, seconds)), layout, None)

    def add_variants(self, layout: Layout, seconds: float, computed: float | None) -> None:
        """Add the variants of a layout that keep more, if they may be faster, with any recompute; of one instance.

        seconds: of the layout. computed: those that variants share, without what replicas exchange and update. None:
        the layout does not fit, but may without gathered weights.
        """
        shape = {"schedule": "1f1b", "chunks": 1, "units": 1, "cut": "cost", "recompute": RecomputeConfig()}
        group = self._groups.get(dataclasses.replace(layout, **shape))  # type: ignore[arg-type]
        if group is None:
            return
        for variant in group.variants[1:]:
            if variant.instances > 1 or (computed is None and variant.sharding == layout.sharding):
                continue
            least = computed or 0.0
            for recompute in (layout.recompute,) if computed is None else group.recomputes:
                other = dataclasses.replace(layout, recompute=recompute, **variant._asdict())
                bound = self._bounds.of(other)
                if bound is None or least + bound.optimizer >= seconds:
                    break
                if other not in self._added and self._pinned(other):
                    self._added.add(other)
                    self.again(bound, other, least + bound.optimizer)

    def least_bytes(self, axis: int) -> dict[int, float]:
        """Return for each pp (axis 0) or cp (axis 1) a lower bound of the bytes of the fullest rank."""
        for _, _, bound, layout, _ in self._heap:
            self._note(bound, layout)
        least: dict[int, float] = {}
        for sizes, num_bytes in self._least.items():
            least[sizes[axis]] = min(num_bytes, least.get(sizes[axis], math.inf))
        return least


@gc_paused()  # plans and schedules are many objects, and none is a cycle
def search(
    config: Config,
    world_size: int,
    hardware: Hardware,
    pinned: Callable[[Layout], bool] = lambda _: True,
    num_best: int = 10,
    load: ExpertLoad = BALANCED,
) -> Found:
    """Return the `num_best` fastest layouts of `config` on `world_size` accelerators.

    config: with a vocabulary size and a global batch size.
    pinned: returns True for the layouts to consider (default: all).
    load: of experts; of a layout with a small ep as much of it as that ep allows.
    Raises ConfigError without a global batch size, with --freeze, if no layout is legal, and if none nearly fits.
    """
    hardware = hardware.on(world_size)
    bounds, steps = Bounds(config, world_size, hardware, load), ShortSteps(config, world_size, hardware, load)
    usable, frontier = hardware.usable_bytes, Frontier(bounds, config, world_size, hardware, pinned)
    walk = _Walk(steps, num_best, math.inf, usable)
    walk.along(frontier)
    least_bytes = frontier.least_bytes(0)
    if not walk.best and not walk.too_large:
        raise ConfigError(_nothing_found(config, world_size, hardware, walk.refused, least_bytes))
    recomputing = [
        layout
        for layout in walk.best
        # not with an imbalance: a run chooses by the memory of balanced routing; nor in parts, which have no budgets
        if layout.recompute != RecomputeConfig() and load == BALANCED and not layout.overlap
    ]
    refined = map(steps.least_recompute, recomputing)
    distinct = dict.fromkeys([*walk.best, *filter(pinned, refined)])
    slowest_first = sorted(map(steps.in_full, distinct), key=lambda each: -each.time.seconds)
    best = list({family(each.layout): each for each in slowest_first}.values())
    best = sorted(best, key=lambda each: each.time.seconds)[:num_best]
    misses = _Walk(steps, MOST_MISSES, best[0].time.seconds if best else math.inf, NEAR_MISS * usable)
    for bound, layout in walk.too_large:
        if not (best and layout.overlap):  # rows of parts are long: their layouts only if nothing fits
            frontier.again(bound, layout, bound.seconds)
    misses.along(frontier)
    rival = None
    if best and all(each.layout.pp == 1 for each in best):
        piped = _Walk(steps, 1, math.inf, usable)
        piped.along(Frontier(bounds, config, world_size, hardware, lambda each: each.pp > 1 and pinned(each)))
        rival = next(map(steps.in_full, piped.best), None)
    counts = frontier.num_layouts, walk.num_predicted + misses.num_predicted
    too_large = tuple(map(steps.in_full, misses.best))
    return Found(world_size, tuple(best), too_large, *counts, rival, least_bytes, frontier.least_bytes(1), steps)


def without_recompute(layout: Layout) -> Layout:
    return dataclasses.replace(layout, recompute=RecomputeConfig())


def family(layout: Layout) -> Layout:
    """Return the layout without recompute, with the distributed optimizer alone. Of layouts that are equal then only
    the fastest is reported: they compute the same, with more or less memory.
    """
    return dataclasses.replace(layout, recompute=RecomputeConfig(), **UNSHARDED)


class _Walk:
    """The state of a search: the best layouts found so far, and those that are slightly too large."""

    def __init__(self, steps: ShortSteps, num_best: int, most_seconds: float, usable: float) -> None:
        self._steps, self._num_best, self._most_seconds, self._usable = steps, num_best, most_seconds, usable
        self.best: list[Layout] = []  # fastest first
        self.too_large: list[tuple[Bound, Layout]] = []
        self.num_predicted, self.refused = 0, ""

    def along(self, frontier: Frontier) -> None:
        """Look at the layouts in the order of their bounds, which grow to their seconds, until enough are found.

        A layout whose seconds are below the bounds of all others is the fastest of the rest.
        """
        families, running = set[Layout](), dict[Layout, Steps]()
        for bound, layout in frontier:
            if bound.seconds >= self._most_seconds or len(self.best) == self._num_best:
                break
            if family(layout) in families:  # and faster
                continue
            if bound.least_bytes > self._usable:
                self.too_large.append((bound, layout))
                continue
            steps = running.setdefault(layout, self._steps.along(layout, self._usable))
            try:
                seconds, computed = next(steps)
            except StopIteration as end:
                if end.value <= self._usable:
                    self.best.append(layout)
                    families.add(family(layout))
                    continue
                frontier.add_variants(layout, math.inf, None)
                if end.value <= NEAR_MISS * self._usable:
                    self.too_large.append((bound, layout))
                continue
            except ConfigError as error:
                self.refused = f"{layout}: {error}"
                continue
            if computed is not None:
                self.num_predicted += 1
                frontier.add_variants(layout, seconds, computed)
            frontier.again(bound, layout, seconds)


class ShortSteps:
    """Short-step predictions of a configuration's layouts.

    Beyond `FILLS` pipeline fills only the steady middle of a step grows, by the same time for every pp microbatches;
    the peak memory stays the same. Plans that differ only in microbatch size and recompute share the rest.
    """

    def __init__(self, config: Config, world_size: int, hardware: Hardware, load: ExpertLoad = BALANCED) -> None:
        self._config, self._world_size, self.hardware, self._load = config, world_size, hardware, load
        self._plans: dict[Hashable, RunPlan] = {}
        self._hidden: dict[Layout, float] = {}
        self._seconds: dict[Layout, float] = {}  # of layouts whose time is known
        self._computed: dict[Layout, float] = {}  # without what replicas exchange and update
        self.least_of_overlap, self._free = cache(self._least_of_overlap), cache(self._without_exchanges)

    def along(self, layout: Layout, most_bytes: float) -> Steps:
        """Yield lower bounds of a step's seconds, each dearer than the one before, with None; then its seconds, with
        those that do not depend on how replicas share; return the bytes of the fullest rank. Raises ConfigError.

        If a rank needs more than `most_bytes`, its bytes; without the time if that is the first rank.
        """
        alike = layout if layout.units > 1 and layout.overlap else dataclasses.replace(layout, **UNSHARDED)
        if layout.overlap:
            yield self.least_of_overlap(alike), None
            yield self._free(alike)[1], None
        if (without := without_recompute(layout)) in self._seconds:
            yield self._seconds[without], None
        if alike in self._computed:
            yield self._computed[alike] * (1 - 1e-9), None
        count, few, plan = self._short(layout)

        def need_of(pp_rank: int) -> int:
            return _in_full(rank_memory(plan, pp_rank, self.hardware.nccl_bytes), few, count).device_bytes

        need = need_of(0)
        if need <= most_bytes:
            time = apart = self._whole(layout, count, few, plan)
            if layout.sharding:  # gathers and reductions within a row delay it
                parallel = dataclasses.replace(plan.config.parallel, data_parallel_sharding_strategy="optim")
                without_them = dataclasses.replace(plan, config=dataclasses.replace(plan.config, parallel=parallel))
                apart = self._whole(layout, count, few, without_them)
            self._seconds[layout] = time.seconds
            self._computed[layout] = apart.seconds - sum(apart.parts[part] for part in ONCE)
            yield time.seconds, self._computed[layout]
            for pp_rank in reversed(range(1, layout.pp)):
                need = max(need, need_of(pp_rank))
                if need > most_bytes:
                    break
        return need

    def of(self, layout: Layout) -> tuple[float, int]:
        """Return (seconds of a step, bytes of the fullest rank). Raises ConfigError."""
        count, few, plan = self._short(layout)
        every = all_rank_memory(plan, self.hardware.nccl_bytes)
        need = max(_in_full(rank, few, count).device_bytes for rank in every)
        return self._whole(layout, count, few, plan).seconds, need

    def _least_of_overlap(self, layout: Layout) -> float:
        """Return a lower bound of a step in which all-to-alls overlap, from one rank alone. Raises ConfigError."""
        count, few, plan = self._in_pairs(layout)
        stages = stage_seconds(plan, self.hardware)
        held = [[stages[stage] for stage in plan.placement.stages_of(rank)] for rank in range(layout.pp)]
        work = [sum(each.of(Op.F) + each.of(Op.B) for each in of_rank) for of_rank in held]
        busiest = max(range(layout.pp), key=lambda rank: (work[rank], rank))  # the last one waits longest
        # whole backwards hide messages of tp that halves do not
        hidden = max(sum(each.hidden for each in of_rank) for of_rank in held) * (count + 2 * layout.pp)
        branches = [branch for kind in plan.model.kinds for branch in kind.branches]
        kinds = {(branch.config.mixer, branch.recompute_modules) for branch in branches}
        share = 1.0 if len(branches) == len(kinds) else PARTS_ERROR
        return share * (least_of_rank(plan, self.hardware, busiest, (count - few) // layout.pp) - hidden)

    def _without_exchanges(self, layout: Layout) -> tuple[float, float]:
        """Return the seconds of a step without all-to-alls, or of those of a rank alone, if these are more: a step in
        which all-to-alls overlap takes no less. Also without what replicas exchange and update. Raises ConfigError.
        """
        count, few, plan = self._in_pairs(layout)
        stages = stage_seconds(plan, self.hardware)
        free = predict_step(plan, self.hardware, tuple(map(without_exchanges, stages)), hides=False)
        least = free.seconds + (count - few) // layout.pp * fill_seconds(free.timeline)
        exchanged = most_exchanged(free.timeline, stages) * count / few
        return max(least, exchanged), max(least - sum(free.parts[part] for part in ONCE), exchanged)

    def _in_pairs(self, layout: Layout) -> tuple[int, int, RunPlan]:
        """Return `_short` of a layout in which all-to-alls overlap, in pairs of stages: parts take long to resolve."""
        count, few, plan = self._short(dataclasses.replace(layout, overlap=False))
        overlapped = layout.applied_to(self._config).parallel
        names = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
        changes = {name: getattr(overlapped, name) for name in names}
        parallel = dataclasses.replace(plan.config.parallel, **changes)
        return count, few, dataclasses.replace(plan, config=dataclasses.replace(plan.config, parallel=parallel))

    def _whole(self, layout: Layout, count: int, few: int, plan: RunPlan) -> StepTime:
        """Return the time of a step of `count` microbatches. plan: of a step of `few`."""
        time = predict_step(plan, self.hardware, hides=False)
        parts = {part: seconds if part in ONCE else seconds * count / few for part, seconds in time.parts.items()}
        seconds = time.seconds + (count - few) // layout.pp * fill_seconds(time.timeline)
        if layout.overlap:
            least, _ = self._free(layout)
            if layout not in self._hidden:
                self._hidden[layout] = hidden_seconds(plan, self.hardware, count, FILLS)
            hidden = min(self._hidden[layout], seconds - least)
            seconds, parts["ep"] = seconds - max(0.0, hidden), max(0.0, parts["ep"] - max(0.0, hidden))
        parts["bubble"] += seconds - sum(parts.values())
        tokens, flops = time.tokens * count // few, time.model_flops * count / few
        return dataclasses.replace(time, seconds=seconds, parts=parts, tokens=tokens, model_flops=flops)

    def least_recompute(self, layout: Layout) -> Layout:
        """Return the layout with the largest --recompute-memory-budget with which it fits, in steps of 1 / PARTS; the
        layout itself if none of these fits.
        """
        fits, too_large = 0, PARTS
        while too_large - fits > 1:
            part = (fits + too_large) // 2
            try:
                count, few, plan = self._short(_with_budget(layout, part))
            except ConfigError:
                return layout
            every = all_rank_memory(plan, self.hardware.nccl_bytes)
            need = max(_in_full(rank, few, count).device_bytes for rank in every)
            fits, too_large = (part, too_large) if need <= self.hardware.usable_bytes else (fits, part)
        return _with_budget(layout, fits) if fits else layout

    def _short(self, layout: Layout) -> tuple[int, int, RunPlan]:
        """Return the microbatches of a whole step and of a short one, and the plan of the short one."""
        count = layout.num_microbatches(self._config, self._world_size)
        is_short = count <= (FILLS + 1) * layout.pp or keeps_all(layout.schedule)
        few = count if is_short else FILLS * layout.pp + count % layout.pp
        return count, few, self._plan(layout, few * layout.dp(self._world_size) * layout.micro_batch_size)

    def in_full(self, layout: Layout) -> Candidate:
        """Predict a whole step. Raises ConfigError."""
        if not layout.overlap:
            return predict(self._config, layout, self._world_size, self.hardware, self._load)
        # rows of parts are long: those of a short step stand for them
        count, few, plan = self._short(layout)
        memory = tuple(_in_full(rank, few, count) for rank in all_rank_memory(plan, self.hardware.nccl_bytes))
        time, full = self._whole(layout, count, few, plan), plan.batch.full // few * count
        training = dataclasses.replace(plan.config.training, global_batch_size=full)
        config, batch = dataclasses.replace(plan.config, training=training), dataclasses.replace(plan.batch, full=full)
        return Candidate(layout, dataclasses.replace(plan, config=config, batch=batch), time, memory)

    def _plan(self, layout: Layout, batch: int) -> RunPlan:
        training = self._config.training.with_batch(batch)
        config = layout.applied_to(dataclasses.replace(self._config, training=training))
        key = dataclasses.replace(layout, micro_batch_size=1, recompute=None)  # type: ignore[arg-type]
        if key not in self._plans and layout.overlap:  # the same grid and parameters, in parts
            self._plans[key] = self._in_pairs(layout)[2]
        if key in self._plans:
            return vary(self._plans[key], config)
        plan = resolve(config, self._world_size, self.hardware.ranks_per_node)
        self._plans[key] = dataclasses.replace(plan, expert_load=self._load)
        return self._plans[key]


def _with_budget(layout: Layout, part: int) -> Layout:
    return dataclasses.replace(layout, recompute=RecomputeConfig(recompute_memory_budget=part / PARTS))


def _in_full(rank: RankMemory, few: int, count: int) -> RankMemory:
    """Return a rank's memory in a whole step, which holds the inputs of all `count` microbatches instead of `few`."""
    items = {**rank.items, "microbatches": rank.items["microbatches"] // few * count}
    return dataclasses.replace(rank, items=items)


def predict(
    config: Config, layout: Layout, world_size: int, hardware: Hardware, load: ExpertLoad = BALANCED
) -> Candidate:
    """Predict one layout over a whole step. Raises ConfigError if training would refuse it."""
    plan = resolve(layout.applied_to(config), world_size, hardware.ranks_per_node)
    return predict_plan(layout, dataclasses.replace(plan, expert_load=load), hardware)


def _nothing_found(
    config: Config, world_size: int, hardware: Hardware, refused: str, least: Mapping[int, float]
) -> str:
    where = f"{world_size} {hardware.name}"
    if refused:
        return f"no layout on {where} is legal; the last one tried: {refused}"
    if not least:
        instances = config.parallel.num_distributed_optimizer_instances
        divides = f", which --num-distributed-optimizer-instances {instances} divides" if instances > 1 else ""
        return (
            f"no layout on {where}: --global-batch-size {config.training.global_batch_size} must be a multiple of the "
            f"data-parallel size{divides}, for some tensor- and pipeline-parallel size that the flags allow; change "
            "the batch size, the number of accelerators or the flags"
        )
    return (
        f"the model does not fit on {where}: any layout needs {bytes_text(min(least.values()))} or more of the "
        f"{bytes_text(hardware.usable_bytes)} of each that can be used; use more accelerators, or another kind"
    )


def as_configured(config: Config, world_size: int, hardware: Hardware, load: ExpertLoad = BALANCED) -> Candidate | str:
    """Predict the layout of the configuration itself, or return why it cannot run."""
    try:
        plan = resolve(config, world_size, hardware.on(world_size).ranks_per_node)
    except ConfigError as error:
        return str(error)
    plan = dataclasses.replace(plan, expert_load=load)
    t, parallel = plan.topology, config.parallel
    layout = Layout(
        t.tp,
        t.pp,
        plan.num_chunks,
        plan.schedule_name,
        config.training.micro_batch_size,
        config.recompute,
        parallel.sequence_parallel,
        plan.config.parallel.use_distributed_optimizer or t.dp == 1,
        parallel.pipeline_balance,
        t.ep,
        t.etp if plan.model.has_experts else None,
        Context.of(parallel),
        "" if plan.sharding is None else strategy_of(parallel),
        parallel.data_parallel_sharding_units,
        plan.num_slices,
        parallel.overlap_moe_expert_parallel_comm and plan.model.has_experts,
        config.model.moe_token_dispatcher_type == "flex",
        parallel.num_distributed_optimizer_instances,
    )
    return predict_plan(layout, plan, hardware)
