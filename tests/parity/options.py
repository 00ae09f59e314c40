"""Options of random grids with their values, and the rules for combining them.

A grid is a dict with one value for each option; tests/parity/configuration.py makes a Config of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from megapipe.schedule.families import SCHEDULES

Grid = dict[str, Any]

WORLDS = (2, 3, 4, 6, 8)
LONG_RUN_WORLDS = (*WORLDS, 12)

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3, 4),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4),
    "chunks": (1, 2, 3),
    "schedule": ("auto", "whole backward", "split backward", "loop", "V", "pairs"),
    "family": (0, 1, 2),  # index in FAMILIES, modulo their number
    "memory_limit": ("pp", "pp + 1"),
    "cut": ("cost", "even", "layout", "empty stages", "first and last", "ends counted"),
    "microbatch_group": ("pp", "pp + 1"),
    "microbatches": (1, 2, 5, 8, "1, 2, 3"),
    "micro_batch_size": (1, 2),
    "rank_order": ("tp-cp-dp-pp", "tp-cp-pp-dp", "pp-dp-cp-tp"),
    "sequence_parallel": (False, True),
    "p2p": ("overlapped", "two receives ahead", "not overlapped"),
    "use_distributed_optimizer": (False, True),
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "bucket": ("whole stage", "some parameters", "one parameter"),
    "recompute": (
        "none",
        "core_attn",
        "layernorm",
        "mlp",
        "activation",
        "core_attn layernorm mlp",
        "core_attn layernorm activation",
        "uniform 1",
        "uniform 2",
        "block 1",
    ),
    "tied": (True, False),
    "layers": (
        "alike",
        "windows skipped",
        "rotary skipped",
        "windows",
        "rotary",
        "heads",
        "widths",
        "missing parts",
    ),
    "kv_heads": ("all", "some", "one"),
    "qk_layernorm": (False, True),
    "qk_layernorm_scope": ("head", "projection"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "norm_position": ("before", "after", "around"),
    "embedding_scale": (1.0, 4.5),
    "residual_scale": (1.0, 0.6),
    "logits_scaling": (1.0, 3.0),
    "qk_layernorm_after_rope": (False, True),
    "attention_output_gate": (False, True),
    "qk_l2_norm": (False, True),
    "layernorm_zero_centered_gamma": (False, True),
    "activation": ("gelu_tanh", "gelu", "swiglu", "geglu_tanh", "squared_relu", "relu"),
    "biases": ("all", "qkv", "none"),
    "positions": ("learned", "rope", "half rope, llama3", "rope, yarn", "rope, linear", "none"),
    "window_size": (None, 5),
    "softmax_scale": (None, 0.2),
    "attn_logit_softcapping": (None, 2.0),
    "final_logit_softcapping": (None, 3.0),
    "attention_softmax_in_fp32": (False, True),
    "hidden_dropout": (0.0, 0.2),
    "attention_dropout": (0.0, 0.3),
    "vocabulary": ("full", "padded", "a rank of padding"),
    "documents": ("ignored", "masked loss", "own positions", "own attention", "all"),
    "calculate_per_token_loss": (False, True),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 1e-2),
    "optimizer": ("adam", "sgd", "sgd without momentum"),
    "clip_grad": (0.0, 0.05, 1000.0),
    "weight_decay": (0.0, 0.1),
    "decoupled_lr": (None, 5e-3),
}


@dataclass(frozen=True)
class Rule:
    """A rule: the values of `names`, in this order, fit together only if `holds` of them."""

    names: tuple[str, ...]
    holds: Callable[..., bool]

    def may_hold(self, known: Mapping[str, Any]) -> bool:
        """Return True if values can be found for the options that are not known yet."""
        return _may_hold(self, tuple((known[name],) if name in known else OPTIONS[name] for name in self.names))


@functools.cache
def _may_hold(rule: Rule, choices: tuple[tuple[Any, ...], ...]) -> bool:
    return any(rule.holds(*values) for values in itertools.product(*choices))


# the schedules of one kind take the same paths through engine and stages, so that pairs of kinds with the other options
# are enough
FAMILIES = {
    "auto": ("auto",),
    "whole backward": ("1f1b", "gpipe", "naive"),
    "split backward": ("zb-h1", "zb-h2", "zb-auto"),
    "loop": ("interleaved", "breadth-first", "hanayo"),
    "V": ("zb-v", "v-half", "v-min"),
    "pairs": ("dualpipe", "dualpipe-v", "chimera"),
}
CHUNKS = {
    "auto": OPTIONS["chunks"],
    "whole backward": (1,),
    "split backward": (1,),
    "loop": (2, 3),
    "V": (2,),
    "pairs": (1, 2),
}


MIRRORED = tuple(name for name, family in SCHEDULES.items() if family.is_mirrored(2))


def schedule_name(kind: str, number: int) -> str:
    """Return the schedule of the options "schedule" and "family"; a hand-written grid may name one instead of a
    kind."""
    families = FAMILIES.get(kind, (kind,))
    return families[number % len(families)]


def _pairs_fit(kind: str, family: int, chunks: int, pp: int, microbatches: Any) -> bool:
    """Return True if DualPipe(V) gets two microbatches for each rank, and a schedule in two directions an even number
    of ranks and microbatches."""
    if kind != "pairs":
        return True
    if schedule_name(kind, family) in MIRRORED:
        return chunks == 1 and pp % 2 == 0 and microbatches == 8
    return chunks == 2 and (microbatches == 8 or (microbatches == 5 and pp == 2))


RULES = (
    Rule(("chunks", "pp"), lambda chunks, pp: chunks == 1 or pp > 1),
    Rule(("schedule", "family", "chunks", "pp", "microbatches"), _pairs_fit),
    Rule(("schedule", "chunks"), lambda kind, chunks: chunks in CHUNKS[kind]),
    Rule(
        ("schedule", "family", "chunks"),
        lambda kind, family, chunks: chunks != 3 or schedule_name(kind, family) != "hanayo",
    ),
    Rule(
        ("microbatch_group", "chunks", "schedule", "family"),
        lambda group, chunks, *family: (
            group == "pp" or (chunks > 1 and schedule_name(*family) in ("auto", "interleaved"))
        ),
    ),
    Rule(
        ("memory_limit", "schedule", "family"),
        lambda limit, *family: limit == "pp" or schedule_name(*family) == "zb-auto",
    ),
    Rule(("cut", "pp"), lambda cut, pp: cut not in ("first and last", "empty stages") or pp > 1),
    Rule(
        ("qk_layernorm_scope", "qk_layernorm", "normalization"),
        lambda scope, is_on, norm: scope == "head" or (is_on and norm == "RMSNorm"),
    ),
    Rule(
        ("qk_l2_norm", "qk_layernorm", "layers"), lambda l2, is_on, layers: not l2 or not (is_on or layers == "heads")
    ),
    Rule(("qk_layernorm_after_rope", "qk_layernorm"), lambda after, is_on: is_on or not after),
    Rule(("layers", "window_size"), lambda layers, window: layers != "windows skipped" or window is not None),
    Rule(("layers", "positions"), lambda layers, positions: layers != "rotary skipped" or "rope" in positions),
    Rule(("overlap_param_gather", "use_distributed_optimizer"), lambda overlap, sharded: sharded or not overlap),
)


@functools.cache
def rules(worlds: tuple[int, ...]) -> tuple[Rule, ...]:
    """Return the rule that the number of ranks is one of the worlds, and RULES."""
    return (Rule(("tp", "pp", "dp"), lambda tp, pp, dp: tp * pp * dp in worlds), *RULES)


@functools.cache
def rules_of(name: str, worlds: tuple[int, ...]) -> tuple[Rule, ...]:
    """Return the rules about an option."""
    return tuple(rule for rule in rules(worlds) if name in rule.names)


def plain_grid(**changes: Any) -> Grid:
    """Return a grid of every option's first value, with some changes."""
    assert changes.keys() <= OPTIONS.keys(), changes
    return {name: changes.get(name, values[0]) for name, values in OPTIONS.items()}


def world_of(grid: Grid) -> int:
    """Return the number of ranks of a grid."""
    return int(grid["tp"] * grid["pp"] * grid["dp"])


def may_fit(known: Mapping[str, Any], worlds: tuple[int, ...]) -> bool:
    """Return False if some rule can no longer hold."""
    return all(rule.may_hold(known) for rule in rules(worlds))


def completed(
    known: Grid, worlds: tuple[int, ...], order: Sequence[str], ranked: Callable[[str, Grid], Sequence[Any]]
) -> Grid | None:
    """Complete the known values to a whole grid; None if that is impossible.

    ranked: returns an option's values in the order in which to try them.
    """
    missing = next((name for name in order if name not in known), None)
    if missing is None:
        return known
    for value in ranked(missing, known):
        candidate = known | {missing: value}
        if all(rule.may_hold(candidate) for rule in rules_of(missing, worlds)):  # the others hold as before
            whole = completed(candidate, worlds, order, ranked)
            if whole is not None:
                return whole
    return None


def possible_values(name: str, known: Grid, worlds: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the values of an option with which the known ones can be completed."""
    constrained = tuple(dict.fromkeys(other for rule in rules(worlds) for other in rule.names))
    candidates = (value for value in OPTIONS[name] if may_fit(known | {name: value}, worlds))
    in_order = lambda option, _: OPTIONS[option]  # noqa: E731
    return tuple(
        value for value in candidates if completed(known | {name: value}, worlds, constrained, in_order) is not None
    )


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(grid: Grid) -> Iterator[Pair]:
    """Yield all pairs of option values of a whole grid."""
    return itertools.combinations(((name, grid[name]) for name in OPTIONS), 2)


@functools.cache
def possible_pairs(worlds: tuple[int, ...]) -> frozenset[Pair]:
    """Return all pairs of option values that occur in some grid."""
    found: set[Pair] = set()
    for (one, values), (other, _) in itertools.combinations(OPTIONS.items(), 2):
        found |= {
            ((one, value), (other, fitting))
            for value in values
            for fitting in possible_values(other, {one: value}, worlds)
        }
    return frozenset(found)


def topologies(worlds: tuple[int, ...]) -> list[Grid]:
    """Return all sizes of the three axes, the largest world first."""
    axes = [
        dict(zip(("tp", "pp", "dp"), sizes, strict=True))
        for sizes in itertools.product(OPTIONS["tp"], OPTIONS["pp"], OPTIONS["dp"])
    ]
    return sorted((sizes for sizes in axes if world_of(sizes) in worlds), key=world_of, reverse=True)


def covering_grids(worlds: tuple[int, ...], num_cubes: int, seed: int = 2, num_candidates: int = 8) -> list[Grid]:
    """Return grids that cover every topology and every possible pair of option values; the first num_cubes have tp = pp
    = dp = 2.

    Grids are added one by one (AETG, Cohen et al. 1997): of some candidates, each greedy in a random order of options,
    the one with the most new pairs relative to the square root of its number of ranks, so that large worlds are not
    postponed.
    """
    random = Random(seed)
    uncovered = set(possible_pairs(worlds))
    starts = [{"tp": 2, "pp": 2, "dp": 2}] * num_cubes
    starts += [sizes for sizes in topologies(worlds) if sizes not in starts]
    found: list[Grid] = []
    while uncovered or starts:
        start = starts.pop(0) if starts else dict(min(uncovered, key=repr))
        candidates = [_greedy(start, uncovered, worlds, random) for _ in range(num_candidates)]
        best = max(
            candidates, key=lambda grid: sum(pair in uncovered for pair in pairs_of(grid)) / world_of(grid) ** 0.5
        )
        uncovered.difference_update(pairs_of(best))
        found.append(best)
    return found


def _greedy(start: Grid, uncovered: set[Pair], worlds: tuple[int, ...], random: Random) -> Grid:
    all_rules = rules(worlds)
    rule_of = {name: number for number, rule in reversed(list(enumerate(all_rules))) for name in rule.names}
    # the options of one rule together, so that dead ends are found early
    order = sorted(random.sample(list(OPTIONS), len(OPTIONS)), key=lambda name: rule_of.get(name, len(all_rules)))
    place = {name: index for index, name in enumerate(OPTIONS)}

    def ranked(name: str, known: Grid) -> Sequence[Any]:
        def gain(value: Any) -> int:
            mine = (name, value)
            return sum(
                ((mine, other) if place[name] < place[other[0]] else (other, mine)) in uncovered
                for other in known.items()
            )

        values = random.sample(OPTIONS[name], len(OPTIONS[name]))
        return sorted(values, key=gain, reverse=True)

    grid = completed(start, worlds, order, ranked)
    assert grid is not None, start
    return {name: grid[name] for name in OPTIONS}
