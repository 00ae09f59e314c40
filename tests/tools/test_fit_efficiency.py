"""The fitted figures of megapipe/plan/hardware.py are those that tools/fit_efficiency.py finds."""

from __future__ import annotations

import pytest

from megapipe.plan.hardware import HARDWARE
from megapipe.plan.stacks import STACKS
from tests.extras.search.published import GRAPHS
from tools.fit_efficiency import FITTED, FITTED_FIELDS, fit_field, fit_highest, root


@pytest.mark.parametrize(("gpu", "is_fp8"), FITTED)
def test_the_table_has_the_fitted_share(gpu: str, is_fp8: bool) -> None:
    assert HARDWARE[gpu].gemm_highest[is_fp8] == pytest.approx(fit_highest(gpu, is_fp8), abs=0.003)


def test_the_stack_has_the_fitted_costs_of_mixtures() -> None:
    stack = STACKS["megatron-core"]
    found = (stack.bias_bytes, stack.launches[0], GRAPHS["partial"]["launches"][0])
    assert found == tuple(pytest.approx(fit_field(name), rel=0.05) for name in FITTED_FIELDS)


def test_a_root_is_found_between_its_bounds() -> None:
    assert root(lambda x: x**3 - 2.0, 0.0, 2.0) == pytest.approx(2.0 ** (1 / 3), abs=1e-4)
