"""The search for the fastest layouts of a configuration on a number of accelerators, and for the best such number.

A candidate is a configuration that training accepts too: nothing is predicted that `resolve` refuses. Closed forms of
time and memory order the candidates (`estimate`); those of a group are looked at one by one only once the group comes
first. The first ones that fit are simulated, until the next closed form is above the seconds of the tenth best, or
MOST_SIMULATED are. Recompute memory budgets and replays in bubbles are not candidates; afterwards each of the best
layouts with recompute is also tried with the largest budget that fits, and with full recompute with its replays ahead.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megapipe.config.config import Config, resolve_model
from megapipe.config.parallel import RecomputeConfig, strategy_of
from megapipe.config.problems import divisors
from megapipe.config.rules.pairs import combinations
from megapipe.errors import ConfigError
from megapipe.extras.search.estimate import Estimate, Estimates
from megapipe.extras.search.layout import Context, Group, Layout, groups, keeps_all
from megapipe.formatting import bytes_text
from megapipe.plan.expert_load import BALANCED, ExpertLoad
from megapipe.plan.expert_overlap import fill_seconds, hidden_seconds
from megapipe.plan.hardware import Hardware
from megapipe.plan.memory import RankMemory, all_rank_memory, rank_memory
from megapipe.plan.resolve import resolve, vary
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, most_exchanged, predict_step, stage_seconds, without_exchanges
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
    shares: tuple[float, ...]  # of the closed form in the seconds of each layout that was simulated
    rival: Candidate | None  # the fastest layout with a pipeline, if none of `best` has one
    least_bytes: Mapping[int, float]  # for each pp those of the fullest rank by closed forms, over all other choices
    least_bytes_of_cp: Mapping[int, float] = field(default_factory=dict)  # the same for each cp
    steps: ShortSteps | None = field(default=None, repr=False)

    @property
    def num_predicted(self) -> int:
        """The layouts that were simulated."""
        return len(self.shares)

    def cost(self, price_per_hour: float | None) -> float | None:
        """Return the price of a billion tokens with the best layout; None without one or a price of an accelerator."""
        if price_per_hour is None or not self.best:
            return None
        return self.num_gpus * price_per_hour / SECONDS_OF_AN_HOUR / self.best[0].time.tokens_per_second * 1e9


UNSHARDED: dict[str, Any] = {"sharding": "", "units": 1, "distributed_optimizer": True, "instances": 1}
NEAR_MISS = 1.25  # layouts that need more than this times the usable memory are not reported
MOST_SIMULATED = 100  # layouts of a search
MOST_MISSES, MOST_SIMULATED_MISSES = 3, 10
FILLS = 4  # a short step has about this many times pp microbatches
SHORT_STEP_ERROR = 1.01  # a short step's prediction for a whole one is at most this factor too long
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
        walk = _Walk(ShortSteps(config, num_gpus, here, load), 1, slowest)
        walk.along(Ranking(estimates.at(num_gpus), config, num_gpus, here, pinned))
        return bool(walk.fastest)

    estimates = Estimates(config, 1, hardware, load)
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


class Ranking:
    """The layouts of a search in the order of their closed forms.

    A heap of groups, of groups with one setting of recompute, and of layouts. The first one is opened, or is the next
    layout; so that layouts of slow groups are never looked at one by one.
    """

    def __init__(
        self,
        estimates: Estimates,
        config: Config,
        world_size: int,
        hardware: Hardware,
        pinned: Callable[[Layout], bool],
    ) -> None:
        """Raises ConfigError without a global batch size, and with --freeze."""
        if config.optimizer.freeze:
            rule = "the search ranks layouts by the memory of models that are trained whole"
            raise ConfigError(f"--freeze: {rule}; leave it out, and plan the layouts it finds with it")
        if config.training.global_batch_size is None:
            raise ConfigError("--global-batch-size is missing; set it: the sequences of a step limit the parallelism")
        self._estimates, self._pinned, self._most_bytes = estimates, pinned, NEAR_MISS * hardware.usable_bytes
        self.num_layouts, self._numbers = 0, itertools.count()
        self._heap: list[tuple[float, int, Estimate, Layout, Group | None]] = []
        self._least: dict[tuple[int, int], float] = {}  # the least bytes of each pp and cp
        every = list(groups(config, world_size, hardware))
        # with experts, sharded weights take three times as long to search: only where nothing else is allowed
        self._add([group for group in every if group.first.etp is None or not group.first.sharding])
        if not self.num_layouts:
            self._add(every)

    def _add(self, every: Iterable[Group]) -> None:
        for group in every:
            allowed = [each for each in group.variants if any(map(self._pinned, group.members(each)))]
            # several instances are searched only where nothing else is allowed
            if variants := [each for each in allowed if each.instances == 1] or allowed:
                searched = group._replace(variants=variants)
                self.num_layouts += searched.size
                self._push(self._estimates.of_group(group.first, self._most_bytes), group.first, searched)

    def _push(self, estimate: Estimate | None, layout: Layout, group: Group | None) -> None:
        if estimate is not None and estimate.least_bytes <= self._most_bytes:
            heapq.heappush(self._heap, (estimate.seconds, next(self._numbers), estimate, layout, group))
        elif estimate is not None:
            self._note(estimate, layout)

    def _note(self, estimate: Estimate, layout: Layout) -> None:
        sizes = layout.pp, layout.context.ranks
        self._least[sizes] = min(estimate.least_bytes, self._least.get(sizes, math.inf))

    def __iter__(self) -> Iterator[tuple[Estimate, Layout]]:
        """Yield the layouts that may fit, or nearly, least seconds first."""
        while self._heap:
            _, _, estimate, layout, group = heapq.heappop(self._heap)
            if group is None:
                self._note(estimate, layout)
                yield estimate, layout
            elif len(group.recomputes) > 1:
                for recompute in group.recomputes:
                    first = dataclasses.replace(layout, recompute=recompute)
                    of_first = self._estimates.of_group(first, self._most_bytes)
                    self._push(of_first, first, group._replace(recomputes=(recompute,)))
            else:
                for member in filter(self._pinned, group.members(*group.variants)):
                    self._push(self._estimates.of(member, self._most_bytes), member, None)

    def least_bytes(self, axis: int) -> dict[int, float]:
        """Return for each pp (axis 0) or cp (axis 1) the least bytes of the fullest rank by closed forms."""
        for _, _, estimate, layout, _ in self._heap:
            self._note(estimate, layout)
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
    estimates, steps = Estimates(config, world_size, hardware, load), ShortSteps(config, world_size, hardware, load)
    ranking = Ranking(estimates, config, world_size, hardware, pinned)
    walk = _Walk(steps, num_best)
    walk.along(ranking)
    least_bytes = ranking.least_bytes(0)
    if not walk.fastest and not walk.too_large:
        raise ConfigError(_nothing_found(config, world_size, hardware, walk.refused, least_bytes))
    fastest = [
        steps.refined(seconds, layout, pinned)
        # not with an imbalance: a run chooses by the memory of balanced routing; nor in parts, which have no budgets
        if layout.recompute != RecomputeConfig() and load == BALANCED and not layout.overlap
        else (seconds, layout)
        for seconds, layout in sorted(walk.fastest.values(), key=lambda each: each[0])[:num_best]
    ]
    best = sorted((steps.in_full(layout) for _, layout in fastest), key=lambda each: each.time.seconds)
    rival = None
    if best and all(each.layout.pp == 1 for each in best):
        piped = _Walk(steps, 1)
        piped.along(Ranking(estimates, config, world_size, hardware, lambda each: each.pp > 1 and pinned(each)))
        rival = next((steps.in_full(layout) for _, layout in piped.fastest.values()), None)
    misses = walk.misses(best[0].time.seconds if best else math.inf, NEAR_MISS * hardware.usable_bytes)
    return Found(
        world_size,
        tuple(best),
        misses,
        ranking.num_layouts,
        tuple(walk.shares),
        rival,
        least_bytes,
        ranking.least_bytes(1),
        steps,
    )


def without_recompute(layout: Layout) -> Layout:
    return dataclasses.replace(layout, recompute=RecomputeConfig())


def family(layout: Layout) -> Layout:
    """Return the layout without recompute, with the distributed optimizer alone. Of layouts that are equal then only
    the fastest is reported: they compute the same, with more or less memory.
    """
    return dataclasses.replace(layout, recompute=RecomputeConfig(), **UNSHARDED)


class _Walk:
    """The state of a search: the fastest layouts that were simulated, and those that are slightly too large.

    most_seconds: no slower layout is asked for.
    """

    def __init__(self, steps: ShortSteps, num_best: int, most_seconds: float = math.inf) -> None:
        self._steps, self._num_best, self._most_seconds = steps, num_best, most_seconds
        self.fastest: dict[Layout, tuple[float, Layout]] = {}  # of each family: seconds, and the layout
        self.too_large: list[tuple[float, Layout]] = []
        self.refused = ""
        self.shares: list[float] = []  # of the closed form in the seconds of each simulated layout

    def along(self, ranking: Ranking) -> None:
        """Simulate layouts in the order of their closed forms, until these are above the seconds of the best found, or
        MOST_SIMULATED are simulated.
        """
        usable = self._steps.hardware.usable_bytes
        fitting = set[Layout]()  # without recompute; with more of it they are slower
        for estimate, layout in ranking:
            if estimate.seconds >= self._limit() or len(self.shares) == MOST_SIMULATED:
                break
            found = self.fastest.get(family(layout))
            if without_recompute(layout) in fitting or (found and found[0] <= estimate.seconds):
                continue
            if estimate.least_bytes > usable:
                self.too_large.append((estimate.seconds, layout))
                continue
            try:
                need = self._steps.need(layout, usable)
                if need > usable:
                    if need <= NEAR_MISS * usable:
                        self.too_large.append((estimate.seconds, layout))
                    continue
                seconds = self._steps.seconds(layout)
            except ConfigError as error:
                self.refused = f"{layout}: {error}"
                continue
            fitting.add(without_recompute(layout))
            self.shares.append(estimate.seconds / seconds)
            if found is None or seconds < found[0]:
                self.fastest[family(layout)] = seconds, layout

    def _limit(self) -> float:
        """Return the seconds from which on a layout is not among the best."""
        if len(self.fastest) < self._num_best:
            return self._most_seconds
        return min(self._most_seconds, sorted(seconds for seconds, _ in self.fastest.values())[self._num_best - 1])

    def misses(self, most_seconds: float, most_bytes: float) -> tuple[Candidate, ...]:
        """Return the fastest layouts that are slightly too large, fastest first, and faster than `most_seconds`."""
        found: dict[Layout, Candidate | None] = {}  # of each family; None for a slower one
        for seconds, layout in sorted(self.too_large, key=lambda each: each[0]):
            if len(found) == MOST_SIMULATED_MISSES or seconds >= most_seconds:
                break
            # rows of parts are long: their layouts only if nothing fits
            if family(layout) in found or (self.fastest and layout.overlap):
                continue
            with suppress(ConfigError):
                if self._steps.need(layout, most_bytes) <= most_bytes:
                    is_faster = self._steps.seconds(layout) < most_seconds
                    found[family(layout)] = self._steps.in_full(layout) if is_faster else None
        missed = [each for each in found.values() if each is not None and each.time.seconds < most_seconds]
        return tuple(sorted(missed, key=lambda each: each.time.seconds)[:MOST_MISSES])


class ShortSteps:
    """Short-step predictions of a configuration's layouts.

    Beyond `FILLS` pipeline fills only the steady middle of a step grows, by the same time for every pp microbatches;
    the peak memory stays the same. Plans that differ only in microbatch size and recompute share the rest.
    """

    def __init__(self, config: Config, world_size: int, hardware: Hardware, load: ExpertLoad = BALANCED) -> None:
        self._config, self._world_size, self.hardware, self._load = config, world_size, hardware, load
        self._plans: dict[Hashable, RunPlan] = {}
        self._hidden: dict[Layout, float] = {}

    def need(self, layout: Layout, most_bytes: float = math.inf) -> int:
        """Return the bytes of the fullest rank, or of the first one found that needs more than `most_bytes`. Raises
        ConfigError.
        """
        count, few, plan = self._short(layout)
        need = 0
        for pp_rank in (0, *reversed(range(1, layout.pp))):
            rank = rank_memory(plan, pp_rank, self.hardware.nccl_bytes)
            need = max(need, _in_full(rank, few, count).device_bytes)
            if need > most_bytes:
                break
        return need

    def seconds(self, layout: Layout) -> float:
        """Return the seconds of a step. Raises ConfigError."""
        return self._whole(layout, *self._short(layout)).seconds

    def refined(self, seconds: float, layout: Layout, pinned: Callable[[Layout], bool]) -> tuple[float, Layout]:
        """Return the seconds and the layout with the largest memory budget that fits, or with full recompute whose
        replays are in bubbles, if that is allowed and faster.
        """
        others = [self.least_recompute(layout)]
        if layout.recompute.recompute_granularity == "full" and layout.pp > 1:
            recompute = dataclasses.replace(layout.recompute, recompute_in_bubbles=True)
            ahead = dataclasses.replace(layout, recompute=recompute)
            is_legal = not any(combinations(ahead.applied_to(self._config)))
            others += [ahead] if is_legal and self.need(ahead) <= self.hardware.usable_bytes else []
        timed = [(self.seconds(other), other) for other in others if other != layout and pinned(other)]
        return min([(seconds, layout), *timed], key=lambda each: each[0])

    def _least_seconds(self, layout: Layout) -> float:
        """Return the seconds of a step without all-to-alls, or of those of a rank alone, if these are more: a step in
        which all-to-alls overlap takes no less. Raises ConfigError.
        """
        count, few, plan = self._in_pairs(layout)
        stages = stage_seconds(plan, self.hardware)
        free = predict_step(plan, self.hardware, tuple(map(without_exchanges, stages)), hides=False)
        least = free.seconds + (count - few) // layout.pp * fill_seconds(free.timeline)
        return max(least, most_exchanged(free.timeline, stages) * count / few)

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
            least = self._least_seconds(layout)
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
                need = self.need(_with_budget(layout, part), self.hardware.usable_bytes)
            except ConfigError:
                return layout
            fits, too_large = (part, too_large) if need <= self.hardware.usable_bytes else (fits, part)
        return _with_budget(layout, fits) if fits else layout

    def _short(self, layout: Layout) -> tuple[int, int, RunPlan]:
        """Return the microbatches of a whole step and of a short one, and the plan of the short one."""
        count = layout.num_microbatches(self._config, self._world_size)
        is_short = count <= (FILLS + 1) * layout.pp or keeps_all(layout.schedule)
        few = count if is_short else FILLS * layout.pp + count % layout.pp
        return count, few, self._plan(layout, few * layout.dp(self._world_size) * layout.micro_batch_size)

    def in_full(self, layout: Layout) -> Candidate:
        """Predict a whole step, with the memory of a short one. Raises ConfigError."""
        count, few, short = self._short(layout)
        memory = tuple(_in_full(rank, few, count) for rank in all_rank_memory(short, self.hardware.nccl_bytes))
        if not layout.overlap:
            plan = vary(short, layout.applied_to(self._config))
            return Candidate(layout, plan, predict_step(plan, self.hardware), memory)
        # rows of parts are long: those of a short step stand for them
        time, full = self._whole(layout, count, few, short), short.batch.full // few * count
        training = dataclasses.replace(short.config.training, global_batch_size=full)
        config, batch = dataclasses.replace(short.config, training=training), short.batch
        plan = dataclasses.replace(short, config=config, batch=dataclasses.replace(batch, full=full))
        return Candidate(layout, plan, time, memory)

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
