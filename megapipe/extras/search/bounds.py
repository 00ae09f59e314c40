"""Lower bounds of a layout's step time and memory, computed without a plan, so that a search simulates few layouts."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import NamedTuple, TypeVar

from megapipe.config.config import Config, ResolvedModelConfig, resolve_model
from megapipe.config.parallel import SHARDED_PARAMS, RecomputeConfig
from megapipe.config.rules.gpu import with_compiled
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.errors import ConfigError
from megapipe.extras.search.layout import Context, Layout, keeps_all, with_dispatcher
from megapipe.layers.model import ModelSpec, model_spec, rank_shape
from megapipe.layers.table import ALL_REDUCE, Documents, RankShape
from megapipe.plan.activations import layers_of
from megapipe.plan.cut import undominated
from megapipe.plan.expert_load import BALANCED, ExpertLoad, with_load
from megapipe.plan.hardware import Hardware, Link
from megapipe.plan.layer_costs import sequence_slices
from megapipe.plan.layer_time import (
    ContextLinks,
    ExpertLinks,
    OpSeconds,
    context_links,
    expert_links_of,
    head_seconds,
    layer_seconds,
)
from megapipe.plan.recompute_choice import FULL, choices
from megapipe.plan.schedule_choice import cut_layers
from megapipe.plan.step_time import update_bytes
from megapipe.plan.traces import head_trace, joined_trace
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.families import SCHEDULES
from megapipe.sharding.spec import Owner
from megapipe.sharding.state_dtypes import StateDtypes, state_dtypes
from megapipe.topology import Topology
from megapipe.trace.parameters import model_parameters

Sizes = TypeVar("Sizes", bound=tuple[int | tuple[int, ...], ...])
NEAR_MISS = 1.25  # layouts that need more than this times the usable memory are not reported
SPLITTING = frozenset(family.name for family in SCHEDULES.values() if family.splits_backward)
FILLS = 2  # after this many times pp microbatches a schedule has nearly reached its peak memory


class Bound(NamedTuple):
    """Lower bounds of a layout."""

    seconds: float  # of a step
    least_bytes: float  # of the fullest rank
    optimizer: float = 0.0  # seconds of the update among those of the step


Counts = tuple[int, ...]  # layers of each kind


class _Waits(NamedTuple):
    """The sizes that a pipeline rank's time depends on. The stages before it are those that a microbatch passes."""

    stages_before: int
    layers_before: Counts
    layers: Counts
    heads: int  # 1 with the output layer


class _Holds(NamedTuple):
    """The sizes that a pipeline rank's memory depends on.

    live_layers: layers x microbatches kept at once, at least; by slice, of each kind.
    """

    layers: Counts
    heads: int
    embeddings: int
    live_layers: Counts


class Elements(NamedTuple):
    """Parameters of one layer of each kind, without its experts, and of these; of the embedding and of the head.

    numbers: the layers of each kind.
    """

    numbers: Counts
    layers: Counts
    experts: Counts
    embedding: int
    head: int


@dataclass(frozen=True, eq=False)
class Cut:
    """The stages of each pipeline rank, in model order, and each stage's layers of each kind.

    With two directions every stage is on two ranks, each of which runs half of the microbatches. `_cut_of` makes one
    for each value, so that cuts compare and hash by identity.
    """

    stages: tuple[tuple[int, ...], ...]
    directions: int
    counts: tuple[Counts, ...]


_cut_of = cache(Cut)


class _Part(NamedTuple):
    """Seconds of one microbatch, or of its first slice, in a layer or in the head."""

    forward: float
    inputs: float  # the backward for inputs (I)
    both: float  # the whole backward, or the sum of its halves (I and W)
    exchanged: float = 0.0  # all-to-alls of experts beside all of these, where computation hides them


class Times(NamedTuple):
    """The costs of one microbatch and of its first slice, which passes a pipeline first and last.

    Without slices both are the same.
    """

    layers: tuple[_Part, ...]  # of each kind
    head: _Part
    first: tuple[_Part, ...]  # of the first slice, of each kind
    message: float  # seconds of the hidden states of the first slice between two stages
    # bytes that are kept of each kind, by slice, and of the head's slice that keeps the fewest
    kept: Callable[[], tuple[Counts, int]]


# of a microbatch, by slice: the seconds of each kind of layer and of the head; and of a message
_Measured = tuple[tuple[list[OpSeconds], ...], float]


def _over(counts: Counts, parts: tuple[_Part, ...], field: str) -> float:
    """Return the sum of a field over layers. parts: a layer of each kind."""
    return sum(count * getattr(part, field) for count, part in zip(counts, parts, strict=True))


class _Sizes(NamedTuple):
    """Options of a layout that the costs of its layers depend on, besides microbatch size and recompute."""

    tp: int
    is_sliced: bool
    ep: int
    etp: int
    context: Context
    slices: int
    flex: bool
    overlap: bool


# the links of the messages of experts, and of those over cp
_Links = tuple[ExpertLinks | None, ContextLinks | None]
_NO_LINKS: _Links = None, None


class Bounds:
    """The bounds of a configuration's layouts; values that several layouts share are computed once."""

    def __init__(self, config: Config, world_size: int, hardware: Hardware, load: ExpertLoad = BALANCED) -> None:
        self._config, self._world_size, self._hardware, self._load = with_compiled(config), world_size, hardware, load
        self._model, self._cut, self._times = cache(self._make_model), cache(self._make_cut), cache(self._make_times)
        self._links, self._measured, self._kept = cache(self._make_links), cache(self._measure), cache(self._keep)

    def at(self, world_size: int) -> Bounds:
        """Return the bounds for another number of accelerators, which share what does not depend on it."""
        other = copy(self)
        other._world_size, other._links = world_size, cache(other._make_links)
        return other

    def of(self, layout: Layout, times: Callable[[bool], Times] | None = None) -> Bound | None:
        """Return the bounds; None for an illegal model or cut, or a cut that equals the one by cost. No seconds of what
        does not nearly fit. times: those of `times_of`, if known.

        Time: a rank starts when the first microbatch has passed the stages before it, then computes all its
        microbatches, and the last gradient passes the stages before it afterwards. With slices both are of the first
        one: on every stage forwards begin with it and backwards end with it.
        Memory: the state of a rank, and the activations that its first forwards keep until a backward.
        """
        found = self._model(layout.tp)
        if found is None:
            return None
        cut = self._cut(layout.tp, layout.pp, layout.chunks, layout.schedule, layout.cut)
        if cut is None:
            return None
        count, is_split = layout.num_microbatches(self._config, self._world_size), layout.schedule in SPLITTING
        costs = self.times_of(layout, is_split) if times is None else times(is_split)
        holds = _holds(cut, layout.schedule, _held(layout, count), layout.slices)
        least, optimizer = self._bytes(found[1], layout, holds, costs, cut.directions)
        if least > NEAR_MISS * self._hardware.usable_bytes:
            return Bound(0.0, least)
        seconds = self._seconds(layout, _waits(cut), costs, count, cut.directions) + optimizer
        return Bound(seconds, least, optimizer)

    def of_group(self, first: Layout) -> Bound | None:
        """Return bounds for every schedule, cut and kind of optimizer with the sizes and the recompute of a layout: of
        its mean rank. None for an illegal model.
        """
        found = self._model(first.tp)
        if found is None:
            return None
        layers, experts = (sum(map(operator.mul, found[1].numbers, each)) for each in found[1][1:3])
        held = (layers + found[1].embedding + found[1].head) / first.tp / first.pp
        least, *_ = self._state(first, held, experts / first.ep / (first.etp or first.tp) / first.pp, 1)
        if least > NEAR_MISS * self._hardware.usable_bytes:
            return Bound(0.0, least)
        times, numbers = self.times_of(first, False), found[1].numbers
        work = sum(_over(numbers, times.layers, part) + getattr(times.head, part) for part in ("forward", "both"))
        longest = max(work, _over(numbers, times.layers, "exchanged")) / first.pp
        return Bound(first.num_microbatches(self._config, self._world_size) * longest, least)

    def times_of(self, layout: Layout, is_split: bool) -> Times:
        """Return the costs of a microbatch of a layout. is_split: backwards are, into I and W."""
        shared, etp, links = layout.context, layout.etp or layout.tp, _NO_LINKS
        if self._config.model.num_experts is not None or shared.ranks > 1:
            links = self._links(layout.tp, shared, layout.pp, layout.ep, etp, layout.flex)
        is_sliced = layout.sequence_parallel and layout.tp > 1
        sizes = _Sizes(layout.tp, is_sliced, layout.ep, etp, shared, layout.slices, layout.flex, layout.overlap)
        return self._times(sizes, layout.micro_batch_size, layout.recompute, links, is_split)

    def _seconds(
        self, layout: Layout, ranks: tuple[_Waits, ...], times: Times, microbatches: int, directions: int
    ) -> float:
        """Return the least seconds until the last backward ends."""
        count = microbatches / directions
        is_split = SCHEDULES[layout.schedule].splits_backward
        longest, head = 0.0, times.head
        for rank in ranks:
            forward = _over(rank.layers, times.layers, "forward") + rank.heads * head.forward
            work = forward + _over(rank.layers, times.layers, "both") + rank.heads * head.both
            hops = rank.stages_before * times.message
            longest = max(longest, count * _over(rank.layers, times.layers, "exchanged"))
            first = _over(rank.layers_before, times.first, "forward")
            if is_split:  # the weight gradients may run last, while input gradients continue on other ranks
                short = forward + _over(rank.layers, times.layers, "inputs") + rank.heads * head.inputs
                both_ways = first + _over(rank.layers_before, times.first, "inputs") + 2 * hops
                longest = max(longest, first + hops + count * work, both_ways + count * short)
            else:
                both_ways = first + _over(rank.layers_before, times.first, "both") + 2 * hops
                longest = max(longest, both_ways + count * work)
        return longest

    def _bytes(
        self, elements: Elements, layout: Layout, ranks: tuple[_Holds, ...], times: Times, directions: int
    ) -> tuple[float, float]:
        """Return (bytes of the fullest rank, seconds of the optimizer)."""
        least = most = most_held = most_summed = 0.0
        of_layers, of_head = times.kept()
        for rank in ranks:
            layers = sum(map(operator.mul, rank.layers, elements.layers))
            held = (layers + rank.embeddings * elements.embedding + rank.heads * elements.head) / layout.tp
            experts = sum(map(operator.mul, rank.layers, elements.experts)) / layout.ep / (layout.etp or layout.tp)
            # with several stages on a rank the head may keep nothing at the moment when most layers are kept
            kept = sum(map(operator.mul, rank.live_layers, of_layers))
            if layout.chunks == 1:
                kept += rank.heads * of_head
            state, sharded, moved, summed = self._state(layout, held, experts, directions)
            least = max(least, state + kept)
            most, most_held, most_summed = max(most, sharded), max(most_held, moved), max(most_summed, summed)
        return least, (most + most_held) / self._hardware.memory_bytes_per_second + most_summed

    def _state(self, layout: Layout, held: float, experts: float, directions: int) -> tuple[float, float, float, float]:
        """Return the bytes of the state of a rank with so many parameters and those of experts, what its optimizer
        moves of its shard and of all of them, and the seconds of summing its shard over instances.
        """
        node, network = self._hardware.node.bytes_per_second, self._hardware.network.bytes_per_second
        replicas, cut = self._world_size // layout.tp // layout.pp * directions, layout.ep * (layout.etp or layout.tp)
        element, dtypes, moved = self._of_state
        reduced = 2 if self._config.parallel.grad_reduce_in_bf16 else dtypes.gradient_bytes
        sharded, whole, summed = 0.0, held + experts, 0.0
        for elements, ranks in ((held, replicas), (experts, replicas * layout.tp // cut)):
            instances = math.gcd(layout.instances, ranks)
            shard = elements / (ranks // instances if layout.distributed_optimizer else 1)
            sharded += shard
            if not self._hardware.stack.overlapped_instances:
                # ranks with the same shard are at least a shard's ranks apart
                crosses = ranks // directions // instances >= self._hardware.ranks_per_node
                rate = network if crosses else max(node, network)
                summed += ALL_REDUCE * shard * reduced * (instances - 1) / instances / rate
        weights = sharded if layout.sharding == SHARDED_PARAMS else whole
        gradients = sharded if layout.sharding else whole
        of_buffers = weights * element + gradients * dtypes.gradient_bytes
        state = of_buffers + sharded * dtypes.state_bytes(True)
        return state, sharded * moved, whole * dtypes.gradient_bytes, summed

    @cached_property
    def _of_state(self) -> tuple[int, StateDtypes, int]:
        """Bytes of a weight, the types of its state, and the bytes that an update of it moves."""
        element = ELEMENT_BYTES[self._config.precision.dtype]
        dtypes = state_dtypes(self._config.optimizer, self._config.precision)
        return element, dtypes, update_bytes(dtypes, element, self._config.kernels.optimizer_impl == "compiled")

    def _make_model(self, tp: int) -> tuple[ResolvedModelConfig, Elements] | None:
        try:
            model = resolve_model(replace(self._config.model, padded_vocab_size=None), tp)
        except ConfigError:
            return None
        elements = Counter[tuple[Owner, bool]]()
        for spec in model_parameters(model, tp > 1):
            elements[spec.owner, spec.is_expert] += math.prod(spec.shape)
        layers = model_spec(model, self._config.precision).layers
        dense, experts = (
            tuple(elements[layers.index(kind), is_expert] for kind in dict.fromkeys(layers))
            for is_expert in (False, True)
        )
        numbers = tuple(Counter(layers).values())
        return model, Elements(numbers, dense, experts, elements["embedding", False], elements["head", False])

    def _make_cut(self, tp: int, pp: int, chunks: int, schedule: str, how: str) -> Cut | None:
        """Return the cut of the layers, None if it is illegal or equals the one by cost. The head's cost includes the
        padding for tp.
        """
        found = self._model(tp)
        assert found is not None
        model, _ = found
        layout = Layout(tp, pp, chunks, schedule, 1, RecomputeConfig(), False, False, how)
        placement = SCHEDULES[schedule].place(pp, chunks)
        try:
            partition = cut_layers(model, layout.applied_to(self._config).parallel, placement)
        except ConfigError:
            return None
        spec = model_spec(model, self._config.precision)
        held = [Counter(layers_of(spec, stage)) for stage in partition.stages]
        stages = tuple(map(placement.stages_of, range(pp)))
        counts = tuple(tuple(each[kind] for kind in spec.kinds) for each in held)
        cut = _cut_of(stages, len(placement.directions), counts)
        return None if how != "cost" and cut is self._cut(tp, pp, chunks, schedule, "cost") else cut

    def _make_links(self, tp: int, shared: Context, pp: int, ep: int, etp: int, flex: bool) -> _Links:
        """Return the links of the messages of experts and over cp; none for a grid that is refused."""
        hardware, parallel = self._hardware, self._config.parallel
        try:
            topology = Topology.of_world(
                self._world_size,
                tp=tp,
                cp=shared.ranks,
                cp_inner=(shared.sizes or (1,))[0],
                pp=pp,
                order=parallel.rank_order,
                ranks_per_node=hardware.on(self._world_size).ranks_per_node,
                allow_tp_across_nodes=True,
                ep=ep,
                expert_tp=etp,
                divides_ep=flex,
            )
        except ConfigError:
            return _NO_LINKS
        links = hardware.node, hardware.network
        return expert_links_of(topology, *links, hardware.stack.pipelined_exchanges), context_links(topology, *links)

    def _shapes(
        self, sizes: _Sizes, size: int, recompute: RecomputeConfig, over: _Links
    ) -> tuple[ModelSpec, list[tuple[RankShape, RankShape]]]:
        """Return the layers, and for each slice of a microbatch of so many sequences a shape that keeps no more than it
        and one that takes no longer.
        """
        found = self._model(sizes.tp)
        assert found is not None
        model, expert_links = with_dispatcher(found[0], sizes.flex), over[0]
        spec = model_spec(model, self._config.precision, sizes.context.kinds)
        if self._load != BALANCED:  # the least of any layer in all of them, so that kinds stay alike
            imbalance = self._load.of(model, sizes.ep)
            least = min(of_layer for _, of_layer in imbalance)
            spec = with_load(spec, tuple((number, least) for number, _ in imbalance))
        parallel = replace(sizes.context.applied_to(self._config.parallel), pipe_sp_splits=sizes.slices)
        config = replace(self._config, parallel=parallel)
        shape = rank_shape(config, sizes.tp, sizes.is_sliced, size)
        shape = replace(shape, recompute=recompute, documents=Documents(), ep=sizes.ep, etp=sizes.etp)
        shape = replace(shape, in_parts=sizes.overlap)
        if expert_links is not None and sizes.flex:
            shape = replace(shape, ep_inner=expert_links.inside)
        return spec, [_around_budget(spec, each) for each in self._slice_shapes(spec, shape, sizes.slices)]

    def _keep(self, sizes: _Sizes, size: int, recompute: RecomputeConfig, over: _Links) -> tuple[Counts, int]:
        """Return the bytes that a microbatch keeps of a layer of each kind, by slice, and at least of the head."""
        spec, pairs = self._shapes(sizes, size, recompute, over)
        kept = [joined_trace(kind, fewest).kept_bytes for fewest, _ in pairs for kind in spec.kinds]
        return tuple(kept), min(head_trace(spec, fewest, has_levels=False).kept_bytes for fewest, _ in pairs)

    def _measure(self, sizes: _Sizes, size: int, recompute: RecomputeConfig, over: _Links) -> _Measured:
        """Return the seconds of a microbatch of so many sequences."""
        hardware, (expert_links, shared) = self._hardware, over
        spec, pairs = self._shapes(sizes, size, recompute, over)
        links = hardware.node, hardware.network
        rate, latency = max(link.bytes_per_second for link in links), min(link.latency_seconds for link in links)
        tp_link = Link(rate, (sizes.tp - 1) * latency)
        of_layer = cache(lambda layer, shape: layer_seconds(layer, shape, hardware, tp_link, shared, expert_links))
        of_slices = []
        for _, shape in pairs:
            head = head_seconds(spec, shape, hardware, tp_link)
            for layer in spec.predictions:
                head += of_layer(layer, replace(shape, recompute=shape.recompute.of_predictions))
            of_slices.append([*(of_layer(kind, shape) for kind in spec.kinds), head])
        _, shape = pairs[0]
        message = shape.hidden_bytes(self._config.model.hidden_size)
        return tuple(of_slices), message / rate + latency

    def _make_times(self, sizes: _Sizes, size: int, recompute: RecomputeConfig, over: _Links, is_split: bool) -> Times:
        """Return the costs of a microbatch of so many sequences."""
        of_slices, message = self._measured(sizes, size, recompute, over)

        def part(each: OpSeconds) -> _Part:
            there, back = (half.get("ep", 0.0) if sizes.overlap else 0.0 for half in (each.forward, each.inputs))
            both = each.of(Op.I) + each.of(Op.W) if is_split else each.of(Op.B)
            return _Part(each.of(Op.F) - there, each.of(Op.I) - back, both - back, there + back)

        *layers, head = (part(sum(each[1:], each[0])) for each in zip(*of_slices, strict=True))
        kept = partial(self._kept, sizes, size, recompute, over)
        return Times(tuple(layers), head, tuple(map(part, of_slices[0][:-1])), message, kept)

    def _slice_shapes(self, spec: ModelSpec, shape: RankShape, count: int) -> tuple[RankShape, ...]:
        """Return the slices of a microbatch, as `RunPlan.slice_shapes` does."""
        if count == 1:
            return (shape,)
        cp, unit = shape.cp, shape.tp if shape.sequence_parallel else 1
        unit = unit if cp == 1 else math.lcm(2 * cp, cp * unit)
        strategy = self._config.parallel.pipe_sp_strategy
        slices = _slices(spec, shape.recompute, shape.whole_seq, count, strategy, unit)
        return tuple(replace(shape, seq=each.length // cp, slice=each) for each in slices)


_slices = cache(sequence_slices)


def _held(layout: Layout, count: int) -> int:
    """Return the microbatches of a step that keeps as much as one of `count`, or less."""
    if keeps_all(layout.schedule):
        return count
    if layout.slices == 1:
        return min(count, FILLS * layout.pp)
    # the same rest of groups of slices, and several fills: as in `decisive_counts`
    period = layout.pp // math.gcd(layout.pp, layout.slices)
    least = 2 * FILLS * layout.pp // layout.slices + 2
    return count if count <= least else least + (count - least) % period


def _around_budget(spec: ModelSpec, shape: RankShape) -> tuple[RankShape, RankShape]:
    """Return the shape with a recompute that keeps no more than the budget's choice, and with one that takes no longer.

    Without a budget both are the shape itself.
    """
    budget = shape.recompute.recompute_memory_budget
    if budget is None:
        return shape, shape
    if len(spec.kinds) > 1:  # in a stage of several kinds, a kind may be recomputed more or less than alone
        return replace(shape, recompute=FULL), replace(shape, recompute=RecomputeConfig())
    hull = choices(spec.layers[0], replace(shape, recompute=RecomputeConfig()))
    wanted = hull[-1].kept_bytes + budget * (hull[0].kept_bytes - hull[-1].kept_bytes)
    place = next(place for place, choice in enumerate(hull) if choice.kept_bytes <= wanted)
    more = hull[place if hull[place].kept_bytes == wanted else place - 1]
    return replace(shape, recompute=hull[place].recompute), replace(shape, recompute=more.recompute)


@cache
def _waits(cut: Cut) -> tuple[_Waits, ...]:
    no_layers, last = (0,) * len(cut.counts[0]), len(cut.counts) - 1
    return _undominated(
        _Waits(held[0], _sum([no_layers, *cut.counts[: held[0]]]), _layers(cut, held), int(last in held))
        for held in cut.stages
    )


@cache
def _holds(cut: Cut, schedule: str, count: int, slices: int) -> tuple[_Holds, ...]:
    pp, num_stages, counts = len(cut.stages), len(cut.counts), cut.counts
    of_ranks = [(_layers(cut, held), int(num_stages - 1 in held), int(0 in held)) for held in cut.stages]
    if keeps_all(schedule):
        return _undominated(_Holds(*held, tuple(count * layers for layers in held[0])) for held in of_ranks)
    kinds, found = len(counts[0]), list[_Holds]()
    shape = Shape(pp, num_stages // pp, count, pp, num_slices=slices)
    for held, row in zip(of_ranks, SCHEDULES[schedule].generate(shape), strict=True):
        # layers x microbatches by slice and kind, and these numbers in every forward
        live, seen = [0] * (kinds * slices), set[Counts]()
        for stage, op, number in _backward_first(row):
            sign = 1 if op is Op.F else -1 if op in (Op.B, Op.I) else 0
            if sign:
                start = (number or 0) % slices * kinds
                for kind, layers in enumerate(counts[stage], start):
                    live[kind] += sign * layers
                if sign == 1:
                    seen.add(tuple(live))
        if slices > 1:  # only where most layers are kept
            most = max(map(sum, seen), default=0)
            seen = {each for each in seen if sum(each) == most}
        found += [_Holds(*held, each) for each in seen]
    return _undominated(found)


def _backward_first(row: Iterable[Action]) -> Iterator[Action]:
    """Yield the actions of a row, of a pair the backward first: its parts free what those of the forward keep."""
    actions = iter(row)
    for action in actions:
        yield from reversed([next(actions), next(actions)]) if action.op is Op.OVERLAP else (action,)


def _undominated(sizes: Iterable[Sizes]) -> tuple[Sizes, ...]:
    """Return the entries that no other one equals or exceeds in every number."""
    flat = {tuple(chain(*(part if isinstance(part, tuple) else (part,) for part in each))): each for each in sizes}
    return tuple(flat[numbers] for numbers in undominated(flat))


def _layers(cut: Cut, stages: Sequence[int]) -> Counts:
    return _sum([cut.counts[stage] for stage in stages])


def _sum(counts: Sequence[Counts]) -> Counts:
    return tuple(sum(column) for column in zip(*counts, strict=True))
