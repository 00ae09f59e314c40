"""The reference equals transformers: logits of each architecture with random weights, and rotary frequencies."""

from typing import Any

import pytest
import torch

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT, inverse_frequencies, yarn_attention_factor
from tests.extras.reference.tiny import SIZES
from tests.extras.reference.transformers_models import FAMILIES, SEQ, VOCAB, build

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)

# One field of each family set to a wrong but similar value: the comparison must detect it.
WRONG: dict[str, dict[str, Any]] = {
    "llama": {"rotary_base": 10000.0},
    "llama_rope_yarn": {"yarn_beta_slow": 1.0},
    "mistral_window": {"window_size": 6},
    "smollm3_no_positions": {"position_embedding_type": "rope"},
    "gemma2_soft_cap": {"attn_logit_softcapping": None},
    "nemotron_squared_relu": {"activation": "relu"},
    "starcoder2_mqa": {"activation": "gelu"},
    "gpt2": {"activation": "gelu"},
    "gpt_neox_rotary_percent": {"rotary_percent": 0.5},
}


def reference(family: str, **changed) -> ReferenceGPT:
    case = build(family)
    model = ReferenceGPT(ReferenceConfig(**case.config | changed))
    model.load_state_dict(case.state)
    return model


def draw_tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILIES)
def test_logits_equal_transformers(family):
    tokens = draw_tokens(seed=2)
    expected = build(family).logits(tokens)
    with torch.no_grad():
        logits = reference(family).logits(tokens)
        changed = reference(family, **WRONG[family]).logits(tokens)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-5)
    assert (changed - expected).abs().max() > 2e-4, f"the comparison cannot see {WRONG[family]}"


@pytest.mark.parametrize("family", ["llama", "llama_rope_yarn", "mistral_window", "gpt2"], ids=str)
def test_packed_documents_equal_transformers_on_each_document_alone(family):
    tokens = draw_tokens(seed=3)[:1]
    lengths = [9, 1, SEQ - 10]
    documents = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat([build(family).logits(document) for document in tokens.split(lengths, dim=1)], dim=1)
    with torch.no_grad():
        logits = reference(family).logits(tokens, position_ids=positions, document_ids=documents)
        unmasked = reference(family).logits(tokens, position_ids=positions)
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-5)
    assert (unmasked - expected).abs().max() > 1e-3


# -------------------------------------------------------------------------------------------- rotary positions

# (head size, base, rotary fraction, scaling in transformers' terms)
SCALINGS: dict[str, tuple[int, float, float, dict[str, Any]]] = {
    "linear": (128, 10000.0, 1.0, {"rope_type": "linear", "factor": 4.0}),
    "llama3, Llama 3.1": (
        128,
        500000.0,
        1.0,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn, Qwen 2.5": (128, 1e6, 1.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn, DeepSeek": (
        64,
        10000.0,
        1.0,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn, half of the head": (
        96,
        10000.0,
        0.5,
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048},
    ),
    "yarn, ramp past the last pair": (
        8,
        10.0,
        1.0,
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096},
    ),
    "yarn, ramp of no length": (
        16,
        10000.0,
        1.0,
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6},
    ),
    "yarn, shrunk": (16, 10000.0, 1.0, {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096}),
}

OURS = {
    "rope_type": "rope_scaling_type",
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position_embeddings",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}


@pytest.mark.parametrize("name", SCALINGS, ids=SCALINGS)
def test_frequencies_equal_transformers(name):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head, base, share, scaling = SCALINGS[name]
    rope = scaling | {"rope_theta": base, "partial_rotary_factor": share}
    theirs = AutoConfig.for_model(
        "llama", hidden_size=4 * head, num_attention_heads=4, head_dim=head, rope_parameters=rope
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))

    scaled = {OURS[key]: value for key, value in scaling.items()}
    rotary = {"position_embedding_type": "rope", "kv_channels": head, "rotary_base": base, "rotary_percent": share}
    config = ReferenceConfig(**SIZES | rotary | scaled)
    for dtype in (torch.float32, torch.float64):
        frequencies = inverse_frequencies(config, dtype, torch.device("cpu"))
        assert frequencies.shape == (head * share / 2,)
        torch.testing.assert_close(frequencies.float(), expected, rtol=2e-6, atol=0.0)
    assert factor == pytest.approx(yarn_attention_factor(config) if scaling["rope_type"] == "yarn" else 1.0, rel=1e-12)
