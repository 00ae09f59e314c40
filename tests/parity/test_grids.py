"""Grids written by hand equal one process in fp64: losses, gradients, weights.

They are of what random grids do not draw: experts, latent attention, context parallelism, predictions, slices of
sequences, stages in parts, padded conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.grids import EVERY_LOSS, MODEL, PER_TOKEN, RATES, differences, grids
from tests.tiny import make_config

KINDS = ("experts", "context", "latent", "prediction", "slices", "parts", "padded")
PADDED_RATES = (Rates(0.01, 0.0, None),) * 2
CASES = [(kind, name) for kind in KINDS for name in grids(kind)]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}: {name}" for kind, name in CASES])
def test_a_grid_equals_one_process(kind: str, name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = grids(kind)[name]
    # with other weights, rounding decides which of the equal tokens of two conversations is dropped
    rates = PADDED_RATES if kind == "padded" else RATES
    assert rank_pools(world_size).run(partial(differences, rates=rates), options)[0] == []


def test_grids_of_parts_have_parts() -> None:
    for world_size, options in grids("parts").values():
        assert resolve(make_config(**options), world_size).parts is not None


def test_router_losses_weigh_as_the_loss_of_their_microbatch(rank_pools: Callable[[int], RankPool]) -> None:
    """With --calculate-per-token-loss a microbatch without a token that counts has no router loss either."""
    options = MODEL | EVERY_LOSS | PER_TOKEN | {"ep": 2}
    assert rank_pools(2).run(partial(differences, without_loss=(1, 4)), options)[0] == []
