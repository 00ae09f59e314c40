"""YAML of launchers around Megatron-LM, and the configuration that `megapipe migrate --write` makes of a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.migrate import main
from megapipe.extras.migrate.judge import TO_CHANGE, Migration
from megapipe.extras.migrate.script_report import reported
from megapipe.extras.migrate.shell_script import shown
from tests.extras.migrate.public_scripts import functional_tests_of_experts

LAUNCHERS = Path(__file__).parents[2] / "fixtures/launcher_yaml"
MODEL_ARGS = (LAUNCHERS / "model_args.yaml").read_text()


def arguments(migration: Migration) -> list[str]:
    return [shown(word) for word in migration.call.arguments]


def test_flags_as_keys_are_read_with_their_variables() -> None:
    found = reported(MODEL_ARGS, "model.yaml", given=[("SEQ_LEN", "32")])
    assert found.runs, found.to_change
    words = arguments(found)
    assert "--sequence-parallel" not in words and "--bf16" in words
    assert words[words.index("--recompute-modules") + 1 :][:2] == ["moe_act", "layernorm"]
    assert words[words.index("--expert-model-parallel-size") + 1] == "8"
    assert found.outside() == {"${OUTPUT}/checkpoints": ["--save"]}
    assert found.world == "not stated by the launcher; checked on 8, the least: tp 1 x pp 1 x dp 8"
    assert reported(MODEL_ARGS, "model.yaml").judgement.unchecked == ("--seq-length",)


def test_names_of_primus_are_read_through_the_files_that_they_extend() -> None:
    path = LAUNCHERS / "examples/mixture.yaml"
    found = reported(path.read_text(), str(path))
    assert found.runs, found.to_change
    words = arguments(found)
    assert words[words.index("--seq-length") + 1] == "32"
    assert {"--disable-bias-linear", "--swiglu", "--bf16", "--sequence-parallel"} <= set(words)
    assert "--no-gradient-accumulation-fusion" in words
    # without effect: latent attention and fp8 are not chosen, and what is Megatron's default
    gone = {"--q-lora-rank", "--rotary-scaling-factor", "--fp8-amax-history-len", "--hidden-dropout", "--some-kernel"}
    assert not gone & set(words)
    assert found.notes == ("use_turbo_grouped_gemm: true is left out: it is no setting of Megatron-LM's",)
    own = reported(path.read_text().replace("manual_gc: false", "own_kernels: fast"), str(path))
    assert [row.text for row in own.judgement.rows if row.outcome in TO_CHANGE] == ["--own-kernels fast"]
    named = path.read_text().replace("vocab_size: 96", "tokenizer_type: MixtralTokenizer\n      tokenizer_model: a/b")
    words = arguments(reported(named, str(path)))
    at = words.index("--tokenizer-type")
    assert words[at : at + 4] == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "a/b"]


def test_names_of_megatron_bridge_are_read_in_their_sections() -> None:
    found = reported((LAUNCHERS / "bridge.yaml").read_text(), "run_config.yaml")
    assert found.runs, found.to_change
    assert found.judgement.loaded is not None
    config = found.judgement.loaded.config
    model = config.model
    assert (model.num_experts, model.activation, model.norm_epsilon, model.num_query_groups) == (8, "swiglu", 1e-6, 4)
    assert (model.untie_embeddings_and_output_weights, model.add_bias_linear) == (True, False)
    assert (config.training.seed, config.precision.dtype, config.data.mock_data) == (7, "bf16", True)
    assert found.notes == ("model.some_new_option: 3 has no flag in Megatron-LM",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "run.yaml: not readable as YAML"),
        ("- 1", "run.yaml: expected a mapping"),
        ("num_layers: 4", "run.yaml: a YAML file of a launcher has MODEL_ARGS"),
        ("modules: {x: {framework: maxtext}}", "run.yaml: no module has `framework: megatron`"),
    ],
)
def test_another_file_is_refused_in_one_message(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reported(text, "run.yaml")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name",
    ["gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8", "gpt3_moe_mcore_te_ep8_resume_torch_dist_muon"],
)
def test_the_written_configuration_is_that_of_the_flags(name: str, tmp_path: Path) -> None:
    words = list(functional_tests_of_experts()[name].arguments)
    launcher = "torchrun --nproc-per-node 8 pretrain_gpt.py".split()
    assert main(["--write", str(tmp_path / "run.yaml"), *launcher, *words]) == 0
    written = load_config(["--config", str(tmp_path / "run.yaml")])
    assert written.config == load_config(words).config
    text = (tmp_path / "run.yaml").read_text()
    assert "# --use-mcore-models: no effect" in text


def test_what_is_left_out_of_the_written_configuration_is_a_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.yaml").write_text(MODEL_ARGS.replace("--vocab-size", "--moe-latent-size: 8\n  --vocab-size"))
    asked = ["--set", "SEQ_LEN=32", "--write", str(tmp_path / "run.yaml"), "--json", str(tmp_path / "model.yaml")]
    assert main(asked) == 1
    text = (tmp_path / "run.yaml").read_text()
    assert "# --moe-latent-size 8: left out" in text
    assert "${OUTPUT}/checkpoints (--save)\n" in text
    assert load_config(["--config", str(tmp_path / "run.yaml")]).config.model.num_experts == 8
    assert json.loads(capsys.readouterr().out)["flags"][0]["flag"] == "--num-layers"
    assert main([*asked[2:]]) == 2
    assert "--write: the value of --seq-length is open" in capsys.readouterr().err
