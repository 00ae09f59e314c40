"""Granite: dense (GraniteForCausalLM), with experts (GraniteMoeForCausalLM), with shared experts
(GraniteMoeSharedForCausalLM), and with windows, attention sinks and a rotary base for each layer
(GraniteMoeSWAForCausalLM). They have factors on embeddings, attention logits, residual branches and output logits; the
experts of a layer are two tensors.
"""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import LLAMA_BIASES, llama_relative
from megapipe.extras.convert.layer_types import (
    FULL,
    ROPE,
    SLIDING,
    TYPES,
    WINDOW,
    as_text,
    pattern,
    read_types,
    write_types,
)
from megapipe.extras.convert.tables import Layers, Rule, Settings, always, key, rows_of

RULES = (
    key("embedding_multiplier", "embedding_scale", 1.0),
    key("attention_multiplier", "softmax_scale", 1.0),
    key("residual_multiplier", "residual_scale", 1.0),
    key("logits_scaling", "logits_scaling", 1.0),
)
DENSE = llama_relative("GraniteForCausalLM", *RULES, LLAMA_BIASES)
EXPERTS = experts.all_layers(("num_local_experts",), 2)
ROWS = rows_of("granitemoe")
FAMILY = llama_relative("GraniteMoeForCausalLM", *RULES, mlp=EXPERTS, more_rows=ROWS)
SHARED_WIDTH = experts.expert_key("shared_intermediate_size", experts.SHARED, 0, none=0)
SHARED_ROWS = (*ROWS, *rows_of("granitemoe_shared"))
WITH_SHARED = llama_relative("GraniteMoeSharedForCausalLM", *RULES, SHARED_WIDTH, mlp=EXPERTS, more_rows=SHARED_ROWS)
BASES = "layer_rope_theta"  # 0: no rotary positions


def read_layers(settings: Settings) -> dict[str, Any]:
    """Read windows by layer type, and rotary bases by layer."""
    window, fields, count = settings.get(WINDOW, 128), ROPE.read(settings), int(settings["num_hidden_layers"])
    types = read_types(settings, lambda count: [SLIDING if layer % 4 else FULL for layer in range(count)], window)
    bases = settings.get(BASES) or [fields["rotary_base"]] * count
    if len(bases) != count:
        raise ConfigError(f"{BASES} has {len(bases)} entries, num_hidden_layers is {count}")
    windows = (f"window_size={window if kind == SLIDING else 'none'}" for kind in types)
    positions = (f"rotary_base={as_text(float(base))}" if base else "position_embedding_type=none" for base in bases)
    layers = [" ".join(words) for words in zip(windows, positions, strict=True)]
    return fields | {"layer_pattern": pattern(layers, {words: words for words in layers})}


def write_layers(layers: Layers) -> dict[str, Any]:
    bases = [layer.rotary_base if layer.position_embedding_type == "rope" else 0 for layer in layers]
    rotated = tuple(layer for layer, base in zip(layers, bases, strict=True) if base) or layers
    return ROPE.write(rotated) | write_types(layers) | {BASES: bases}


WITH_WINDOWS = llama_relative(
    "GraniteMoeSWAForCausalLM",
    *RULES,
    SHARED_WIDTH,
    always(softmax_type="learnable"),
    rope=Rule((*ROPE.keys, WINDOW, TYPES, BASES), read_layers, write_layers),
    mlp=EXPERTS,
    more_rows=(*SHARED_ROWS, *rows_of("granitemoe_swa")),
)
