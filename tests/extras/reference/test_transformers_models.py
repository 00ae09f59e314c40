"""Logits of the reference equal those of transformers' models with random weights, for each architecture."""

from typing import Any

import pytest
import torch

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from tests.extras.reference.transformers_models import FAMILIES, SEQ, VOCAB, build

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)

# One field of each family set to a wrong but similar value: the comparison must detect it.
WRONG: dict[str, dict[str, Any]] = {
    "llama": {"rotary_base": 10000.0},
    "llama_rope_linear": {"rope_scaling_type": "none"},
    "llama_rope_llama3": {"rope_high_freq_factor": 4.0},
    "llama_rope_yarn": {"yarn_beta_slow": 1.0},
    "llama_rope_yarn_mscale": {"yarn_mscale_all_dim": 0.0},
    "mistral_window": {"window_size": 6},
    "qwen2_qkv_bias": {"rotary_base": 10000.0},
    "qwen3_qk_norm": {"softmax_scale": 0.3},
    "smollm3_no_positions": {"position_embedding_type": "rope"},
    "gemma_geglu": {"activation": "swiglu"},
    "gemma2_soft_cap": {"attn_logit_softcapping": None},
    "nemotron_squared_relu": {"activation": "relu"},
    "starcoder2_mqa": {"activation": "gelu"},
    "gpt2": {"activation": "gelu"},
    "gpt_neox_rotary_percent": {"rotary_percent": 0.5},
    "opt_relu": {"activation": "gelu"},
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
