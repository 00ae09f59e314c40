"""The partition of the layers into stages: by hand (layout string, first and last stage), evenly, or by cost."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.errors import ConfigError
from megapipe.layers.model import model_spec
from megapipe.plan.flops import head_flops, layer_flops
from megapipe.schedule.partition import Partition, cut_by_cost, cut_evenly, parse_layout
from megapipe.schedule.placement import Placement


class CutFlags(NamedTuple):
    """The fields of the parallel section that the partition depends on."""

    pipeline_model_parallel_layout: str | None
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    num_layers_per_virtual_pipeline_stage: int | None
    pipeline_balance: str


def cut_flags(parallel: ParallelConfig) -> CutFlags:
    """Return the flags of the parallel section that a cut depends on."""
    return CutFlags(*(getattr(parallel, name) for name in CutFlags._fields))


def is_by_hand(parallel: ParallelConfig | CutFlags) -> bool:
    """Return True if flags give the layers of a rank, or their number."""
    return (
        parallel.pipeline_model_parallel_layout is not None
        or parallel.decoder_first_pipeline_num_layers is not None
        or parallel.decoder_last_pipeline_num_layers is not None
        or parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
        or parallel.num_layers_per_virtual_pipeline_stage is not None
    )


@cache
def cut_layers(model: ResolvedModelConfig, parallel: CutFlags, placement: Placement) -> Partition:
    """Partition the layers as `parallel` asks; no layer is ever dropped.

    By hand with a layout string; in equal numbers if first, last, embedding or loss are accounted for, or with
    --pipeline-balance even; otherwise stage by stage by forward FLOPs, so that embedding, head and loss count with
    their cost. For the other values of --pipeline-balance, `balance` improves this partition, for which it needs a
    plan.
    """
    num_stages, pp = placement.num_stages, placement.num_ranks
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, model.num_layers, num_stages)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    embedding, loss = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    if is_by_hand(parallel) or parallel.pipeline_balance == "even":
        return cut_evenly(model.num_layers, placement.rank_of_stage, first, last, embedding, loss)
    if model.num_layers < num_stages:
        raise ConfigError(
            f"--num-layers {model.num_layers} is fewer than {pp} pipeline ranks x {num_stages // pp} chunks = "
            f"{num_stages} stages; use fewer stages, or write --pipeline-model-parallel-layout, in which a stage "
            "may be empty"
        )
    spec = model_spec(model, PrecisionConfig())
    costs = [layer_flops(layer, model.seq_length, causal=False) for layer in spec.layers]
    return cut_by_cost(costs, 0.0, head_flops(spec), num_stages)
