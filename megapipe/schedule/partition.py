"""Partitions of the layers into stages: by cost, by count (Megatron's rules), or given as Megatron's layout string.

Every function returns a Partition that holds each layer exactly once, or raises ConfigError. Stages are in model order;
`placement` maps them to ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import NamedTuple

from megapipe.errors import ConfigError


class StageLayers(NamedTuple):
    """Layers first_layer .. last_layer_exclusive - 1 of the model, with the embedding before or the head after them."""

    first_layer: int
    last_layer_exclusive: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return self.last_layer_exclusive - self.first_layer


@dataclass(frozen=True)
class Partition:
    """The layers of every stage: each layer once, the embedding on stage 0, the head on the last stage."""

    stages: tuple[StageLayers, ...]

    def __post_init__(self) -> None:
        last, end = len(self.stages) - 1, 0
        for index, stage in enumerate(self.stages):
            if stage.first_layer != end or stage.num_layers < 0:
                raise ConfigError(
                    f"stage {index} starts at layer {stage.first_layer}, but the stages before it end at layer {end}"
                )
            if stage.has_embedding != (index == 0) or stage.has_head != (index == last):
                raise ConfigError(
                    f"stage {index} of {last + 1}: the embedding belongs on the first stage only, the head on the last"
                )
            end = stage.last_layer_exclusive
        if not self.stages:
            raise ConfigError("a model needs at least one stage")

    @property
    def num_layers(self) -> int:
        return self.stages[-1].last_layer_exclusive

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return tuple(stage.num_layers for stage in self.stages)

    def layout(self) -> str:
        """Return Megatron's layout string of this partition: the inverse of parse_layout."""
        return "|".join("E" * s.has_embedding + "t" * s.num_layers + "L" * s.has_head for s in self.stages)

    def __str__(self) -> str:
        texts = []
        for first, end, has_embedding, has_head in self.stages:
            parts = ["embedding"] if has_embedding else []
            if end > first:
                parts.append(str(first) if end == first + 1 else f"{first}..{end - 1}")
            if has_head:
                parts.append("head")
            texts.append("+".join(parts) or "nothing")
        return " | ".join(texts)


def from_counts(layer_counts: Sequence[int], num_layers: int) -> Partition:
    """Return the partition with these numbers of layers. Raises ConfigError unless they sum to num_layers."""
    ends = list(accumulate(layer_counts))
    if sum(layer_counts) != num_layers or any(count < 0 for count in layer_counts):
        raise ConfigError(
            f"the stages hold {list(layer_counts)} layers, {sum(layer_counts)} together; the model has {num_layers}"
        )
    last = len(ends) - 1
    stages = enumerate(zip(layer_counts, ends, strict=True))
    return Partition(tuple(StageLayers(end - count, end, i == 0, i == last) for i, (count, end) in stages))


# by cost


def cut_by_cost(layer_costs: Sequence[float], head_cost: float, num_stages: int) -> Partition:
    """Return the contiguous cut whose most expensive stage is cheapest; among equals that of the most equal counts.

    Costs are in any unit (seconds, FLOPs); head_cost (with the loss) counts on the last stage. Every stage has a layer
    unless there are fewer layers than stages. Raises ConfigError for no stage or a negative cost.
    """
    num_layers = len(layer_costs)
    if num_stages < 1 or min((*layer_costs, head_cost)) < 0:
        raise ConfigError(
            f"cannot cut {num_layers} layers into {num_stages} stages: stages must be 1 or more and costs 0 or more"
        )
    prefix = [0.0, *accumulate(layer_costs)]

    def cost(stage: int, first: int, end: int) -> float:
        return prefix[end] - prefix[first] + (head_cost if stage == num_stages - 1 else 0.0)

    cut = cut_by_stage_cost(cost, num_layers, num_stages)
    assert cut is not None  # no cost is infinite
    return cut


# (stage, first layer, last layer exclusive) -> cost, infinite if not allowed
StageCost = Callable[[int, int, int], float]


def cut_by_stage_cost(
    cost: StageCost, num_layers: int, num_stages: int, layers_alike: bool = False
) -> Partition | None:
    """Return the cut of `cut_by_cost` for any cost that grows with the layers of a stage; None if no cut is allowed.

    layers_alike: the cost depends only on the number of layers, which is faster.
    """
    fewest = 1 if num_layers >= num_stages else 0
    least = _least_maximum_of_alike if layers_alike else _least_maximum
    bound = least(cost, num_layers, num_stages, fewest)
    if bound == float("inf"):
        return None
    return from_counts(_most_equal_counts(cost, bound, num_layers, num_stages, fewest), num_layers)


def _least_maximum_of_alike(cost: StageCost, num_layers: int, num_stages: int, fewest: int) -> float:
    """Return the min-max cost if layers are alike: each layer in turn goes to the stage that is then cheapest."""
    counts = [fewest] * num_stages
    waiting = [(cost(stage, 0, fewest + 1), stage) for stage in range(num_stages)]
    heapify(waiting)
    largest = max(cost(stage, 0, fewest) for stage in range(num_stages))
    for _ in range(num_layers - num_stages * fewest):
        reached, stage = waiting[0]
        counts[stage] += 1
        largest = max(largest, reached)
        heapreplace(waiting, (cost(stage, 0, min(counts[stage] + 1, num_layers)), stage))
    return largest


def _least_maximum(cost: StageCost, num_layers: int, num_stages: int, fewest: int) -> float:
    """Return the min-max cost over contiguous cuts, by dynamic programming.

    best[end]: the least maximum of the stages so far if they hold the first `end` layers.
    """
    infinite = float("inf")
    best = [cost(0, 0, end) if end >= fewest else infinite for end in range(num_layers + 1)]
    for stage in range(1, num_stages):
        before, best = best, [infinite] * (num_layers + 1)
        lowest = stage * fewest
        for end in range(lowest + fewest, num_layers + 1):
            # from few layers on this stage to many: its own cost grows, until no cut can be better
            for cut in range(end - fewest, lowest - 1, -1):
                own = cost(stage, cut, end)
                if own >= best[end]:
                    break
                best[end] = min(best[end], max(before[cut], own))
    return best[num_layers]


def _most_equal_counts(cost: StageCost, bound: float, num_layers: int, num_stages: int, fewest: int) -> list[int]:
    """Return the counts with the least sum of squares among the cuts with no stage above `bound`."""
    # [stages so far][layers so far] -> (sum of squares, cut before)
    least: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage in range(num_stages):
        reached: dict[int, tuple[int, int]] = {}
        most = num_layers - fewest * (num_stages - 1 - stage)
        for first, (squares, _) in least[-1].items():
            for end in range(first + fewest, most + 1):
                if cost(stage, first, end) > bound:
                    break
                total = squares + (end - first) ** 2
                if end not in reached or total < reached[end][0]:
                    reached[end] = (total, first)
        least.append(reached)
    counts, end = [], num_layers
    for reached in reversed(least[1:]):
        first = reached[end][1]
        counts.append(end - first)
        end = first
    return counts[::-1]


# by count


def cut_evenly(
    num_layers: int,
    rank_of_stage: Sequence[int],
    first_rank_layers: int | None = None,
    last_rank_layers: int | None = None,
    count_embedding: bool = False,
    count_head: bool = False,
) -> Partition:
    """Cut by Megatron's rules: the same number of layers on every rank, split evenly over its chunks.

    rank_of_stage: the pp_rank of each stage; every rank has equally many. first_rank_layers, last_rank_layers
    (--decoder-first/last-pipeline-num-layers): layers of all chunks of the first and last pp_rank; the other ranks
    share the rest. count_embedding, count_head (--account-for-embedding/loss-in-pipeline-split): the embedding or the
    loss counts as one layer. Raises ConfigError if something does not divide; `cut_by_cost` takes any number of layers.
    """
    num_ranks = len(set(rank_of_stage))
    num_chunks = len(rank_of_stage) // num_ranks
    given = ((0, first_rank_layers), (num_ranks - 1, last_rank_layers))
    fixed = {rank: count for rank, count in given if count is not None}
    rest = num_layers + count_embedding + count_head - sum(fixed.values())
    others = num_ranks - len(fixed)
    uneven = next((count for count in fixed.values() if count % num_chunks or count < 0), None)
    fault = ""
    if others and rest % (others * num_chunks):
        fault = (
            f"{rest} layers (embedding and loss included where they count) do not divide over {others} ranks x "
            f"{num_chunks} chunks"
        )
    elif uneven is not None:
        fault = f"{uneven} layers on one pipeline rank do not divide into its {num_chunks} chunks"
    if fault:
        raise ConfigError(
            f"{fault}; choose counts that divide, write --pipeline-model-parallel-layout, or cut the layers by cost"
        )
    counts = [(fixed[rank] if rank in fixed else rest // others) // num_chunks for rank in rank_of_stage]
    counts[0] -= count_embedding
    counts[-1] -= count_head
    if min(counts) < 0:
        raise ConfigError(
            f"{num_layers} layers are too few for {len(counts)} stages if embedding or loss counts; use fewer stages"
        )
    return from_counts(counts, num_layers)


# by hand


def parse_layout(text: str, num_layers: int, num_stages: int, num_predictions: int = 0) -> Partition:
    """Parse Megatron's --pipeline-model-parallel-layout.

    E is the embedding, t a layer, m a module of multi-token prediction (all in the last stage, or none is written), L
    the loss, | a stage border; *n and (...)*n repeat, commas are ignored.
    `Et*3|(tt|)*29,L` has 31 stages of 3, 2, .., 2, 0 layers, in model order. A stage may be empty. Raises ConfigError
    with the invalid part.
    """
    stages = _expand(text).split("|")
    if len(stages) != num_stages:
        raise ConfigError(
            f"pipeline layout {text!r} has {len(stages)} stages; the pipeline ranks and their chunks need {num_stages}"
        )
    predictions = "m" * num_predictions if any("m" in stage for stage in stages) else ""
    for index, stage in enumerate(stages):
        end = predictions + "L" if index == num_stages - 1 else ""
        expected = "E" * (index == 0) + "t" * stage.count("t") + end
        if stage != expected:
            rule = "E must appear once, at the start of the first stage, and L once, at the end of the last"
            if predictions:
                rule = f"all {num_predictions} modules of multi-token prediction (m) are before L, or left out"
            elif "m" in stage:
                rule = "m is a module of multi-token prediction, of which --mtp-num-layers gives the number"
            raise ConfigError(f"pipeline layout {text!r}: stage {index} is {stage!r}, expected {expected!r}; {rule}")
    counts = [stage.count("t") for stage in stages]
    if sum(counts) != num_layers:
        raise ConfigError(f"pipeline layout {text!r} holds {sum(counts)} layers (t); the model has {num_layers}")
    return from_counts(counts, num_layers)


def layout_stages(text: str) -> int:
    """Return the number of stages of a layout string. Raises ConfigError if it is invalid."""
    return _expand(text).count("|") + 1


_REPETITION = re.compile(r"\*(\d*)")


def _expand(text: str) -> str:
    """Write out all repetitions."""
    plain = "".join(text.split()).replace(",", "")
    opened: list[tuple[int, str]] = []  # for each '(': where it is, and the expansion before it
    expanded, at = "", 0
    while at < len(plain):
        symbol, start, piece = plain[at], at, plain[at]
        at += 1
        if symbol == "(":
            opened.append((start, expanded))
            expanded = ""
            continue
        fault = ""
        if symbol == ")" and opened:
            piece = expanded
            start, expanded = opened.pop()
        elif symbol == ")":
            fault = f"')' without '(' before {plain[start:]!r}"
        elif symbol not in "EtmL|":
            fault = f"{plain[start:]!r} starts with none of E t m L | ( and is no repetition *n"
        repetition = _REPETITION.match(plain, at)
        if repetition and not fault:
            if repetition[1]:
                piece *= int(repetition[1])
                at = repetition.end()
            else:
                fault = f"{plain[start : at + 1]!r} lacks the number of repetitions"
        if fault:
            raise ConfigError(f"pipeline layout {text!r}: {fault}")
        expanded += piece
    if opened:
        raise ConfigError(f"pipeline layout {text!r}: {plain[opened[-1][0] :]!r} opens '(' and does not close it")
    return expanded
