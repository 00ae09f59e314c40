"""Every file of configs/ resolves on the world size in its first line and lists only non-default values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megapipe.config.config import Config, all_fields, value_of
from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES
from megapipe.extras.convert.tables import check_expressed
from megapipe.extras.dry_run.run import dry_run
from megapipe.plan.run_plan import RunPlan
from tests.tiny import plan_for

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
PARAMETERS = {  # billions, as the papers count parameters
    "gpt2_124m": 0.124,
    "gpt3_175b": 175.0,
    "llama2_7b": 6.74,
    "llama3_8b": 8.03,
    "llama3_70b": 70.6,
    "llama3_70b_sharded": 70.6,
    "llama3_405b": 405.9,
    "gemma2_9b": 9.24,
    "gemma3_27b": 27.0,
    "olmo2_7b": 7.30,
    "olmo3_32b": 32.2,
    "mixtral_8x7b": 46.7,
    "qwen2_57b_a14b": 57.4,
    "qwen3_30b_a3b": 30.5,
    "deepseek_v3": 671.0 + 11.5,  # with its module of multi-token prediction
    "gpt_oss_20b": 20.91,
    "gpt_oss_120b": 116.83,
}
# of a token; GPT-OSS's model card leaves out the embedding, 201,088 x 2,880, and counts 3.61 and 5.13
ACTIVE = {
    "mixtral_8x7b": 12.9,
    "qwen2_57b_a14b": 14.2,
    "qwen3_30b_a3b": 3.3,
    "deepseek_v3": 37.0 + 0.7,
    "gpt_oss_20b": 3.61 + 0.579,
    "gpt_oss_120b": 5.13 + 0.579,
}
# keys of config.json on the hub, and the architecture in transformers; OLMo-3 before its YaRN
HUB = ("gemma2_9b", "gemma3_27b", "gpt_oss_20b", "olmo2_7b", "olmo3_32b")
MADE_FOR_THE_DATA = {name: ["--vocab-size", "2048"] for name in ("quickstart", "quickstart_gpu", "stdlib_llama")}
OVER_THE_QUICKSTART = {  # values that are defaults, but not those of quickstart.yaml
    "stdlib_llama": {
        "parallel.tensor_model_parallel_size",
        "parallel.pipeline_model_parallel_size",
        "parallel.num_virtual_stages_per_pipeline_rank",
    }
}
UNDER = {"quickstart_gpu": ["--config", str(REPOSITORY / "configs" / "quickstart.yaml")]}


def plan_of(path: Path, *more: str) -> RunPlan:
    world = re.match(r"# (\d+) ranks?(?:, (\d+) a node)?\b", path.read_text().splitlines()[0])
    assert world is not None, f"{path.name}: the first line has to state the world, as in '# 64 ranks, 8 a node: ...'"
    arguments = [*UNDER.get(path.stem, []), "--config", str(path), *MADE_FOR_THE_DATA.get(path.stem, []), *more]
    return plan_for(arguments, int(world[1]), int(world[2]) if world[2] else None)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_resolves_on_the_world_it_states(path: Path) -> None:
    plan = plan_of(path)
    layers = [stage.num_layers for stage in plan.partition.stages]
    assert sum(layers) == plan.config.model.num_layers
    if path.stem in PARAMETERS:
        assert num_parameters(plan) / 1e9 == pytest.approx(PARAMETERS[path.stem], rel=5e-3)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_sees_as_many_parameters_as_published(name: str) -> None:
    plan = plan_of(REPOSITORY / "configs" / f"{name}.yaml")
    assert plan.active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


def num_parameters(plan: RunPlan) -> int:
    """Return the parameters of a plan's model without the padding of the vocabulary."""
    padding = (plan.config.model.padded_vocab_size or 0) - (plan.config.model.vocab_size or 0)
    tables = 2 if plan.config.model.untie_embeddings_and_output_weights else 1
    return sum(spec.num_elements for spec in plan.specs) - tables * padding * plan.config.model.hidden_size


@pytest.mark.parametrize("name", HUB)
def test_a_config_is_the_model_on_the_hub_with_as_many_parameters_as_in_transformers(name: str) -> None:
    transformers = pytest.importorskip(
        "transformers",
        reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'",
    )
    settings = json.loads((REPOSITORY / f"tests/fixtures/hugging_face/{name}.json").read_text())
    (architecture,) = settings.pop("architectures")
    plan = plan_of(REPOSITORY / "configs" / f"{name}.yaml")
    family = FAMILIES[architecture]
    check_expressed(plan.config.model, family.read(settings), architecture)
    config = transformers.AutoConfig.for_model(family.model_type, **settings)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    assert num_parameters(plan) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", HUB)
def test_a_config_whose_layers_differ_dry_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight layers of it have all kinds."""
    options = ("--num-layers", "8", "--mock-data", "--train-iters", "4000")
    assert dry_run(plan_of(REPOSITORY / "configs" / f"{name}.yaml", *options), rank=0) == 0
    difference = re.search(r"^ +total .* ([-+]\d+\.\d) %", capsys.readouterr().out, re.MULTILINE)
    assert difference is not None and -1.0 < float(difference[1]) < 1.0


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
    assert set(same) == OVER_THE_QUICKSTART.get(path.stem, set())


def test_llama3_405b_keeps_one_slot_free_at_each_end() -> None:
    plan = plan_of(REPOSITORY / "configs" / "llama3_405b.yaml")
    layers = [stage.num_layers for stage in plan.partition.stages]
    assert (len(layers), layers[0], layers[-1], set(layers[1:-1])) == (128, 0, 0, {1})


def test_a_supplied_config_is_found_by_its_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(["--config", "llama3_8b"], is_job=False).config.model.num_layers == 32
    (tmp_path / "llama3_8b").write_text("model:\n  num_layers: 3\n")
    assert load_config(["--config", "llama3_8b"], is_job=False).config.model.num_layers == 3
    with pytest.raises(ConfigError, match=r"--config llama3_8: cannot be read: .*; did you mean llama3_8b\?$"):
        load_config(["--config", "llama3_8"], is_job=False)
    with pytest.raises(ConfigError, match=r"--config mine: cannot be read: .*; megapipe configs lists the supplied"):
        load_config(["--config", "mine"], is_job=False)
    with pytest.raises(ConfigError, match=r"--config mine\.yaml: cannot be read: No such file or directory$"):
        load_config(["--config", "mine.yaml"], is_job=False)
