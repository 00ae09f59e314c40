"""ReferenceConfig refuses invalid combinations."""

from typing import Any

import pytest

from megapipe.extras.reference.config import ReferenceConfig
from tests.extras.reference.tiny import SIZES

REFUSED: dict[str, dict[str, Any]] = {
    "activation": {"activation": "sigmoid"},
    "normalization": {"normalization": "BatchNorm"},
    "position_embedding_type": {"position_embedding_type": "alibi"},
    "rope_scaling_type": {"rope_scaling_type": "dynamic"},
    "norm_position": {"norm_position": "between"},
    "qk_layernorm_scope": {"qk_layernorm_scope": "group"},
    "layers describes 3 layers, num_layers is 2": {"layers": ({}, {}, {})},
    "num_query_groups": {"num_query_groups": 3},
    "num_query_groups 3": {"layers": ({}, {"num_query_groups": 3})},
    "padded_vocab_size": {"padded_vocab_size": 20},
    "rotary_percent": {"position_embedding_type": "rope", "rotary_percent": 0.5},  # 3 of 6 channels
}


@pytest.mark.parametrize("field", REFUSED, ids=REFUSED)
def test_an_impossible_field_is_named(field):
    with pytest.raises(ValueError, match=field):
        ReferenceConfig(**SIZES | REFUSED[field])
