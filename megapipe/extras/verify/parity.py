"""`--verify-grid`: train on the grid and in the oracle; every rank compares what it holds, and gets all results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from megapipe.assembly.compose import DrawSlice, parameter_dtype
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.bootstrap import join, shutdown
from megapipe.comm.collectives import barrier, broadcast, gather_objects
from megapipe.comm.groups import Group, ProcessGroups, build_process_groups
from megapipe.environment import Environment
from megapipe.extras.verify.compare import (
    NO_CHOICES,
    Chosen,
    GridChoices,
    HeldPiece,
    ParityStep,
    RankStep,
    Summary,
    Tolerance,
    broadcast_choices,
    check_all_compared,
    compare,
    gradient_pieces,
    tolerance_of,
    uncovered,
    weight_pieces,
)
from megapipe.extras.verify.oracle import (
    GlobalBatch,
    Oracle,
    OracleStep,
    StreamOracle,
    drawn_slices,
    random_batches,
    share_of,
    whole_weights,
)
from megapipe.extras.verify.report import found_text, plan_text
from megapipe.extras.verify.shrink import Shrunk, shrink
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.run_plan import RunPlan
from megapipe.trace.parameters import model_states
from megapipe.train.facts import facts_of
from megapipe.train.gpu_setup import check_deterministic, deterministic_algorithms
from megapipe.train.state import Schedules
from megapipe.train.step import PendingLoss, Routed, StepBatch, StepResult, TrainStep
from megapipe.train.stream import BegunStep, StreamStep

EXIT_CODE_DIFFERENT = 1
MAX_REPEATS = 60  # of a step whose gradients overflow while a dynamic loss scale falls


def verify(plan: RunPlan, environment: Environment, mode: str) -> int:
    """Train the plan with small sizes on this rank's grid and in one process, print what differs, and return 0 or 1.

    mode: 'fp64', or 'native' for the configuration's dtype. With other ranks this ends the process, as training does.
    """
    world = join(plan.config, environment, partial(facts_of, plan, environment))
    small = shrink(plan, mode, environment.world_size, environment.local_world_size, world.device.type == "cuda")
    groups = build_process_groups(small.plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    if world.global_rank == 0:
        print(plan_text(small), flush=True)
    steps = verified_steps(small, groups, world.device)
    if world.global_rank == 0:
        print(found_text(small, steps), flush=True)
    barrier(groups.world)  # a rank that exits with an error terminates the others: rank 0 prints its report first
    code = 0 if all(step.passes for step in steps) else EXIT_CODE_DIFFERENT
    if world.world_size > 1:
        shutdown(code)
    return code


def verified_steps(small: Shrunk, groups: ProcessGroups, device: torch.device) -> list[ParityStep]:
    """Draw weights and batches for the small configuration and compare. The same result on every rank."""
    plan, config = small.plan, small.plan.config
    batches = random_batches(config, plan.topology.dp, small.num_microbatches, config.training.seed)
    schedules, samples = Schedules.of(config), 0
    rates = []
    for batch in batches:
        rates.append(schedules.rates(samples))
        samples += len(batch) * config.training.micro_batch_size
    slices = drawn_slices(config.training.seed, parameter_dtype(config.precision.dtype))
    with deterministic_algorithms(config):
        check_deterministic(config, device)
        return compare_with_oracle(plan, groups, device, slices, batches, rates, tolerance_of(config))


@dataclass(frozen=True)
class TrainedStep:
    """A step of this rank's grid, with copies of what it held."""

    step: int
    result: StepResult
    averaged: list[HeldPiece]  # gradients before clipping; of a schedule that updates often, those of its last update
    weights: list[HeldPiece]  # after the update
    chosen: Chosen  # by routers of experts
    repeats: int = 0  # while the step only lowered a dynamic loss scale


def compare_with_oracle(
    plan: RunPlan,
    groups: ProcessGroups,
    device: torch.device,
    slices: DrawSlice,  # draws the initial weights, rounded to the parameters' dtype
    batches: Sequence[GlobalBatch],
    rates: Sequence[Rates],
    tolerance: Tolerance,
    drains: Collection[int] = (),
) -> list[ParityStep]:
    """Train the plan's grid and, on rank 0, the oracle from the same weights; one step for each batch.

    drains: steps after which the pipeline of an asynchronous schedule drains, besides the last one and those before
    another batch size. The same result on every rank. The oracle computes in fp64, so every difference is the grid's.
    Raises RuntimeError if no rank has compared some element of a gradient.
    """
    runtime = TrainingRuntime(plan, groups, device, slices)
    sizes = list(map(len, batches))
    ends = {step for step, (size, following) in enumerate(pairwise(sizes)) if size != following}
    ends |= {*drains, len(batches) - 1}
    oracle: Oracle | None = None
    if groups.world.rank == 0:
        weights = whole_weights(plan.specs, slices)
        if plan.is_synchronous:
            oracle = Oracle(plan.config, weights, device, plan.topology.dp)
        else:
            oracle = StreamOracle(plan, weights, device)
    choices = GridChoices(runtime) if plan.model.has_experts else None
    begun = [
        StepBatch(step, 0, 0, share_of(runtime, batch, step), rate)
        for step, (batch, rate) in enumerate(zip(batches, rates, strict=True))
    ]
    trained = _steps(runtime, begun, choices) if plan.is_synchronous else _stream(runtime, begun, choices, ends)
    found = []
    for own in trained:
        batch = batches[own.step]
        reference = oracle.step(batch, own.step, rates[own.step], own.step in ends) if oracle else None
        found.append(_compared(runtime, own, reference, len(batch), choices, tolerance))
    return found


def _compared(
    runtime: TrainingRuntime,
    own: TrainedStep,
    reference: OracleStep | None,
    num_microbatches: int,  # of the global batch
    choices: GridChoices | None,
    tolerance: Tolerance,
) -> ParityStep:
    """Compare a step of the grid with that of the oracle, which rank 0 has. The same result on every rank."""
    plan, world, result = runtime.plan, runtime.groups.world, own.result
    plain = _broadcast(reference, plan, world, runtime.device)
    routing = NO_CHOICES
    if choices is not None:
        known = None if reference is None else reference.choices
        everywhere = broadcast_choices(known, plan.config, num_microbatches, world, runtime.device)
        routing = choices.compare(own.chosen, everywhere)
    gradients = compare(own.averaged, plain.gradients, tolerance.gradient, tolerance.least_share)
    weights_found = compare(own.weights, plain.weights, tolerance.weight)
    rank, norm = world.global_rank, result.update.grad_norm
    summaries = Summary.of(gradients), Summary.of(weights_found)
    mine = RankStep(rank, result.loss, norm, *summaries, routing, result.ahead)
    covered = [(held.piece.spec.name, held.piece.box) for held in own.averaged]
    gathered = gather_objects((mine, covered), world)
    trained_specs = [spec for spec in plan.specs if spec.trainable]
    missing = uncovered(trained_specs, [box for _, boxes in gathered for box in boxes])
    if missing:
        raise RuntimeError(
            f"no rank has compared the whole gradients of {', '.join(missing)}: the comparison proves nothing "
            "about them"
        )
    ranks = tuple(each for each, _ in gathered)
    if choices is not None:
        check_all_compared([rank.routing for rank in ranks], plan.config, num_microbatches)
    return ParityStep(own.step, plain.loss, plain.grad_norm, ranks, tolerance, own.repeats, plain.ahead)


def _steps(
    runtime: TrainingRuntime, batches: Sequence[StepBatch], choices: GridChoices | None
) -> Iterator[TrainedStep]:
    """Train one step after another; a step whose gradients overflow is repeated while a dynamic loss scale falls."""
    trainer = RecordingStep(runtime)
    for batch in batches:
        result, repeats = trainer.run(batch.microbatches, batch.rates), 0
        while result.update.skipped and runtime.optimizer.scaler.is_dynamic and repeats < MAX_REPEATS:
            result = trainer.run(batch.microbatches, batch.rates)
            repeats += 1
        chosen = {} if choices is None else choices.take()
        yield TrainedStep(batch.step, result, trainer.averaged, list(weight_pieces(runtime)), chosen, repeats)


def _stream(
    runtime: TrainingRuntime, batches: Sequence[StepBatch], choices: GridChoices | None, ends: Collection[int]
) -> Iterator[TrainedStep]:
    """Train streams of steps, which end with those in `ends`."""
    trainer = RecordingStreamStep(runtime, choices)
    for batch in batches:
        following = None if batch.step in ends else batches[batch.step + 1]
        for done, result in trainer.advance(batch, following):
            yield TrainedStep(done.step, result, *trainer.recorded.pop(0))


class RecordingStep(TrainStep):
    """The training step, with a copy of its averaged gradients taken between the reduction and the update."""

    averaged: list[HeldPiece]  # of the last step, in fp64, before clipping

    def gradients(self, microbatches: Sequence[Microbatch]) -> PendingLoss:
        loss = super().gradients(microbatches)
        denominator = loss.denominator_of(loss.summed.num_tokens) * self.runtime.optimizer.loss_scale
        self.averaged = _copies(self.runtime, 1.0 / denominator)
        return loss


class RecordingStreamStep(StreamStep):
    """A stream that records each step: averaged gradients of its last update, weights after it, choices of experts."""

    def __init__(self, runtime: TrainingRuntime, choices: GridChoices | None) -> None:
        super().__init__(runtime)
        self._choices, self._chosen = choices, dict[int, Chosen]()  # by number of the step
        self.recorded: list[tuple[list[HeldPiece], list[HeldPiece], Chosen]] = []

    def _take_routed(self, begun: BegunStep) -> list[Routed]:
        if self._choices is not None:
            self._chosen.setdefault(begun.batch.step, {}).update(self._choices.take())
        return super()._take_routed(begun)

    def _before_update(self, factor: float) -> None:
        self._averaged = _copies(self.runtime, factor)

    def _after_update(self) -> None:
        self._install(self._num_updates)
        weights = [HeldPiece(held.stage, held.piece, held.values.clone()) for held in weight_pieces(self.runtime)]
        self.recorded.append((self._averaged, weights, self._chosen.pop(min(self._chosen)) if self._chosen else {}))


def _copies(runtime: TrainingRuntime, factor: float) -> list[HeldPiece]:
    return [HeldPiece(held.stage, held.piece, held.values.double() * factor) for held in gradient_pieces(runtime)]


def _broadcast(plain: OracleStep | None, plan: RunPlan, world: Group, device: torch.device) -> OracleStep:
    """Return rank 0's oracle step on every rank, sent as one tensor: loss, gradient norm, losses of multi-token
    prediction, gradients, weights.
    """
    specs, states = plan.specs, model_states(plan.config.model)
    sent = (*specs, *specs, *states)
    sizes = [spec.num_elements for spec in sent]
    num_numbers = 2 + len(plan.model.predictions)
    flat = torch.empty(num_numbers + sum(sizes), dtype=torch.float64, device=device)
    if plain is not None:
        wholes = [plain.gradients] * len(specs) + [plain.weights] * (len(specs) + len(states))
        tensors = [whole[spec.name].reshape(-1) for whole, spec in zip(wholes, sent, strict=True)]
        numbers = torch.tensor([plain.loss, plain.grad_norm, *plain.ahead], dtype=torch.float64, device=device)
        torch.cat([numbers, *tensors], out=flat)
    broadcast(flat, world)
    loss, grad_norm, *ahead = flat[:num_numbers].tolist()
    parts = [part.view(spec.shape) for spec, part in zip(sent, flat[num_numbers:].split(sizes), strict=True)]
    gradients = {spec.name: part for spec, part in zip(specs, parts, strict=False)}
    weights = {spec.name: part for spec, part in zip(sent[len(specs) :], parts[len(specs) :], strict=True)}
    return OracleStep(loss, grad_norm, gradients, weights, tuple(ahead))
