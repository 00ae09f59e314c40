"""Granite-3 with experts (GraniteMoeForCausalLM), and with shared experts (GraniteMoeSharedForCausalLM): factors on
embeddings, attention logits, residual branches and output logits; the experts of a layer are two tensors.
"""

from __future__ import annotations

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, UNUSUAL_HEAD_DIM, llama_family
from megapipe.extras.convert.tables import LLAMA, OURS, Row, key, stacked_experts, stacked_transposed_experts

BLOCK, SHARED = f"{LLAMA}.block_sparse_moe", f"{OURS}.mlp.shared_experts"
RULES = (
    UNUSUAL_HEAD_DIM,
    *NO_ATTENTION_BIAS,
    key("embedding_multiplier", "embedding_scale", 1.0),
    key("attention_multiplier", "softmax_scale", 1.0),
    key("residual_multiplier", "residual_scale", 1.0),
    key("logits_scaling", "logits_scaling", 1.0),
)
ROWS = (
    Row(f"{OURS}.mlp.router", (f"{BLOCK}.router.layer",)),
    Row(f"{OURS}.mlp.experts.weight1", (f"{BLOCK}.input_linear.weight",), stacked_experts),
    Row(f"{OURS}.mlp.experts.weight2", (f"{BLOCK}.output_linear.weight",), stacked_transposed_experts),
)
EXPERTS = experts.all_layers(("num_local_experts",), 2)
FAMILY = llama_family("GraniteMoeForCausalLM", "granitemoe", 2048, *RULES, mlp=EXPERTS, more_rows=ROWS)
SHARED_WIDTH = experts.expert_key("shared_intermediate_size", experts.SHARED, 0, none=0)
SHARED_ROWS = (
    Row(f"{SHARED}.linear_fc1", (f"{LLAMA}.shared_mlp.input_linear",)),
    Row(f"{SHARED}.linear_fc2", (f"{LLAMA}.shared_mlp.output_linear",)),
)
WITH_SHARED = llama_family(
    "GraniteMoeSharedForCausalLM",
    "granitemoeshared",
    2048,
    *RULES,
    SHARED_WIDTH,
    mlp=EXPERTS,
    more_rows=(*ROWS, *SHARED_ROWS),
)
