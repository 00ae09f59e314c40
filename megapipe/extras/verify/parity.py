"""The grid's training step beside the oracle's: every rank compares what it holds, and all learn what all found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.assembly.inference_runtime import DrawSlice
from megapipe.assembly.loss import PendingLoss
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import broadcast, gather_objects
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.extras.verify.batches import GlobalBatch, share_of
from megapipe.extras.verify.compare import (
    Boxes,
    Difference,
    HeldPiece,
    boxes_of,
    compare,
    gradient_pieces,
    uncovered,
    weight_pieces,
)
from megapipe.extras.verify.oracle import OracleStep, oracle_of
from megapipe.extras.verify.tolerance import Tolerance
from megapipe.extras.verify.weights import whole_weights
from megapipe.model.microbatch import Microbatch
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.train.asynchronous_step import AsynchronousStep
from megapipe.train.step import NO_TIMERS, Rates, StepResult, TrainStep
from megapipe.train.timers import Timers

MOST_REPEATS = 60  # of a step whose gradients overflowed while the loss scale is searched


@dataclass(frozen=True)
class RankStep:
    """What one rank found in one step; small enough to be sent to all.

    worst_*: the tensor with the largest difference / bound. first_*: the first in model order that is out of bounds. wrong_*: names of all
    that are.
    """

    global_rank: int
    loss: float
    grad_norm: float
    worst_gradient: Difference | None  # None: this rank's shards are all padding
    worst_weight: Difference | None
    first_gradient: Difference | None
    first_weight: Difference | None
    wrong_gradients: tuple[str, ...]
    wrong_weights: tuple[str, ...]

    @classmethod
    def of(
        cls, global_rank: int, result: StepResult, gradients: Sequence[Difference], weights: Sequence[Difference]
    ) -> RankStep:
        wrong = [[difference for difference in found if not difference.passes] for found in (gradients, weights)]
        return cls(
            global_rank,
            result.loss,
            result.update.grad_norm,
            worst_gradient=worst(gradients),
            worst_weight=worst(weights),
            first_gradient=wrong[0][0] if wrong[0] else None,
            first_weight=wrong[1][0] if wrong[1] else None,
            wrong_gradients=tuple(difference.name for difference in wrong[0]),
            wrong_weights=tuple(difference.name for difference in wrong[1]),
        )


@dataclass(frozen=True)
class ParityStep:
    """One step on all ranks, in order of global ranks. num_repeats: attempts that overflowed while the loss scale was searched."""

    step: int
    num_microbatches: int
    loss: float  # the oracle's
    grad_norm: float  # the oracle's
    ranks: tuple[RankStep, ...]
    tolerance: Tolerance
    num_repeats: int = 0

    @property
    def loss_passes(self) -> bool:
        return all(_close(rank.loss, self.loss, self.tolerance.loss) for rank in self.ranks)

    @property
    def grad_norm_passes(self) -> bool:
        return all(_close(rank.grad_norm, self.grad_norm, self.tolerance.grad_norm) for rank in self.ranks)

    @property
    def first_wrong(self) -> tuple[str, list[tuple[RankStep, Difference]]]:
        """The first tensor out of bounds, gradients before weights, in model order: ('gradient' | 'weight', the ranks where it is and what
        they found); ('', []) if there is none."""
        for kind in ("gradient", "weight"):
            found = [
                (rank, first)
                for rank in self.ranks
                if (first := rank.first_gradient if kind == "gradient" else rank.first_weight)
            ]
            if found:
                place = min(first.place for _, first in found)
                return kind, [(rank, first) for rank, first in found if first.place == place]
        return "", []

    @property
    def passes(self) -> bool:
        tensors = all(rank.first_gradient is None and rank.first_weight is None for rank in self.ranks)
        return tensors and self.loss_passes and self.grad_norm_passes


class RecordingStep(TrainStep):
    """The training step, which lets its averaged gradients be seen between the reduction and the update.

    averaged: those of the last step, fp64 copies, before clipping.
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        super().__init__(runtime)
        self.averaged: list[HeldPiece] = []

    def _reduced_gradients(
        self, microbatches: Sequence[Microbatch], timers: Timers, settled: Callable[[StepResult], bool]
    ) -> PendingLoss | None:
        loss = super()._reduced_gradients(microbatches, timers, settled)
        if loss is not None:
            self.averaged = _copies(self._runtime, 1.0 / (loss.denominator * self._runtime.optimizer.loss_scale))
        return loss


class AsynchronousRecordingStep(AsynchronousStep):
    """The same for an asynchronous schedule. averaged: the gradients of each stage's last update."""

    def __init__(self, runtime: TrainingRuntime) -> None:
        super().__init__(runtime)
        self.averaged: list[HeldPiece] = []

    def run(self, microbatches: Sequence[Microbatch], rates: Rates, timers: Timers = NO_TIMERS) -> StepResult:
        result = super().run(microbatches, rates, timers)
        self.averaged = _copies(self._runtime, 1.0)
        return result


def _copies(runtime: TrainingRuntime, factor: float) -> list[HeldPiece]:
    return [HeldPiece(held.stage, held.piece, held.values.double() * factor) for held in gradient_pieces(runtime)]


def compare_with_oracle(
    plan: RunPlan,
    groups: ProcessGroups,
    device: torch.device,
    slices: DrawSlice,
    batches: Sequence[GlobalBatch],
    rates: Sequence[Rates],
    tolerance: Tolerance,
) -> list[ParityStep]:
    """Train the plan's grid and, on rank 0, the oracle, for len(batches) steps from the same weights. The same result on every rank.

    slices: the initial weights, numbers of the parameters' dtype. The oracle computes in fp64, so that all differences are the grid's.
    """
    runtime = TrainingRuntime(plan, groups, device, slices)
    trainer = RecordingStep(runtime) if plan.is_synchronous else AsynchronousRecordingStep(runtime)
    is_judge = groups.world.rank == 0
    oracle = oracle_of(plan, whole_weights(plan.specs, slices), torch.float64, device) if is_judge else None
    found = []
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        result, repeats = _step(trainer, runtime, batch, step, rate)
        plain = _shared(oracle.step(batch, step, rate) if oracle else None, plan.specs, groups.world, device)
        gradients = compare(trainer.averaged, plain.gradients, tolerance.gradient, tolerance.least_share)
        weights = compare(weight_pieces(runtime), plain.weights, tolerance.weight)
        mine = RankStep.of(groups.world.global_rank, result, gradients, weights)
        ranks = _from_all(mine, boxes_of(trainer.averaged), plan.specs, groups.world)
        count = len(batch) // plan.topology.dp
        found.append(ParityStep(step, count, plain.loss, plain.grad_norm, ranks, tolerance, repeats))
    return found


def _step(
    trainer: RecordingStep | AsynchronousRecordingStep,
    runtime: TrainingRuntime,
    batch: GlobalBatch,
    step: int,
    rates: Rates,
) -> tuple[StepResult, int]:
    """The grid's step, again as long as it only lowers a dynamic loss scale, as training would with its next batches."""
    repeats = 0
    while True:
        result = trainer.run(share_of(runtime, batch, step), rates)
        if repeats == MOST_REPEATS or not (result.update.skipped and runtime.optimizer.scaler.is_dynamic):
            return result, repeats
        repeats += 1


def _from_all(mine: RankStep, compared: Boxes, specs: Sequence[ParamSpec], world: Group) -> tuple[RankStep, ...]:
    """What all ranks found. compared: this rank's gradients. Raises RuntimeError if an element of a gradient was seen by none."""
    found = gather_objects((mine, compared), world)
    missing = uncovered(specs, [boxes for _, boxes in found])
    if missing:
        raise RuntimeError(
            f"no rank has compared the whole gradients of {', '.join(missing)}: nothing is proven of them"
        )
    return tuple(rank for rank, _ in found)


def _shared(plain: OracleStep | None, specs: Sequence[ParamSpec], world: Group, device: torch.device) -> OracleStep:
    """Rank 0's oracle step on every rank, in one message."""
    numel = sum(spec.num_elements for spec in specs)
    flat = torch.empty(2 + 2 * numel, dtype=torch.float64, device=device)
    if plain is not None:
        tensors = [whole[spec.name].reshape(-1) for whole in (plain.gradients, plain.weights) for spec in specs]
        torch.cat([torch.tensor([plain.loss, plain.grad_norm], dtype=torch.float64, device=device), *tensors], out=flat)
    broadcast(flat, world)
    loss, grad_norm = flat[:2].tolist()
    gradients, weights = (_unpacked(part, specs) for part in flat[2:].split(numel))
    return OracleStep(loss, grad_norm, gradients, weights)


def _unpacked(flat: Tensor, specs: Sequence[ParamSpec]) -> dict[str, Tensor]:
    parts = flat.split([spec.num_elements for spec in specs])
    return {spec.name: part.view(spec.shape) for spec, part in zip(specs, parts, strict=True)}


def worst(differences: Iterable[Difference]) -> Difference | None:
    """The one that is furthest off for what it may be."""
    return max(differences, key=lambda d: d.difference / d.bound if d.bound else d.difference, default=None)


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * abs(b)  # False for NaN
