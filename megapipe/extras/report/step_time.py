"""The predicted time of a step of a plan as text: its parts, gathers and reductions, and the all-to-alls of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megapipe.formatting import text_table
from megapipe.plan.expert_overlap import MOST_FILLS, expert_model, hidden_seconds
from megapipe.plan.hardware import TERA, Hardware
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, predict_step
from megapipe.schedule.action import Op
from megapipe.schedule.experts import ExpertMeasures, measure_experts
from megapipe.schedule.families import SCHEDULES, build_schedule

SMALL_PART = 0.0005  # of a step
SENT = {Op.UNSHARD: "gathers take", Op.REDUCE_GRAD: "reductions"}
# what the terms of a step are computed from, by part of StepTime; docs/time_model.md has the sources
TERMS = {
    "gemm": "depth and waves of tiles; at most {gemm_highest[0]} of the peak, {gemm_highest[1]} in fp8",
    "attention": "FLOPs and rate of the kernel by keys and head size",
    "pointwise": "bytes moved, at {pointwise_share} of the memory's rate",
    "tp": "bytes and hops of rings over tp that no GEMM hides, times {stack.message_times:g}",
    "cp": "bytes of keys and values that attention does not hide",
    "ep": "bytes of rows to experts and back",
    "overhead": "{stack.overhead} of the kernels: the stack's mean over published runs",
    "host": "waits for copies to the host, or until it has launched the kernels of layers with experts",
    "bubble": "the schedule, simulated with these seconds and its messages",
    "reduce": "bytes and hops of rings over replicas that the last backward does not hide",
    "gather": "bytes and hops of rings over replicas that forwards do not hide",
    "optimizer": "bytes of the update, and its products",
}


def step_text(plan: RunPlan, hardware: Hardware) -> str:
    """Return the predicted time of a step by parts, and of the all-to-alls of experts, as text for a terminal."""
    time = predict_step(plan, hardware)
    shares = {part: seconds / time.seconds for part, seconds in time.parts.items()}
    words = ", ".join(f"{part} {share:.1%}" for part, share in shares.items() if share > SMALL_PART)
    rate = time.tokens_per_second / time.world_size
    lines = [
        f"  step     {time.seconds:.3g} s predicted on {hardware.name}, {rate:,.0f} tokens/s a rank, "
        f"{time.flops_per_second / TERA:.0f} TFLOP/s, MFU {time.mfu:.1%} (causal attention counted half)",
        f"           on the rank with the most computation: {words}",
    ]
    if plan.sharding is not None and plan.num_optimizer_shards > 1:
        lines.append(_collective_times(plan, time))
    if plan.model.has_experts and plan.topology.ep * plan.topology.etp > 1:
        lines += _exchange_times(plan, hardware, time)
    return "\n".join(lines)


def terms_text(plan: RunPlan, hardware: Hardware) -> str:
    """Return the terms of a predicted step as a table: seconds, share, and what each is computed from."""
    time = predict_step(plan, hardware)
    rows = (
        (part, f"{seconds:.4g}", f"{seconds / time.seconds:.1%}", TERMS[part].format(**vars(hardware)))
        for part, seconds in time.parts.items()
    )
    return "\n".join(text_table([("term", "seconds", "share", "computed from"), *rows], left=(0, 3), indent=4))


def _collective_times(plan: RunPlan, time: StepTime) -> str:
    """Return a line with the time of gathers and reductions on the network of the busiest rank, and what hides it."""
    seconds = [
        Counter[Op](
            {op: sum(e - s for (_, o, _), s, e in zip(row, starts, ends, strict=True) if o is op) for op in SENT}
        )
        for row, starts, ends in zip(time.timeline.schedule.rows, time.timeline.starts, time.timeline.ends, strict=True)
    ]
    busiest = max(seconds, key=lambda of_rank: of_rank.total())
    total, exposed = busiest.total(), time.parts["gather"] + time.parts["reduce"]
    words = " and ".join(f"{SENT[op]} {busiest[op]:.3g} s" for op in SENT if busiest[op])
    hidden = max(0.0, 1.0 - exposed / total) if total else 1.0
    return (
        f"           {words} on the network of the busiest rank, {total / time.seconds:.0%} of the step; computation "
        f"hides {hidden:.0%} of it (waits for gathers {time.parts['gather']:.3g} s, reductions at the end "
        f"{time.parts['reduce']:.3g} s)"
    )


def _exchange_times(plan: RunPlan, hardware: Hardware, time: StepTime) -> Iterator[str]:
    """Yield lines with the all-to-alls of a layer and microbatch, their share of a step, and what overlap hides."""
    dispatch = expert_model(plan, hardware).dispatch
    whole, share = 2 * sum(dispatch), time.parts["ep"] / time.seconds
    yield (
        f"  ep       {whole * 1e3:.3g} ms a layer and microbatch to experts and back "
        f"({2 * dispatch[0] * 1e3:.3g} forward, {2 * dispatch[1] * 1e3:.3g} backward), {share:.1%} of the step, while "
        "nothing else is computed"
    )
    if plan.parts is not None:
        hidden = hidden_seconds(plan, hardware)
        share = hidden / (time.seconds + hidden)
        yield f"           --overlap-moe-expert-parallel-comm takes {hidden:.3g} s off the step ({share:.1%})"
        return
    measures = measure_overlap(plan, hardware)
    if measures is not None:
        gain = 1.0 - measures.step_seconds / measures.serial_seconds
        yield (
            f"           rows of parts would hide {measures.hidden_share:.0%} of the all-to-alls under computation: "
            f"{gain:.1%} less time for the schedule (docs/experts.md)"
        )


def measure_overlap(plan: RunPlan, hardware: Hardware) -> ExpertMeasures | None:
    """Simulate the plan's schedule with all-to-alls that block the computation, and with rows in which they overlap.

    None where there is nothing to overlap, or no such rows: one rank of ep, a schedule that is searched for or not
    synchronous, a stage with neither layers nor head.
    """
    family, t, partition = SCHEDULES[plan.schedule_name], plan.topology, plan.partition
    is_empty = any(not stage.num_layers and not stage.has_head for stage in partition.stages)
    if t.ep == 1 or family.is_automatic or not plan.is_synchronous or is_empty or not plan.model.has_experts:
        return None
    count = plan.batch.num_microbatches
    few = min(count, MOST_FILLS * t.pp + count % t.pp)
    group = plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    schedule = build_schedule(plan.schedule_name, t.pp, plan.num_chunks, few, group)
    return measure_experts(schedule, expert_model(plan, hardware))[0]
