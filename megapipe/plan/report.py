"""The plan as text: grid with node placement, stages with their parameters, batch, bubble, memory, FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from megapipe.config.layers import LAYER_OPTIONS, layer_configs, layer_kinds
from megapipe.config.rules.gpu import uses_gpu
from megapipe.formatting import bytes_text, count_text, flops_text, grid_text, range_text, ranges_text, text_table
from megapipe.layers.model import comm_chunks
from megapipe.layers.table import WHOLE
from megapipe.plan.activations import stage_bytes
from megapipe.plan.expert_load import BALANCED
from megapipe.plan.hardware import GIGA, HOST_SHARE, PCIE_4, PCIE_5
from megapipe.plan.layer_costs import layer_flops, step_flops
from megapipe.plan.memory import RankMemory, all_rank_memory, slice_bytes, stage_activation_bytes
from megapipe.plan.recompute_choice import recompute_text
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.sharded import replica_bytes, row_bytes
from megapipe.plan.step_time import expected_bubble
from megapipe.plan.traffic import layer_bytes
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers

MOST_RANKS_SHOWN = 64
MOST_STAGES_SHOWN = 16
MOST_PIPELINE_RANKS_SHOWN = 16
MOST_PARTS_SHOWN = 5
SMALL = 0.01  # of a rank's total
STRATEGIES = {"optim_grads": "gradients and optimizer", "optim_grads_params": "weights, gradients and optimizer"}
ALWAYS_SHOWN = ("weights", "gradients", "optimizer", "activations")


def plan_text(plan: RunPlan) -> str:
    """Return everything about the run that is decided before it starts, as text for a terminal."""
    sections = (_headline, _kinds, _grid, _stages, _batch, _bubble, _memory)
    return "\n".join(line for section in sections for line in section(plan))


def _headline(plan: RunPlan) -> Iterator[str]:
    t, model, parallel = plan.topology, plan.config.model, plan.config.parallel
    extras = {
        "sequence parallel": parallel.sequence_parallel and t.tp > 1,
        "tensor-parallel collectives in chunks": comm_chunks(parallel) != WHOLE,
        "distributed optimizer": parallel.use_distributed_optimizer and plan.sharding is None,
        f"{STRATEGIES.get(parallel.data_parallel_sharding_strategy)} sharded": plan.sharding is not None,
        f"{t.num_instances} instances of shards": t.num_instances > 1,
        f"stages of up to {max(plan.num_units, default=1)} units": bool(plan.num_units),
        "every parameter on two pipeline ranks": t.mirrored_pipeline,
        "experts' all-to-alls under computation": plan.parts is not None,
    }
    ranks, name = count_text(t.world_size, "rank"), ", ".join([plan.schedule_name, *(e for e in extras if extras[e])])
    cp = f"{t.cp} ({' '.join(dict.fromkeys(parallel.cp_comm_type))})" if t.cp > 1 else 1
    yield f"plan: {ranks} = {grid_text(t.tp, t.pp, t.dp, cp, plan.num_chunks)}, schedule {name}"
    if not plan.is_synchronous:
        held = [plan.num_weight_versions(pp_rank) for pp_rank in range(t.pp)]
        drains = [f"every {steps} steps ({flag})" for flag, steps in plan.config.drain_intervals.items()]
        versions = count_text(held[0], "version") if len(set(held)) == 1 else f"{max(held)} to {min(held)} versions"
        yield (
            f"           NOT synchronous: the pipeline does not drain between steps, {versions} of the weights on a "
            f"rank; one process would train something else. Drains: {', '.join(drains) or 'at the end'}"
        )
    has_groups = model.num_query_groups != model.num_attention_heads
    groups = f", {model.num_query_groups} key/value heads" if has_groups else ""
    yield (
        f"  model    {model.num_layers} layers, hidden {model.hidden_size}, ffn {model.ffn_hidden_size}, "
        f"{model.num_attention_heads} heads{groups}, sequence {model.seq_length}, vocabulary {model.vocab_size:,} "
        f"(padded {model.padded_vocab_size:,}), {plan.config.precision.dtype}"
    )


def _kinds(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each kind of layer, in order of appearance; nothing if all layers are alike."""
    model_config, model = plan.config.model, plan.model
    kinds, sequence = layer_kinds(model_config), model_config.seq_length
    if len(kinds) == 1:
        return
    differing = [name for name in LAYER_OPTIONS if len({getattr(kind, name) for kind in kinds}) > 1]
    count, layers = model_config.num_layers, layer_configs(model_config)
    period = next(n for n in range(1, count + 1) if layers[n:] == layers[: count - n])
    rows = [("layers", "number", "parameters", "FLOPs", "kept", "with")]
    for kind, numbers in kinds.items():
        words = [f"no {part}" for part in kind.missing_parts]
        words += [f"{name} {_option_text(getattr(kind, name))}" for name in differing if name in kind.used_options]
        parameters = sum(spec.num_elements for spec in plan.specs if spec.owner == numbers[0])
        flops = sequence * layer_flops(model.layers[numbers[0]], sequence, causal=True)
        kept = stage_bytes(model, plan.shape, StageLayers(numbers[0], numbers[0] + 1, False, False))
        sizes = f"{parameters:,}", flops_text(flops), bytes_text(sum(kept.values()))
        shown = ranges_text(numbers)
        if 2 * period <= count:
            shown = f"{ranges_text([number for number in numbers if number < period])} of every {period}"
        rows.append((shown, str(len(numbers)), *sizes, ", ".join(words)))
    yield (
        f"  layers   of {len(kinds)} kinds; of one layer: parameters, forward FLOPs of a sequence (causal, within the "
        "window), and what a rank keeps of a microbatch"
    )
    yield from text_table(rows, left=(0, -1), indent=11)


def _option_text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.12g}"
    return "none" if value is None else str(value).lower()


def _grid(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each pipeline rank: the global ranks of its tp groups, by dp replica; | between cp ranks."""
    t = plan.topology
    if t.num_nodes > 1:
        names = ("tp", "cp", "pp", "dp", *(("ep", "etp") if plan.model.has_experts else ()))
        crossing = ", ".join(name for name in names if t.crosses_nodes(name))
        yield f"  nodes    {t.num_nodes} of {t.ranks_per_node} ranks; groups that cross nodes: {crossing or 'none'}"
    if t.world_size == 1:
        return
    if plan.model.has_experts:
        groups = [t.group_of(name, 0) for name in ("etp", "ep", "expert_replicas")]
        shown = [" ".join(map(str, group if len(group) <= 8 else (*group[:3], "...", group[-1]))) for group in groups]
        sizes = f"{t.experts_text}, {load_text(plan)}"
        yield f"  experts  {sizes}; groups of rank 0: etp ({shown[0]}), ep ({shown[1]}), copies ({shown[2]})"
        yield from _expert_messages(plan)
    if t.world_size > MOST_RANKS_SHOWN:
        yield f"  grid     rank order {t.order}, tp fastest: tp groups (0..{t.tp - 1}), ..."
        return
    parts: dict[tuple[int, int], dict[int, str]] = {}
    for ranks in t.groups("tp"):
        place = t.coordinates(ranks[0])
        node = f"n{t.node_of(ranks[0])}:" if t.num_nodes > 1 else ""
        parts.setdefault((place.pp_rank, place.dp_rank), {})[place.cp_rank] = node + " ".join(map(str, ranks))
    tp_groups = {place: " | ".join(text for _, text in sorted(of_cp.items())) for place, of_cp in parts.items()}
    width = max(len("dp 00"), *map(len, tp_groups.values()))
    yield "  grid     " + " " * 5 + "  ".join(f"dp {d}".ljust(width) for d in range(t.dp)).rstrip()
    for pp_rank in range(t.pp):
        yield f"           pp {pp_rank} " + "  ".join(tp_groups[pp_rank, d].ljust(width) for d in range(t.dp)).rstrip()


def load_text(plan: RunPlan) -> str:
    """Return the load of experts for which a plan gives memory and time, in a few words."""
    if plan.expert_load == BALANCED:
        return "balanced"
    most, layers = plan.expert_imbalance, " in the worst layer" if plan.expert_load.of_layers else ""
    return f"the fullest rank with {most:.3g} times the mean of rows{layers}"


def _expert_messages(plan: RunPlan) -> Iterator[str]:
    """Yield a line with what a rank sends for the experts of one layer and microbatch."""
    t, of_layers = plan.topology, (layer_bytes(plan, kind) for kind in plan.model.kinds)
    sent = max(of_layers, key=lambda of_layer: sum(of_layer.values()))
    words: list[str] = []
    if "ep_nodes" in sent:
        words += [f"{bytes_text(sent['ep_places'])} within its node", f"{bytes_text(sent['ep_nodes'])} to other nodes"]
    elif t.ep > 1:
        away = (t.ep - t.least_on_a_node("ep")) / (t.ep - 1)
        ways = {"within its node": (1.0 - away) * sent["ep"], "to other nodes": away * sent["ep"]}
        words += [f"{bytes_text(size)} over ep {where}" for where, size in ways.items() if size]
    if t.etp > 1:
        words.append(f"{bytes_text(sent['etp'])} over etp")
    if words:
        yield f"           a rank sends for a layer and microbatch, forward and backward: {', '.join(words)}"


def _stages(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each stage; with many stages, one line for neighbours that hold equally much."""
    counts = [sum(spec.num_elements for spec in specs) for specs in plan.stage_specs]
    alike = list(zip(plan.partition.layer_counts, counts, strict=True))
    is_long = len(counts) > MOST_STAGES_SHOWN
    runs = [list(run) for _, run in groupby(range(len(counts)), lambda stage: alike[stage] if is_long else stage)]
    rows = []
    for run in runs:
        ranks = [rank for stage in run for rank in plan.placement.ranks_of(stage)]
        shown = ", ".join(map(str, sorted(set(ranks))))
        if len(set(ranks)) == plan.topology.pp > 1:
            shown = "all"
        elif ranks == list(range(ranks[0], ranks[0] + len(ranks))):
            shown = range_text(ranks)
        rows.append((range_text(run), shown, f"{counts[run[0]]:,}", _holds(plan, run)))
    copies = sum(counts) - sum(spec.num_elements for spec in plan.specs)
    once = "every element of the model" + (", on two pipeline ranks" if plan.topology.mirrored_pipeline else " once")
    if copies:
        copied = "embedding" if plan.config.model.untie_embeddings_and_output_weights else "tied embedding"
        once = f"less {copies:,} of the {copied}'s copy = {sum(counts) - copies:,}, {once}"
    total = ("sum", "", f"{sum(counts):,}", once)
    yield from text_table([("stage", "pp_rank", "parameters", "holds"), *rows, total], left=(-1,))
    frozen = sum(spec.num_elements for spec in plan.specs if not spec.trainable)
    if frozen:
        patterns = " ".join(plan.config.optimizer.freeze)
        yield f"  frozen   {frozen:,} parameters, which are not trained (--freeze {patterns})"
    if plan.model.has_experts:
        share = plan.active_parameters / sum(spec.num_elements for spec in plan.specs)
        of_all = f"{share:.1%} of all, of the experts those that a token chooses; FLOPs count these"
        yield f"  active   {plan.active_parameters:,} parameters, {of_all}"


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
        if plan.model.predictions:
            names.append(f"{count_text(len(plan.model.predictions), 'module')} of multi-token prediction")
    return ", ".join(names) or "nothing"


def _memory(plan: RunPlan) -> Iterator[str]:
    """Yield one line for each pp_rank, equal neighbours as one, of many only the largest; small items are added up."""
    ranks = all_rank_memory(plan)
    chosen = sorted(ranks, key=lambda rank: -rank.total)[:MOST_PIPELINE_RANKS_SHOWN]
    shown = sorted(chosen, key=lambda rank: rank.pp_rank)
    columns = [
        item
        for item in ranks[0].items
        if item in ALWAYS_SHOWN or any(rank.items[item] > SMALL * rank.total for rank in ranks)
    ]

    rows = []
    # the difference of pp_rank and place is the same in a run of ranks
    for _, same in groupby(enumerate(shown), lambda at: (at[1].pp_rank - at[0], at[1].items, at[1].live_microbatches)):
        run = [rank for _, rank in same]
        sizes = [run[0].items[item] for item in columns]
        cells = map(bytes_text, (*sizes, run[0].total - sum(sizes), run[0].total))
        rows.append((range_text([rank.pp_rank for rank in run]), *cells, f"{run[0].live_microbatches:.3g}"))
    yield (
        "  memory   of a rank at the peak of a step; kernel workspace, allocator slack and CUDA context are not counted"
    )
    yield from text_table([("pp_rank", *columns, "other", "total", "live microbatches"), *rows], indent=11)
    most_nccl = max(ranks, key=lambda rank: rank.nccl_bytes)
    if most_nccl.nccl_bytes and uses_gpu(plan.config):
        held = f"{bytes_text(most_nccl.nccl_bytes)} on pp_rank {most_nccl.pp_rank}"
        yield f"           besides, NCCL's communicators hold up to {held} (a model, not measured)"
    largest = max(ranks, key=lambda rank: rank.total)
    if len(ranks) > 1:
        smallest = min(ranks, key=lambda rank: rank.total)
        others = f"; {len(ranks) - len(shown)} smaller ones are not shown" if len(shown) < len(ranks) else ""
        yield (
            f"           the most: pp_rank {largest.pp_rank}, {bytes_text(largest.total)}; "
            f"the least: pp_rank {smallest.pp_rank}, {bytes_text(smallest.total)}{others}"
        )
    kept = {}  # by stages: one, or the units of one
    num_units = plan.num_units or (1,) * plan.placement.num_stages
    for end, count in zip(accumulate(num_units), num_units, strict=True):
        if end - 1 in plan.placement.stages_of(largest.pp_rank):
            units = range(end - count, end)
            kept[units] = sum((Counter(stage_activation_bytes(plan, unit)) for unit in units), Counter[str]())
    of_what = "one microbatch" if plan.num_slices == 1 else f"the first of {plan.num_slices} slices of a microbatch"
    stages = max(kept, key=lambda stages: kept[stages].total())
    parts = sorted(kept[stages].items(), key=lambda part: -part[1])
    rest = sum(size for _, size in parts[MOST_PARTS_SHOWN:])
    parts = [*parts[:MOST_PARTS_SHOWN], *([("other", rest)] if rest else [])]
    words = ", ".join(f"{what} {bytes_text(size)}" for what, size in parts)
    name = f"stage{'s' if len(stages) > 1 else ''} {range_text(stages)}"
    yield f"  kept     {bytes_text(kept[stages].total())} by {name} for {of_what}: {words}"
    yield from _recompute(plan)
    yield from _sharding(plan)
    yield from _host(plan, max(ranks, key=lambda rank: sum(rank.host.values())))


def _sharding(plan: RunPlan) -> Iterator[str]:
    """Yield lines on what is gathered and reduced within a step, by the rank that moves the most."""
    policy = plan.sharding
    if policy is None or plan.num_optimizer_shards == 1:
        return
    rows = plan.schedule(plan.batch.num_microbatches).rows
    pp_rank, most = max(
        ((rank, row_bytes(plan, rank, row)) for rank, row in enumerate(rows)),
        key=lambda each: each[1].gathered + each[1].reduced,
    )
    held, t = plan.num_elements(plan.placement.stages_of(pp_rank)), plan.topology
    sent = sum(replica_bytes(plan, pp_rank, rows[pp_rank]).values())
    times = {"microbatch": "for each microbatch", "run": "for runs of microbatches", "step": "once a step"}
    moved = [("reduction", most.reductions, most.reduced * plan.shape.gradient, "gradients")]
    if policy.gathers:
        moved.insert(0, ("gather", most.gathers, most.gathered * plan.shape.element, "weights"))
    words = [f"{count_text(count, what)} of {bytes_text(size)} of {of_what}" for what, count, size, of_what in moved]
    yield (
        f"  sharding over {t.num_shards} ranks, {times[policy.granularity]}: pp_rank {pp_rank} has "
        f"{' and '.join(words)} a step, {most.gathered / held:.3g} and {most.reduced / held:.3g} times all it holds"
    )
    yield (
        f"           at most {bytes_text(most.peak.weights)} of gathered weights and {bytes_text(most.peak.gradients)} "
        f"of whole gradients at a time; it sends {bytes_text(sent)}"
    )


def _recompute(plan: RunPlan) -> Iterator[str]:
    """Yield a line with the layers of each kind of recompute that --recompute-memory-budget has chosen."""
    if plan.config.recompute.recompute_memory_budget is None:
        return
    own = [each for stage in range(plan.placement.num_stages) for each in plan.layer_recompute(stage)]
    numbers: dict[str, list[int]] = {}
    for number, recompute in enumerate(own):
        numbers.setdefault(recompute_text(recompute), []).append(number)
    words = "; ".join(f"layers {ranges_text(layers)}: {what}" for what, layers in numbers.items())
    yield f"  {recompute_text(plan.config.recompute)}: {words}"


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
    stages = plan.placement.stages_of(rank.pp_rank)
    moved = [slice_bytes(plan, stages, shape).moved for shape in plan.slice_shapes]
    row = plan.schedule(plan.batch.num_microbatches).rows[rank.pp_rank]
    step = sum(moved[(number or 0) % len(moved)][stage] for stage, op, number in row if op is Op.OFFLOAD)
    most = max(max(of_slice.values()) for of_slice in moved)
    rates = (("PCIe 4", PCIE_4), ("PCIe 5", PCIE_5))
    times = ", ".join(f"{most / (HOST_SHARE * rate * GIGA) * 1e3:.3g} ms over {name}" for name, rate in rates)
    yield (
        f"           {bytes_text(step)} travel each way in a step, at most {bytes_text(most)} under one "
        f"layer's computation: {times}"
    )


def _batch(plan: RunPlan) -> Iterator[str]:
    training, batch = plan.config.training, plan.batch
    steps = count_text(training.train_iters, "step") if training.train_iters else "no steps"
    changes = batch.steps[1:]
    ramp = f", from {batch.steps[0][1]} on in {len(changes)} steps over {changes[-1][0]:,} samples" if changes else ""
    tokens = batch.full * plan.config.model.seq_length
    yield (
        f"  batch    {count_text(batch.full, 'sequence')} = {count_text(batch.num_microbatches, 'microbatch')} "
        f"x {training.micro_batch_size} x dp {plan.topology.dp}{ramp}; {tokens:,} tokens a step, {steps}"
    )
    full, half = (flops_text(step_flops(plan.config.model, batch.full, causal)) for causal in (False, True))
    yield f"  FLOPs    {full} a step with full attention, {half} with causal attention counted half"


def _bubble(plan: RunPlan) -> Iterator[str]:
    if plan.topology.pp == 1:
        return
    bubble, span = expected_bubble(plan, plan.batch.num_microbatches), "from the first action of any rank to the last"
    if not plan.is_synchronous:
        span = "between two drains"
    yield (
        f"  bubble   {bubble.share:.1%} of the ranks' time expected idle, {span} (stages weighed by FLOPs, messages "
        "free)"
    )
