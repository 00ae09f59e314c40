"""`ModelSpec`: the parts of a model, which need not be alike from layer to layer, and its parameters in model order.

Names are Megatron-Core's (`decoder.layers.3.self_attention.linear_qkv.weight`), linear weights are [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import PrecisionConfig
from megapipe.layers.attention import Attention
from megapipe.layers.embedding import Embedding
from megapipe.layers.head import Head
from megapipe.layers.linear import fp8_layers
from megapipe.layers.mlp import DenseMLP
from megapipe.layers.table import Collectives, Gemm, Kept, Operation, RankShape, Table, total_bytes
from megapipe.sharding.spec import Owner, ParamSpec

Part = Attention | DenseMLP


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One transformer layer: its residual branches in order.

    `model_spec` makes layers that are alike one object, so that they compare and hash by identity.
    """

    parts: tuple[Part, ...]
    is_fp8: bool  # its linears multiply in 8 bits

    @cached_property
    def hidden_size(self) -> int:
        return self.parts[0].norm.size

    @cached_property
    def attention(self) -> Attention:
        return next(part for part in self.parts if isinstance(part, Attention))

    def gemms(self, tp: int) -> tuple[Gemm, ...]:
        """Return its linears on one of tp ranks, in the order of the forward."""
        return tuple(gemm for part in self.parts for gemm in part.gemms(tp))


@dataclass(frozen=True)
class LayerTable:
    """The tables of a layer's parts, in order, and sums over them."""

    parts: tuple[Table, ...]

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(operation for part in self.parts for operation in part.operations)

    @cached_property
    def keeps(self) -> tuple[Kept, ...]:
        return tuple(tensor for part in self.parts for tensor in part.keeps)

    @cached_property
    def kept_bytes(self) -> int:
        return total_bytes(self.keeps)

    @cached_property
    def deferred_bytes(self) -> int:
        return sum(part.deferred_bytes for part in self.parts)

    @cached_property
    def collectives(self) -> Collectives:
        return sum((operation.collectives for operation in self.operations), Collectives())


@cache
def layer_table(layer: LayerSpec, shape: RankShape) -> LayerTable:
    """Return what one microbatch does in a layer on one rank."""
    return LayerTable(tuple(part.table(shape) for part in layer.parts))


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model: embedding, layers, head."""

    embedding: Embedding
    layers: tuple[LayerSpec, ...]
    head: Head

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The layers that differ from each other, in order of appearance."""
        return tuple(dict.fromkeys(self.layers))


@cache
def model_spec(model: ResolvedModelConfig, precision: PrecisionConfig) -> ModelSpec:
    """Return the parts of a resolved model."""
    output_std = model.init_method_std / math.sqrt(2 * model.num_layers)  # of the last linear of each residual branch
    in_fp8 = fp8_layers(precision, model.num_layers)
    plain, fp8 = (
        LayerSpec((Attention.of(model, output_std, is_fp8), DenseMLP.of(model, output_std, is_fp8)), is_fp8)
        for is_fp8 in (False, True)
    )
    layers = tuple(fp8 if number in in_fp8 else plain for number in range(model.num_layers))
    return ModelSpec(Embedding.of(model), layers, Head.of(model))


@cache
def model_parameters(model: ResolvedModelConfig, sequence_parallel: bool) -> tuple[ParamSpec, ...]:
    """Return all parameters of a resolved model.

    sequence_parallel: norms, row-parallel biases and position embeddings then see only a slice of the sequence, so
    that their gradients are partial over tp (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    spec = model_spec(model, PrecisionConfig())
    return (
        *spec.embedding.parameters(sequence_parallel),
        *(
            parameter
            for number, layer in enumerate(spec.layers)
            for part in layer.parts
            for parameter in part.parameters(f"decoder.layers.{number}.", number, sequence_parallel)
        ),
        *spec.head.parameters(sequence_parallel),
    )


def stage_parameters(
    parameters: Iterable[ParamSpec], layers: range, has_embedding: bool, has_head: bool, has_tied_copy: bool = True
) -> tuple[ParamSpec, ...]:
    """Return the parameters that a stage with these layers holds, in model order.

    has_tied_copy: the head's stage holds a copy of the tied embedding; False where it uses that of the first stage,
    on the same rank.
    """
    held_of: dict[Owner, bool] = {"embedding": has_embedding, "head": has_head}
    return tuple(
        spec
        for spec in parameters
        if held_of.get(spec.owner, spec.owner in layers) or (spec.tied and has_head and has_tied_copy)
    )
