"""Mellum-2 (MellumForCausalLM): experts of Qwen3, windows and rotary positions by layer type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import llama_relative
from megapipe.extras.convert.layer_types import SCALING, THETA, windows_and_rope
from megapipe.extras.convert.tables import Layers, fixed, unwritten

MODULES = (experts.PREDICTED, experts.OTHER_NAME, "mtp_layer_types", "mtp_mlp_layer_types")
ROPE = windows_and_rope(1, 5e5, local_base=1e4, default_window=1024)


def write_rope(layers: Layers) -> dict[str, Any]:
    """Return keys without those of transformers 4, which this architecture takes for one more set of positions."""
    return {name: value for name, value in ROPE.write(layers).items() if name not in (THETA, SCALING)}


FAMILY = llama_relative(
    "MellumForCausalLM",
    experts.MAYBE_NORMALIZED,
    experts.mlp_types(0),
    *(unwritten(fixed(name, None, "transformers does not load its modules of prediction")) for name in MODULES),
    rope=replace(ROPE, write=write_rope),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
    more_rows=experts.ROWS,
)
