"""The layers of the plans of the ledger, as they are traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.config.load import load_config
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import RankShape
from megapipe.plan.activations import layers_with_recompute
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traces import split, with_recompute
from megapipe.plan.world_rules import rules_of_world
from tests.features import FEATURES, RECIPES
from tests.ledger import NUM_SETS, SEED, SIZES, Combination, drawn

CASES = {
    **{each.name: (each.name,) for each in FEATURES},
    **{each.name: (*each.features, each.name) for each in RECIPES},
    **{f"set {number}": drawn(SEED, number).features for number in range(NUM_SETS)},
}


def planned(features: tuple[str, ...], device: str) -> RunPlan:
    """Return the plan of a combination of the ledger; raises ConfigError for a refused one."""
    combination = Combination(features)
    flags = ["--plan", "--world-size", str(combination.world_size), *combination.arguments(SIZES)]
    config = load_config(flags, is_job=False, more=rules_of_world).config
    return resolve(replace(config, training=replace(config.training, device=device)), combination.world_size)


def shapes_of(plan: RunPlan) -> list[RankShape]:
    return [split(shape) if plan.splits_backward else shape for shape in plan.slice_shapes]


def layers_of(plan: RunPlan) -> Iterator[tuple[LayerSpec, RankShape]]:
    """Yield the layers of a plan's stages with their shapes, each once."""
    for shape in shapes_of(plan):
        found = (each for stage in plan.partition.stages for each in layers_with_recompute(plan.model, shape, stage))
        for layer, recompute in dict.fromkeys(found):
            yield layer, with_recompute(shape, recompute)
