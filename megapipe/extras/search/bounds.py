"""Lower bounds of a layout's step time and memory, computed without a plan, so that a search simulates few layouts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.errors import ConfigError
from megapipe.extras.search.layout import Layout
from megapipe.layers.model import model_parameters, model_spec
from megapipe.layers.table import Documents, RankShape
from megapipe.plan.activations import stage_bytes
from megapipe.plan.cut import cut_layers, undominated
from megapipe.plan.hardware import Hardware, Link
from megapipe.plan.layer_time import OpSeconds, head_seconds, layer_seconds
from megapipe.plan.resolve import resolve_model
from megapipe.plan.step_time import NORM_BYTES, OPTIMIZER_BYTES
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.partition import StageLayers

FILLS = 2  # after this many times pp microbatches a schedule has nearly reached its peak memory


class Bound(NamedTuple):
    """Lower bounds of a layout."""

    seconds: float  # of a step
    least_bytes: float  # of the fullest rank


class _Waits(NamedTuple):
    """The sizes that a pipeline rank's time depends on. The stages before it are those that a microbatch passes."""

    stages_before: int
    layers_before: int
    layers: int
    heads: int  # 1 with the output layer


class _Holds(NamedTuple):
    """The sizes that a pipeline rank's memory depends on. live_layers: layers x microbatches kept at once, at least."""

    layers: int
    heads: int
    embeddings: int
    live_layers: int


Elements = Counter[str | int]  # parameters of each layer (all are alike), of "embedding" and of "head"
Cut = tuple[int, tuple[int, ...], tuple[int, ...]]  # ranks, the rank of each stage, layers of each stage


class _Part(NamedTuple):
    """Seconds and kept bytes of one microbatch in a layer or in the head."""

    forward: float
    inputs: float  # the backward for inputs (I)
    both: float  # the whole backward, or the sum of its halves (I and W)
    kept_bytes: int


class _Times(NamedTuple):
    """The costs of one microbatch. message: seconds of the hidden states between two stages."""

    layer: _Part
    head: _Part
    message: float


class Bounds:
    """The bounds of a configuration's layouts; values that several layouts share are computed once."""

    def __init__(self, config: Config, world_size: int, hardware: Hardware) -> None:
        self._config, self._world_size, self._hardware = config, world_size, hardware
        self._model, self._cut, self._times = cache(self._make_model), cache(self._make_cut), cache(self._make_times)

    def of(self, layout: Layout) -> Bound | None:
        """Return the bounds; None for an illegal model or cut, or a cut that equals the one by cost.

        Time: a rank starts when the first microbatch has passed the stages before it, then computes all its
        microbatches, and the last gradient passes the stages before it afterwards.
        Memory: the state of a rank, and the activations that its first forwards keep until a backward.
        """
        found = self._model(layout.tp)
        if found is None:
            return None
        grid = layout.tp, layout.pp, layout.chunks, layout.schedule
        cut = self._cut(*grid, layout.cut)
        if cut is None or (layout.cut != "cost" and cut == self._cut(*grid, "cost")):
            return None
        count = layout.num_microbatches(self._config, self._world_size)
        is_sliced, is_split = layout.sequence_parallel and layout.tp > 1, SCHEDULES[layout.schedule].splits_backward
        times = self._times(layout.tp, is_sliced, is_split, layout.micro_batch_size, layout.recompute)
        waits, holds = _waits(cut), _holds(cut, layout.schedule, min(count, FILLS * layout.pp))
        _, elements = found
        least, optimizer = self._bytes(elements, layout, holds, times)
        return Bound(self._seconds(layout, waits, times, count) + optimizer, least)

    def _seconds(self, layout: Layout, ranks: tuple[_Waits, ...], times: _Times, count: int) -> float:
        """Return the least seconds until the last backward ends."""
        is_split = SCHEDULES[layout.schedule].splits_backward
        # without a barrier between steps no rank waits for the first microbatch and the last gradient of another
        waits = not self._config.optimizer.optimizer_post_validation
        longest, layer, head = 0.0, times.layer, times.head
        for rank in ranks:
            forward = rank.layers * layer.forward + rank.heads * head.forward
            work = forward + rank.layers * layer.both + rank.heads * head.both
            hops = rank.stages_before * times.message
            if is_split:  # the weight gradients may run last, while input gradients continue on other ranks
                short = forward + rank.layers * layer.inputs + rank.heads * head.inputs
                before = rank.layers_before * layer.forward + hops
                both_ways = rank.layers_before * (layer.forward + layer.inputs)
                longest = max(longest, waits * before + count * work, waits * (both_ways + 2 * hops) + count * short)
            else:
                both_ways = rank.layers_before * (layer.forward + layer.both) + 2 * hops
                longest = max(longest, waits * both_ways + count * work)
        return longest

    def _bytes(
        self, elements: Elements, layout: Layout, ranks: tuple[_Holds, ...], times: _Times
    ) -> tuple[float, float]:
        """Return (bytes of the fullest rank, seconds of the optimizer)."""
        layer, embedding, head = (elements[owner] / layout.tp for owner in (0, "embedding", "head"))
        shards = self._world_size // layout.tp // layout.pp if layout.distributed_optimizer else 1
        optimizer, element = self._config.optimizer, ELEMENT_BYTES[self._config.precision.dtype]
        wide = max(element, 4)
        moments = {"adam": 2, "sgd": int(optimizer.sgd_momentum > 0)}[optimizer.optimizer]
        per_element = element + wide + (moments + (element != wide)) * wide / shards
        least = most = 0.0
        for rank in ranks:
            held = rank.layers * layer + rank.embeddings * embedding + rank.heads * head
            # with several stages on a rank the head may keep nothing at the moment when most layers are kept
            kept = rank.live_layers * times.layer.kept_bytes
            if layout.chunks == 1:
                kept += rank.heads * times.head.kept_bytes
            least = max(least, held * per_element + kept)
            most = max(most, held)
        return least, most / shards * (OPTIMIZER_BYTES + NORM_BYTES) / self._hardware.memory_bytes_per_second

    def _make_model(self, tp: int) -> tuple[ResolvedModelConfig, Elements] | None:
        try:
            model = resolve_model(replace(self._config.model, padded_vocab_size=None), tp)
        except ConfigError:
            return None
        elements: Elements = Counter()
        for spec in model_parameters(model, tp > 1):
            elements[spec.owner] += math.prod(spec.shape)
        return model, elements

    def _make_cut(self, tp: int, pp: int, chunks: int, schedule: str, how: str) -> Cut | None:
        """Return the cut of the layers, None if it is illegal. The head's cost includes the padding for tp."""
        found = self._model(tp)
        assert found is not None
        model, _ = found
        layout = Layout(tp, pp, chunks, schedule, 1, RecomputeConfig(), False, False, how)
        placement = SCHEDULES[schedule].place(pp, chunks)
        try:
            partition = cut_layers(model, layout.applied_to(self._config).parallel, placement)
        except ConfigError:
            return None
        return pp, placement.rank_of_stage, partition.layer_counts

    def _make_times(self, tp: int, sliced: bool, split: bool, size: int, recompute: RecomputeConfig) -> _Times:
        hardware, found = self._hardware, self._model(tp)
        assert found is not None
        model, _ = found
        links = hardware.node, hardware.network
        tp_link = Link(max(link.bytes_per_second for link in links), min(link.latency_seconds for link in links))
        shape = replace(RankShape.of(self._config, tp, sliced, size), recompute=recompute, documents=Documents())
        spec = model_spec(model, self._config.precision)
        head = head_seconds(spec, shape, hardware, tp_link)
        kinds = [layer_seconds(kind, shape, hardware, tp_link) for kind in spec.kinds]
        kept = sum(stage_bytes(spec, shape, StageLayers(0, 1, False, False)).values())
        with_head = sum(stage_bytes(spec, shape, StageLayers(0, 1, False, True)).values())

        def both(each: OpSeconds) -> float:
            return each.of(Op.I) + each.of(Op.W) if split else each.of(Op.B)

        forward, inputs = (min(kind.of(op) for kind in kinds) for op in (Op.F, Op.I))
        return _Times(
            _Part(forward, inputs, min(map(both, kinds)), kept),
            _Part(head.of(Op.F), head.of(Op.I), both(head), with_head - kept),
            shape.hidden_bytes(model.hidden_size) / tp_link.bytes_per_second + tp_link.latency_seconds,
        )


@cache
def _waits(cut: Cut) -> tuple[_Waits, ...]:
    pp, ranks, counts = cut
    firsts = [ranks.index(rank) for rank in range(pp)]
    return undominated(
        _Waits(first, sum(counts[:first]), _layers(cut, rank), int(ranks[-1] == rank))
        for rank, first in enumerate(firsts)
    )


@cache
def _holds(cut: Cut, schedule: str, count: int) -> tuple[_Holds, ...]:
    pp, ranks, counts = cut
    rows = SCHEDULES[schedule].generate(Shape(pp, len(ranks) // pp, count, pp))
    return undominated(
        _Holds(
            _layers(cut, rank),
            int(ranks[-1] == rank),
            int(ranks[0] == rank),
            int(peak_held(row, {Held.ACTIVATIONS: 1}, counts)),
        )
        for rank, row in enumerate(rows)
    )


def _layers(cut: Cut, rank: int) -> int:
    return sum(layers for holder, layers in zip(cut[1], cut[2], strict=True) if holder == rank)
