"""The fewest accelerators and the cheapest tokens, against an exhaustive search over the number of accelerators."""

from __future__ import annotations

import dataclasses

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.search.layout import Layout
from megapipe.extras.search.objective import Objective, choose
from megapipe.extras.search.search import search
from megapipe.plan.hardware import GIB, hardware_named
from tests.extras.search.test_search import small

TINY = dataclasses.replace(hardware_named("h100"), ranks_per_node=2, memory_bytes=int(0.15 * GIB))
CONFIG = small(num_layers=8, hidden_size=512, vocab_size=2048, global_batch_size=16)


def one(layout: Layout) -> bool:
    return layout.schedule == "1f1b" and layout.micro_batch_size == 1 and layout.cut == "cost"


def fits(num_gpus: int, tokens_per_second: float = 0.0) -> bool:
    try:
        best = search(CONFIG, num_gpus, TINY, one).best
    except ConfigError:
        return False
    return bool(best) and best[0].time.tokens_per_second >= tokens_per_second


def test_fewer_ranks_than_the_fewest_do_not_fit() -> None:
    every = [n for n in (1, 2, 4, 6, 8) if fits(n)]
    chosen = choose(CONFIG, 8, TINY, Objective("gpus"), one)
    assert chosen.best.num_gpus == every[0] > 1
    fastest = choose(CONFIG, 8, TINY, Objective(), one).best.found.best[0].time.tokens_per_second
    chosen = choose(CONFIG, 8, TINY, Objective("gpus", tokens_per_second=0.9 * fastest), one)
    assert chosen.best.num_gpus == next(n for n in every if fits(n, 0.9 * fastest))


def test_the_cheapest_tokens_cost_what_their_accelerators_do() -> None:
    chosen = choose(CONFIG, 8, TINY, Objective("cost", price_per_hour=3.6), one)
    assert [sized.num_gpus for sized in chosen.tried] == [4, 8]
    assert chosen.best.cost == min(sized.cost or 0.0 for sized in chosen.tried)
    rate = chosen.best.found.best[0].time.tokens_per_second
    assert chosen.best.cost == pytest.approx(chosen.best.num_gpus * 3.6 / 3600 / rate * 1e9)


def test_what_cannot_be_reached_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no layout on up to 8 h100 fits and reaches 1,000,000,000,000,000 tokens/s"):
        choose(CONFIG, 8, TINY, Objective("gpus", tokens_per_second=1e15), one)
