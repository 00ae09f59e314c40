"""The ledger: what is accepted takes the planned memory and trains as one process does; what is refused ends as stated.

tests/ledger.py has the cases and their parts, tests/combinations.py what is compared. A refused pair is tried with its
rows left out of the table, so that no refusal outlives its reason; what needs a GPU or a library that is not installed
cannot be tried here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.config.rules import pairs
from megapipe.config.rules.pairs import Refusal
from megapipe.plan import world_rules
from tests import combinations, ledger
from tests.combinations import examine, needs_gpu, rounded_steps
from tests.features import FEATURES, RECIPES, ROUNDED
from tests.harness import RankFailure, RankPool
from tests.ledger import (
    BY_NAME,
    ENDS,
    EVERYDAY,
    MAX_FEATURES,
    MAX_WORLD,
    MIN_FEATURES,
    NUM_SETS,
    PARTS,
    RETIRED,
    SMALL_SIZES,
    Case,
    Combination,
    cases,
    chosen,
    drawn,
)
from tools.write_composition_page import PAGE, PICTURE, matrix, page, picture, refused_rows

Pools = Callable[[int], RankPool]
Record = Callable[[Case, str, float], None]
GOOD = ("zero1", "window", "grad overlap", "chunked loss")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test of the cases those of the chosen parts."""
    if "case" in metafunc.fixturenames:
        cases = chosen(metafunc.config.ledger_parts)  # type: ignore[attr-defined]
        metafunc.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Yield what notes a case that has passed; at the end they are written if asked for."""
    passed: list[tuple[Case, str, float]] = []
    commit = ledger.clean_commit() if request.config.getoption("ledger_record") else None
    yield lambda *case: passed.append(case)
    if commit is not None:
        ledger.write_record(passed, commit)


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


@pytest.mark.timeout(600)
def test_a_case_equals_one_process_or_is_refused_as_stated(case: Case, rank_pools: Pools, record: Record) -> None:
    began = time.perf_counter()
    rows, end = refused_rows(case.features), ENDS.get(case.features)  # type: ignore[call-overload]
    if not rows:
        assert end is None, f"accepted, although tests/ledger.py states how it fails: {end}"
        found = examine(Combination(case.features), rank_pools)
        assert found.verdict == "equal", found.why
        rounds = any(BY_NAME[name].needs == ROUNDED for name in case.features)
        assert found.compared == (("memory", "exact", "rounded") if rounds else ("memory", "exact"))
    elif end is not None:
        with without(rows):
            found = examine(Combination(case.features), partial(lifted, rank_pools, rows))  # type: ignore[arg-type]
        assert found.verdict == end[0], f"{found.verdict}, not {end[0]} as stated\n{found.why}"
        assert end[1] in found.why
    else:
        is_pair = len(case.features) == 2
        assert not is_pair or any(needs_gpu(BY_NAME[name]) for name in case.features), "tests/ledger.py states no end"
    record(case, "refused" if rows else "equal", time.perf_counter() - began)


@pytest.mark.timeout(300)
def test_the_page_is_the_table_and_has_the_verdict_on_every_recipe() -> None:
    found = matrix()
    assert page(found) == PAGE.read_text(encoding="utf-8"), "run python tools/write_composition_page.py"
    assert picture(found) == PICTURE.read_text(encoding="utf-8"), "run python tools/write_composition_page.py"
    assert found.refused.keys() >= ENDS.keys() and list(found.recipes) == list(RECIPES)


def test_every_case_is_in_one_part_and_parts_are_alike_in_size() -> None:
    sizes = [sum(case.part == part for case in cases()) for part in range(PARTS)]
    assert sum(sizes) == len(cases()) == len({case.name for case in cases()})
    assert max(sizes) < 1.5 * len(cases()) / PARTS < 3 * min(sizes)
    assert [case.name for case in chosen(())] == sorted(EVERYDAY, key=[case.name for case in cases()].index)
    assert set(chosen(range(PARTS))) == set(cases())


def test_pairs_recipes_and_sets_are_cases() -> None:
    assert len(FEATURES) == 44 and len(BY_NAME) == 44 + len(RECIPES) and not BY_NAME.keys() & set(RETIRED)
    assert (
        len(cases()) == len(list(ledger.pairs())) + len(ledger.SETS) + len(RECIPES) + NUM_SETS
        and len(list(ledger.pairs())) > 800
    )
    sets = [case for case in cases() if case.name.startswith("set ")]
    assert all(MIN_FEATURES <= len(each.features) <= MAX_FEATURES for each in sets)
    drawable = {feature.name for feature in FEATURES} - set(ledger.NOT_DRAWN)
    assert {name for each in sets for name in each.features} == drawable
    assert all(Combination(case.features).world_size <= MAX_WORLD for case in cases())
    assert drawn(1, 7) == drawn(1, 7) != drawn(2, 7)


def test_the_part_of_a_commit_is_its_number_and_without_a_number_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "false", "rev-list": "1043"}
    monkeypatch.setattr(ledger, "git", lambda command, *_: answers[command])
    assert ledger.part_of_commit.__wrapped__() == (3, "commit number 1043")
    for answer in ("true", ""):
        answers["rev-parse"] = answer
        part, why = ledger.part_of_commit.__wrapped__()
        assert part == 0 and "shallow clone or an archive" in why


def test_the_record_has_what_passed_and_lists_what_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"rev-parse": "abc", "status": " M megapipe/errors.py"}
    monkeypatch.setattr(ledger, "git", lambda command, *_: answers[command])
    monkeypatch.setattr(ledger, "RECORD", tmp_path / "ledger.tsv")
    first, second = cases()[:2]
    with pytest.raises(ValueError, match="without changes"):
        ledger.clean_commit()
    answers["status"] = ""
    ledger.write_record([(first, "equal", 1.0)], ledger.clean_commit())
    ledger.write_record([(second, "equal", 2.0)], ledger.clean_commit())
    never, changed = ledger.not_recorded()
    assert len(never) == len(cases()) - 2 and not {first.name, second.name} & set(never) and not changed
    monkeypatch.setitem(ENDS, second.features, ("crash", "now it fails"))  # type: ignore[misc, arg-type]
    assert ledger.not_recorded()[1] == [second.name]


def no_pools(world_size: int) -> RankPool:
    raise AssertionError("nothing is trained")


def test_a_combination_that_the_plan_refuses_is_not_trained() -> None:
    found = examine(Combination(("muon", "precision-aware", "window", "documents")), no_pools)
    assert found.verdict == "refused" and "--use-precision-aware-optimizer" in found.why


def test_other_memory_than_planned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "MEMORY_TOLERANCE", -0.5)
    found = examine(Combination(GOOD), no_pools, trains=False)
    assert found.verdict == "memory" and "planned" in found.why


@pytest.mark.parametrize("verdict", ["wrong", "crash"])
def test_wrong_results_and_crashes_are_found(verdict: str) -> None:
    def run(*arguments: object) -> list[tuple[bool, str]]:
        if verdict == "crash":
            raise RankFailure(1, "ValueError", "it broke", "rank 1 raised ValueError: it broke")
        return [(False, "the gradient of one weight differs")]

    pools: Any = lambda world_size: SimpleNamespace(run=run)  # noqa: E731
    found = examine(Combination(GOOD), pools)
    assert found.verdict == verdict and found.compared == ("memory",)
    assert ("differs" if verdict == "wrong" else "it broke") in found.why


def trained(pools: Pools, *features: str, rows: Collection[Refusal] = ()) -> Any:
    """Return losses and norms of three steps on the grid of these features, the norm of two steps clipped."""
    combination = Combination(features)
    with without(rows):
        arguments = [*combination.arguments(SMALL_SIZES, needs_gpu), "--device", "cpu", "--clip-grad", "0.3"]
    return lifted(pools, rows, combination.world_size).run(rounded_steps, combination, arguments)[0]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("schedule", [(), ("zb-h1",)], ids=["no pipeline", "zb-h1"])
def test_sharded_weights_in_fp8_have_the_bits_of_a_sharded_optimizer(
    rank_pools: Pools, strategy: str, schedule: tuple[str, ...]
) -> None:
    assert trained(rank_pools, strategy, "fp8 local", *schedule) == trained(rank_pools, "zero1", "fp8 local", *schedule)
