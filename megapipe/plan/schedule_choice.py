"""The choice of the pipeline schedule and of the chunks on a rank, from flags and schedule family; the first cut of the
layers into stages: by hand (layout string, first and last stage), evenly, or by forward FLOPs.

`cut.balanced_cut` improves the cut for the busiest pipeline rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.fields import nearest
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.problems import Problems
from megapipe.errors import ConfigError
from megapipe.formatting import one_of
from megapipe.layers.model import model_spec
from megapipe.plan.layer_costs import head_flops, layer_flops
from megapipe.registry import EXTENSIONS
from megapipe.schedule.families import SCHEDULES, default_schedule, even_near
from megapipe.schedule.partition import Partition, cut_by_cost, cut_evenly, layout_stages, parse_layout
from megapipe.schedule.placement import Placement

AUTO = "auto"
SCHEDULE_NAMES = (AUTO, *SCHEDULES)
CHUNKS_FLAG = "--num-virtual-stages-per-pipeline-rank"
BY_HAND: dict[str, Any] = {  # options that give the layers of a rank, or their number -> their values without
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "num_layers_per_virtual_pipeline_stage": None,
}


def check_schedule(config: Config) -> None:
    """Raise ConfigError if --pipeline-schedule is unknown or lacks what the configuration needs (a line for each rule).

    Weights of an asynchronous schedule change while microbatches are in flight. Where updates are not delayed, each
    stage makes them at its own time, so that no option may need all ranks at the same moment.
    """
    name = _known_name(config.parallel)
    if config.optimizer.delay_error_feedback and (name == AUTO or not SCHEDULES[name].is_delayed):
        raise ConfigError(
            f"--delay-error-feedback {config.optimizer.delay_error_feedback:g} makes up for gradients that come a step "
            f"late, but those of --pipeline-schedule {name} do not; leave it out, or use pipedream-2bw"
        )
    versions = None if name == AUTO else SCHEDULES[name].versions
    if config.optimizer.clip_grad_delay and (versions is None or versions.is_stashed):
        raise ConfigError(
            f"--clip-grad-delay {config.optimizer.clip_grad_delay} clips by the norm of the update before, which is "
            "known in time where each stage is updated once a step, whenever its own gradients are complete; "
            f"--pipeline-schedule {name} does not do that; leave it out, or use paci"
        )
    if versions is None:
        return
    # (True if the option is given, the reason and the way out)
    rules: list[tuple[bool, str]] = []
    if not versions.is_stashed:
        rules.append(
            (
                config.recompute.recompute_granularity is not None,
                f"--recompute-granularity {config.recompute.recompute_granularity}: with --pipeline-schedule {name} a "
                "backward may meet newer weights than its forward, with which activations would come out differently; "
                "leave it out, or use pipedream-2bw",
            )
        )
    if not SCHEDULES[name].is_delayed:
        rules += _rules_of_apart_updates(config, name)
    Problems([message for is_given, message in rules if is_given]).raise_all()


def _rules_of_apart_updates(config: Config, name: str) -> list[tuple[bool, str]]:
    """Return what a schedule rules out that updates each stage at its own time: (True if it is given, the error)."""
    updates, precision = f"--pipeline-schedule {name} updates", config.precision
    return [
        (
            precision.dtype == "fp16" and precision.loss_scale is None,
            f"{updates} each stage at its own time and cannot skip an update because another stage overflowed; use "
            "--bf16, a fixed --loss-scale with --fp16, or pipedream-2bw",
        ),
        (
            config.training.calculate_per_token_loss,
            f"{updates} each stage at its own time, before the tokens of the batch, by which "
            "--calculate-per-token-loss divides, are counted; leave that out, so that each microbatch has the same "
            "weight, or use pipedream-2bw"
            if not config.data.sft
            else f"{updates} each stage at its own time, before the trained tokens, by which --sft divides, are "
            "counted; use pipedream-2bw, or a synchronous schedule",
        ),
        (
            not config.model.untie_embeddings_and_output_weights and config.parallel.pipeline_model_parallel_size > 1,
            f"{updates} each stage at its own time, but the tied embedding is on the first and the last stage and "
            "has one gradient; give --untie-embeddings-and-output-weights, or use pipedream-2bw",
        ),
        (
            config.model.mtp_num_layers is not None,
            f"--mtp-num-layers does not work with --pipeline-schedule {name}: the embedding is on the first and "
            f"the last stage, but {updates} each stage at its own time; use pipedream-2bw",
        ),
    ]


def _known_name(parallel: ParallelConfig) -> str:
    name = parallel.pipeline_schedule
    if name != AUTO and name not in SCHEDULES:
        names = (AUTO, *SCHEDULES)
        raise ConfigError(f"--pipeline-schedule {name}: choose {one_of(names)}{nearest(name, names)}{EXTENSIONS.hint}")
    return name


def schedule_and_chunks(parallel: ParallelConfig, num_layers: int) -> tuple[str, int]:
    """Return (schedule, chunks per rank). Raises ConfigError if the schedule cannot run what the flags ask for."""
    name, asked = _known_name(parallel), asked_chunks(parallel, num_layers)
    chunks = asked or 1
    if name == AUTO:
        return default_schedule(chunks), chunks
    family = SCHEDULES[name]
    if family.chunks is not None:
        if parallel.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"--pipeline-schedule {name} fills a pipeline's bubble: it needs --pipeline-model-parallel-size of at "
                "least 2; leave it out or raise pp"
            )
        if asked not in (None, family.chunks):
            raise ConfigError(
                f"--pipeline-schedule {name} always has {family.chunks} chunks on every rank, but {asked} were asked "
                f"for; leave {CHUNKS_FLAG} out, or give {family.chunks}"
            )
        return name, family.chunks
    if family.has_waves and chunks % 2:
        raise ConfigError(
            f"--pipeline-schedule {name} passes the ranks down and up again and needs an even number of chunks; give "
            f"{CHUNKS_FLAG} {even_near(chunks)}"
        )
    if family.takes_chunks and chunks == 1:
        raise ConfigError(
            f"--pipeline-schedule {name} needs chunks; give {CHUNKS_FLAG} 2 or more, or choose {family.without_chunks}"
        )
    if chunks > 1 and not family.takes_chunks:
        raise ConfigError(
            f"--pipeline-schedule {name} runs one chunk per rank, but {chunks} were asked for; choose interleaved or "
            "breadth-first, or leave the chunks out"
        )
    return name, chunks


def group_size(parallel: ParallelConfig, name: str) -> int | None:
    """Return the microbatches that run through a chunk before the next one; None without groups. Raises ConfigError."""
    group, pp = parallel.microbatch_group_size_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    if not SCHEDULES[name].takes_group_size:
        if group is not None:
            raise ConfigError(
                f"{flag} {group} belongs to interleaving, but schedule {name} has no groups; leave it out or give "
                f"{CHUNKS_FLAG}"
            )
        return None
    if group is not None and group < pp:
        raise ConfigError(f"{flag} {group} is below --pipeline-model-parallel-size {pp}; use at least {pp}")
    return group or pp


def memory_limit(parallel: ParallelConfig, name: str) -> int | None:
    """Return the microbatches that zb-auto may keep alive on a rank, None for others. Raises ConfigError."""
    limit = parallel.pipeline_memory_limit
    if SCHEDULES[name].is_automatic:
        return limit or parallel.pipeline_model_parallel_size
    if limit is not None:
        raise ConfigError(
            f"--pipeline-memory-limit {limit} is a limit for --pipeline-schedule zb-auto, but the memory of schedule "
            f"{name} is fixed; choose zb-auto or leave it out"
        )
    return None


def asked_chunks(parallel: ParallelConfig, num_layers: int) -> int | None:
    """Return the chunks per rank that one of three flags asks for, or None. Raises ConfigError if they disagree."""
    pp = parallel.pipeline_model_parallel_size
    asked = {}
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        asked[CHUNKS_FLAG] = parallel.num_virtual_stages_per_pipeline_rank
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        # as in Megatron
        num_layers += parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
        if num_layers % (pp * per_stage):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage}: {num_layers} layers are not a multiple of "
                f"{per_stage} x {pp} pipeline ranks; use {CHUNKS_FLAG}, which divides unevenly where it must"
            )
        asked["--num-layers-per-virtual-pipeline-stage"] = num_layers // (pp * per_stage)
    if parallel.pipeline_model_parallel_layout is not None:
        stages = layout_stages(parallel.pipeline_model_parallel_layout)
        if stages % pp:
            raise ConfigError(
                f"--pipeline-model-parallel-layout has {stages} stages, not a multiple of "
                f"--pipeline-model-parallel-size {pp}; add or remove a stage border |"
            )
        asked["--pipeline-model-parallel-layout"] = stages // pp
    if len(set(asked.values())) > 1:
        ways = ", ".join(f"{flag} gives {chunks}" for flag, chunks in asked.items())
        raise ConfigError(f"the flags disagree on the number of model chunks per rank: {ways}; keep one of them")
    return next(iter(asked.values()), None)


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
        ends = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
        counted = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
        return cut_evenly(num_layers, placement.rank_of_stage, *ends, *counted)
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
    predictions = sum(layer_flops(layer, model.seq_length, causal=False) for layer in spec.predictions)
    return cut_by_cost(costs, head_flops(spec) + predictions, num_stages)
