"""The comparison of one grid with the plain reference: the job of each rank, and the differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np
import torch

from megapipe.comm.groups import build_process_groups
from megapipe.data.batch import Batch
from megapipe.extras.verify.compare import FP64, Difference, ParityStep
from megapipe.extras.verify.oracle import drawn_slices, random_batches
from megapipe.extras.verify.parity import compare_with_oracle
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.harness import RankFailure, RankPool
from tests.parity.configuration import configuration
from tests.parity.options import Grid, world_of

STEPS = 3


def assert_equals_reference(
    pool: RankPool, grid: Grid, without_loss: tuple[int, ...] = (), steps: int = STEPS, drains: tuple[int, ...] = ()
) -> None:
    """Train a grid and the reference. Raises AssertionError with all differences and the grid.

    without_loss: microbatches of each global batch in which no token counts. drains: see `compare_with_oracle`.
    """
    print(grid)
    try:
        wrong = pool.run(differences, grid, without_loss, steps, drains)[0]
    except RankFailure as failure:
        wrong = [failure.report]
    if wrong:
        raise AssertionError(
            f"{len(wrong)} differences from the reference. The grid:\n\n    {grid}\n\n" + "\n".join(wrong)
        )


def differences(
    rank: int, world_size: int, grid: Grid, without_loss: tuple[int, ...], steps: int, drains: tuple[int, ...] = ()
) -> list[str]:
    """Return a line for each loss, gradient norm, gradient and weight that differs; run by all ranks, the same on
    each."""
    assert world_size == world_of(grid)
    plan = resolve(configuration(grid), world_size)
    rates = [
        Rates(lr, grid["weight_decay"] * decay, grid["decoupled_lr"])
        for lr, decay in islice(cycle(((0.02, 1), (0.01, 2), (0.015, 1))), steps)
    ]
    return plan_differences(rank, plan, rates, without_loss, drains=drains)


def plan_differences(
    rank: int,
    plan: RunPlan,
    rates: Sequence[Rates],
    without_loss: tuple[int, ...] = (),
    change: Callable[[Batch], Batch] = lambda batch: batch,
    drains: tuple[int, ...] = (),
) -> list[str]:
    """Return the differences of one plan's run, a step for each of the rates; called by all ranks.

    change: of each random batch.
    """
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    batches = random_batches(plan.config, plan.topology.dp, microbatch_counts(plan, len(rates)), seed=1)
    batches = [
        [_masked(part) if number in without_loss else change(part) for number, part in enumerate(batch)]
        for batch in batches
    ]
    slices = drawn_slices(plan.config.training.seed, torch.float64)
    compared = compare_with_oracle(plan, groups, torch.device("cpu"), slices, batches, rates, FP64, drains)
    return [line for step in compared for line in _lines(step)]


def _masked(batch: Batch) -> Batch:
    return dataclasses.replace(batch, loss_mask=np.zeros(batch.tokens.shape, dtype=np.float32))


def microbatch_counts(plan: RunPlan, steps: int = STEPS) -> list[int]:
    """Return the number of microbatches of a dp rank in each step."""
    counts: list[int] = []
    consumed = 0
    for _ in range(steps):
        counts.append(plan.batch.num_microbatches_at(consumed))
        consumed += plan.batch.size_at(consumed)
    return counts


def _lines(step: ParityStep) -> list[str]:
    lines = []
    for rank in step.ranks:
        where = f"step {step.step}, rank {rank.global_rank}"
        if not abs(rank.loss - step.loss) <= FP64.loss * abs(step.loss):
            lines.append(f"{where}: loss {rank.loss!r}, reference {step.loss!r}")
        for number, (loss, plain) in enumerate(zip(rank.ahead, step.ahead, strict=True)):
            if not abs(loss - plain) <= FP64.loss * abs(plain):
                lines.append(f"{where}: loss of module {number} {loss!r}, reference {plain!r}")
        if not abs(rank.grad_norm - step.grad_norm) <= FP64.grad_norm * abs(step.grad_norm):
            lines.append(f"{where}: gradient norm {rank.grad_norm!r}, reference {step.grad_norm!r}")
        for kind, found in (("gradient", rank.gradients), ("weight", rank.weights)):
            if found.first:
                lines.append(f"{where}: {kind} of {_line(found.first)}; all: {found.wrong}")
    return lines


def _line(difference: Difference) -> str:
    return (
        f"{difference.name} (stage {difference.stage}) differs by {difference.difference:.3g} of "
        f"{difference.scale:.3g}: at "
        f"{difference.index} {difference.part} {difference.grid!r}, reference {difference.plain!r}; "
        f"{difference.num_wrong} of "
        f"{difference.num_held} elements"
    )
