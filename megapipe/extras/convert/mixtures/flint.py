"""Flint (FlintForCausalLM): attention sinks beside normalized queries and keys, rotary positions in layers with a
window alone; sigmoid scores without biases, shared experts.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import llama_relative
from megapipe.extras.convert.layer_types import FULL, SLIDING, Types, windows_with_rope
from megapipe.extras.convert.tables import Settings, always, rows_of, stated


def default_types(settings: Settings, num_layers: int) -> Types:
    """Return full attention for the first two layers, every fourth one from the second on, and the last one."""
    full = (layer < 2 or layer % 4 == 1 or layer == num_layers - 1 for layer in range(num_layers))
    return [FULL if is_full else SLIDING for is_full in full]


SPARSE_STEP, DENSE = experts.SPARSE_STEP, experts.DENSE

FAMILY = llama_relative(
    "FlintForCausalLM",
    always(softmax_type="learnable", moe_router_score_function="sigmoid", moe_router_dtype="fp32"),
    windows_with_rope(default_types, 513),
    experts.normalized(True),
    experts.expert_key("shared_expert_intermediate_size", experts.SHARED, 1024),
    replace(SPARSE_STEP, read=lambda own: SPARSE_STEP.read({**own, DENSE: stated(own, DENSE, (0, 1))})),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 6),
    more_rows=(*experts.expert_rows(shared="shared_expert"), *rows_of("flint")),
)
