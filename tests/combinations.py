"""Combinations of features: each one is planned, counted by the dry run and trained beside one process.

tests/ledger.py has the combinations. What the plan accepts is examined in up to three ways:

- memory: the dry run of every kind of rank, with CUDA's kernels, is within MEMORY_TOLERANCE of the plan
- exact: three steps of the grid equal one process in fp64, as with --verify-grid, which uses torch's own kernels and
  leaves out what exists in low precision only
- rounded: features that this leaves out are trained as given; losses and gradient norms are within LOSS_TOLERANCE and
  NORM_TOLERANCE of one process that computes in the same dtypes
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.config.load import load_config
from megapipe.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.extras.dry_run.rank import count_rank, kinds_of_ranks, random_reader
from megapipe.extras.verify.oracle import random_batches, share_of
from megapipe.extras.verify.parity import verified_steps
from megapipe.extras.verify.report import found_text
from megapipe.extras.verify.shrink import shrink
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import step_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.train.stream import train_step
from tests.features import LIBRARY, ON_GPU, ROUNDED, Feature
from tests.harness import RankFailure, RankPool
from tests.ledger import BY_NAME, SIZES, SMALL_SIZES, Combination

MEMORY_TOLERANCE = 0.03
LOSS_TOLERANCE, NORM_TOLERANCE = 0.01, 0.05  # relative, of bf16 and fp8 in three steps
SECONDS = 250.0  # a run of the grid may take

VERDICTS = ("refused", "equal", "memory", "wrong", "crash")  # from the best to the worst


@dataclass
class Finding:
    """The result of examining a combination.

    verdict: 'refused' by the plan; 'equal'; other 'memory' than planned; 'wrong' results; 'crash'. compared: the ways
    of examining it that it passed. memory: the largest difference, (counted - planned) / planned. why: the refusal, or
    what failed.
    """

    verdict: str = "equal"
    compared: tuple[str, ...] = ()
    memory: float | None = None
    why: str = ""

    def fail(self, verdict: str, why: str) -> None:
        self.verdict, self.why = max(self.verdict, verdict, key=VERDICTS.index), f"{self.why}{why}\n"


def examine(combination: Combination, pools: Callable[[int], RankPool], trains: bool = True) -> Finding:
    """Plan a combination, count it and, if `trains`, compare its training with one process."""
    found = Finding()
    ways = {"memory": lambda: memory_trouble(combination, found)}
    if trains:
        ways["exact"] = lambda: exact_trouble(combination, pools)
        if any(BY_NAME[name].needs == ROUNDED for name in combination.features):
            ways["rounded"] = lambda: rounded_trouble(combination, pools)
    try:
        planned(combination, [*combination.arguments(SIZES), "--device", "cuda"])
    except ConfigError as error:
        found.verdict, found.why, ways = "refused", str(error), {}
    except Exception:
        found.fail("crash", f"plan: {traceback.format_exc()}")
        ways = {}
    for way, check in ways.items():
        try:
            trouble = check()
        except Exception as error:
            report = str(error) if isinstance(error, RankFailure) else traceback.format_exc()
            found.fail("crash", f"{way}: {report}")
            continue
        if trouble:
            found.fail("memory" if way == "memory" else "wrong", f"{way}: {trouble}")
        else:
            found.compared += (way,)
    return found


def planned(combination: Combination, arguments: Sequence[str]) -> RunPlan:
    """Plan a command line on the ranks of a combination. Raises ConfigError."""
    return resolve(load_config(arguments).config, combination.world_size)


def memory_trouble(combination: Combination, found: Finding) -> str:
    """Count one rank of each kind; return how the counts differ from the plan, '' within MEMORY_TOLERANCE."""
    plan = planned(combination, [*combination.arguments(SIZES, needs_library), "--device", "cuda"])
    gpu = dataclasses.replace(plan.config.gpu, cuda_graph_impl="none")  # graphs can only be recorded on a GPU
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, gpu=gpu))
    trouble = []
    for kind in kinds_of_ranks(plan):
        counted = count_rank(plan, kind.ranks[0], random_reader(plan))
        memory = step_memory(plan, kind.pp_ranks[0], plan.batch.num_microbatches)
        difference = counted.peak / memory.total - 1.0
        if found.memory is None or abs(difference) > abs(found.memory):
            found.memory = difference
        if abs(difference) > MEMORY_TOLERANCE:
            items = {name: size for name, size in memory.items.items() if size}
            trouble.append(f"rank {kind.ranks[0]}: {difference:+.1%}, planned {items}, counted {counted}")
    return "\n".join(trouble)


def needs_library(feature: Feature) -> bool:
    return feature.needs == LIBRARY


def needs_gpu(feature: Feature) -> bool:
    return feature.needs in (ON_GPU, LIBRARY)


def exact_trouble(combination: Combination, pools: Callable[[int], RankPool]) -> str:
    """Train in fp64 beside the oracle and return what differs."""
    arguments = [*combination.arguments(SIZES, needs_gpu), "--device", "cpu"]
    passes, text = pools(combination.world_size).run(exact_steps, combination, arguments)[0]
    return "" if passes else text


def exact_steps(rank: int, world_size: int, combination: Combination, arguments: list[str]) -> tuple[bool, str]:
    """Return, on each rank, whether three steps equal the oracle's, and the report."""
    small = shrink(planned(combination, arguments), "fp64", world_size)
    groups = build_process_groups(small.plan.topology, rank, "gloo", SECONDS)
    steps = verified_steps(small, groups, torch.device("cpu"))
    return all(step.passes for step in steps), found_text(small, steps)


def rounded_trouble(combination: Combination, pools: Callable[[int], RankPool]) -> str:
    """Train as given, and in one process without grid; return how far they are apart, '' within the bounds."""
    arguments = [*combination.arguments(SMALL_SIZES, needs_gpu), "--device", "cpu"]
    grid = pools(combination.world_size).run(rounded_steps, combination, arguments)
    plain = pools(1).run(rounded_steps, combination, arguments)[0]
    if any(each != grid[0] for each in grid):
        return f"ranks report other losses: {grid}"
    if len(plain) != len(grid[0]):
        return f"{len(grid[0])} steps on the grid, {len(plain)} in one process"
    for (loss, norm), (plain_loss, plain_norm) in zip(grid[0], plain, strict=True):
        is_close = abs(loss - plain_loss) <= LOSS_TOLERANCE * plain_loss
        if not is_close or not abs(norm - plain_norm) <= NORM_TOLERANCE * plain_norm:
            return f"losses and norms on the grid {grid[0]}, in one process {plain}"
    return ""


def rounded_steps(
    rank: int, world_size: int, combination: Combination, arguments: list[str]
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of three steps."""
    config = load_config(arguments).config
    plan = resolve(config if world_size > 1 else in_one_process(config), world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", SECONDS)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"))
    steps = 3
    whole = resolve(in_one_process(config), 1)  # the same samples on each grid
    batches = random_batches(whole.config, 1, [whole.batch.num_microbatches] * steps, plan.config.training.seed)
    taken: list[tuple[float, float]] = []
    # an update of Muon is large whatever the gradient
    step, rates = train_step(runtime), Rates(3e-3 if config.optimizer.optimizer == "muon" else 1e-2, 0.1)
    for number, batch in enumerate(batches):
        result = step.run(share_of(runtime, batch, number), rates)
        taken.append((result.loss, result.update.grad_norm))
    runtime.stores.finish_weights()
    return taken


def in_one_process(config: Config) -> Config:
    """Return the configuration without a grid, recomputation or offload."""
    optimizer = dataclasses.replace(config.optimizer, optimizer_cpu_offload=False)
    plain = {"parallel": ParallelConfig(), "recompute": RecomputeConfig(), "offload": OffloadConfig()}
    return dataclasses.replace(config, optimizer=optimizer, **plain)  # type: ignore[arg-type]
