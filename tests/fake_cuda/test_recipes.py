"""The recipes of `tests.features` under the checker of streams, each cut to its smallest step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.features import RECIPES
from tests.ledger import SIZES, Combination

pytestmark = pytest.mark.timeout(580)


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("name", [recipe.name for recipe in RECIPES])
def test_a_recipe_has_no_race(name: str) -> None:
    (recipe,) = (recipe for recipe in RECIPES if recipe.name == name)
    combination = Combination((*recipe.features, recipe.name))
    words = [*combination.arguments(SIZES), "--world-size", str(combination.world_size)]
    command = [sys.executable, "-m", "megapipe", "verify", "--streams", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["no race"]), ended.stdout + ended.stderr
