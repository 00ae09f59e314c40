"""Every file of configs/ resolves on the world size in its first line and lists only non-default values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megapipe.config.config import Config, all_fields, value_of
from megapipe.config.load import load_config
from megapipe.extras.cli.planning import plan_for
from megapipe.plan.run_plan import RunPlan

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
PARAMETERS = {  # billions, as the papers count parameters
    "gpt2_124m": 0.124,
    "gpt3_175b": 175.0,
    "llama2_7b": 6.74,
    "llama3_8b": 8.03,
    "llama3_70b": 70.6,
    "llama3_405b": 405.9,
}
MADE_FOR_THE_DATA = {"quickstart": ["--vocab-size", "2048"], "quickstart_gpu": ["--vocab-size", "2048"]}
UNDER = {"quickstart_gpu": ["--config", str(REPOSITORY / "configs" / "quickstart.yaml")]}


def plan_of(path: Path) -> RunPlan:
    world = re.match(r"# (\d+) ranks?(?:, (\d+) a node)?\b", path.read_text().splitlines()[0])
    assert world is not None, f"{path.name}: the first line has to state the world, as in '# 64 ranks, 8 a node: ...'"
    arguments = [*UNDER.get(path.stem, []), "--config", str(path), *MADE_FOR_THE_DATA.get(path.stem, [])]
    return plan_for(arguments, int(world[1]), int(world[2]) if world[2] else None)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_resolves_on_the_world_it_states(path: Path) -> None:
    plan = plan_of(path)
    layers = [stage.num_layers for stage in plan.partition.stages]
    assert sum(layers) == plan.config.model.num_layers
    if path.stem in PARAMETERS:
        padding = (plan.config.model.padded_vocab_size or 0) - (plan.config.model.vocab_size or 0)
        tables = 2 if plan.config.model.untie_embeddings_and_output_weights else 1
        count = sum(spec.num_elements for spec in plan.specs) - tables * padding * plan.config.model.hidden_size
        assert count / 1e9 == pytest.approx(PARAMETERS[path.stem], rel=5e-3)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_file_lists_only_values_other_than_the_defaults(path: Path) -> None:
    loaded = load_config(["--config", str(path)], is_job=False)
    given = [field for field in all_fields() if loaded.origins[field.key].startswith("yaml")]
    required = [field.key for field in given if field.option.required]
    same = [
        field.key
        for field in given
        if value_of(loaded.config, field) == value_of(Config(), field) and field.key not in required
    ]
    assert not same


def test_llama3_405b_keeps_one_slot_free_at_each_end() -> None:
    plan = plan_of(REPOSITORY / "configs" / "llama3_405b.yaml")
    layers = [stage.num_layers for stage in plan.partition.stages]
    assert (len(layers), layers[0], layers[-1], set(layers[1:-1])) == (128, 0, 0, {1})
