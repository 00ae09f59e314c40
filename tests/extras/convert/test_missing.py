"""Every mixture of experts of transformers is converted, or refused by naming a feature that is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES, family_of, missing_features, missing_table
from tests.extras.convert.models import CASES


def has_experts(config: Any) -> bool:
    if not isinstance(config, Mapping):
        return False
    return any("expert" in str(key) or "moe_" in str(key) or has_experts(value) for key, value in config.items())


def configurations() -> dict[str, dict[str, Any]]:
    """Return the default configuration of each model type of transformers that has experts, as it is saved."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for model_type in transformers.CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # a few have no defaults
            found[model_type] = transformers.CONFIG_MAPPING[model_type]().to_dict()
    return {name: config for name, config in found.items() if has_experts(config)}


@pytest.fixture(scope="module")
def mixtures() -> dict[str, dict[str, Any]]:
    return configurations()


@pytest.mark.filterwarnings("ignore")
def test_every_mixture_of_transformers_is_converted_or_refused_by_naming_a_feature(
    mixtures: dict[str, dict[str, Any]],
) -> None:
    converted, unnamed = set(), {}
    features = {*missing_table("key").values(), *missing_table("model_type").values(), "layers of the type"}
    for model_type, config in mixtures.items():
        try:
            family_of({name: value for name, value in config.items() if name != "architectures"})
            converted.add(model_type)
        except ConfigError as error:
            if not any(feature in str(error) for feature in features):
                unnamed[model_type] = str(error)
    assert unnamed == {}
    of_families = {family.model_type for family in FAMILIES.values()}
    assert converted == of_families & mixtures.keys()
    # each of them is proven by logits: tests/extras/convert/test_hugging_face.py
    assert converted <= {case.model_type for case in CASES.values()}
    assert len(mixtures) >= 60


@pytest.mark.filterwarnings("ignore")
def test_no_model_type_is_listed_in_vain(mixtures: dict[str, dict[str, Any]]) -> None:
    """A row that a key makes superfluous, or that belongs to a converted family, would go stale."""
    of_families = {family.model_type for family in FAMILIES.values()}
    assert not of_families & missing_table("model_type").keys()
    for model_type in missing_table("model_type").keys() & mixtures.keys():
        without = {name: value for name, value in mixtures[model_type].items() if name != "model_type"}
        assert missing_features(without) == (), model_type


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": (
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "linear_num_key_heads": 16},
        "Qwen3NextForCausalLM cannot be expressed: megapipe lacks linear attention",
    ),
    "images": (
        {"architectures": ["NewForConditionalGeneration"], "text_config": {"index_topk": 9}, "vision_config": {"a": 1}},
        "megapipe lacks images, sound or video; attention to the tokens that an indexer chooses",
    ),
    "layer_types": (
        {"architectures": ["NewForCausalLM"], "layer_types": ["full_attention", "spiral_attention"]},
        "megapipe lacks layers of the type spiral_attention",
    ),
    "no_feature": (
        {"architectures": ["NewForCausalLM"], "index_topk": None, "mamba_d_state": 0},
        "unknown architecture NewForCausalLM; known are",
    ),
}


@pytest.mark.parametrize(("config", "message"), FILES.values(), ids=FILES)
def test_an_unknown_architecture_is_refused_by_its_features(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        family_of(config)
