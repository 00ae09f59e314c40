"""Modules of training that are built once on one rank for what they declare: a layer, the ends of a model, a module of
multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig, convert
from megapipe.config.layers import LayerConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.gpu.kernels import TORCH
from megapipe.layers.table import WHOLE
from megapipe.model.block import Block, Prediction
from megapipe.model.embedding_and_head import Embedding, output_layer
from megapipe.model.layer_factory import LayerFactory
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.parameter import declarations


def layer(config: LayerConfig, sequence_parallel: bool) -> nn.Module:
    """Build a transformer layer."""
    return Block(0, _factory(config, sequence_parallel))


def prediction(config: LayerConfig, sequence_parallel: bool) -> nn.Module:
    """Build a module of multi-token prediction. config: of its layer."""
    return Prediction(0, _factory(config, sequence_parallel), RecomputeConfig())


def embedding(model: ResolvedModelConfig, sequence_parallel: bool) -> nn.Module:
    """Build the embedding."""
    made = Embedding(model, Group.alone("tp"), sequence_parallel=sequence_parallel, queue=WeightQueue())
    return nn.ModuleDict({"embedding": made})


def head(model: ResolvedModelConfig, sequence_parallel: bool) -> nn.Module:
    """Build the final norm and, where it is not tied to the embedding, the output layer."""
    norm = _factory(convert(LayerConfig, model), sequence_parallel).norm(model.hidden_size)
    found: dict[str, nn.Module] = {"decoder": nn.ModuleDict({"final_layernorm": norm})}
    if model.untie_embeddings_and_output_weights:
        found["output_layer"] = output_layer(model, Group.alone("tp"), sequence_parallel, WeightQueue())
    return nn.ModuleDict(found)


MODULES: dict[str, Callable[[Any, bool], nn.Module]] = {
    "layer": layer,
    "prediction": prediction,
    "embedding": embedding,
    "head": head,
}


def declarations_of(
    kind: str, config: Any, sequence_parallel: bool
) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
    """Return the parameters of a module of a kind, and its buffers, which have no gradient."""
    made = MODULES[kind](config, sequence_parallel)
    states = (ParamSpec(name, tuple(buffer.shape), 0) for name, buffer in made.named_buffers())
    return tuple(declarations(made)), tuple(states)


def _factory(config: LayerConfig, sequence_parallel: bool) -> LayerFactory:
    return LayerFactory(config, Group.alone("tp"), sequence_parallel, frozenset(), WeightQueue(), TORCH, WHOLE)
