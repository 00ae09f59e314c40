"""Refused pairs, tried with their rows left out of the table: each ends as stated here, so that no refusal is stale.

What needs a GPU or a library that is not installed cannot be tried here; `NOT_TRIED` counts those pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.config.features import LIBRARY, ON_GPU
from megapipe.config.rules import pairs
from megapipe.config.rules.pairs import Refusal
from megapipe.errors import ConfigError
from megapipe.plan import world_rules
from tests.combinations import BY_NAME, SIZES, SMALL_SIZES, Combination, examine, needs_gpu, planned, rounded_steps
from tests.harness import RankPool
from tools.write_composition_page import NAMES, PAGE, PICTURE, matrix, page, picture, rows_of

Pools = Callable[[int], RankPool]
NOT_TRIED = 11
CRASH, WRONG, MEMORY, REFUSED, IGNORED = "crash", "wrong", "memory", "refused", "ignored"
# pair -> (verdict, words of what happens). REFUSED: nothing could order it; IGNORED: one of the two has no effect
ENDS: dict[tuple[str, str], tuple[str, str]] = {
    ("dualpipe-v", "slices2"): (REFUSED, "has no order for 2 slices"),
    ("slices2", "moe overlap"): (REFUSED, "has no order for 2 slices"),
    ("mla", "sinks"): (CRASH, "softmax_offset"),
    ("recompute full", "moe overlap"): (MEMORY, "planned"),
    ("recompute budget", "moe overlap"): (MEMORY, "planned"),
    ("muon", "precision-aware"): (MEMORY, "planned"),
    ("recompute sel", "recompute budget"): (IGNORED, ""),
    ("recompute full", "recompute budget"): (IGNORED, ""),
}
ROLLED_BACK = ("fp8 local", "post validation")  # see below: the pair trains, but with stale casts after a rollback


@contextmanager
def without(rows: Collection[Refusal]) -> Iterator[None]:
    """Leave rows out of the tables in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pairs, "REFUSED"), (world_rules, "REFUSED_BY_SCHEDULES")):
            patch.setattr(module, name, tuple(row for row in getattr(module, name) if row not in rows))
        yield


def on_rank(rank: int, world_size: int, rows: Collection[Refusal], steps: Callable[..., Any], *arguments: Any) -> Any:
    with without(rows):
        return steps(rank, world_size, *arguments)


def lifted(pools: Pools, rows: Collection[Refusal], world_size: int) -> SimpleNamespace:
    """Return a pool whose ranks leave the rows out."""
    return SimpleNamespace(run=partial(pools(world_size).run, on_rank, rows))


def refused_rows(pair: tuple[str, ...]) -> tuple[Refusal, ...]:
    combination = Combination(0, pair)
    with pytest.raises(ConfigError) as error:
        planned(combination, [*combination.arguments(SIZES), "--device", "cuda"])
    return tuple(rows_of(str(error.value)))


@pytest.mark.parametrize("pair", ENDS, ids=" with ".join)
def test_a_refused_pair_ends_as_stated(pair: tuple[str, str], rank_pools: Pools) -> None:
    (verdict, words), rows = ENDS[pair], refused_rows(pair)
    with without(rows):
        found = examine(Combination(0, pair), partial(lifted, rank_pools, rows))  # type: ignore[arg-type]
    assert found.verdict == ("equal" if verdict == IGNORED else verdict), found.why
    assert words in found.why


@pytest.mark.timeout(300)
def test_the_page_is_the_table_and_every_refused_pair_is_tried_where_it_can_be() -> None:
    found = matrix()
    assert page(found) == PAGE.read_text(encoding="utf-8"), "run python tools/write_composition_page.py"
    assert picture(found) == PICTURE.read_text(encoding="utf-8"), "run python tools/write_composition_page.py"
    tried = {frozenset(pair) for pair in (*ENDS, ROLLED_BACK)}
    elsewhere = [pair for pair in found.refused if frozenset(pair) not in tried]
    assert all(any(BY_NAME[name].needs in (ON_GPU, LIBRARY) for name in pair) for pair in elsewhere), elsewhere
    assert len(elsewhere) == NOT_TRIED and tried <= {frozenset(pair) for pair in found.refused}
    assert len(list(itertools.combinations(NAMES, 2))) == 903


def trained(pools: Pools, *features: str, rows: Collection[Refusal] = ()) -> Any:
    """Return losses and norms of three steps on the grid of these features, the norm of two steps clipped."""
    combination = Combination(0, features)
    with without(rows):
        arguments = [*combination.arguments(SMALL_SIZES, needs_gpu), "--device", "cpu", "--clip-grad", "0.3"]
    return lifted(pools, rows, combination.world_size).run(rounded_steps, combination, arguments)[0]


@pytest.mark.parametrize("other", ["slices2", "p2p fp8", "opt offload", "mtp", "recompute full"])
def test_steps_without_a_barrier_have_the_same_bits(rank_pools: Pools, other: str) -> None:
    assert trained(rank_pools, "post validation", other) == trained(rank_pools, "zb-h1", "zero1", other)


def test_steps_without_a_barrier_would_train_with_stale_casts_in_fp8(rank_pools: Pools) -> None:
    plain = trained(rank_pools, "zb-h1", "zero1", "fp8 local")
    found = trained(rank_pools, "post validation", "fp8 local", rows=refused_rows(ROLLED_BACK))
    assert found[0] == plain[0] and found[1] != plain[1]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("schedule", [(), ("zb-h1",)], ids=["no pipeline", "zb-h1"])
def test_sharded_weights_in_fp8_have_the_bits_of_a_sharded_optimizer(
    rank_pools: Pools, strategy: str, schedule: tuple[str, ...]
) -> None:
    assert trained(rank_pools, strategy, "fp8 local", *schedule) == trained(rank_pools, "zero1", "fp8 local", *schedule)
