"""The text model of Qwen3-VL with experts (Qwen3VLMoeForConditionalGeneration): a Qwen3-MoE, which an export writes.

The three positions of a token (mrope) are equal in text, so that its rotary positions are the usual ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, llama_relative
from megapipe.extras.convert.layer_types import PARAMETERS, SCALING, WINDOW, rope
from megapipe.extras.convert.tables import Rule, Settings, fixed

SECTIONS = ("mrope_section", "mrope_interleaved")
ROPE = rope(5e5)


def read_rope(settings: Settings) -> dict[str, Any]:
    """Read rotary positions without the sections of a head that images rotate by rows and columns."""
    found = dict(settings)
    for name in (SCALING, PARAMETERS):
        if isinstance(given := settings.get(name), Mapping):
            kept = {key: value for key, value in given.items() if key not in SECTIONS}
            found[name] = kept if kept.get("type") != "mrope" else {**kept, "type": "default"}
    return ROPE.read(found)


_FAMILY = llama_relative(
    "Qwen3VLMoeTextModel",
    experts.SPARSE_STEP,
    *NO_ATTENTION_BIAS,
    fixed(experts.NORMALIZED, True, "the weights of the chosen experts are divided by their sum in this architecture"),
    fixed(WINDOW, None, "this architecture has no sliding windows"),
    rope=Rule(ROPE.keys, read_rope, ROPE.write),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 4),
    more_rows=experts.STACKED_ROWS,
)
# published files have these tensors transposed
FAMILY = replace(_FAMILY, either_way=("experts.gate_up_proj", "experts.down_proj"), is_tower=True)
