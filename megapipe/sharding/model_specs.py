"""The parameters of a GPT model, in model order, and those of one of its stages.

Names are Megatron-Core's (`decoder.layers.3.self_attention.linear_qkv.weight`), linear weights are [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from megapipe.config.model import ModelConfig
from megapipe.sharding.slicing import Fused, QueryGroups, Slicing
from megapipe.sharding.spec import Init, ParamSpec

GATED_ACTIVATIONS = ("swiglu", "geglu_tanh")
WORD_EMBEDDING = "embedding.word_embeddings.weight"


def model_specs(model: ModelConfig, sequence_parallel: bool) -> tuple[ParamSpec, ...]:
    """All parameters of the model whose derived sizes are filled in (padded_vocab_size, ffn_hidden_size, ...).

    sequence_parallel: norms, row-parallel biases and position embeddings then see only a slice of the sequence, so that their
    gradients are partial over tp (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    return (
        *_embedding(model, sequence_parallel),
        *(spec for layer in range(model.num_layers) for spec in _block(model, layer, sequence_parallel)),
        *_head(model, sequence_parallel),
    )


def specs_of_stage(
    specs: Iterable[ParamSpec], layers: range, has_embedding: bool, has_head: bool, has_tied_copy: bool = True
) -> tuple[ParamSpec, ...]:
    """The parameters that a stage with these layers holds, in model order.

    has_tied_copy: the head's stage holds a copy of the tied embedding; False where it uses that of the first stage, on the same rank.
    """

    def held(spec: ParamSpec) -> bool:
        if spec.owner == "embedding":
            return has_embedding or (has_head and spec.tied and has_tied_copy)
        return has_head if spec.owner == "head" else spec.owner in layers

    return tuple(spec for spec in specs if held(spec))


def _embedding(model: ModelConfig, sequence_parallel: bool) -> Iterator[ParamSpec]:
    normal = Init("normal", model.init_method_std)
    yield ParamSpec(
        WORD_EMBEDDING,
        (_known(model.padded_vocab_size), model.hidden_size),
        owner="embedding",
        slicing=Fused(0),
        init=normal,
        tied=not model.untie_embeddings_and_output_weights,
        decoupled_lr=True,
        true_rows=_known(model.vocab_size),
    )
    if model.position_embedding_type == "learned_absolute":
        shape = (_known(model.max_position_embeddings), model.hidden_size)
        name = "embedding.position_embeddings.weight"
        yield ParamSpec(name, shape, owner="embedding", init=normal, partial_gradient=sequence_parallel)


def _head(model: ModelConfig, sequence_parallel: bool) -> Iterator[ParamSpec]:
    yield from _norm(model, "decoder.final_layernorm", model.hidden_size, "head", sequence_parallel)
    if model.untie_embeddings_and_output_weights:
        yield ParamSpec(
            "output_layer.weight",
            (_known(model.padded_vocab_size), model.hidden_size),
            owner="head",
            slicing=Fused(0),
            init=Init("normal", model.init_method_std),
            decoupled_lr=True,
            true_rows=_known(model.vocab_size),
        )


def _block(model: ModelConfig, layer: int, sequence_parallel: bool) -> Iterator[ParamSpec]:
    prefix = f"decoder.layers.{layer}"
    heads, groups = model.num_attention_heads, _known(model.num_query_groups)
    head_dim, ffn = _known(model.kv_channels), _known(model.ffn_hidden_size)
    hidden, bias = model.hidden_size, model.add_bias_linear
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    out_std = model.init_method_std / math.sqrt(2 * model.num_layers)  # output layers of the residual branches
    attention = f"{prefix}.self_attention"

    def linear(
        name: str, shape: Sequence[int], slicing: Slicing, has_bias: bool, std: float = model.init_method_std
    ) -> Iterator[ParamSpec]:
        yield ParamSpec(f"{name}.weight", tuple(shape), layer, slicing, Init("normal", std))
        if has_bias and slicing.dim == 0:
            yield ParamSpec(f"{name}.bias", (shape[0],), layer, slicing, weight_decay=False)
        elif has_bias:  # row parallel: the bias is added after the sum over tp
            yield ParamSpec(f"{name}.bias", (shape[0],), layer, weight_decay=False, partial_gradient=sequence_parallel)

    yield from _norm(model, f"{prefix}.input_layernorm", hidden, layer, sequence_parallel)
    qkv = QueryGroups(heads, groups, head_dim)
    yield from linear(
        f"{attention}.linear_qkv", ((heads + 2 * groups) * head_dim, hidden), qkv, bias or model.add_qkv_bias
    )
    if model.qk_layernorm:  # the same weight for all heads, of which each tp_rank sees its own
        yield from _norm(model, f"{attention}.q_layernorm", head_dim, layer, True)
        yield from _norm(model, f"{attention}.k_layernorm", head_dim, layer, True)
    yield from linear(f"{attention}.linear_proj", (hidden, heads * head_dim), Fused(1), bias, out_std)
    yield from _norm(model, f"{prefix}.pre_mlp_layernorm", hidden, layer, sequence_parallel)
    yield from linear(f"{prefix}.mlp.linear_fc1", (gates * ffn, hidden), Fused(0, gates), bias)
    yield from linear(f"{prefix}.mlp.linear_fc2", (hidden, ffn), Fused(1), bias, out_std)


def _norm(model: ModelConfig, name: str, size: int, owner: int | Literal["head"], partial: bool) -> Iterator[ParamSpec]:
    weight = Init("zeros" if model.layernorm_zero_centered_gamma else "ones")
    yield ParamSpec(f"{name}.weight", (size,), owner, init=weight, weight_decay=False, partial_gradient=partial)
    if model.normalization == "LayerNorm":
        yield ParamSpec(f"{name}.bias", (size,), owner, weight_decay=False, partial_gradient=partial)


def _known(value: int | None) -> int:
    if value is None:
        raise ValueError("the model configuration has not been resolved: a derived size is still None")
    return value
