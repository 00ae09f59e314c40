"""`ModelSpec`: the parts of a model, which need not be alike from layer to layer; `stage_parameters`: those of a stage;
`rank_shape`: the options of a configuration that traces of its layers depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.layers import LayerConfig, layer_configs, why_masked
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.dtypes import FP8_BLOCKS
from megapipe.layers.attention import AttentionTable
from megapipe.layers.branch import Branch
from megapipe.layers.ends import EmbeddingTable, HeadTable
from megapipe.layers.latent_attention import LatentAttentionTable
from megapipe.layers.linear import fp8_layers
from megapipe.layers.mixer import MixerTable
from megapipe.layers.mlp import MLPTable
from megapipe.layers.moe import MoETable
from megapipe.layers.prediction import PredictionTable
from megapipe.layers.table import WHOLE, CommChunks, Documents, RankShape
from megapipe.sharding.spec import Owner, ParamSpec
from megapipe.sharding.state_dtypes import state_dtypes


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One transformer layer: its residual branches in order.

    `model_spec` makes layers that are alike one object, so that they compare and hash by identity.
    """

    parts: tuple[Branch, ...]
    is_fp8: bool  # its linears and experts multiply in 8 bits
    frozen: frozenset[str] = frozenset()  # linears whose weights are not trained

    @cached_property
    def hidden_size(self) -> int:
        return self.parts[0].model.hidden_size

    @cached_property
    def attention(self) -> AttentionTable | None:
        return next((part for part in self.parts if isinstance(part, AttentionTable)), None)

    @cached_property
    def mlp(self) -> MLPTable | None:
        return next((part for part in self.parts if isinstance(part, MLPTable)), None)

    @cached_property
    def experts(self) -> MoETable | None:
        return next((part for part in self.parts if isinstance(part, MoETable)), None)

    @cached_property
    def unfrozen(self) -> LayerSpec:
        """The layer with all of its weights trained."""
        return replace(self, frozen=frozenset()) if self.frozen else self

    @cached_property
    def mixer(self) -> MixerTable | None:
        return next((part for part in self.parts if isinstance(part, MixerTable)), None)

    @cached_property
    def config(self) -> LayerConfig:
        """The configuration of a layer with these branches alone."""
        model, held = self.parts[0].model, {part.site for part in self.parts}
        mixer = model.mixer if "mixer" in held else None
        return replace(model, has_attention="has_attention" in held, has_mlp="has_mlp" in held, mixer=mixer)

    def attention_flops(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, or of what stands in its place, per token."""
        return sum(part.flops_per_token(seq_length, causal) for part in self.parts)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model: embedding, layers, head, and modules of multi-token prediction, each with its transformer layer."""

    embedding: EmbeddingTable
    layers: tuple[LayerSpec, ...]
    head: HeadTable
    predictions: tuple[tuple[PredictionTable, LayerSpec], ...] = ()

    @cached_property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.kinds)

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The layers that differ from each other, in order of appearance; without those of predictions."""
        return tuple(dict.fromkeys(self.layers))


@cache
def model_spec(
    model: ResolvedModelConfig,
    precision: PrecisionConfig,
    cp_comm_type: tuple[str, ...] = ("p2p",),
    frozen: frozenset[str] = frozenset(),
) -> ModelSpec:
    """Return the parts of a resolved model. cp_comm_type: one, or one for each layer. frozen: names of the parameters
    that are not trained.
    """

    def frozen_linears(prefix: str) -> frozenset[str]:
        return frozenset(name.split(".")[-2] for name in frozen if name.startswith(prefix) and name.endswith(".weight"))

    @cache
    def layer_spec(
        layer: LayerConfig, is_fp8: bool, comm_type: str, frozen: frozenset[str]
    ) -> LayerSpec:  # alike layers are one object
        parts: list[Branch] = []
        if layer.mixer is not None:
            parts.append(MixerTable(layer))
        elif layer.has_attention:
            table = LatentAttentionTable if layer.multi_latent_attention else AttentionTable
            parts.append(table(layer, comm_type))
        if layer.has_mlp:
            parts.append(MLPTable(layer) if layer.num_experts is None else MoETable(layer))
        return LayerSpec(tuple(parts), is_fp8, frozen)

    in_fp8 = fp8_layers(precision, model.num_layers)
    kinds = cp_comm_type * (model.num_layers if len(cp_comm_type) == 1 else 1)
    layers = (
        layer_spec(layer, number in in_fp8, kind, frozen_linears(f"decoder.layers.{number}."))
        for number, (layer, kind) in enumerate(zip(layer_configs(model), kinds, strict=True))
    )
    last, last_in_fp8 = layer_configs(model)[-1], model.num_layers - 1 in in_fp8
    predictions = tuple(PredictionTable(model, number, last_in_fp8) for number in range(model.mtp_num_layers or 0))
    return ModelSpec(
        EmbeddingTable(model, frozen),
        tuple(layers),
        HeadTable(model, frozen),
        tuple(
            (prediction, layer_spec(last, last_in_fp8, kinds[-1], frozen_linears(prediction.layer_prefix)))
            for prediction in predictions
        ),
    )


def stage_parameters(
    parameters: Iterable[ParamSpec], layers: range, has_embedding: bool, has_head: bool, has_tied_copy: bool = True
) -> tuple[ParamSpec, ...]:
    """Return the parameters that a stage with these layers holds, in model order.

    has_tied_copy: the head's stage holds a copy of the embedding that both ends use; False where it uses that of the
    first stage, on the same rank.
    """
    ends: dict[Owner, bool] = {"embedding": has_embedding, "head": has_head}
    owners = {*layers, *(end for end, is_held in ends.items() if is_held)}
    has_copy = has_head and has_tied_copy
    return tuple(spec for spec in parameters if spec.owner in owners or (spec.tied and has_copy))


def rank_shape(config: Config, tp: int, sequence_parallel: bool, micro_batch_size: int) -> RankShape:
    """Return the shape for a configuration's options on another grid or with another microbatch than its own."""
    data, is_cuda = config.data, config.training.device != "cpu"
    is_masked = why_masked(config, is_cuda) is not None
    has_borders = data.reset_attention_mask and not is_masked
    return RankShape(
        batch=micro_batch_size,
        seq=config.model.seq_length // config.parallel.context_parallel_size,
        dtype=config.precision.dtype,
        tp=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        recompute=config.recompute,
        documents=Documents(data.reset_position_ids, is_masked, data.masks_loss, has_borders),
        chunks=comm_chunks(config.parallel) if tp > 1 else WHOLE,
        attention_impl=config.kernels.attention_impl,
        transformer_impl=config.kernels.transformer_impl,
        compile_pointwise=config.kernels.compile_pointwise,
        compile_loss=bool(config.kernels.compile_loss),
        loss_chunk=config.training.cross_entropy_chunk_size,
        fp8_block=FP8_BLOCKS.get(config.precision.fp8_recipe),
        is_cuda=is_cuda,
        ep=config.parallel.expert_model_parallel_size,
        etp=config.parallel.expert_tensor_parallel_size or tp,
        gradient_dtype=state_dtypes(config.optimizer, config.precision).gradient,
        cp=config.parallel.context_parallel_size,
        cp_inner=(config.parallel.hierarchical_context_parallel_sizes or (1,))[0],
        in_parts=config.parallel.overlap_moe_expert_parallel_comm,
    )


def comm_chunks(parallel: ParallelConfig) -> CommChunks:
    """Return the chunks that --tp-comm-overlap asks for; one of each without it, and in a tp group of one rank."""
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size == 1:
        return WHOLE
    count = parallel.tp_comm_overlap_chunks
    return CommChunks(count if parallel.tp_comm_overlap_ag else 1, count if parallel.tp_comm_overlap_rs else 1)
