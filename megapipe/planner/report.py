"""The plan as text: grid with node placement, stages with their parameters and the sum, batch, bubble, memory, FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megapipe.planner.bubble import predicted_timeline
from megapipe.planner.flops import step_flops
from megapipe.planner.run_plan import RunPlan

MOST_RANKS_SHOWN = 64


def plan_text(plan: RunPlan) -> str:
    """Everything about the run that is decided before it starts, for a terminal."""
    return "\n".join([*_headline(plan), *_grid(plan), *_stages(plan), *_batch(plan), *_bubble(plan)])


def _headline(plan: RunPlan) -> Iterator[str]:
    t, model = plan.topology, plan.config.model
    chunks = f" x {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    extras = [
        name
        for name, is_on in (
            ("sequence parallel", plan.config.parallel.sequence_parallel and t.tp > 1),
            ("distributed optimizer", plan.config.parallel.use_distributed_optimizer),
        )
        if is_on
    ]
    yield f"plan: {t.world_size} ranks = tp {t.tp} x pp {t.pp}{chunks} x dp {t.dp}, schedule {plan.schedule_name}" + "".join(
        f", {e}" for e in extras
    )
    groups = f", {model.num_query_groups} key/value heads" if model.num_query_groups != model.num_attention_heads else ""
    yield (
        f"  model    {model.num_layers} layers, hidden {model.hidden_size}, ffn {model.ffn_hidden_size}, "
        f"{model.num_attention_heads} heads{groups}, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size:,} (padded {model.padded_vocab_size:,}), {plan.config.precision.dtype}"
    )


def _grid(plan: RunPlan) -> Iterator[str]:
    """One line a pipeline rank: the global ranks of its tp groups, by dp replica."""
    t = plan.topology
    if t.num_nodes > 1:
        crossing = [name for name in ("tp", "pp", "dp") if t.size(name) > 1 and t.crosses_nodes(name)]
        yield f"  nodes    {t.num_nodes} of {t.ranks_per_node} ranks; groups that cross nodes: {', '.join(crossing) or 'none'}"
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
    counts = [sum(spec.num_elements for spec in specs) for specs in plan.stage_specs]
    yield "  stage    pp_rank  parameters  holds"
    for stage, (layers, count) in enumerate(zip(plan.partition.stages, counts, strict=True)):
        names = ["embedding"] if layers.has_embedding else []
        if layers.num_layers:
            last = layers.last_layer_exclusive - 1
            names.append(f"layer {last}" if layers.num_layers == 1 else f"layers {layers.first_layer} to {last}")
        if layers.has_head:
            names.append("head")
        yield f"  {stage:>5}    {plan.placement.rank_of_stage[stage]:>7}  {count:>10,}  {', '.join(names) or 'nothing'}"
    copies = sum(counts) - sum(spec.num_elements for spec in plan.specs)
    tied = f", less {copies:,} of the tied embedding's copy" if copies else ""
    yield f"    sum             {sum(counts):>10,}{tied} = {sum(counts) - copies:,} parameters, every element once"


def _batch(plan: RunPlan) -> Iterator[str]:
    training, batch = plan.config.training, plan.batch
    steps = f"{training.train_iters:,} steps" if training.train_iters is not None else "no steps"
    ramp = f", ramped up from {batch.start} over {batch.ramp_samples:,} samples" if batch.increment else ""
    tokens = batch.full * plan.config.model.seq_length
    yield (
        f"  batch    {batch.full} sequences = {batch.full // batch.samples_per_microbatch} microbatches x {training.micro_batch_size} x dp "
        f"{plan.topology.dp}{ramp}; {tokens:,} tokens a step, {steps}"
    )
    flops = [step_flops(plan.config.model, batch.full, causal) for causal in (False, True)]
    yield f"  FLOPs    {_tera(flops[0])} a step with full attention, {_tera(flops[1])} with causal attention counted half"


def _bubble(plan: RunPlan) -> Iterator[str]:
    if plan.topology.pp == 1:
        return
    timeline = predicted_timeline(plan, plan.batch.full // plan.batch.samples_per_microbatch)
    yield (
        f"  bubble   {timeline.barrier_bubble.share:.1%} of the ranks' time expected idle, from the first action of any rank to the last "
        "(stages weighed by FLOPs, messages free)"
    )


def _tera(flops: float) -> str:
    """2.1 TFLOP, with a prefix that fits."""
    exponent = min(max(int(math.log10(max(flops, 1.0)) // 3), 3), 6)
    return f"{flops / 1000.0**exponent:.3g} {'GTPE'[exponent - 3]}FLOP"
