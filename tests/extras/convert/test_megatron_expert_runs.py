"""Runs with experts, latent attention and sinks that Megatron-Core 0.19.2 trained and saved on CPU, there and back.

The README of the fixtures says what they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.errors import ConfigError
from megapipe.extras.convert import megatron_dist
from megapipe.extras.convert.megatron_args import MegatronGrid, read_config, write_args
from megapipe.extras.convert.snapshot import EXPERT_BIAS
from megapipe.extras.convert.tables import meaning
from tests.extras.convert.test_megatron_experts import ARGS
from tests.extras.convert.test_megatron_runs import read, values


@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("latent", ("plain", "legacy")),
        ("latent", ("fully_reshardable", "dp_reshardable", "legacy_distributed")),
        ("sinks", ("plain", "legacy")),
        ("sinks", ("fully_reshardable", "dp_reshardable", "legacy_distributed")),
        ("stages", ("plain", "legacy")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_forms_of_a_run_hold_the_same_weights_and_optimizer_state(
    runs: Path, family: str, forms: tuple[str, ...]
) -> None:
    """A chain of two optimizers: by name, and in buckets. `torch` has the same weights."""
    first, *others = (read(runs / f"{family}_{form}") for form in forms if not form.startswith("legacy"))
    plain, legacy = (read(runs / f"{family}_{form}", "--weights-only").weights for form in (forms[0], forms[-1]))
    assert plain.keys() == legacy.keys()
    assert all(torch.equal(plain[name].detach(), legacy[name].detach()) for name in plain)
    expected = values(first)
    moments = {name.split("/", 1)[1] for name in expected if name.startswith("exp_avg/")}
    weights = {name for name in first.weights if not name.endswith(EXPERT_BIAS)}
    assert moments == weights and any(".mlp.experts." in name for name in moments)
    for other in others:
        found = values(other)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        assert (other.state, other.config) == (first.state, first.config)
    assert first.state["optimizer"]["num_steps"] == 3


REFUSED = {
    "ep": (MegatronGrid(1, 1, 3), "--expert-model-parallel-size 3 does not divide the 4 experts"),
    "etp": (MegatronGrid(1, 1, 2, 3), "--expert-tensor-parallel-size 3 does not divide the 8 channels of an expert"),
}


@pytest.mark.parametrize(("grid", "message"), REFUSED.values(), ids=REFUSED)
def test_a_grid_that_does_not_fit_is_refused(runs: Path, tmp_path: Path, grid: MegatronGrid, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron_dist.write(read(runs / "sinks_plain"), tmp_path / "theirs", grid, False)


LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "position_embedding_type": "rope", "normalization": "RMSNorm", "kv_lora_rank": 8,
    "q_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "qk_layernorm": True,
}  # fmt: skip
YARN_PLAIN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 32.0, "kv_channels": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (LATENT | {"rotary_scaling_factor": 1.0}, ("none", 8.0, 8192, 1.0, 0.0)),
        (LATENT | {"rotary_scaling_factor": 4.0, "mscale_all_dim": 0.5}, ("yarn", 4.0, 4096, 1.0, 0.5)),
        (LATENT | {"rope_type": "rope", "rotary_scaling_factor": 4.0}, ("none", 8.0, 8192, 1.0, 0.0)),
        (YARN_PLAIN, ("yarn", 32.0, 4096, 1.0, 0.0)),
        (YARN_PLAIN | {"yarn_original_max_position_embeddings": 128}, ("yarn", 32.0, 128, 1.0, 0.0)),
    ],
    ids=["factor_1", "latent", "latent_rope", "plain", "plain_length"],
)
def test_args_of_yarn_are_read_and_written(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = read_config(ARGS | given, None)
    model = config.model
    assert expected == (
        model.rope_scaling_type,
        model.rope_scaling_factor,
        model.rope_original_max_position_embeddings,
        model.yarn_mscale,
        model.yarn_mscale_all_dim,
    )
    args = write_args(config, {"training": {"step": 0, "consumed_samples": 0}}, 64, MegatronGrid())
    assert meaning(read_config(args, None).model) == meaning(model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (LATENT | {"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0}, "scales its softmax"),
        (LATENT | {"rotary_scaling_factor": 4.0, "mscale": 0.0, "mscale_all_dim": 1.0}, "mscale 0 with mscale_all_dim"),
        (LATENT | {"rotary_scaling_factor": 4.0, "mscale": 0.7}, "--yarn-mscale 0.7 acts only together"),
        (LATENT | {"position_embedding_type": "learned_absolute"}, "--multi-latent-attention rotates all channels"),
    ],
    ids=["softmax", "mscale_0", "mscale_alone", "positions"],
)
def test_yarn_that_cannot_be_expressed_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(ARGS | given, None)


def test_a_length_that_no_flag_of_megatron_sets_is_refused() -> None:
    config = read_config(ARGS | LATENT | {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 128}, None)
    with pytest.raises(ConfigError, match=r"cannot express model\.rope_original_max_position_embeddings 128"):
        write_args(config, {"training": {"step": 0, "consumed_samples": 0}}, 64, MegatronGrid())
