"""Tables of tensor names: one row says under which names, and in which layout, another format holds a tensor of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megapipe.config.model import ModelConfig
from megapipe.config.resolved import ResolvedModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.layouts import Layout, fused_qkv, gate_and_up, same, separate_qkv, transposed
from megapipe.layers.model import model_parameters
from megapipe.sharding.spec import ParamSpec

MakeLayout = Callable[[ModelConfig], Layout]
LAYER = "#"  # stands for the layer's number, ours and theirs


@dataclass(frozen=True)
class Row:
    """ours, theirs: name patterns."""

    ours: str
    theirs: tuple[str, ...]
    layout: MakeLayout = same


@dataclass(frozen=True)
class Placed:
    """One of our parameters and where it lies over there."""

    spec: ParamSpec
    theirs: tuple[str, ...]
    layout: Layout


def place(rows: Sequence[Row], model: ResolvedModelConfig, architecture: str) -> tuple[Placed, ...]:
    """Every parameter of a model (as `snapshot.unpadded` gives it), in model order.

    Raises ConfigError where the table has no row for one.
    """
    by_ours = {row.ours: row for row in rows}
    placed = []
    for spec in model_parameters(model, sequence_parallel=False):
        layer = str(spec.owner)
        pattern = spec.name.replace(f".{layer}.", f".{LAYER}.", 1) if isinstance(spec.owner, int) else spec.name
        row = by_ours.get(pattern)
        if row is None:
            raise ConfigError(f"{architecture} has no place for the tensor {spec.name} of shape {list(spec.shape)}")
        placed.append(Placed(spec, tuple(name.replace(LAYER, layer) for name in row.theirs), row.layout(model)))
    return tuple(placed)


def _both(
    ours: str, theirs: str | Sequence[str], layout: MakeLayout = same, bias_layout: MakeLayout = same
) -> Iterator[Row]:
    """Rows of a module's weight and bias."""
    modules = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    for kind, how in (("weight", layout), ("bias", bias_layout)):
        yield Row(f"{ours}.{kind}", tuple(f"{module}.{kind}" for module in modules), how)


OURS, LLAMA, GPT2 = f"decoder.layers.{LAYER}", f"model.layers.{LAYER}", f"transformer.h.{LAYER}"

LLAMA_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    *_both(f"{OURS}.input_layernorm", f"{LLAMA}.input_layernorm"),
    *_both(
        f"{OURS}.self_attention.linear_qkv", [f"{LLAMA}.self_attn.{x}_proj" for x in "qkv"], separate_qkv, separate_qkv
    ),
    *_both(f"{OURS}.self_attention.q_layernorm", f"{LLAMA}.self_attn.q_norm"),
    *_both(f"{OURS}.self_attention.k_layernorm", f"{LLAMA}.self_attn.k_norm"),
    *_both(f"{OURS}.self_attention.linear_proj", f"{LLAMA}.self_attn.o_proj"),
    *_both(f"{OURS}.pre_mlp_layernorm", f"{LLAMA}.post_attention_layernorm"),
    *_both(f"{OURS}.mlp.linear_fc1", [f"{LLAMA}.mlp.gate_proj", f"{LLAMA}.mlp.up_proj"], gate_and_up, gate_and_up),
    *_both(f"{OURS}.mlp.linear_fc2", f"{LLAMA}.mlp.down_proj"),
    *_both("decoder.final_layernorm", "model.norm"),
    Row("output_layer.weight", ("lm_head.weight",)),
)

GPT2_ROWS = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *_both(f"{OURS}.input_layernorm", f"{GPT2}.ln_1"),
    *_both(f"{OURS}.self_attention.linear_qkv", f"{GPT2}.attn.c_attn", fused_qkv, fused_qkv),
    *_both(f"{OURS}.self_attention.linear_proj", f"{GPT2}.attn.c_proj", transposed),
    *_both(f"{OURS}.pre_mlp_layernorm", f"{GPT2}.ln_2"),
    *_both(f"{OURS}.mlp.linear_fc1", f"{GPT2}.mlp.c_fc", transposed),
    *_both(f"{OURS}.mlp.linear_fc2", f"{GPT2}.mlp.c_proj", transposed),
    *_both("decoder.final_layernorm", "transformer.ln_f"),
    Row("output_layer.weight", ("lm_head.weight",)),
)
