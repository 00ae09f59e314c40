"""Anything that the target format cannot hold is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.families import FAMILIES, REFUSED
from megapipe.extras.convert.snapshot import write_checkpoint
from megapipe.extras.convert.tables import separate_qkv
from tests.extras.convert.models import refused_settings

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
}


def folder(root: Path, settings: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a Llama folder without transformers; None in `tensors` removes a tensor."""
    root.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (LLAMA | (settings or {})).items() if value != "absent"}
    if settings is not None and "model_type" not in settings and config["architectures"][0] in FAMILIES:
        config["model_type"] = FAMILIES[config["architectures"][0]].model_type
    (root / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} | (tensors or {})
    save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, root / "model.safetensors")
    return root


def test_the_folder_itself_is_read_with_q_k_and_v_in_their_groups(tmp_path: Path) -> None:
    snapshot = hugging_face.read(folder(tmp_path))
    qkv = snapshot.weights["decoder.layers.0.self_attention.linear_qkv.weight"].detach()
    q, k, v = separate_qkv(snapshot.config.model).split(qkv)
    found = hugging_face.stored_tensors(tmp_path)
    assert all(
        torch.equal(part, found[f"model.layers.0.self_attn.{x}_proj.weight"].detach())
        for part, x in ((q, "q"), (k, "k"), (v, "v"))
    )
    assert torch.equal(qkv[:4], q[:4]) and torch.equal(qkv[4:6], k[:2]) and torch.equal(qkv[6:8], v[:2])


@pytest.mark.parametrize(
    ("settings", "named"), refused_settings("folder"), ids=[settings for settings, _ in refused_settings("folder")]
)
def test_settings_that_cannot_be_expressed_are_named(tmp_path: Path, settings: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        hugging_face.read(folder(tmp_path, json.loads(settings)))
    assert all(word in str(error.value) for word in [*named.split(" & "), str(tmp_path / "config.json")])


def test_a_key_that_the_caller_vouches_for_is_passed_over(tmp_path: Path) -> None:
    hugging_face.read(folder(tmp_path, {"logit_scale": 3.0}), frozenset({"logit_scale"}))


@pytest.mark.parametrize("architecture", REFUSED)
def test_known_architectures_without_a_table_are_refused_with_the_reason(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(ConfigError, match=f"{architecture} cannot be expressed: (it|attention)"):
        hugging_face.read(folder(tmp_path, {"architectures": [architecture]}))


Q = "model.layers.0.self_attn.q_proj.weight"
TENSORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown": (
        {},
        {"model.layers.0.extra.weight": torch.zeros(2)},
        r"the tensor model.layers.0.extra.weight has no place in LlamaForCausalLM",
    ),
    "a_layer_too_many": (
        {"num_hidden_layers": 1},
        {Q.replace(".0.", ".1."): torch.zeros(8, 8)},
        "model.layers.1.self_attn.q_proj.weight has no",
    ),
    "missing": ({}, {Q: None}, f"lacks the tensor {Q}, which its config.json requires"),
    "shape": ({}, {Q: torch.zeros(8, 6)}, rf"{Q} has shape \[8, 6\], config.json requires \[8, 8\]"),
    "vocabulary": (
        {"vocab_size": 12},
        {},
        r"model.embed_tokens.weight has shape \[11, 8\], config.json requires \[12, 8\]",
    ),
    "quantized": ({}, {Q: torch.zeros(8, 8, dtype=torch.int8)}, f"{Q} is quantized or of an integer dtype"),
    "several_dtypes": (
        {},
        {Q: torch.zeros(8, 8).half()},
        "become one tensor, .*linear_qkv.weight, but have several dtypes",
    ),
    "a_head_beside_a_tied_one": ({"tie_word_embeddings": True}, {}, "lm_head.weight differs from the word embedding"),
    "a_tied_head_of_another_dtype": (
        {"tie_word_embeddings": True},
        {"lm_head.weight": torch.zeros(11, 8).half(), "model.embed_tokens.weight": torch.zeros(11, 8)},
        "lm_head.weight differs from the word embedding",
    ),
}


@pytest.mark.parametrize(("settings", "tensors", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors_without_a_place_are_named(
    tmp_path: Path, settings: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        hugging_face.read(folder(tmp_path, settings, tensors))


def _truncate(root: Path) -> None:
    path = root / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_config": (lambda root: (root / "config.json").unlink(), "config.json: no such file"),
    "no_json": (lambda root: (root / "config.json").write_text("{"), "config.json cannot be read"),
    "no_weights": (lambda root: (root / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "pickled_weights": (
        lambda root: (root / "model.safetensors").rename(root / "pytorch_model.bin"),
        "pytorch_model.bin is pickled: save it as safetensors",
    ),
    "truncated": (_truncate, "model.safetensors is not a safetensors file, or damaged"),
    "index_of_a_missing_file": (
        lambda root: (root / "model.safetensors.index.json").write_text(
            '{"weight_map": {"lm_head.weight": "gone.safetensors"}}'
        ),
        "gone.safetensors: no such file",
    ),
    "index_of_a_missing_tensor": (
        lambda root: (root / "model.safetensors.index.json").write_text(
            '{"weight_map": {"gone.weight": "model.safetensors"}}'
        ),
        "model.safetensors lacks the tensor gone.weight",
    ),
}


@pytest.mark.parametrize(("harm", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_folders_are_named(tmp_path: Path, harm: Callable[[Path], Any], message: str) -> None:
    harm(folder(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        hugging_face.read(tmp_path)


def test_a_base_model_without_the_prefix_is_the_same_model(tmp_path: Path) -> None:
    bare = {name.removeprefix("model."): torch.zeros(shape) for name, shape in SHAPES.items()}
    taken = dict.fromkeys(SHAPES)
    assert (
        hugging_face.read(folder(tmp_path, {}, taken | bare)).weights.keys()
        == hugging_face.read(folder(tmp_path / "b")).weights.keys()
    )


def test_an_export_overwrites_no_file_and_leaves_none_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "source")
    snapshot = hugging_face.read(source)
    write_checkpoint(snapshot, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="step_00000000 already exists; converting never overwrites"):
        write_checkpoint(snapshot, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="source already exists; converting never overwrites"):
        hugging_face.write(snapshot, source)
    monkeypatch.setattr(
        hugging_face, "write_tensors", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(CheckpointError, match=r"export cannot be written: No space left on device \(errno 28\)"):
        hugging_face.write(snapshot, tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]


COMMANDS = {
    "no_such_folder": ("{t}/nowhere {t}/x", "nowhere is not a folder"),
    "no_format": ("{t} {t}/x", "looks like none of"),
    "the_same_format": ("{t}/source {t}/x --to hugging-face", "is already hugging-face"),
    "architecture": ("{t}/ours {t}/x --architecture Nothing", "unknown --architecture Nothing"),
    "cannot_express": ("{t}/ours {t}/x --architecture GPT2LMHeadModel", "GPT2LMHeadModel cannot express model."),
    "idle_flag": (
        "{t}/ours {t}/x --weights-only",
        "--weights-only applies only to a conversion from megatron, this one is from megapipe",
    ),
    "idle_grid": (
        "{t}/source {t}/x --tensor-model-parallel-size 2",
        "applies only to a conversion to megatron, this one is to megapipe",
    ),
    "no_target": ("{t}/source", "give a folder to write, or --print-config"),
    "sequence": ("{t}/source {t}/x --seq-length 99", "--max-position-embeddings 16 is below --seq-length 99"),
    "step": ("{t}/ours {t}/x --step 5", "step_00000005"),
}


@pytest.mark.parametrize(("line", "message"), COMMANDS.values(), ids=COMMANDS.keys())
def test_the_command_reports_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    write_checkpoint(hugging_face.read(folder(tmp_path / "source")), tmp_path / "ours")
    assert main([*line.format(t=tmp_path).split(), "--no-check"]) in (1, 2)
    error = capsys.readouterr().err
    assert "error: " in error and message in error
    assert not (tmp_path / "x").exists()
