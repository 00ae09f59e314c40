"""Grids with frozen parameters equal one process that freezes the same, in fp64: loss, gradients, norm and weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.extras.verify.grids import compared
from tests.harness import RankPool
from tests.parity.grids import grids
from tests.tiny import tiny_config


@pytest.mark.parametrize("name", grids("frozen"))
def test_a_grid_equals_one_process_that_freezes_the_same(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world, options = grids("frozen")[name]
    steps, report = rank_pools(world).run(compared, tiny_config(**options), "fp64")[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report
