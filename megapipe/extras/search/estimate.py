"""Closed forms of a layout's step time and memory: they order the layouts of a search, which simulates the first ones.

They need no plan: seconds and kept bytes of layers are traced, everything else is counted. What they leave out makes a
step longer, or a rank fuller: bubbles inside a step, exchanges of replicas, temporaries, buffers of NCCL.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
from megapipe.plan.layer_time import (
    ContextLinks,
    ExpertLinks,
    OpSeconds,
    context_links,
    expert_links_of,
    head_seconds,
    layer_seconds,
)
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.plan.schedule_choice import cut_layers
from megapipe.plan.step_time import update_bytes
from megapipe.plan.traces import head_trace, layer_trace, with_recompute
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.families import SCHEDULES
from megapipe.sharding.spec import Owner
from megapipe.sharding.state_dtypes import StateDtypes, state_dtypes
from megapipe.topology import Topology
from megapipe.trace.parameters import model_parameters

Sizes = TypeVar("Sizes", bound=tuple[int | tuple[int, ...], ...])
FILLS = 2  # after this many times pp microbatches a schedule has nearly reached its peak memory


class Estimate(NamedTuple):
    """The closed forms of a layout."""

    seconds: float  # of a step
    least_bytes: float  # of the fullest rank


Counts = tuple[int, ...]  # layers of each kind


class _Waits(NamedTuple):
    """The sizes that a pipeline rank's time depends on. The stages before it are those that a microbatch passes."""

    stages_before: int
    layers_before: Counts
    layers: Counts
    heads: int  # 1 with the output layer


class _Holds(NamedTuple):
    """The sizes that a pipeline rank's memory depends on."""

    layers: Counts
    heads: int
    embeddings: int
    live_layers: Counts  # layers x slices of microbatches kept at once, of each kind


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


class _Cost(NamedTuple):
    """Seconds and kept bytes of one microbatch in a layer or in the head."""

    forward: float
    inputs: float  # the backward for inputs (I)
    both: float  # the whole backward, or the sum of its halves (I and W)
    exchanged: float  # all-to-alls of experts beside all of these, where computation hides them
    kept_bytes: float


class _Costs(NamedTuple):
    """The costs of a microbatch. message: seconds of the hidden states of a slice of it between two stages."""

    layers: tuple[_Cost, ...]  # of each kind
    head: _Cost
    message: float

    def over(self, counts: Counts, field: str) -> float:
        """Return the sum of a field over so many layers of each kind."""
        return sum(count * getattr(cost, field) for count, cost in zip(counts, self.layers, strict=True))


class _Sizes(NamedTuple):
    """Options of a layout that the costs of its layers depend on."""

    tp: int
    is_sliced: bool
    ep: int
    etp: int
    context: Context
    slices: int
    flex: bool
    overlap: bool
    in_parts: bool
    micro_batch_size: int
    recompute: RecomputeConfig


# the links of the messages of experts, and of those over cp
_Links = tuple[ExpertLinks | None, ContextLinks | None]
_NO_LINKS: _Links = None, None


class Estimates:
    """The closed forms of a configuration's layouts; values that several layouts share are computed once."""

    def __init__(self, config: Config, world_size: int, hardware: Hardware, load: ExpertLoad = BALANCED) -> None:
        self._config, self._world_size, self._hardware, self._load = with_compiled(config), world_size, hardware, load
        self._model, self._cut, self._costs = cache(self._make_model), cache(self._make_cut), cache(self._make_costs)
        self._links = cache(self._make_links)

    def at(self, world_size: int) -> Estimates:
        """Return the closed forms on another number of accelerators, which share what does not depend on it."""
        other = copy(self)
        other._world_size, other._links = world_size, cache(other._make_links)
        return other

    def of(self, layout: Layout, most_bytes: float) -> Estimate | None:
        """Return the closed forms; None for an illegal model or cut, or a cut that equals the one by cost. No seconds
        of what needs more than `most_bytes`.

        Time: a rank starts when the first microbatch has passed the stages before it, then computes all its
        microbatches, and the last gradient passes the stages before it afterwards. With slices both are of one slice.
        Memory: the state of a rank, and the activations of the moment when it keeps most layers.
        """
        found = self._model(layout.tp)
        cut = None if found is None else self._cut(layout.tp, layout.pp, layout.chunks, layout.schedule, layout.cut)
        if found is None or cut is None:
            return None
        count, costs = layout.num_microbatches(self._config, self._world_size), self._costs_of(layout, layout.overlap)
        holds = _holds(cut, layout.schedule, _held(layout, count), layout.slices, layout.overlap)
        least, optimizer = self._bytes(found[1], layout, holds, costs, cut.directions)
        if least > most_bytes:
            return Estimate(0.0, least)
        return Estimate(self._seconds(layout, cut, costs, count / cut.directions) + optimizer, least)

    def of_group(self, first: Layout, most_bytes: float) -> Estimate | None:
        """Return closed forms for every schedule, cut and kind of optimizer with the sizes and the recompute of a
        layout: of its mean rank. None for an illegal model. No seconds of what needs more than `most_bytes`.
        """
        found = self._model(first.tp)
        if found is None:
            return None
        layers, experts = (sum(map(operator.mul, found[1].numbers, each)) for each in found[1][1:3])
        held = (layers + found[1].embedding + found[1].head) / first.tp / first.pp
        least, *_ = self._state(first, held, experts / first.ep / (first.etp or first.tp) / first.pp, 1)
        if least > most_bytes:
            return Estimate(0.0, least)
        # parts, which keep more, are not traced
        costs, numbers = self._costs_of(first, in_parts=False), found[1].numbers
        work = sum(costs.over(numbers, part) + getattr(costs.head, part) for part in ("forward", "both"))
        longest = max(work, costs.over(numbers, "exchanged")) / first.pp
        return Estimate(first.num_microbatches(self._config, self._world_size) * longest, least)

    def _costs_of(self, layout: Layout, in_parts: bool) -> _Costs:
        shared, etp, links = layout.context, layout.etp or layout.tp, _NO_LINKS
        if self._config.model.num_experts is not None or shared.ranks > 1:
            links = self._links(layout.tp, shared, layout.pp, layout.ep, etp, layout.flex)
        is_sliced = layout.sequence_parallel and layout.tp > 1
        sizes = (layout.slices, layout.flex, layout.overlap, in_parts, layout.micro_batch_size, layout.recompute)
        splits = SCHEDULES[layout.schedule].splits_backward
        return self._costs(_Sizes(layout.tp, is_sliced, layout.ep, etp, shared, *sizes), links, splits)

    def _seconds(self, layout: Layout, cut: Cut, costs: _Costs, count: float) -> float:
        """Return the seconds until the last backward ends. count: microbatches of a rank and direction."""
        longest, head = 0.0, costs.head
        splits = SCHEDULES[layout.schedule].splits_backward
        for rank in _waits(cut):
            forward = costs.over(rank.layers, "forward") + rank.heads * head.forward
            work = forward + costs.over(rank.layers, "both") + rank.heads * head.both
            hops = rank.stages_before * costs.message
            first = costs.over(rank.layers_before, "forward") / layout.slices + hops
            back = costs.over(rank.layers_before, "inputs" if splits else "both") / layout.slices + hops
            if splits:  # the weight gradients may run last, while input gradients continue on other ranks
                short = forward + costs.over(rank.layers, "inputs") + rank.heads * head.inputs
                longest = max(longest, first + count * work, first + back + count * short)
            else:
                longest = max(longest, first + back + count * work)
            longest = max(longest, count * costs.over(rank.layers, "exchanged"))
        return longest

    def _bytes(
        self, elements: Elements, layout: Layout, ranks: tuple[_Holds, ...], costs: _Costs, directions: int
    ) -> tuple[float, float]:
        """Return (bytes of the fullest rank, seconds of the optimizer)."""
        least = most = most_held = most_summed = 0.0
        for rank in ranks:
            layers = sum(map(operator.mul, rank.layers, elements.layers))
            held = (layers + rank.embeddings * elements.embedding + rank.heads * elements.head) / layout.tp
            experts = sum(map(operator.mul, rank.layers, elements.experts)) / layout.ep / (layout.etp or layout.tp)
            kept = costs.over(rank.live_layers, "kept_bytes")
            # with several stages on a rank the head may keep nothing at the moment when most layers are kept
            if layout.chunks == 1:
                kept += rank.heads * costs.head.kept_bytes
            state, sharded, moved, summed = self._state(layout, held, experts, directions)
            least = max(least, state + kept / layout.slices)
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

    def _shape(self, sizes: _Sizes, over: _Links) -> tuple[ModelSpec, RankShape]:
        """Return the layers, and the shape of a whole microbatch."""
        found = self._model(sizes.tp)
        assert found is not None
        model, expert_links = with_dispatcher(found[0], sizes.flex), over[0]
        spec = model_spec(model, self._config.precision, sizes.context.kinds)
        if self._load != BALANCED:  # the least of any layer in all of them, so that kinds stay alike
            imbalance = self._load.of(model, sizes.ep)
            least = min(of_layer for _, of_layer in imbalance)
            spec = with_load(spec, tuple((number, least) for number, _ in imbalance))
        config = replace(self._config, parallel=sizes.context.applied_to(self._config.parallel))
        shape = rank_shape(config, sizes.tp, sizes.is_sliced, sizes.micro_batch_size)
        shape = replace(shape, recompute=sizes.recompute, documents=Documents(), ep=sizes.ep, etp=sizes.etp)
        shape = replace(shape, in_parts=sizes.in_parts)
        if expert_links is not None and sizes.flex:
            shape = replace(shape, ep_inner=expert_links.inside)
        return spec, shape

    def _make_costs(self, sizes: _Sizes, over: _Links, is_split: bool) -> _Costs:
        """Return the costs of a microbatch. is_split: backwards are, into I and W."""
        hardware, (expert_links, shared) = self._hardware, over
        spec, shape = self._shape(sizes, over)
        links = hardware.node, hardware.network
        rate, latency = max(link.bytes_per_second for link in links), min(link.latency_seconds for link in links)
        tp_link = Link(rate, (sizes.tp - 1) * latency)

        def cost(seconds: OpSeconds, kept: float) -> _Cost:
            there, back = (half.get("ep", 0.0) if sizes.overlap else 0.0 for half in (seconds.forward, seconds.inputs))
            both = seconds.of(Op.I) + seconds.of(Op.W) if is_split else seconds.of(Op.B)
            return _Cost(seconds.of(Op.F) - there, seconds.of(Op.I) - back, both - back, there + back, kept)

        layers = []
        for kind in spec.kinds:
            (recompute,) = layer_recompute((kind,), shape)  # alone, of a memory budget
            own = with_recompute(shape, recompute)
            seconds = layer_seconds(kind, own, hardware, tp_link, shared, expert_links)
            layers.append(cost(seconds, layer_trace(kind, own, has_levels=False).kept_bytes))
        head = head_seconds(spec, shape, hardware, tp_link)
        for layer in spec.predictions:
            again = with_recompute(shape, shape.recompute.of_predictions)
            head += layer_seconds(layer, again, hardware, tp_link, shared, expert_links)
        message = shape.hidden_bytes(self._config.model.hidden_size) / sizes.slices
        of_head = cost(head, head_trace(spec, shape, has_levels=False).kept_bytes)
        return _Costs(tuple(layers), of_head, message / rate + latency)


def _held(layout: Layout, count: int) -> int:
    """Return the microbatches of a step that keeps as much as one of `count`, or less."""
    return count if keeps_all(layout.schedule) else min(count, FILLS * layout.pp)


@cache
def _waits(cut: Cut) -> tuple[_Waits, ...]:
    no_layers, last = (0,) * len(cut.counts[0]), len(cut.counts) - 1
    return _undominated(
        _Waits(held[0], _sum([no_layers, *cut.counts[: held[0]]]), _layers(cut, held), int(last in held))
        for held in cut.stages
    )


@cache
def _holds(cut: Cut, schedule: str, count: int, slices: int, overlap: bool) -> tuple[_Holds, ...]:
    pp, num_stages, counts = len(cut.stages), len(cut.counts), cut.counts
    of_ranks = [(_layers(cut, held), int(num_stages - 1 in held), int(0 in held)) for held in cut.stages]
    if keeps_all(schedule):
        return _undominated(_Holds(*held, tuple(count * layers for layers in held[0])) for held in of_ranks)
    shape, found = Shape(pp, num_stages // pp, count, pp, num_slices=slices), list[_Holds]()
    for held, row in zip(of_ranks, SCHEDULES[schedule].generate(shape), strict=True):
        live = most = (0,) * len(counts[0])
        for stage, op, _ in _backward_first(row):
            if op is Op.F:
                live = _sum([live, counts[stage]])
                most = max(most, live, key=sum)
            elif op in (Op.B, Op.I):
                live = tuple(map(operator.sub, live, counts[stage]))
        if overlap and pp > 1:  # a pair runs the forward of another microbatch before its backward frees anything
            most = _sum([most, max((counts[stage] for stage in {action.stage for action in row}), key=sum)])
        found.append(_Holds(*held, most))
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
