"""The plan as text: grid with node placement, stages with their parameters, batch, bubble, memory, FLOPs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.formatting import bytes_text, count_text, flops_text, range_text, text_table
from megapipe.layers.table import WHOLE, comm_chunks
from megapipe.plan.bubble import expected_bubble
from megapipe.plan.flops import step_flops
from megapipe.plan.hardware import GIGA, HOST_SHARE, PCIE_4, PCIE_5
from megapipe.plan.memory import RankMemory, all_rank_memory, offloaded_groups, stage_activation_bytes
from megapipe.plan.offload import row_moves
from megapipe.plan.run_plan import RunPlan

MOST_RANKS_SHOWN = 64
MOST_STAGES_SHOWN = 16
MOST_PIPELINE_RANKS_SHOWN = 16
MOST_PARTS_SHOWN = 5
SMALL = 0.01  # of a rank's total
ALWAYS_SHOWN = ("weights", "gradients", "optimizer", "activations")


def plan_text(plan: RunPlan) -> str:
    """Return everything about the run that is decided before it starts, as text for a terminal."""
    return "\n".join([*_headline(plan), *_grid(plan), *_stages(plan), *_batch(plan), *_bubble(plan), *_memory(plan)])


def _headline(plan: RunPlan) -> Iterator[str]:
    t, model = plan.topology, plan.config.model
    chunks = f" x {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    extras = [
        name
        for name, is_on in (
            ("sequence parallel", plan.config.parallel.sequence_parallel and t.tp > 1),
            ("tensor-parallel collectives in chunks", comm_chunks(plan.config.parallel) != WHOLE),
            ("distributed optimizer", plan.config.parallel.use_distributed_optimizer),
            ("every parameter on two pipeline ranks", t.mirrored_pipeline),
        )
        if is_on
    ]
    yield (
        f"plan: {count_text(t.world_size, 'rank')} = tp {t.tp} x pp {t.pp}{chunks} x dp {t.dp}, schedule "
        f"{plan.schedule_name}" + "".join(f", {e}" for e in extras)
    )
    if not plan.is_synchronous:
        yield from _asynchronous(plan)
    groups = (
        f", {model.num_query_groups} key/value heads" if model.num_query_groups != model.num_attention_heads else ""
    )
    yield (
        f"  model    {model.num_layers} layers, hidden {model.hidden_size}, ffn {model.ffn_hidden_size}, "
        f"{model.num_attention_heads} heads{groups}, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size:,} (padded {model.padded_vocab_size:,}), "
        f"{plan.config.precision.dtype}"
    )


def _asynchronous(plan: RunPlan) -> Iterator[str]:
    count = plan.batch.full // plan.batch.samples_per_microbatch
    updates = len(plan.weight_versions(count, 0).group_sizes)
    held = [plan.num_weight_versions(pp_rank) for pp_rank in range(plan.topology.pp)]
    versions = count_text(held[0], "version") if len(set(held)) == 1 else f"{max(held)} to {min(held)} versions"
    alike = "; with a single update a step trains as 1f1b does: raise --global-batch-size" if updates == 1 else ""
    yield (
        f"           NOT synchronous: {count_text(updates, 'update')} in a step of "
        f"{count_text(count, 'microbatch')}, every stage at its own time, "
        f"{versions} of the weights on a rank; one process would train something else{alike}"
    )


def _grid(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each pipeline rank: the global ranks of its tp groups, by dp replica."""
    t = plan.topology
    if t.num_nodes > 1:
        crossing = [name for name in ("tp", "pp", "dp") if t.size(name) > 1 and t.crosses_nodes(name)]
        yield (
            f"  nodes    {t.num_nodes} of {t.ranks_per_node} ranks; groups that cross nodes: "
            f"{', '.join(crossing) or 'none'}"
        )
    if t.world_size == 1:
        return
    if t.world_size > MOST_RANKS_SHOWN:
        yield f"  grid     rank order {t.order}, tp fastest: tp groups (0..{t.tp - 1}), ..."
        return
    tp_groups = {}
    for ranks in t.groups("tp"):
        place = t.coordinates(ranks[0])
        node = f"n{t.node_of(ranks[0])}:" if t.num_nodes > 1 else ""
        tp_groups[place.pp_rank, place.dp_rank] = node + " ".join(map(str, ranks))
    width = max(len("dp 00"), *map(len, tp_groups.values()))
    yield "  grid     " + " " * 5 + "  ".join(f"dp {d}".ljust(width) for d in range(t.dp)).rstrip()
    for pp_rank in range(t.pp):
        yield f"           pp {pp_rank} " + "  ".join(tp_groups[pp_rank, d].ljust(width) for d in range(t.dp)).rstrip()


def _stages(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each stage; with many stages, one line for neighbours that hold equally much."""
    counts = [sum(spec.num_elements for spec in specs) for specs in plan.stage_specs]
    rows = [
        (range_text(run), _ranks_of(plan, run), f"{counts[run[0]]:,}", _holds(plan, run))
        for run in _equal_neighbours(plan, counts)
    ]
    copies = sum(counts) - sum(spec.num_elements for spec in plan.specs)
    once = "every element of the model once"
    if copies:
        once = f"less {copies:,} of the tied embedding's copy = {sum(counts) - copies:,}, {once}"
    if plan.topology.mirrored_pipeline:
        once = once.removesuffix(" once") + ", on two pipeline ranks"
    yield from text_table(
        [("stage", "pp_rank", "parameters", "holds"), *rows, ("sum", "", f"{sum(counts):,}", once)], left=(-1,)
    )


def _equal_neighbours(plan: RunPlan, counts: Sequence[int]) -> list[list[int]]:
    """Return the stages in runs of equal layer and parameter counts; each stage separately where there are few."""
    runs: list[list[int]] = []
    for stage, layers in enumerate(plan.partition.layer_counts):
        same = runs and (layers, counts[stage]) == (plan.partition.layer_counts[stage - 1], counts[stage - 1])
        if same and len(counts) > MOST_STAGES_SHOWN:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _ranks_of(plan: RunPlan, run: Sequence[int]) -> str:
    ranks = [rank for stage in run for rank in plan.placement.ranks_of(stage)]
    if len(set(ranks)) == plan.topology.pp > 1:
        return "all"
    return (
        range_text(ranks)
        if ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        else ", ".join(map(str, sorted(set(ranks))))
    )


def _holds(plan: RunPlan, run: Sequence[int]) -> str:
    first, last = plan.partition.stages[run[0]], plan.partition.stages[run[-1]]
    names = ["embedding"] if first.has_embedding else []
    if first.num_layers:
        layers = range_text(range(first.first_layer, last.last_layer_exclusive))
        names.append(("layer " if layers.isdigit() else "layers ") + layers)
        if len(run) > 1:
            names[-1] += f", {first.num_layers} each"
    if last.has_head:
        names.append("head")
    return ", ".join(names) or "nothing"


def _memory(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each pp_rank, equal neighbours as one; of many only the largest.

    Items that are small everywhere are added up.
    """
    ranks = all_rank_memory(plan)
    shown = _largest(ranks)
    columns = [
        item
        for item in ranks[0].items
        if item in ALWAYS_SHOWN or any(rank.items[item] > SMALL * rank.total for rank in ranks)
    ]
    rows = []
    for run in _equal_ranks(shown):
        rank = run[0]
        sizes = [rank.items[item] for item in columns]
        cells = (*sizes, rank.total - sum(sizes))
        live = f"{rank.live_microbatches:.3g}"
        rows.append((range_text([rank.pp_rank for rank in run]), *map(bytes_text, cells), bytes_text(rank.total), live))
    yield (
        "  memory   of a rank at the peak of a step; kernel workspace, allocator slack and CUDA context are not counted"
    )
    yield from text_table([("pp_rank", *columns, "other", "total", "live microbatches"), *rows], indent=11)
    largest = max(ranks, key=lambda rank: rank.total)
    if len(ranks) > 1:
        smallest = min(ranks, key=lambda rank: rank.total)
        others = f"; {len(ranks) - len(shown)} smaller ones are not shown" if len(shown) < len(ranks) else ""
        yield (
            f"           the most: pp_rank {largest.pp_rank}, {bytes_text(largest.total)}; "
            f"the least: pp_rank {smallest.pp_rank}, {bytes_text(smallest.total)}{others}"
        )
    yield _kept(plan, largest.pp_rank)
    yield from _host(plan, max(ranks, key=lambda rank: sum(rank.host.values())))


def _kept(plan: RunPlan, pp_rank: int) -> str:
    """Return the line on what the rank's largest stage keeps for one microbatch."""
    kept = {stage: stage_activation_bytes(plan, stage) for stage in plan.placement.stages_of(pp_rank)}
    stage = max(kept, key=lambda stage: sum(kept[stage].values()))
    parts = sorted(kept[stage].items(), key=lambda part: -part[1])
    rest = sum(size for _, size in parts[MOST_PARTS_SHOWN:])
    words = [f"{what} {bytes_text(size)}" for what, size in parts[:MOST_PARTS_SHOWN]] + (
        [f"other {bytes_text(rest)}"] if rest else []
    )
    return f"  kept     {bytes_text(sum(kept[stage].values()))} by stage {stage} for one microbatch: {', '.join(words)}"


def _host(plan: RunPlan, rank: RankMemory) -> Iterator[str]:
    """Yield lines on host memory and on the copies to and from it."""
    if not rank.host:
        return
    if not sum(rank.host.values()):
        smallest = plan.config.offload.min_offloaded_tensor_size
        yield (
            "  host     nothing of it: no activation that would move has --min-offloaded-tensor-size "
            f"{smallest} elements"
        )
        return
    words = ", ".join(f"{what} {bytes_text(size)}" for what, size in rank.host.items())
    yield (
        f"  host     {bytes_text(sum(rank.host.values()))} of the host's memory for a rank (pp_rank "
        f"{rank.pp_rank} the most): {words}"
    )
    if not rank.host.get("activations"):
        return
    groups = {stage: offloaded_groups(plan, stage) for stage in plan.placement.stages_of(rank.pp_rank)}
    count = plan.batch.full // plan.batch.samples_per_microbatch
    moves = row_moves(plan, count, rank.pp_rank)
    step = sum(groups[unit.stage][unit.group].moved for unit in moves.moved)
    most = max(group.moved for each in groups.values() for group in each)
    rates = (("PCIe 4", PCIE_4), ("PCIe 5", PCIE_5))
    times = ", ".join(f"{most / (HOST_SHARE * rate * GIGA) * 1e3:.3g} ms over {name}" for name, rate in rates)
    yield (
        f"           {bytes_text(step)} travel each way in a step, at most {bytes_text(most)} under one "
        f"layer's computation: {times}"
    )


def _equal_ranks(ranks: Sequence[RankMemory]) -> list[list[RankMemory]]:
    """Return neighbours with the same memory in runs."""
    runs: list[list[RankMemory]] = []
    for rank in ranks:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.pp_rank + 1, last.items, last.live_microbatches) == (
            rank.pp_rank,
            rank.items,
            rank.live_microbatches,
        ):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _largest(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the ranks that are shown, in pipeline order."""
    chosen = sorted(ranks, key=lambda rank: -rank.total)[:MOST_PIPELINE_RANKS_SHOWN]
    return sorted(chosen, key=lambda rank: rank.pp_rank)


def _batch(plan: RunPlan) -> Iterator[str]:
    training, batch = plan.config.training, plan.batch
    steps = count_text(training.train_iters, "step") if training.train_iters else "no steps"
    ramp = f", ramped up from {batch.start} over {batch.ramp_samples:,} samples" if batch.increment else ""
    tokens = batch.full * plan.config.model.seq_length
    yield (
        f"  batch    {count_text(batch.full, 'sequence')} = "
        f"{count_text(batch.full // batch.samples_per_microbatch, 'microbatch')} "
        f"x {training.micro_batch_size} x dp {plan.topology.dp}{ramp}; {tokens:,} tokens a step, {steps}"
    )
    flops = [step_flops(plan.config.model, batch.full, causal) for causal in (False, True)]
    yield (
        f"  FLOPs    {flops_text(flops[0])} a step with full attention, {flops_text(flops[1])} with causal "
        "attention counted half"
    )


def _bubble(plan: RunPlan) -> Iterator[str]:
    if plan.topology.pp == 1:
        return
    bubble = expected_bubble(plan, plan.batch.full // plan.batch.samples_per_microbatch)
    ahead = plan.config.optimizer.optimizer_post_validation
    span = "in steps that follow without a barrier" if ahead else "from the first action of any rank to the last"
    yield (
        f"  bubble   {bubble.share:.1%} of the ranks' time expected idle, {span} (stages weighed by FLOPs, "
        "messages free)"
    )
