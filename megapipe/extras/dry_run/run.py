"""The request `--dry-run`: from the plan to the exit code, in one process, whatever the size of the world."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from megapipe.assembly.datasets import RunData, build_data
from megapipe.comm.bootstrap import choose_backend
from megapipe.data.batch import Batch
from megapipe.errors import ConfigError
from megapipe.extras.dry_run.grid import Kind, audit_grid, kinds_of_ranks
from megapipe.extras.dry_run.rank import RankCount, count_rank
from megapipe.extras.dry_run.report import audited_line, counted_text, not_looked_at
from megapipe.plan.run_plan import RunPlan
from megapipe.train.schedules import Schedules


def dry_run(plan: RunPlan, rank: int | None = None) -> int:
    """Audit every rank, count `rank` or one rank of each kind, and print what was found beside the plan. Returns 0.

    Raises ConfigError, DataError for what would also end a training at its start.
    """
    asked, plan = plan, without_graphs(plan)
    device = device_of(plan)
    if rank is not None and rank >= plan.topology.world_size:
        raise ConfigError(
            f"--rank {rank}: a world of {plan.topology.world_size} has the ranks 0 to {plan.topology.world_size - 1}"
        )
    if not plan.config.training.skip_train:
        Schedules.of(plan.config)
    started = time.perf_counter()
    num_groups = audit_grid(plan)
    kinds = kinds_of_ranks(plan)
    print(audited_line(plan, num_groups, kinds, time.perf_counter() - started), flush=True)
    data = build_data(plan)
    try:
        counts = _counted(
            plan, kinds if rank is None else [kind for kind in kinds if rank in kind.ranks], rank, data, device
        )
    finally:
        data.close()
    print("\n".join([*counted_text(plan, counts, device), *not_looked_at(asked)]), flush=True)
    return 0


def without_graphs(plan: RunPlan) -> RunPlan:
    """The plan without CUDA graphs, which need a card to be recorded."""
    if plan.config.gpu.cuda_graph_impl == "none":
        return plan
    gpu = replace(plan.config.gpu, cuda_graph_impl="none")
    return replace(plan, config=replace(plan.config, gpu=gpu))


def device_of(plan: RunPlan) -> str:
    """Whose kernels are counted: 'cpu' with --device cpu, else 'cuda'. Raises ConfigError for a backend that CPUs do not have."""
    if plan.shape.is_cuda:
        return "cuda"
    choose_backend(plan.config.parallel.distributed_backend, "cpu", 0)
    return "cpu"


def _counted(
    plan: RunPlan, kinds: Sequence[Kind], rank: int | None, data: RunData, device: str
) -> list[tuple[Kind, RankCount]]:
    loader = data.train or data.valid or data.test
    if loader is None:
        raise ConfigError(
            "there is no data to take a step with: raise --train-iters, or --eval-iters with --skip-train"
        )
    dp, micro = plan.topology.dp, plan.config.training.micro_batch_size

    def read(dp_rank: int, k: int) -> Batch:
        return loader.microbatch(0, k, dp_rank, dp, micro)

    return [(kind, count_rank(plan, kind.ranks[0] if rank is None else rank, read, device)) for kind in kinds]
