"""A conversion family: Nemotron and Minitron (NemotronForCausalLM), from and to Hugging Face.

    megapipe convert --extension examples/nemotron_family.py Minitron-4B-Base checkpoints/minitron
    megapipe convert --extension examples/nemotron_family.py checkpoints/minitron export --to hugging-face

docs/convert.md explains it.
"""

from __future__ import annotations

from megapipe.extras.convert.extend import (
    HEAD_DIM,
    LLAMA_BIASES,
    Family,
    Row,
    always,
    key,
    register_family,
    rope,
    separate_qkv,
)

OURS, THEIRS = "decoder.layers.#", "model.layers.#"  # #: the number of the layer
ROWS = (
    Row("embedding.word_embeddings", ("model.embed_tokens",)),
    Row(f"{OURS}.input_layernorm", (f"{THEIRS}.input_layernorm",)),
    Row(f"{OURS}.self_attention.linear_qkv", tuple(f"{THEIRS}.self_attn.{x}_proj" for x in "qkv"), separate_qkv),
    Row(f"{OURS}.self_attention.linear_proj", (f"{THEIRS}.self_attn.o_proj",)),
    Row(f"{OURS}.pre_mlp_layernorm", (f"{THEIRS}.post_attention_layernorm",)),
    Row(f"{OURS}.mlp.linear_fc1", (f"{THEIRS}.mlp.up_proj",)),
    Row(f"{OURS}.mlp.linear_fc2", (f"{THEIRS}.mlp.down_proj",)),
    Row("decoder.final_layernorm", ("model.norm",)),
    Row("output_layer", ("lm_head",)),
)
RULES = (
    key("vocab_size", "vocab_size"),
    key("hidden_size", "hidden_size"),
    key("intermediate_size", "ffn_hidden_size"),
    key("num_hidden_layers", "num_layers"),
    key("num_attention_heads", "num_attention_heads"),
    key("num_key_value_heads", "num_query_groups", lambda config: config["num_attention_heads"]),
    HEAD_DIM,
    key("max_position_embeddings", "max_position_embeddings", 4096),
    key("hidden_act", "activation", "relu2", {"relu2": "squared_relu"}),
    key("norm_eps", "norm_epsilon", 1e-5),
    key("tie_word_embeddings", "untie_embeddings_and_output_weights", False, {False: True, True: False}),
    key("attention_dropout", "attention_dropout", 0.0),
    key("initializer_range", "init_method_std", 0.0134),
    LLAMA_BIASES,
    rope(10000.0, part=0.5),
    always(normalization="LayerNorm", layernorm_zero_centered_gamma=True, hidden_dropout=0.0),
)
EXAMPLE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip

NEMOTRON = register_family(Family("NemotronForCausalLM", "nemotron", ROWS, RULES), EXAMPLE)
