from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import RankPool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
