"""Which layers each stage gets: by hand (layout string, first and last stage), in equal numbers, or balanced by cost."""

from __future__ import annotations

from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.errors import ConfigError
from megapipe.planner.flops import head_forward_flops, layer_forward_flops
from megapipe.schedule.partition import Partition, cut_by_cost, cut_evenly, layout_stages, parse_layout


def num_chunks(parallel: ParallelConfig, num_layers: int) -> int:
    """Model chunks a pipeline rank holds, from whichever of the three ways it was asked for. Raises ConfigError if they disagree."""
    pp = parallel.pipeline_model_parallel_size
    asked = {}
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        asked["--num-virtual-stages-per-pipeline-rank"] = parallel.num_virtual_stages_per_pipeline_rank
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        if num_layers % (pp * per_stage):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage}: {num_layers} layers are not a multiple of {per_stage} x {pp} "
                "pipeline ranks; use --num-virtual-stages-per-pipeline-rank, which cuts unevenly where it must"
            )
        asked["--num-layers-per-virtual-pipeline-stage"] = num_layers // (pp * per_stage)
    if parallel.pipeline_model_parallel_layout is not None:
        stages = layout_stages(parallel.pipeline_model_parallel_layout)
        if stages % pp:
            raise ConfigError(
                f"--pipeline-model-parallel-layout has {stages} stages, not a multiple of --pipeline-model-parallel-size {pp}; "
                "add or remove a stage border |"
            )
        asked["--pipeline-model-parallel-layout"] = stages // pp
    if len(set(asked.values())) > 1:
        ways = ", ".join(f"{flag} gives {chunks}" for flag, chunks in asked.items())
        raise ConfigError(f"the number of model chunks a rank is asked for in different ways: {ways}; keep one of them")
    return next(iter(asked.values()), 1)


def cut_layers(model: ModelConfig, parallel: ParallelConfig, chunks: int) -> Partition:
    """The cut that `parallel` asks for; no layer is ever dropped.

    By hand with a layout string; in equal numbers where first, last, embedding or loss are accounted for, or with
    --pipeline-balance even; otherwise by forward FLOPs, so that embedding, head and loss weigh what they cost.
    """
    pp = parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, model.num_layers, pp, chunks)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    embedding, loss = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    by_hand = first is not None or last is not None or embedding or loss
    if by_hand or parallel.pipeline_balance == "even" or parallel.num_layers_per_virtual_pipeline_stage is not None:
        return cut_evenly(model.num_layers, pp, chunks, first, last, embedding, loss)
    if model.num_layers < pp * chunks:
        raise ConfigError(
            f"--num-layers {model.num_layers} is fewer than {pp} pipeline ranks x {chunks} chunks = {pp * chunks} stages; use fewer "
            "stages, or write --pipeline-model-parallel-layout, in which a stage may be empty"
        )
    layer = layer_forward_flops(model, causal=False)
    return cut_by_cost([layer] * model.num_layers, 0.0, head_forward_flops(model), pp * chunks)
