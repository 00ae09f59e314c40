"""The first cut of the layers into stages: by hand (layout string, first and last stage), evenly, or by forward FLOPs.

`cut.balanced_cut` improves it for the busiest pipeline rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.errors import ConfigError
from megapipe.layers.model import model_spec
from megapipe.plan.layer_costs import head_flops, layer_flops
from megapipe.schedule.partition import Partition, cut_by_cost, cut_evenly, parse_layout
from megapipe.schedule.placement import Placement

BY_HAND: dict[str, Any] = {  # options that give the layers of a rank, or their number -> their values without
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "num_layers_per_virtual_pipeline_stage": None,
}


def is_by_hand(parallel: ParallelConfig) -> bool:
    """Return True if flags give the layers of a rank, or their number."""
    return any(getattr(parallel, name) != absent for name, absent in BY_HAND.items())


def cut_layers(model: ResolvedModelConfig, parallel: ParallelConfig, placement: Placement) -> Partition:
    """Partition the layers as `parallel` asks; no layer is ever dropped.

    By hand with a layout string; in equal numbers if first, last, embedding or loss are accounted for, or with
    --pipeline-balance even; otherwise by forward FLOPs, head included. For the other values of --pipeline-balance,
    `cut.balanced_cut` improves this partition, for which it needs a plan.
    """
    return check_cut(model, parallel, placement) or _cut_by_flops(model, placement.num_stages)


def check_cut(model: ModelConfig, parallel: ParallelConfig, placement: Placement) -> Partition | None:
    """Return the partition by hand or in equal numbers, or None to cut by cost. Raises ConfigError if it cannot be."""
    num_stages, pp, num_layers = placement.num_stages, placement.num_ranks, model.num_layers
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, num_layers, num_stages, model.mtp_num_layers or 0)
    if is_by_hand(parallel) or parallel.pipeline_balance == "even":
        return cut_evenly(
            num_layers,
            placement.rank_of_stage,
            parallel.decoder_first_pipeline_num_layers,
            parallel.decoder_last_pipeline_num_layers,
            parallel.account_for_embedding_in_pipeline_split,
            parallel.account_for_loss_in_pipeline_split,
        )
    if num_layers < num_stages:
        raise ConfigError(
            f"--num-layers {num_layers} is fewer than {pp} pipeline ranks x {num_stages // pp} chunks = "
            f"{num_stages} stages; use fewer stages, or write --pipeline-model-parallel-layout, in which a stage "
            "may be empty"
        )
    return None


@cache
def _cut_by_flops(model: ResolvedModelConfig, num_stages: int) -> Partition:
    spec = model_spec(model, PrecisionConfig())
    costs = [layer_flops(layer, model.seq_length, causal=False) for layer in spec.layers]
    predictions = sum(layer_flops(layer, model.seq_length, causal=False) for _, layer in spec.predictions)
    return cut_by_cost(costs, head_flops(spec) + predictions, num_stages)


def check_rank_settings(config: Config) -> None:
    """Raise ConfigError for settings of pipeline ranks that do not fit the pipeline."""
    parallel, pp = config.parallel, config.parallel.pipeline_model_parallel_size
    if parallel.pipeline_balance == "measured" and parallel.pipeline_layer_times is None:
        raise ConfigError("--pipeline-balance measured needs --pipeline-layer-times FILE, from megapipe profile-layers")
    for flag, values, counts, rule in (
        ("--pipeline-rank-speeds", parallel.pipeline_rank_speeds, (pp,), "one number for each"),
        ("--pipeline-rank-memory", parallel.pipeline_rank_memory, (1, pp), "one number, or one for each"),
    ):
        if values is not None and len(values) not in counts:
            raise ConfigError(f"{flag} names {len(values)} ranks, --pipeline-model-parallel-size is {pp}; give {rule}")
