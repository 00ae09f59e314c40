"""Which pipeline schedule runs, and how many model chunks a rank then holds: from the flags and the schedule's row in the table."""

from __future__ import annotations

from megapipe.config.parallel import ParallelConfig
from megapipe.errors import ConfigError
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.partition import layout_stages

CHUNKS_FLAG = "--num-virtual-stages-per-pipeline-rank"


def schedule_and_chunks(parallel: ParallelConfig, num_layers: int) -> tuple[str, int]:
    """(schedule, chunks a rank). Raises ConfigError if the schedule cannot run what the flags ask for."""
    asked = asked_chunks(parallel, num_layers)
    name, chunks = parallel.pipeline_schedule, asked or 1
    if name == "auto":
        return ("interleaved" if chunks > 1 else "1f1b"), chunks
    family = SCHEDULES[name]
    if family.chunks is not None:
        if parallel.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"--pipeline-schedule {name} fills a pipeline's bubble: it needs --pipeline-model-parallel-size of at least 2; "
                "leave it out or raise pp"
            )
        if asked not in (None, family.chunks):
            raise ConfigError(
                f"--pipeline-schedule {name} holds {family.chunks} chunks on every rank by itself, but {asked} were asked for; "
                f"leave {CHUNKS_FLAG} out, or give {family.chunks}"
            )
        return name, family.chunks
    if family.takes_chunks and chunks == 1:
        raise ConfigError(
            f"--pipeline-schedule {name} needs chunks; give {CHUNKS_FLAG} 2 or more, or choose {_without_chunks(name)}"
        )
    if chunks > 1 and not family.takes_chunks:
        raise ConfigError(
            f"--pipeline-schedule {name} runs one chunk a rank, but {chunks} were asked for; choose interleaved or breadth-first, or leave "
            "the chunks out"
        )
    return name, chunks


def _without_chunks(name: str) -> str:
    """The schedule that a looped one is with one chunk."""
    return {"breadth-first": "gpipe"}.get(name, "1f1b")


def group_size(parallel: ParallelConfig, name: str) -> int | None:
    """Microbatches that run through a chunk before the next one's turn; None where the schedule has no groups. Raises ConfigError."""
    group, pp = parallel.microbatch_group_size_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    if not SCHEDULES[name].takes_group_size:
        if group is not None:
            raise ConfigError(
                f"{flag} {group} belongs to interleaving and pipedream-2bw, schedule {name} has no groups; leave it out or give "
                f"{CHUNKS_FLAG}"
            )
        return None
    if group is not None and group < pp:
        raise ConfigError(f"{flag} {group} is below --pipeline-model-parallel-size {pp}; use at least {pp}")
    return group or pp


def memory_limit(parallel: ParallelConfig, name: str) -> int | None:
    """Microbatches that zb-auto may keep alive on a rank; None for other schedules. Raises ConfigError."""
    limit = parallel.pipeline_memory_limit
    if name == "zb-auto":
        return limit or parallel.pipeline_model_parallel_size
    if limit is not None:
        raise ConfigError(
            f"--pipeline-memory-limit {limit} is what --pipeline-schedule zb-auto searches within; schedule {name} keeps what it keeps: "
            "choose zb-auto or leave it out"
        )
    return None


def asked_chunks(parallel: ParallelConfig, num_layers: int) -> int | None:
    """Model chunks a rank, from whichever of the three ways they were asked for; None if in none. Raises ConfigError if they disagree."""
    pp = parallel.pipeline_model_parallel_size
    asked = {}
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        asked[CHUNKS_FLAG] = parallel.num_virtual_stages_per_pipeline_rank
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        if num_layers % (pp * per_stage):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage}: {num_layers} layers are not a multiple of {per_stage} x {pp} "
                f"pipeline ranks; use {CHUNKS_FLAG}, which cuts unevenly where it must"
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
    return next(iter(asked.values()), None)
