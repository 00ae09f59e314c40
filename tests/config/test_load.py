"""Precedence, origins, --print-config, --use-checkpoint-args."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megapipe.config.config import Config
from megapipe.config.load import from_yaml, load_config, with_checkpoint_model
from megapipe.config.model import ModelConfig
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import ConfigError
from megapipe.plan.resolve import resolve
from tests.config.examples import SHAPE, job

RESOLVED = [
    ("--train-iters 10", 2),
    ("--train-iters 100 --lr-warmup-iters 10 --lr-decay-style WSD --lr-wsd-decay-iters 5", 1),
    ("--train-samples 100 --global-batch-size 4 --rampup-batch-size 2 2 20", 1),
    (
        (
            "--train-iters 9 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--tensor-model-parallel-size 2"
        ),
        8,
    ),
    (
        (
            "--train-iters 9 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL --swiglu "
            "--decoupled-lr 1e-4"
        ),
        2,
    ),
]
NO_LENGTH = SHAPE + " --micro-batch-size 2 --lr 1e-3 --mock-data --vocab-size 100 "


@pytest.mark.parametrize(("flags", "world_size"), RESOLVED, ids=[flags for flags, _ in RESOLVED])
def test_a_saved_configuration_loads_and_plans_the_same(flags: str, world_size: int, tmp_path: Path) -> None:
    loaded = load_config((NO_LENGTH + flags).split())
    plan = resolve(loaded.config, world_size)
    saved = tmp_path / "saved.yaml"
    saved.write_text(loaded.text(plan.config))
    again = load_config(["--config", str(saved)])
    assert again.config == loaded.config
    assert resolve(again.config, world_size).config == plan.config
    assert f"# default; derived: {plan.config.model.padded_vocab_size}" in saved.read_text()
    assert to_yaml(from_yaml(to_yaml(plan.config))) == to_yaml(plan.config)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text("model:\n  num_layers: 6\n  hidden_dropout: 0.2\noptimizer:\n  min_lr: 1e-5\nseed: 7\n")
    return path


def test_flags_win_over_yaml_and_yaml_over_defaults(tiny: Path) -> None:
    loaded = load_config(job(f"--config {tiny} --seed 8"))
    assert (loaded.config.training.seed, loaded.origins["training.seed"]) == (8, "flag --seed")
    assert (loaded.config.optimizer.min_lr, loaded.origins["optimizer.min_lr"]) == (1e-5, f"yaml {tiny} line 5")
    assert (loaded.config.optimizer.clip_grad, loaded.origins["optimizer.clip_grad"]) == (1.0, "default")
    assert loaded.config.model.num_layers == 4  # the flag in the example


def test_a_later_file_wins_over_an_earlier_one(tiny: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("seed: 9\n")
    config = load_config(job(f"--config {tiny} --config {second}")).config
    assert (config.training.seed, config.model.hidden_dropout) == (9, 0.2)


def test_a_flag_can_take_back_what_yaml_turned_on(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("bf16: true\nsequence_parallel: true\nwindow_size: 16\n")
    config = load_config(job(f"--config {path} --dtype fp32 --no-sequence-parallel --window-size none")).config
    assert (config.precision.dtype, config.parallel.sequence_parallel, config.model.window_size) == (
        "fp32",
        False,
        None,
    )


def test_none_takes_back_a_list_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "recompute_granularity: selective\nrecompute_modules: [layernorm]\nprofile_ranks: [0, 1]\n"
        "num_experts: 4\nmoe_router_load_balancing_type: aux_loss\ndataset_options: [a=1]\nextension: [no/such.py]\n"
    )
    unset = "--recompute-modules none --profile-ranks null --dataset-options none --extension none"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    config = load_config(job(f"--config {path} {unset} {full} --moe-router-load-balancing-type none")).config
    assert config.recompute.recompute_modules == ("core_attn",)  # its default
    assert config.logging.profile_ranks == (0,)
    assert config.data.dataset_options == config.training.extension == ()
    assert config.model.moe_router_load_balancing_type == ("none",)  # which is one of its values


def test_none_takes_back_an_extension_and_keeps_those_after_it() -> None:
    file = "tests/fixtures/extension.py"
    config = load_config(job(f"--extension no/such.py --extension none --extension {file}")).config
    assert config.training.extension == (file,)


def test_the_supplied_llama3_405b_can_recompute_whole_layers() -> None:
    """Its file chooses selective recompute, whose list of modules contradicts the full one."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"--config llama3_405b --mock-data --train-iters 10 {full}".split()
    with pytest.raises(ConfigError, match="--recompute-modules layernorm activation needs"):
        load_config(flags)
    assert load_config([*flags, "--recompute-modules", "none"]).config.recompute.recompute_granularity == "full"


def test_print_config_loads_again_and_has_the_origin_of_each_value(tiny: Path) -> None:
    loaded = load_config(job(f"--config {tiny} --swiglu"))
    text = loaded.text()
    assert from_yaml(text) == loaded.config
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["activation"].endswith("# flag --swiglu")
    assert lines["min_lr"].endswith(f"# yaml {tiny} line 5")
    assert lines["clip_grad"].endswith("# default")
    assert "num-attention-heads" in lines["num_query_groups"]  # how the value is derived


def test_the_last_of_a_repeated_flag_holds() -> None:
    assert load_config(job("--seed 1 --seed 2")).config.training.seed == 2


def test_every_missing_field_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([])
    for flag in "--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --lr".split():
        assert f"{flag} is missing" in str(error.value)


def test_evaluation_only_needs_no_rate_and_no_length() -> None:
    words = [*SHAPE.split(), "--micro-batch-size", "2", "--mock-data", "--vocab-size", "100"]
    assert load_config([*words, "--skip-train"]).config.training.skip_train
    with pytest.raises(ConfigError, match="--lr is missing"):
        load_config(words)


def test_the_origin_of_an_implied_value_names_the_flag_and_a_given_value_wins() -> None:
    loaded = load_config(job("--disable-bias-linear --checkpoint-activations --recompute-num-layers 2"))
    assert loaded.origins["model.activation"] == "default of flag --disable-bias-linear"
    assert (loaded.config.recompute.recompute_method, loaded.config.recompute.recompute_num_layers) == ("uniform", 2)
    assert loaded.origins["recompute.recompute_num_layers"] == "flag --recompute-num-layers"


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(job()).config.training.seed = 1  # type: ignore[misc]


class TestUseCheckpointArgs:
    SAVED = Config(
        model=ModelConfig(
            num_layers=12, hidden_size=96, num_attention_heads=6, seq_length=48, vocab_size=50, padded_vocab_size=128
        )
    )
    LINE = "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --load old --use-checkpoint-args"
    WORDS = LINE.split()

    def test_the_model_comes_from_the_checkpoint_and_the_rest_from_here(self) -> None:
        merged = with_checkpoint_model(load_config(self.WORDS), self.SAVED, "old")
        assert merged.config.model == dataclasses.replace(self.SAVED.model, padded_vocab_size=None)
        assert merged.origins["model.num_layers"] == "checkpoint old"
        assert merged.config.training.micro_batch_size == 2

    def test_a_flag_equal_to_the_checkpoint_is_accepted_and_another_refused(self) -> None:
        with_checkpoint_model(load_config([*self.WORDS, "--num-layers", "12"]), self.SAVED, "old")
        with pytest.raises(ConfigError, match=r"num_layers .*4 .*--num-layers.* 12 .*old"):
            with_checkpoint_model(load_config([*self.WORDS, "--num-layers", "4"]), self.SAVED, "old")

    @pytest.mark.parametrize(
        "words",
        [
            "--moe-aux-loss-coeff 0.1",
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
            "--moe-z-loss-coeff 1e-3",
            "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position --moe-pad-expert-input-to-capacity",
            "--moe-token-dispatcher-type allgather",
            "--moe-router-dtype fp32",
            "--moe-router-force-load-balancing",
            "--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.01",
            "--seq-length 24",
        ],
        ids=lambda words: words.split()[0],
    )
    def test_how_a_mixture_is_trained_is_chosen_here(self, words: str) -> None:
        model = dataclasses.replace(self.SAVED.model, num_experts=8, add_bias_linear=False, moe_router_topk=3)
        saved = dataclasses.replace(self.SAVED, model=model)
        given = load_config([*self.WORDS, "--finetune", *words.split()])
        merged = with_checkpoint_model(given, saved, "old").config
        changed = {name for name in vars(model) if getattr(merged.model, name) != getattr(model, name)}
        assert changed == {word[2:].replace("-", "_") for word in words.split() if word.startswith("--")} | {
            "padded_vocab_size"
        }
        assert merged.model.moe_router_topk == 3

    def test_a_run_that_is_loaded_without_a_model_takes_the_whole_section(self) -> None:
        words = [word for word in self.WORDS if word != "--use-checkpoint-args"]
        bare = load_config(words)
        assert bare.takes_model and bare.is_bare
        given = load_config([*words, *SHAPE.split(), "--vocab-size", "100"])
        assert not given.takes_model
        with pytest.raises(ConfigError, match="--num-layers is missing"):
            load_config([*words, "--hidden-size", "96"])

    def test_a_value_that_another_flag_implies_gives_way_to_the_checkpoint(self) -> None:
        saved = dataclasses.replace(self.SAVED, model=dataclasses.replace(self.SAVED.model, add_bias_linear=False))
        merged = with_checkpoint_model(load_config([*self.WORDS, "--disable-bias-linear"]), saved, "old")
        assert merged.config.model.activation == "gelu_tanh"

    def test_rules_hold_for_the_merged_configuration(self) -> None:
        with pytest.raises(ConfigError, match="use 1, 2, 3 or 6"):
            with_checkpoint_model(load_config([*self.WORDS, "--tensor-model-parallel-size", "4"]), self.SAVED, "old")
