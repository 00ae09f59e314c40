"""A run that loads a checkpoint computes the function that was trained, or is refused with both values."""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.changes import OF_EACH_LAYER, model_differences
from megapipe.checkpoint.manifest import MANIFEST_NAME, SavedFile
from megapipe.config.changes import FUNCTION, classes
from megapipe.config.config import fields_by_key
from megapipe.config.model import ModelConfig
from megapipe.config.options import ConfigField
from megapipe.train.loading import load
from megapipe.train.state import Schedules, TrainingState
from tests.checkpoint.layouts import newest
from tests.config.examples import has_values
from tests.train.runs import runtime_of, save

MODEL = ModelConfig(
    num_layers=4,
    num_query_groups=2,
    vocab_size=29,
    position_embedding_type="rope",
    rope_scaling_type="yarn",
    qk_layernorm=True,
    window_size=16,
    add_bias_linear=False,
)
# in one of them each option has an effect
BASES = (
    MODEL,
    replace(MODEL, rope_scaling_type="llama3"),
    replace(MODEL, position_embedding_type="none", nope_query_scale=0.1),
    replace(MODEL, num_experts=8, moe_router_num_groups=4),
    replace(MODEL, multi_latent_attention=True, num_query_groups=None),
)
# token mixers have their own test: tests/test_mixer.py
COMPARED = [
    key.removeprefix("model.")
    for key, kind in classes().items()
    if kind == FUNCTION and key.removeprefix("model.") not in (*OF_EACH_LAYER, "attention_options")
]
# other options follow from these
FOLLOWED = (
    *("num_attention_heads", "hidden_size", "ffn_hidden_size", "kv_channels", "norm_epsilon", "yarn_mscale_all_dim"),
    *("multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim", "num_experts"),
    *("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
)
LAYERS = {
    "window_attn_skip_freq": ("2", "--window-size: 16 in the checkpoint, null here (layers 1, 3)"),
    "no_rope_freq": ("4", "--position-embedding-type: rope in the checkpoint, none here (layer 3)"),
    "layer_pattern": (("3 mlp=none", "1 activation=relu"), "--layer-pattern mlp: true in the checkpoint, false here"),
}


def another(field: ConfigField, value: Any) -> Any:
    """Return a value that differs."""
    if not has_values(field):
        return "of an extension"
    if field.option.choices:
        return next(choice for choice in field.option.choices if choice != value)
    return not value if field.kind.scalar is bool else 2 * value if value else 2


@pytest.mark.parametrize("name", COMPARED)
def test_an_option_that_changes_the_function_is_found_with_both_values(name: str) -> None:
    field = fields_by_key()[f"model.{name}"]
    found = []
    for saved in BASES:
        changed = replace(saved, **{name: another(field, getattr(saved, name))})
        found.append([line for line in model_differences(saved, changed) if line.startswith(f"{field.main_flag}: ")])
        assert name in FOLLOWED or list(model_differences(saved, changed)) == found[-1]
        assert list(model_differences(saved, saved)) == []
    assert any(found)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_compared_one_by_one(name: str) -> None:
    value, message = LAYERS[name]
    found = list(model_differences(MODEL, replace(MODEL, **{name: value})))
    assert any(line.startswith(message) for line in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dropout": 0.0, "attention_dropout": 0.5, "init_method_std": 1.0},
        {"padded_vocab_size": 1024, "make_vocab_size_divisible_by": 1},
        {"seq_length": 64, "max_position_embeddings": 4096, "attention_softmax_in_fp32": True},
        {"ffn_hidden_size": 512, "kv_channels": 32, "softmax_scale": 1 / math.sqrt(32)},  # what is derived otherwise
        {"window_size": None, "layer_pattern": ("4 window_size=16",)},
    ],
    ids=["training", "padding", "length", "derived", "pattern"],
)
def test_what_leaves_the_function_as_it_is_may_change(changes: dict[str, Any]) -> None:
    assert list(model_differences(MODEL, replace(MODEL, **changes))) == []


def test_options_without_effect_are_not_compared() -> None:
    plain = ModelConfig()
    unused = {"rotary_base": 1.0, "yarn_mscale": 2.0, "qk_layernorm_scope": "projection", "window_size": 128}
    assert list(model_differences(plain, replace(plain, **unused, add_qkv_bias=True))) == []
    assert list(model_differences(plain, replace(plain, window_size=127))) == [
        "--window-size: null in the checkpoint, 127 here"
    ]


def test_tensors_that_the_model_lacks_are_an_error(tmp_path: Path) -> None:
    runtime = runtime_of(0, 1, qk_layernorm=True)
    save(runtime, TrainingState(step=1, consumed_samples=8), Schedules.of(runtime.plan.config), tmp_path)
    flags = {"qk_layernorm": False}
    with pytest.raises(Exception, match=r"--qk-layernorm: true in the checkpoint, false here\n"):
        load(runtime_of(0, 1, **flags), tmp_path)
    assert load(runtime_of(0, 1, **flags, allow_changed_model=True), tmp_path).state.step == 1
    _rewrite_config(tmp_path, "qk_layernorm: true", "qk_layernorm: false")
    with pytest.raises(Exception, match=r"exp_avg/"):
        load(runtime_of(0, 1, **flags), tmp_path)
    with pytest.raises(Exception, match=r"holds master/.*k_layernorm.bias, .* and \d+ others, which"):
        load(runtime_of(0, 1, **flags, no_load_optim=True), tmp_path)


def _rewrite_config(root: Path, old: str, new: str) -> None:
    """Change the configuration of the newest checkpoint, and its checksum."""
    folder = newest(root)
    path = folder.path / "config.yaml"
    content = path.read_text().replace(old, new).encode()
    assert content != path.read_bytes()
    path.write_bytes(content)
    files = dict(folder.manifest.files) | {path.name: SavedFile(len(content), zlib.crc32(content))}
    (folder.path / MANIFEST_NAME).write_text(dataclasses.replace(folder.manifest, files=files).to_json())
