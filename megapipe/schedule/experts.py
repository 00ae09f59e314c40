"""The time of schedules of parts: what the all-to-alls of expert parallelism cost, and what each schedule hides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, product

from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.costs import Costs, Seconds, seconds_of_stages
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower, without_pairs
from megapipe.schedule.partition import cut_by_cost
from megapipe.schedule.parts import Part, Parts, Site, expand, pair_up, parts_of, prove
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class ExpertModel:
    """Seconds of the parts of a model on one rank, for one microbatch; an all-to-all has no weight gradient."""

    has_experts: tuple[bool, ...]  # of each layer
    attention: Seconds  # of one layer, with norms and router
    dense_mlp: Seconds
    expert_mlp: Seconds  # routed and shared experts
    head: Seconds
    dispatch: tuple[float, float]  # forward, backward
    combine: tuple[float, float]
    transfer_seconds: float = 0.0  # of messages between stages, as in Model
    latency_seconds: float = 0.0
    kept_for_weights: float = 1.0

    def seconds(self, site: Site) -> Seconds:
        """Return the seconds of one part."""
        experts = site.part is Part.MLP and self.has_experts[site.layer]
        return {
            Part.ATTENTION: self.attention,
            Part.DISPATCH: Seconds(*self.dispatch, 0.0),
            Part.MLP: self.expert_mlp if experts else self.dense_mlp,
            Part.COMBINE: Seconds(*self.combine, 0.0),
            Part.HEAD: self.head,
        }[site.part]

    def parts(self, num_stages: int) -> Parts:
        """Return the parts of contiguous stages with about equal computation."""
        layers = [sum(self.attention) + sum(self.expert_mlp if e else self.dense_mlp) for e in self.has_experts]
        return parts_of(cut_by_cost(layers, sum(self.head), num_stages), self.has_experts)

    def costs(self, num_stages: int) -> Costs:
        """Return the costs of whole stages whose all-to-alls block the computation."""
        parts = self.parts(num_stages)
        seconds: dict[tuple[int, Op], float] = {}
        for (site, op), value in self.part_costs(parts, overlap=False).seconds.items():
            stage = parts.sites[site].stage
            seconds[stage, op] = seconds.get((stage, op), 0.0) + value
        seconds |= dict.fromkeys(product(range(num_stages), (Op.SEND_F, Op.SEND_B)), self.transfer_seconds)
        return Costs(seconds, self.latency_seconds)

    def measure(self, schedule: Schedule) -> ExpertMeasures:
        """Return the measures of a compute-only schedule."""
        return measure_experts(schedule, self)[0]

    def part_costs(self, parts: Parts, overlap: bool) -> Costs:
        """Return the costs of parts. overlap: all-to-alls overlap with the computation; otherwise they block it."""
        seconds = seconds_of_stages(map(self.seconds, parts.sites), self.transfer_seconds)
        return Costs(seconds, self.latency_seconds, network=parts.network if overlap else frozenset())


@dataclass(frozen=True)
class ExpertMeasures:
    """Seconds of a step whose layers have all-to-alls, under one schedule."""

    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    is_synchronous: bool
    serial_seconds: float  # all-to-alls block the computation
    weights_seconds: float  # they overlap with weight gradients of the same backward, and between actions
    pairs_seconds: float | None  # forwards and backwards are merged; None: the schedule has no pairs
    bound_seconds: float  # no order of the parts on this placement is faster
    exchange_seconds: float  # all-to-alls of the rank with most of them
    exposed_seconds: float  # of those, while the rank computes nothing, in the faster of the two rows that overlap
    hidden_share: float  # the part of all all-to-alls that is not exposed there
    num_pairs: int
    peak_microbatches: float  # with pairs if it has any; a microbatch of 1 / num_ranks of the model

    @property
    def step_seconds(self) -> float:
        """The faster of the two rows that overlap."""
        return min(self.weights_seconds, self.weights_seconds if self.pairs_seconds is None else self.pairs_seconds)


def measure_experts(schedule: Schedule, model: ExpertModel) -> tuple[ExpertMeasures, Timeline]:
    """Expand, prove and simulate a compute-only schedule; returns also the timeline of its fastest row."""
    parts = model.parts(schedule.num_stages)
    paired = pair_up(schedule)
    serial = replace(schedule, rows=tuple(map(without_pairs, schedule.rows)))
    has_pairs = Op.OVERLAP in paired.ops
    depth = max(map(len, parts.of_stage))  # of receives: one stage ahead

    def timeline(stages: Schedule, overlap: bool) -> Timeline:
        rows = lower(expand(stages, parts, delay_weights=overlap), depth)
        prove(rows, stages, parts)
        return simulate(rows, model.part_costs(parts, overlap))

    blocking, weights = timeline(serial, False), timeline(serial, True)
    pairs = timeline(paired, True) if has_pairs else None
    fastest = weights if pairs is None or weights.makespan_seconds < pairs.makespan_seconds else pairs
    exchanges = exposures(fastest)
    exchanging, exposed = map(sum, zip(*exchanges, strict=True))
    measures = ExpertMeasures(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        is_synchronous=schedule.is_synchronous,
        serial_seconds=blocking.makespan_seconds,
        weights_seconds=weights.makespan_seconds,
        pairs_seconds=None if pairs is None else pairs.makespan_seconds,
        bound_seconds=least_seconds(fastest),
        exchange_seconds=max(exchange for exchange, _ in exchanges),
        exposed_seconds=max(exposed for _, exposed in exchanges),
        hidden_share=1.0 - exposed / exchanging if exchanging else 1.0,
        num_pairs=sum(action.op is Op.OVERLAP for row in paired.rows for action in row),
        peak_microbatches=max(peak_live_chunks(paired)) * schedule.num_ranks / schedule.num_stages,
    )
    return measures, fastest


def exposures(timeline: Timeline) -> list[tuple[float, float]]:
    """Return for each rank the seconds of its all-to-alls, and those of them in which it computes nothing."""
    found = []
    for row, starts, ends in zip(timeline.schedule.rows, timeline.starts, timeline.ends, strict=True):
        lanes: tuple[list[tuple[float, float]], ...] = [], []
        for (stage, op, _), start, end in zip(row, starts, ends, strict=True):
            if op in COMPUTE_OPS:
                lanes[stage in timeline.costs.network].append((start, end))
        computing, exchanging = lanes
        hidden, first = 0.0, 0
        for start, end in exchanging:
            while first < len(computing) and computing[first][1] <= start:
                first += 1
            for begin, until in computing[first:]:
                if begin >= end:
                    break
                hidden += min(end, until) - max(start, begin)
        total = sum(end - start for start, end in exchanging)
        found.append((total, total - hidden))
    return found


def least_seconds(timeline: Timeline) -> float:
    """Return a lower bound of the step for a schedule of parts, whatever the order of its rows.

    The largest of: one microbatch forward and back; for each rank the way of the first microbatch to it, and then all
    of its computation or of its all-to-alls; the same without weight gradients, and then the way back.
    """
    schedule, costs = timeline.schedule, timeline.costs
    seconds, sites = costs.seconds, range(schedule.num_stages)
    back = [seconds[site, Op.B if site in costs.network else Op.I] for site in sites]
    weights = [0.0 if site in costs.network else seconds[site, Op.W] for site in sites]
    arrival = [0.0, *accumulate(seconds[site, Op.F] for site in sites)]  # without messages
    way_back = [0.0, *accumulate(back)]
    bound = arrival[-1] + way_back[-1] + weights[0]
    for rank in range(schedule.num_ranks):
        held = [
            (site, len(range(direction, schedule.num_microbatches, len(schedule.placement.directions))))
            for direction, ranks in enumerate(schedule.placement.directions)
            for site in sites
            if ranks[site] == rank
        ]
        for network in (False, True):
            own = [(site, count) for site, count in held if (site in costs.network) is network]
            if own:
                first = min(site for site, _ in own)
                work = sum(count * (seconds[site, Op.F] + back[site]) for site, count in own)
                bound = max(
                    bound,
                    arrival[first] + work + way_back[first] + weights[0],
                    arrival[first] + work + sum(count * weights[site] for site, count in own),
                )
    return bound
