"""NVIDIA's functional tests with experts: how many run here as they are, and that they train as one process does."""

from __future__ import annotations

from collections.abc import Callable

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


# test -> how its grid is cut to 4 ranks
CUT = {
    "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel": "--tensor-model-parallel-size 1",
    "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic": "",
    "gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel": "--tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 1",
    "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances_1node": "",
    "gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router": "",
    "gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4_1node": "",
    "deepseek_proxy_fsdp_ep2_fsdp2_1node": "",
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8": "--expert-model-parallel-size 2",
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental": "--expert-model-parallel-size 2",
    "gpt3_moe_mcore_te_ep8_resume_torch_dist_muon_1node": "",
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph": "--tensor-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
}


def on_four_ranks(name: str) -> Config:
    """Return the configuration of a test on a grid of 4 ranks, on a CPU."""
    sizes = "--vocab-size 96 --device cpu --transformer-impl local --distributed-backend gloo"
    return load_config([*TESTS[name].arguments, *CUT[name].split(), *sizes.split()]).config


@pytest.mark.parametrize("name", CUT)
def test_a_functional_test_on_4_ranks_equals_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    steps, report = rank_pools(4).run(compared, on_four_ranks(name), "fp64")[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report
