"""Grids equal one process, in fp64 and in their own dtypes: frozen parameters, and features that the ledger does not
combine.

tests/test_ledger.py compares its combinations in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.extras.verify.grids import compared
from tests.harness import RankPool
from tests.parity.grids import grids
from tests.tiny import tiny_config

CASES = [(kind, name) for kind in ("frozen", "fp64", "native") for name in grids(kind)]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}: {name}" for kind, name in CASES])
def test_a_grid_equals_one_process(kind: str, name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world, options = grids(kind)[name]
    mode = "native" if kind == "native" else "fp64"
    steps, report = rank_pools(world).run(compared, tiny_config(**options), mode)[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report
    if kind == "fp64":
        worst = max(
            rank.gradients.worst.ratio for step in steps for rank in step.ranks if rank.gradients.worst is not None
        )
        assert worst < 1e-11, "the tolerance has a margin"
