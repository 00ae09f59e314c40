"""The table in megapipe/model/stage.py against the bytes that one layer saves for its backward.

Every recompute option is counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapipe.comm.groups import Group
from megapipe.config.model import ACTIVATIONS, ModelConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import BATCH, GPT2, LLAMA, SEQ, make_microbatch, make_stage, model_config, reference
from tests.model.saved_bytes import SavedBytes
from tests.model.test_planned_bytes import weights_of

SELECTIONS: list[tuple[str, ...]] = [
    (),
    ("core_attn",),
    ("layernorm",),
    ("mlp",),
    ("activation",),
    ("layernorm", "mlp"),
    ("core_attn", "layernorm", "activation"),
    ("core_attn", "layernorm", "mlp", "activation"),
]
OPTIONS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gpt2_gqa": GPT2 | {"num_query_groups": 2},
    "qk_norm": LLAMA | {"qk_layernorm": True},
    "gated": LLAMA | {"attention_output_gate": True},
    "window_zero_centred": LLAMA | {"window_size": 4, "layernorm_zero_centered_gamma": True},
    "relu": GPT2 | {"activation": "relu"},
    "squared_relu": GPT2 | {"activation": "squared_relu"},
    "geglu": GPT2 | {"activation": "geglu_tanh"},
    "hidden_dropout": GPT2 | {"hidden_dropout": 0.1},
    "soft_cap": LLAMA | {"attn_logit_softcapping": 2.0},
    "attention_dropout": LLAMA | {"attention_dropout": 0.1},
    "sinks": LLAMA | {"softmax_type": "learnable"},
    "sinks_window": LLAMA | {"softmax_type": "learnable", "window_size": 4, "qk_layernorm": True},
    "norms_after": LLAMA | {"norm_position": "after", "qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "norms_around": GPT2 | {"norm_position": "around", "hidden_dropout": 0.1},
}


def layer_bytes(config: ModelConfig, modules: tuple[str, ...], element: int, wide: int) -> int:
    """Compute the table's bytes of one layer.

    element: bytes per element of the model's dtype. wide: the same for at least fp32.
    """
    tokens = BATCH * SEQ
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    heads, kv_heads, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
    q, kv, hidden, ffn = heads * channels, kv_heads * channels, config.hidden_size, config.ffn_hidden_size
    statistics = wide * (2 if config.normalization == "LayerNorm" else 1)
    gates = 2 if ACTIVATIONS[config.activation].is_gated else 1
    explicit = config.attn_logit_softcapping is not None or config.attention_dropout > 0

    has_first, has_last = config.norm_position != "after", config.norm_position != "before"
    total = 2 * tokens * hidden * element  # residual stream at the start of both branches
    total += 2 * tokens * (has_first + has_last) * statistics
    total += 2 * tokens * has_last * hidden * element  # outputs of the branches
    total += 2 * tokens * hidden * (config.hidden_dropout > 0)  # masks, one byte per element
    total += (0 if "layernorm" in modules else 2) * has_first * tokens * hidden * element
    total += tokens * ((2 if config.attention_output_gate else 1) * q + 2 * kv) * element
    if config.qk_layernorm:
        vectors = heads + kv_heads if config.qk_layernorm_scope == "head" else 2
        total += tokens * ((q + kv) * element + vectors * statistics)
    if "core_attn" not in modules:
        total += tokens * q * element * (2 if config.attention_output_gate else 1)
        if explicit:
            square = BATCH * heads * SEQ * SEQ
            total += tokens * q * element * (heads > kv_heads)  # q in the layout of its batched GEMM
            total += square * wide  # probabilities
            total += square * (wide if config.attn_logit_softcapping is not None else 0)  # tanh
            total += square * (
                (1 + element) if config.attention_dropout > 0 else element if element != wide else 0
            )  # mask, dropped probabilities
        else:
            total += tokens * heads * wide  # log-sum-exp
    if "mlp" not in modules:
        total += tokens * ffn * gates * element * (config.activation != "relu")
        total += tokens * ffn * element * ("activation" not in modules or config.activation == "relu")
    elif "layernorm" in modules and has_first:
        total -= tokens * statistics  # the replay starts at the norm's input, so its statistics are not kept either
    return total


@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "soft_cap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "hidden_dropout"])
def test_embedding_and_head_keep_what_the_table_says(name: str, dtype: torch.dtype, cap: float | None) -> None:
    config = model_config(**OPTIONS[name], final_logit_softcapping=cap)
    microbatch = make_microbatch(config, dropout_key=DropoutKey(1, 2, 3))
    weights = {key: tensor.to(dtype) for key, tensor in reference(config).named_parameters()}
    stage = make_stage(config, weights, recompute=RecomputeConfig("full", "uniform", config.num_layers))
    with SavedBytes(stage, (microbatch.tokens, microbatch.labels, microbatch.loss_mask)) as saved:
        stage(microbatch)
    element, tokens, hidden = torch.empty((), dtype=dtype).element_size(), BATCH * SEQ, config.hidden_size
    total = tokens * hidden * (config.hidden_dropout > 0)
    total += tokens * hidden * element  # the checkpoint of all layers
    total += 2 * tokens * hidden * element + tokens * 4 * (2 if config.normalization == "LayerNorm" else 1)
    total += tokens * config.padded_vocab_size * (element if cap is None else 8)
    total += tokens * 2 * 4
    assert saved.total == total, "\n".join(saved.storages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("modules", SELECTIONS, ids=lambda modules: "-".join(modules) or "none")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_keeps_what_the_table_says(name: str, modules: tuple[str, ...], dtype: torch.dtype) -> None:
    config = model_config(**OPTIONS[name])
    recompute = RecomputeConfig("selective" if modules else None, recompute_modules=modules)
    counted, storages = counted_layer(config, recompute, dtype)
    element = torch.empty((), dtype=dtype).element_size()
    assert counted == layer_bytes(config, modules, element, max(element, 4)), "\n".join(storages)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("modules", [(), ("core_attn",)], ids=["none", "core_attn"])
def test_documents_with_grouped_queries_repeat_keys_and_values(modules: tuple[str, ...], qk_norm: bool) -> None:
    config = model_config(**LLAMA, qk_layernorm=qk_norm)
    recompute = RecomputeConfig("selective" if modules else None, recompute_modules=modules)
    counted, storages = counted_layer(config, recompute, torch.float32, documents=True)
    repeated = 0 if modules else 3 * 4 * 10 - (0 if qk_norm else (4 + 2 * 2) * 10) - (4 + 2) * 10 * qk_norm
    assert counted == layer_bytes(config, modules, 4, 4) + BATCH * SEQ * repeated * 4, "\n".join(storages)


def counted_layer(
    config: ModelConfig, recompute: RecomputeConfig, dtype: torch.dtype, documents: bool = False
) -> tuple[int, list[str]]:
    stage = make_stage(config, weights_of(config, dtype), tp=Group.alone("tp"), recompute=recompute)
    block = stage.decoder.layers["0"]
    microbatch = make_microbatch(config, documents=documents, dropout_key=DropoutKey(1, 2, 3))
    context = stage.make_context(microbatch, dtype)[0]
    hidden = torch.randn(SEQ, BATCH, config.hidden_size, dtype=dtype, requires_grad=True)
    shared: list[Any] = context.masks
    with SavedBytes(block, shared) as saved:
        output = block(hidden, context)
    assert output.dtype == dtype
    return saved.total, saved.storages


@pytest.mark.parametrize(
    ("recompute", "num_inputs"),
    [
        (RecomputeConfig("full", "uniform", 1), 3),
        (RecomputeConfig("full", "uniform", 2), 2),
        (RecomputeConfig("full", "uniform", 3), 1),
        (RecomputeConfig("full", "block", 3), 3),
    ],
    ids=["uniform1", "uniform2", "uniform3", "block3"],
)
def test_full_recompute_keeps_the_input_of_each_group(recompute: RecomputeConfig, num_inputs: int) -> None:
    config = model_config(**GPT2, num_layers=3)
    weights = {name: tensor.float() for name, tensor in reference(config).named_parameters()}
    stage = make_stage(config, weights, recompute=recompute)
    microbatch = make_microbatch(config)
    contexts = stage.make_context(microbatch, torch.float32)
    hidden = torch.randn(SEQ, BATCH, config.hidden_size, requires_grad=True)
    with SavedBytes(stage) as saved:
        stage.run_layers(hidden, contexts)
    assert saved.total == num_inputs * SEQ * BATCH * config.hidden_size * 4, "\n".join(saved.storages)


def test_block_recompute_keeps_all_of_the_other_layers() -> None:
    config = model_config(**GPT2, num_layers=3)
    weights = {name: tensor.float() for name, tensor in reference(config).named_parameters()}
    stage = make_stage(config, weights, recompute=RecomputeConfig("full", "block", 1))
    contexts = stage.make_context(make_microbatch(config), torch.float32)
    hidden = torch.randn(SEQ, BATCH, config.hidden_size, requires_grad=True)
    with SavedBytes(stage) as saved:
        stage.run_layers(hidden, contexts)
    assert saved.total == SEQ * BATCH * config.hidden_size * 4 + 2 * layer_bytes(config, (), 4, 4)
