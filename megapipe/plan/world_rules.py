"""Rules on the schedule and on the number of ranks, in the form of `config.rules`: their errors are reported together
with those of the flags.

A rule yields what `resolve` would stop at; it is silent where a rule of `config.rules` has said what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from megapipe.config.config import Config
from megapipe.config.flags import Requests
from megapipe.config.layers import layer_kinds, layers_text
from megapipe.config.parallel import SHARDED_PARAMS, strategy_of
from megapipe.config.problems import divisors
from megapipe.config.rules import model as of_model
from megapipe.config.rules import training as of_training
from megapipe.config.rules.check import Rule
from megapipe.config.rules.pairs import CONTRADICTION, NOT_BUILT, OPTIONS, Option, Refusal, refusals
from megapipe.config.training import batch_size_steps
from megapipe.errors import ConfigError
from megapipe.formatting import one_of
from megapipe.plan.batch import BatchSchedule, batch_schedule
from megapipe.plan.schedule_choice import check_cut, check_schedule, group_size, memory_limit, schedule_and_chunks
from megapipe.schedule.action import Op
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.parts import MERGED
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule
from megapipe.topology import Topology


def rules_of_world(requests: Requests) -> tuple[Rule, ...]:
    """Return the rules of the world that --world-size gives, none without."""
    if requests.world_size is None:
        return ()
    return world_rules(requests.world_size, requests.ranks_per_node)


def world_rules(world_size: int, ranks_per_node: int | None = None) -> tuple[Rule, ...]:
    """Return the rules of a run on `world_size` ranks, `ranks_per_node` of them on each node (None: one node)."""

    def grid_of(config: Config) -> Topology:
        return topology_of(config, world_size, ranks_per_node, replicas=1)

    def check_batch(config: Config) -> None:
        grid = grid_of(config)
        batch = batch_of(config, grid)
        check_counts(config, schedule_of(config), grid, batch)
        num_steps(config, batch)

    options = OPTIONS | SCHEDULES_CHOSEN
    return (
        _rule(check_schedule),
        _rule(placement_of, of_model.chunks),
        _rule(lambda c: group_size(c.parallel, schedule_of(c)), of_model.chunks),
        _rule(lambda c: memory_limit(c.parallel, schedule_of(c)), of_model.chunks),
        _rule(lambda c: refusals(c, REFUSED_BY_SCHEDULES, options), of_model.chunks),
        _rule(lambda c: check_cut(c.model, c.parallel, placement_of(c)), of_model.chunks, of_model.layers_of_stages),
        _rule(_check_ends, of_model.chunks),
        _rule(_check_rank_settings),
        _rule(_kv_replicas, of_model.shape, of_model.attention, of_model.layers_that_differ),
        _rule(grid_of, of_model.axes),
        _rule(check_batch, of_training.batch, of_model.axes, of_model.chunks),
        _rule(_ruled_out, of_model.chunks),
    )


def _rule(question: Callable[[Config], object], *before: Rule) -> Rule:
    """Return the rule that yields the lines of a question or of its ConfigError, unless a rule before it is broken."""

    def rule(config: Config) -> Iterator[str]:
        if any(True for other in before for _ in other(config)):
            return
        try:
            found = question(config)
            yield from found if isinstance(found, Iterator) else ()
        except ConfigError as error:
            yield from str(error).splitlines()

    return rule


def schedule_of(config: Config) -> str:
    """Return the name of the schedule. Raises ConfigError."""
    return schedule_and_chunks(config.parallel, config.model.num_layers)[0]


def placement_of(config: Config) -> Placement:
    """Return which rank holds which stage. Raises ConfigError."""
    name, chunks = schedule_and_chunks(config.parallel, config.model.num_layers)
    return SCHEDULES[name].place(config.parallel.pipeline_model_parallel_size, chunks)


def _check_ends(config: Config) -> None:
    """Raise ConfigError for an embedding at both ends of the model that are on other ranks than its group.

    Only placements of extensions can be like this.
    """
    placement, predicts = placement_of(config), config.model.mtp_num_layers is not None
    first, last = placement.ranks_of(0), placement.ranks_of(placement.num_stages - 1)
    if config.model.has_embedding_at_both_ends and first != last and {*first, *last} != {0, placement.num_ranks - 1}:
        way = "leave the flag out" if predicts else "add --untie-embeddings-and-output-weights"
        where = f"{' and '.join(map(str, first))} and the last on {' and '.join(map(str, last))}"
        raise ConfigError(
            f"{'--mtp-num-layers' if predicts else 'a tied embedding'} with --pipeline-schedule {schedule_of(config)}, "
            f"which has the first stage on pp_rank {where}: gradients of the embedding are summed over the first and "
            f"the last pp_rank; place both stages there or on one rank, or {way}"
        )


def _check_rank_settings(config: Config) -> None:
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


def topology_of(config: Config, world_size: int, ranks_per_node: int | None, replicas: int | None = None) -> Topology:
    """Return the grid of ranks. Raises ConfigError if it does not fit.

    replicas: tp ranks that hold the same key/value heads, if not those of the model.
    """
    parallel = config.parallel
    family = SCHEDULES.get(parallel.pipeline_schedule)  # None for 'auto', which is not mirrored
    is_mirrored = family is not None and family.is_mirrored(parallel.pipeline_model_parallel_size)
    return _topology(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
        ranks_per_node=ranks_per_node,
        allow_tp_across_nodes=parallel.allow_tp_across_nodes,
        kv_replicas=replicas or _kv_replicas(config),
        mirrored_pipeline=is_mirrored,
        ep=parallel.expert_model_parallel_size,
        expert_tp=parallel.expert_tensor_parallel_size,
        cp_inner=(parallel.hierarchical_context_parallel_sizes or (1,))[0],
        num_instances=parallel.num_distributed_optimizer_instances,
        divides_ep=config.model.moe_token_dispatcher_type == "flex",
    )


_topology = cache(Topology.of_world)  # a search asks for the same grids again and again


def _kv_replicas(config: Config) -> int:
    """Return how many neighbouring tp ranks hold the same key/value heads: 1, tp, or the one number between them.

    Raises ConfigError if heads cannot be spread over tp, or if layers differ in a number between 1 and tp.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    found: dict[int, int] = {}  # replicas -> key/value heads
    for layer, numbers in layer_kinds(model).items():
        groups = layer.num_query_groups
        if layer.has_attention and groups % tp and tp % groups:
            ways = ", ".join(str(n) for n in divisors(layer.num_attention_heads) if groups % n == 0 or n % groups == 0)
            where = "" if len(numbers) == model.num_layers else f"{layers_text(numbers)}: "
            raise ConfigError(
                f"{where}--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the other, "
                f"so that each rank holds whole key/value heads or a copy of one; use a tensor-parallel size of {ways}"
            )
        if layer.has_attention:
            found[max(1, tp // groups)] = groups
    between = [number for number in found if 1 < number < tp]
    if len(between) > 1:
        some, other = (found[number] for number in between[:2])
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} with layers of {some} and of {other} key/value heads: {between[0]} "
            f"ranks would share a head in some layers and {between[1]} in others; use at most {max(some, other)}"
        )
    return between[0] if between else max(found, default=1)


def batch_of(config: Config, topology: Topology) -> BatchSchedule:
    """Return the batch sizes of the run. Raises ConfigError if they do not divide over the ranks."""
    training, ranks_per_replica = config.training, topology.tp * topology.cp * topology.pp
    sizes, words = (training.global_batch_size, training.micro_batch_size), training.step_batch_size_schedule
    steps = () if words is None else batch_size_steps(words, config.model.seq_length)
    return batch_schedule(*sizes, topology.dp, training.rampup_batch_size, ranks_per_replica, steps)


def num_steps(config: Config, batch: BatchSchedule) -> int | None:
    """Return the steps of the run, None if no length is given. Raises ConfigError if it is shorter than a step."""
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is not None or samples is None:
        return iters
    iters = batch.steps_for(samples)
    if iters == 0:
        raise ConfigError(f"--train-samples {samples} is less than one step of {batch.sizes[0]} sequences")
    return iters


def check_counts(config: Config, schedule_name: str, topology: Topology, batch: BatchSchedule) -> None:
    """Raise ConfigError if the schedule cannot run some number of microbatches of the run (a ramp-up changes it)."""
    counts = SCHEDULES[schedule_name].counts
    if counts is None:
        return
    for size in batch.sizes:
        count = size // batch.samples_per_microbatch
        trouble, near = counts(topology.pp, count)
        if trouble:
            numbers = [str(number * batch.samples_per_microbatch) for number in near]
            ways = " or ".join([*numbers, "more"] if near[0] > count else numbers)
            raise ConfigError(
                f"--pipeline-schedule {schedule_name} {trouble}; {batch.flag_of(size)} {size}, {count} microbatch(es) "
                f"of {config.training.micro_batch_size} x dp {topology.dp}: use {ways}"
            )


def _ruled_out(config: Config) -> Iterator[str]:
    """Yield a line for each option of experts and sharding that the schedule rules out."""
    name, model, strategy = schedule_of(config), config.model, strategy_of(config.parallel)
    has_global_loss = model.num_experts is not None and "global_aux_loss" in model.moe_router_load_balancing_type
    if has_global_loss and placement_of(config).is_mirrored:
        yield (
            f"--moe-router-load-balancing-type global_aux_loss does not work with --pipeline-schedule {name}: each of "
            "the two pipeline ranks of a stage sees half of the microbatches; use dualpipe-v"
        )
    is_tied = not model.untie_embeddings_and_output_weights
    if strategy == SHARDED_PARAMS and is_tied and placement_of(config).is_mirrored:
        yield (
            f"--data-parallel-sharding-strategy {strategy} with a tied embedding and --pipeline-schedule {name}: "
            "opposite ranks use the embedding at both ends in different orders, and would gather it differently often; "
            "add --untie-embeddings-and-output-weights, use dualpipe-v, or shard gradients only (optim_grads)"
        )
    overlaps = config.parallel.overlap_moe_expert_parallel_comm
    if overlaps and name not in MERGED and Op.OVERLAP not in _small_schedule(name).ops:
        yield (
            f"--overlap-moe-expert-parallel-comm runs the all-to-alls of a forward under the backward of another "
            f"microbatch, but --pipeline-schedule {name} has no such pairs; use 1f1b, interleaved, dualpipe or "
            "dualpipe-v, or leave the flag out"
        )


@cache
def _small_schedule(name: str) -> Schedule:
    return build_schedule(name, 2, SCHEDULES[name].num_chunks(1), 4)


def _chosen_if(is_chosen: Callable[[str], bool]) -> Option:
    """Return the option of a schedule with this property."""
    return lambda config: is_chosen(schedule_of(config)) and f"--pipeline-schedule {schedule_of(config)}"


SCHEDULES_CHOSEN: dict[str, Option] = {
    "two passes at a time": _chosen_if(lambda name: Op.OVERLAP in _small_schedule(name).ops),
    "updates between microbatches": _chosen_if(lambda name: not SCHEDULES[name].is_synchronous),
    "no order of slices": _chosen_if(lambda name: not SCHEDULES[name].takes_slices),
}
REFUSED_BY_SCHEDULES = (
    Refusal(
        "slices",
        ("no order of slices",),
        NOT_BUILT,
        "it has no order for slices of a microbatch",
        f"use {one_of([family.name for family in SCHEDULES.values() if family.takes_slices])}",
    ),
    Refusal(
        "CUDA graphs",
        ("two passes at a time",),
        NOT_BUILT,
        "two graphs would run at the same time and share cuBLAS's workspace",
        "use zb-v",
    ),
    Refusal(
        "updates between microbatches",
        ("sharded gradients alone", "CUDA graphs", "activation offload", "pipeline profile", "replays in bubbles"),
        NOT_BUILT,
        "it updates weights while microbatches are in flight, and does not drain between steps",
        "use a synchronous schedule, such as 1f1b",
    ),
    Refusal(
        "updates between microbatches",
        ("sharded weights",),
        CONTRADICTION,
        "it keeps whole versions of the weights, since each backward reads those of its forward",
        "use a synchronous schedule, such as 1f1b",
    ),
)
