"""Granite-3 with experts (GraniteMoeForCausalLM), and with shared experts (GraniteMoeSharedForCausalLM): factors on
embeddings, attention logits, residual branches and output logits; the experts of a layer are two tensors.
"""

from __future__ import annotations

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, UNUSUAL_HEAD_DIM, llama_relative
from megapipe.extras.convert.tables import key, rows_of

RULES = (
    UNUSUAL_HEAD_DIM,
    *NO_ATTENTION_BIAS,
    key("embedding_multiplier", "embedding_scale", 1.0),
    key("attention_multiplier", "softmax_scale", 1.0),
    key("residual_multiplier", "residual_scale", 1.0),
    key("logits_scaling", "logits_scaling", 1.0),
)
ROWS, SHARED_ROWS = rows_of("granitemoe"), rows_of("granitemoe_shared")
EXPERTS = experts.all_layers(("num_local_experts",), 2)
FAMILY = llama_relative("GraniteMoeForCausalLM", *RULES, mlp=EXPERTS, more_rows=ROWS)
SHARED_WIDTH = experts.expert_key("shared_intermediate_size", experts.SHARED, 0, none=0)
WITH_SHARED = llama_relative(
    "GraniteMoeSharedForCausalLM",
    *RULES,
    SHARED_WIDTH,
    mlp=EXPERTS,
    more_rows=(*ROWS, *SHARED_ROWS),
)
