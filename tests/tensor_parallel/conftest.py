"""Live ranks for this folder: two and four, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import RankPool


@pytest.fixture(scope="package", params=[2, 4], ids=["tp2", "tp4"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool
