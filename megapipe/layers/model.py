"""`ModelSpec`: the layers of a model, each a `LayerSpec`; `stage_parameters`: the parameters of a stage;
`rank_shape`: the options of a configuration that traces of its layers depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.layers import LayerConfig, layer_configs, why_masked
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import ParallelConfig, RecomputeConfig
from megapipe.dtypes import FP8_BLOCKS
from megapipe.layers.linear import fp8_layers
from megapipe.layers.table import WHOLE, CommChunks, Documents, RankShape
from megapipe.sharding.sequence import SequencePart, SequenceSlice, Visibility
from megapipe.sharding.spec import Owner, ParamSpec
from megapipe.sharding.state_dtypes import state_dtypes


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One transformer layer on a rank. `model_spec` makes layers that are alike one object, so that they compare and
    hash by identity.

    config: with the branches that it has. is_fp8: its linears and experts multiply in 8 bits. comm_type: how attention
    reaches the keys of other cp ranks. frozen: linears whose weights are not trained. imbalance: rows that the rank's
    experts see, over the mean of all ranks. recompute: its own, where that depends on its place in a stage of several
    units; None: that of the run.
    """

    config: LayerConfig
    is_fp8: bool
    comm_type: str = "p2p"
    frozen: frozenset[str] = frozenset()
    imbalance: float = 1.0
    recompute: RecomputeConfig | None = None

    @cached_property
    def num_experts(self) -> int:
        """Number of experts; 0 for a layer without."""
        return (self.config.num_experts or 0) if self.config.has_mlp else 0

    @cached_property
    def unfrozen(self) -> LayerSpec:
        """The layer with all of its weights trained."""
        return replace(self, frozen=frozenset()) if self.frozen else self

    @cached_property
    def branches(self) -> tuple[LayerSpec, ...]:
        """Its residual branches as layers."""
        config, has_first = self.config, self.config.has_attention or self.config.mixer is not None
        if not (has_first and config.has_mlp):
            return (self,)
        second = replace(config, has_attention=False, mixer=None)
        return (
            replace(self, config=replace(config, has_mlp=False), imbalance=1.0),
            replace(self, config=second, comm_type="p2p"),
        )

    @cached_property
    def recompute_modules(self) -> tuple[str, ...]:
        """The modules that --recompute-modules can name, besides layernorm."""
        config = self.config
        attention = ("core_attn",) if config.has_attention or config.mixer is not None else ()
        latents = ("mla_up_proj",) if config.has_attention and config.multi_latent_attention else ()
        dense = ("mlp", "activation") if config.has_mlp and not self.num_experts else ()
        experts = ("moe", "moe_act", "shared_experts") if self.num_experts else ()
        return (*attention, *latents, *dense, *experts)

    def attention_flops(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs of core attention, or of what stands in its place, per token. A sliding window
        limits the causal count, and values that a kernel pads count without.
        """
        config = self.config
        if config.mixer is not None:
            return float(config.mixer_kind.module.declare(config).flops)
        if not config.has_attention:
            return 0.0
        seen = Visibility.of(SequenceSlice((seq_length,)), **config.limits)
        keys = seen.mean_keys if causal else float(seq_length)
        values = config.v_head_dim if config.multi_latent_attention else config.kv_channels
        return 2.0 * keys * config.num_attention_heads * (config.kv_channels + values)

    def visibility(self, shape: RankShape) -> Visibility:
        """Return which keys the first rank of the ring sees. Layers that share a mask have it in common."""
        exchanged = {"a2a": shape.cp, "a2a+p2p": shape.cp_inner}.get(self.comm_type, 1)  # heads for positions
        place, part = shape.slice or SequenceSlice((shape.whole_seq,)), SequencePart(0, shape.cp // exchanged)
        return Visibility.of(place, shape.documents.attention_mask, part, **self.config.limits)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model: its ends, its layers, and the layers of its modules of multi-token prediction.

    frozen: names of the parameters that are not trained.
    """

    config: ResolvedModelConfig
    layers: tuple[LayerSpec, ...]
    predictions: tuple[LayerSpec, ...] = ()
    frozen: frozenset[str] = frozenset()

    @cached_property
    def has_experts(self) -> bool:
        return any(layer.num_experts for layer in self.kinds)

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
    """Return the layers of a resolved model. cp_comm_type: one, or one for each layer. frozen: names of the parameters
    that are not trained.
    """

    def frozen_linears(prefix: str) -> frozenset[str]:
        return frozenset(name.split(".")[-2] for name in frozen if name.startswith(prefix) and name.endswith(".weight"))

    @cache
    def layer_spec(
        layer: LayerConfig, is_fp8: bool, comm_type: str, frozen: frozenset[str]
    ) -> LayerSpec:  # alike layers are one object
        has_attention = layer.has_attention and layer.mixer is None
        own = layer if has_attention == layer.has_attention else replace(layer, has_attention=has_attention)
        return LayerSpec(own, is_fp8, comm_type if has_attention else "p2p", frozen)

    in_fp8 = fp8_layers(precision, model.num_layers)
    kinds = cp_comm_type * (model.num_layers if len(cp_comm_type) == 1 else 1)
    layers = (
        layer_spec(layer, number in in_fp8, kind, frozen_linears(f"decoder.layers.{number}."))
        for number, (layer, kind) in enumerate(zip(layer_configs(model), kinds, strict=True))
    )
    last, last_in_fp8 = layer_configs(model)[-1], model.num_layers - 1 in in_fp8
    predictions = (
        layer_spec(last, last_in_fp8, kinds[-1], frozen_linears(f"mtp.layers.{number}.transformer_layer."))
        for number in range(model.mtp_num_layers or 0)
    )
    return ModelSpec(model, tuple(layers), tuple(predictions), frozen)


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
        recompute=replace(config.recompute, recompute_in_bubbles=False),  # a microbatch may be replayed in its backward
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
