"""NVIDIA's functional tests with experts: how many run here as they are, and that they train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from megapipe.config.config import Config
from megapipe.config.load import load_config
from megapipe.extras.migrate.judge import json_report, text_report
from tests.extras.migrate.public_scripts import PAGE, functional_tests_of_experts
from tests.extras.verify.grids import compared
from tests.harness import RankPool

TESTS = functional_tests_of_experts()


def test_the_share_of_functional_tests_with_experts_is_on_the_page() -> None:
    reports = {name: test.migration() for name, test in TESTS.items()}
    accepted = {name for name, report in reports.items() if report.runs}
    changes = {name: report.to_change for name, report in reports.items() if not report.runs}
    assert (len(TESTS), len(accepted)) == (51, 51), changes
    assert not [name for name in accepted if reports[name].judgement.unchecked]
    distinct = {test.arguments for test in TESTS.values()}
    assert f"{len(accepted)} of {len(TESTS)} ({len(distinct)} that differ)" in PAGE.read_text(encoding="utf-8")


def test_a_start_line_says_what_runs_in_place_of_other_kernels_and_that_sinkhorn_depends_on_the_grid() -> None:
    test = TESTS["gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph"]
    loaded = test.migration().judgement.loaded
    assert loaded is not None and any("kernels are launched one by one" in line for line in loaded.remarks)
    sinkhorn = TESTS["gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel"].migration()
    lines = list(text_report(sinkhorn))
    told = lines[lines.index("a run says at its start:") + 1]
    assert "results depend on --tensor-model-parallel-size" in told
    assert json_report(sinkhorn)["remarks"] == [told.strip()]


# tests whose grid is not cut to 4 ranks by `cut_to_four_ranks`, so that stages stay in other kinds of models
CUT = {
    "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel": "--tensor-model-parallel-size 1",
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph": "--tensor-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
}
# the first of each that differ
DISTINCT = sorted({test.arguments: name for name, test in reversed(TESTS.items())}.values())
CPU = "--vocab-size 96 --device cpu --transformer-impl local --distributed-backend gloo".split()


def cut_to_four_ranks(name: str) -> list[str]:
    """Return the flags of the largest grid within that of a test that fits 4 ranks."""
    parallel = load_config([*TESTS[name].arguments, *CPU]).config.parallel
    axes = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
    given = [getattr(parallel, f"{axis}_parallel_size") for axis in axes]
    given[4] = given[4] or given[0]
    grids = []
    for grid in product(*([size for size in (1, 2, 4) if own % size == 0] for own in given)):
        tp, cp, pp, ep, etp = grid
        if 4 % (tp * cp * pp) == 0 and 4 % (ep * etp * pp) == 0:
            grids.append((sum(size > 1 for size in grid), tp * cp * pp + ep * etp, grid))
    sizes = zip(axes, max(grids)[2], strict=True)
    return [word for axis, size in sizes for word in (f"--{axis.replace('_', '-')}-parallel-size", str(size))]


def on_four_ranks(name: str) -> Config:
    """Return the configuration of a test on a grid of 4 ranks, on a CPU."""
    cut = CUT[name].split() if name in CUT else cut_to_four_ranks(name)
    return load_config([*TESTS[name].arguments, *cut, *CPU]).config


@pytest.mark.parametrize("name", DISTINCT)
def test_a_functional_test_on_4_ranks_equals_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    steps, report = rank_pools(4).run(compared, on_four_ranks(name), "fp64")[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report


def test_the_grids_of_functional_tests_stay_of_every_kind() -> None:
    """Each axis is above 1 in some of them, and etp apart from tp."""
    grids = [on_four_ranks(name).parallel for name in DISTINCT]
    assert len(grids) == 45
    assert {grid.context_parallel_size for grid in grids} == {1, 2}
    assert {grid.pipeline_model_parallel_size for grid in grids} == {1, 2}
    assert {grid.tensor_model_parallel_size for grid in grids} == {1, 2, 4}
    assert {grid.expert_model_parallel_size for grid in grids} == {1, 2, 4}
    assert any(grid.expert_tensor_parallel_size not in (None, grid.tensor_model_parallel_size) for grid in grids)
