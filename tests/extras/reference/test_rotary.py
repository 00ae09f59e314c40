"""Rotary frequencies of the reference equal those of transformers. Logits: tests/extras/convert/test_fp64.py."""

from pathlib import Path

import pytest
import torch

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import inverse_frequencies, yarn_attention_factor
from tests.extras.reference.tiny import SIZES
from tests.tables import options, rows

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)

SCALINGS = {
    name: (int(head), float(base), float(share), options(words, {}))
    for head, base, share, words, name in rows(Path(__file__).with_name("rotary.tsv"))
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
