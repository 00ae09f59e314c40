"""Granite-3 with experts (GraniteMoeForCausalLM): factors on embeddings, attention logits, residual branches and output
logits; the experts of a layer are two tensors.
"""

from __future__ import annotations

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, UNUSUAL_HEAD_DIM, llama_family
from megapipe.extras.convert.tables import LLAMA, OURS, Row, key, stacked_experts, stacked_transposed_experts

BLOCK = f"{LLAMA}.block_sparse_moe"
FAMILY = llama_family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    2048,
    UNUSUAL_HEAD_DIM,
    *NO_ATTENTION_BIAS,
    key("embedding_multiplier", "embedding_scale", 1.0),
    key("attention_multiplier", "softmax_scale", 1.0),
    key("residual_multiplier", "residual_scale", 1.0),
    key("logits_scaling", "logits_scaling", 1.0),
    mlp=experts.all_layers(("num_local_experts",), 2),
    more_rows=(
        Row(f"{OURS}.mlp.router", (f"{BLOCK}.router.layer",)),
        Row(f"{OURS}.mlp.experts.weight1", (f"{BLOCK}.input_linear.weight",), stacked_experts),
        Row(f"{OURS}.mlp.experts.weight2", (f"{BLOCK}.output_linear.weight",), stacked_transposed_experts),
    ),
)
