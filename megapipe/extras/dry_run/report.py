"""What the dry run found, as text: planned beside counted, and what travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.comm.fake_backend import Ledger
from megapipe.extras.dry_run.grid import Kind
from megapipe.extras.dry_run.rank import STATE, RankCount
from megapipe.formatting import bytes_text, text_table
from megapipe.plan.memory import RankMemory, all_rank_memory, rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op, parse_action

Counted = Sequence[tuple[Kind, RankCount]]


def audited_line(plan: RunPlan, num_groups: int, kinds: Sequence[Kind], seconds: float) -> str:
    """All ranks, in plain Python."""
    ways = (
        "one kind: all do the same"
        if len(kinds) == 1
        else f"{len(kinds)} kinds that differ in shapes or in what they do"
    )
    return (
        f"dry run: {plan.topology.world_size:,} ranks, {num_groups:,} process groups and {plan.placement.num_stages} stages audited "
        f"in {seconds:.1f} s; {ways}"
    )


def counted_text(plan: RunPlan, counts: Counted, device: str) -> Iterator[str]:
    """Every counted rank in a line, then the fullest item by item with its messages."""
    kernels = "CUDA" if device == "cuda" else "a CPU"
    yield f"  counted  storages that live at the peak of a step, as {kernels}'s kernels keep them; not counted: {NOT_COUNTED}"
    rows = [_row(plan, kind, count) for kind, count in counts]
    yield from text_table(
        [("pp_rank", "ranks", "counted on", "planned", "counted", "difference", "peak in", "seconds"), *rows], indent=11
    )
    kind, fullest = max(counts, key=lambda pair: pair[1].peak)
    yield from _items(plan, kind, fullest)
    if fullest.ledger is not None and fullest.ledger.counts:
        yield from _sent(fullest.ledger)


NOT_COUNTED = "workspace inside kernels, allocator slack, NCCL, the CUDA context"


def not_looked_at(plan: RunPlan) -> Iterator[str]:
    """What a start does that this does not."""
    checkpoint = plan.config.checkpoint
    flags = [flag for flag, folder in (("--load", checkpoint.load), ("--save", checkpoint.save)) if folder is not None]
    if flags:
        yield f"  not looked at: the folder of {' and of '.join(flags)}; devices and network"
    if plan.config.gpu.cuda_graph_impl != "none":
        graphs = max(memory.items["graphs"] for memory in all_rank_memory(plan))
        yield f"  not counted: the pools of CUDA graphs; planned {bytes_text(graphs)} more on the rank that has the most"


def difference_text(planned: int, counted: int) -> str:
    """+1.2 %: how much more was counted than planned."""
    return "" if not planned else f"{(counted - planned) / planned:+.1%}".replace("%", " %")


def planned_step(memory: RankMemory) -> int:
    """All but the state that lies there between steps too."""
    return memory.total - sum(memory.items[item] for item in STATE)


def _row(plan: RunPlan, kind: Kind, count: RankCount) -> tuple[str, ...]:
    planned = rank_memory(plan, plan.topology.coordinates(count.global_rank).pp_rank).total
    where, rank = count.peak_action or "optimizer", f"rank {count.global_rank}"
    return (
        _ranges(kind.pp_ranks),
        f"{kind.count:,}",
        rank,
        bytes_text(planned),
        bytes_text(count.peak),
        difference_text(planned, count.peak),
        where,
        f"{count.seconds:.1f}",
    )


def _items(plan: RunPlan, kind: Kind, count: RankCount) -> Iterator[str]:
    memory = rank_memory(plan, plan.topology.coordinates(count.global_rank).pp_rank)
    full = plan.batch.full // plan.batch.samples_per_microbatch
    run = (
        ""
        if count.num_run == full
        else f"; {count.num_run} of {full} microbatches run, which show every situation of the row"
    )
    yield f"  memory   of rank {count.global_rank}, which stands for {kind.count:,}{run}"
    rows = [(item, memory.items[item], count.items[item]) for item in STATE if memory.items[item] or count.items[item]]
    inside = memory.items["temporaries"] + memory.items["recompute"]
    if count.peak_action and parse_action(count.peak_action).op in (
        Op.B,
        Op.I,
    ):  # the plan's items are those at the start of a backward
        rows.append(("when the peak's action begins", planned_step(memory) - inside, count.before_action))
        rows.append((f"made in {count.peak_action}", inside, count.items["step"] - count.before_action))
    else:
        rows.append((f"in {count.peak_action or 'the optimizer'}", planned_step(memory), count.items["step"]))
    rows.append(("total", memory.total, count.peak))
    cells = [
        (name, bytes_text(planned), bytes_text(counted), difference_text(planned, counted))
        for name, planned, counted in rows
    ]
    yield from text_table([("item", "planned", "counted", "difference"), *cells], indent=11)


def _sent(ledger: Ledger) -> Iterator[str]:
    yield "  sent     in a step, over groups of more than one rank; bytes of the whole tensor of a collective, of each message"
    rows = [
        (group, operation.replace("_", "-"), f"{count:,}", bytes_text(ledger.bytes[group, operation]))
        for (group, operation), count in sorted(ledger.counts.items(), key=lambda entry: -ledger.bytes[entry[0]])
    ]
    yield from text_table([("group", "operation", "times", "bytes"), *rows], indent=11)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 2 to 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
