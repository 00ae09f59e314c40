"""The request `--dry-run`: from the plan to the printed report, in one process, whatever the size of the world."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megapipe.assembly.datasets import DATA_FILES, build_data, missing_files
from megapipe.comm.bootstrap import choose_backend
from megapipe.comm.groups import Traffic
from megapipe.config.config import ResolvedConfig
from megapipe.config.rules.training import TOKENIZER_FILES
from megapipe.data.batch import Batch
from megapipe.errors import ConfigError
from megapipe.extras.dry_run.rank import STATE, RankCount, RankKind, audit_grid, count_rank, kinds_of_ranks
from megapipe.formatting import bytes_text, ranges_text, text_table
from megapipe.plan.memory import RankMemory, all_rank_memory, step_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op, stage_action
from megapipe.train.state import Schedules

NOT_COUNTED = "workspace inside kernels, allocator slack, NCCL, the CUDA context"


def dry_run(plan: RunPlan, rank: int | None = None) -> int:
    """Audit every rank, count `rank` or one rank of each kind, and print the counts and the plan. Return 0.

    Raises ConfigError or DataError for everything that would also end a training at its start, but for token and
    tokenizer files that do not exist: made-up tokens are counted in their place.
    """
    asked, world_size = plan, plan.topology.world_size
    if plan.config.gpu.cuda_graph_impl != "none":  # CUDA graphs can only be recorded on a GPU
        plan = replace(plan, config=replace(plan.config, gpu=replace(plan.config.gpu, cuda_graph_impl="none")))
    device = "cuda" if plan.shape.is_cuda else "cpu"
    if device == "cpu":
        choose_backend(plan.config.parallel.distributed_backend, "cpu", 0)  # raises for a backend without CPU support
    if rank is not None and rank >= world_size:
        raise ConfigError(f"--rank {rank}: a world of {world_size} has the ranks 0 to {world_size - 1}")
    if not plan.config.training.skip_train:
        Schedules.of(plan.config)  # raises for schedules that cannot be built
    started = time.perf_counter()
    num_groups = audit_grid(plan)
    kinds = kinds_of_ranks(plan)
    seconds = time.perf_counter() - started
    same = "all do the same" if len(kinds) == 1 else f"{len(kinds)} kinds that differ in shapes or in their actions"
    print(
        f"dry run: {world_size:,} ranks, {num_groups:,} process groups and {plan.placement.num_stages} stages audited "
        f"in {seconds:.1f} s; {same}",
        flush=True,
    )
    missing = () if plan.config.data.sft else tuple(missing_files(plan.config.data))
    data = build_data(replace(plan, config=without_files(plan.config)) if missing else plan)
    try:
        loader = data.train or data.valid or data.test
        if loader is None:
            raise ConfigError("there is no data for a step: raise --train-iters, or --eval-iters with --skip-train")
        dp, micro = plan.topology.dp, plan.config.training.micro_batch_size

        def read(dp_rank: int, k: int) -> Batch:
            return loader.microbatch(0, k, dp_rank, dp, micro)

        chosen = [(kind, kind.ranks[0]) for kind in kinds]
        if rank is not None:
            chosen = [(kind, rank) for kind in kinds if rank in kind.ranks]
        counts = [(kind, count_rank(plan, counted, read, device)) for kind, counted in chosen]
    finally:
        data.close()
    print("\n".join([*counted_text(plan, counts, device), *_not_checked(asked, missing)]), flush=True)
    return 0


def without_files(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with made-up tokens and with NullTokenizer in place of all files."""
    changes: dict[str, Any] = dict.fromkeys((*TOKENIZER_FILES, *DATA_FILES))
    changes |= {"mock_data": True, "tokenizer_type": "NullTokenizer"}
    return replace(config, data=replace(config.data, **changes))


def counted_text(plan: RunPlan, counts: Sequence[tuple[RankKind, RankCount]], device: str) -> Iterator[str]:
    """Yield a line for every counted rank, then the items and messages of the fullest one."""
    kernels = "CUDA" if device == "cuda" else "CPU"
    yield f"  counted  storages alive at the peak of a step, as {kernels} kernels keep them; not counted: {NOT_COUNTED}"
    rows = [("pp_rank", "ranks", "counted on", "planned", "counted", "difference", "peak in", "seconds")]
    for kind, count in counts:
        planned, where = _planned(plan, count).total, count.peak_action or "optimizer"
        sizes = bytes_text(planned), bytes_text(count.peak), difference_text(planned, count.peak)
        seconds, rank = f"{count.seconds:.1f}", f"rank {count.global_rank}"
        rows.append((ranges_text(kind.pp_ranks), f"{len(kind.ranks):,}", rank, *sizes, where, seconds))
    yield from text_table(rows, indent=11)
    kind, fullest = max(counts, key=lambda pair: pair[1].peak)
    memory, full = _planned(plan, fullest), plan.batch.num_microbatches
    enough = f"; {fullest.num_run} of {full} microbatches run, enough for every memory state"
    run = "" if fullest.num_run == full else enough
    yield f"  memory   of rank {fullest.global_rank}, which represents {len(kind.ranks):,}{run}"
    state = {item: memory.items.get(item, 0) for item in STATE}
    items = [(item, state[item], fullest.items[item]) for item in STATE if state[item] or fullest.items[item]]
    step = memory.total - sum(state.values())
    inside = memory.items["temporaries"] + memory.items["recompute"]
    if fullest.peak_action and stage_action(fullest.peak_action).op in (Op.B, Op.I):
        # the plan's items are those at the start of a backward
        items.append(("at the start of the peak's action", step - inside, fullest.before_action))
        items.append((f"allocated in {fullest.peak_action}", inside, fullest.items["step"] - fullest.before_action))
    else:
        items.append((f"in {fullest.peak_action or 'the optimizer'}", step, fullest.items["step"]))
    items.append(("total", memory.total, fullest.peak))
    cells = [(name, bytes_text(a), bytes_text(b), difference_text(a, b)) for name, a, b in items]
    yield from text_table([("item", "planned", "counted", "difference"), *cells], indent=11)
    if fullest.traffic is not None and fullest.traffic.counts:
        yield from _messages(fullest.traffic)


def difference_text(planned: int, counted: int) -> str:
    """Return how much more was counted than planned, such as '+1.2 %'."""
    return "" if not planned else f"{(counted - planned) / planned:+.1%}".replace("%", " %")


def _planned(plan: RunPlan, count: RankCount) -> RankMemory:
    return step_memory(plan, plan.topology.coordinates(count.global_rank).pp_rank, plan.batch.num_microbatches)


def _messages(traffic: Traffic) -> Iterator[str]:
    sizes = "bytes of a collective's whole tensor, or of each message"
    yield f"  sent     in a step, over groups of more than one rank; {sizes}"
    rows = [
        (group, operation.replace("_", "-"), f"{count:,}", bytes_text(traffic.bytes[group, operation]))
        for (group, operation), count in sorted(traffic.counts.items(), key=lambda entry: -traffic.bytes[entry[0]])
    ]
    yield from text_table([("group", "operation", "times", "bytes"), *rows], indent=11)


def _not_checked(plan: RunPlan, missing: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield what a start of training does and a dry run does not. missing: (flag, path) of files that do not exist."""
    if missing:
        files = ", ".join(f"{flag} {path}" for flag, path in missing)
        yield f"  not read: {files} (no such file here): counted with made-up tokens; training needs them"
    checkpoint = plan.config.checkpoint
    flags = [flag for flag, folder in (("--load", checkpoint.load), ("--save", checkpoint.save)) if folder is not None]
    if flags:
        yield f"  not checked: the folder of {' and of '.join(flags)}; devices and network"
    if plan.config.gpu.cuda_graph_impl != "none":
        graphs = max(memory.items["graphs"] for memory in all_rank_memory(plan))
        yield f"  not counted: the pools of CUDA graphs; planned {bytes_text(graphs)} more on the rank with the most"
