"""NaN and infinity: find the rank, stage, microbatch and module where a bad step first went wrong.

Each stage's output is summed as it comes, without a synchronisation; only when the loss or the gradient norm of a step
is not finite are the sums looked at, on all ranks. Then the step runs once more with hooks on every module. That costs
nothing before: random streams are keyed by the step, and a step with a non-finite norm has updated nothing, so it can
be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.assembly.microbatches import Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import gather_objects
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.optimizer.optimizer import StepReport
from megapipe.schedule.action import with_slices

Sums = Mapping[tuple[int, int], Tensor]  # (microbatch, stage) -> sum of the stage's output
WEIGHTS, FORWARD, BACKWARD, WEIGHT_GRADIENT = range(4)  # phases of a `Finding`
NOT_REPEATED = "repeated, the step is finite everywhere: the fault does not repeat itself, which points at the hardware"


class OutputWatch:
    """The sum of every stage's output of the current training step; the forwards of evaluations are left out."""

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._sums: dict[tuple[int, int], Tensor] = {}
        for stage, runner in runtime.runners.items():
            runner.observe = partial(self._observe, stage)

    def take(self) -> Sums:
        """Return the sums of the step that has been run, and start to collect those of the next."""
        taken, self._sums = self._sums, {}
        return taken

    def _observe(self, stage: int, microbatch: int, output: Any) -> None:
        if torch.is_grad_enabled():
            first, *others = (value.detach().sum() for value in _tensors(output))
            self._sums[microbatch, stage] = sum(others, first)


def describe_nonfinite(
    runtime: TrainingRuntime, sums: Sums, microbatches: Microbatches, loss: float, update: StepReport
) -> str:
    """Say where the loss or gradient norm of a step became NaN or infinite. Called by all ranks after such a step."""
    first = min((key for key, total in sums.items() if not torch.isfinite(total)), default=None)  # (microbatch, stage)
    slices = runtime.plan.num_slices
    samples = () if first is None else microbatches.sample_ids.get(first[0] // slices, ())
    bad_gradients = runtime.optimizer.nonfinite_gradients()[:3]
    found = gather_objects((first, samples, bad_gradients), runtime.groups.world)
    outputs = [(where, rank, samples) for rank, (where, samples, _) in enumerate(found) if where is not None]
    scale = "" if update.loss_scale == 1.0 else f", loss scale {update.loss_scale:g}"
    text = f"loss {loss}, gradient norm {update.grad_norm}{scale}; "
    if not outputs:
        rank, names = next(((rank, names) for rank, (_, _, names) in enumerate(found) if names), (0, []))
        gradient = f"gradient of {', '.join(names) or 'unknown'} on rank {rank}"
        return f"{text}all forwards were finite, so it arose in a backward: {gradient}"
    (microbatch, stage), rank, samples = min(outputs)
    part = runtime.plan.partition.stages[stage]
    layers = f"layers {part.first_layer} to {part.last_layer_exclusive - 1}" if part.num_layers else "no layers"
    shown = f", samples {', '.join(map(str, samples))} of the training data" if samples else ""
    where = f"stage {stage} ({layers}) on rank {rank}, {with_slices(f'microbatch {microbatch}', slices)}{shown}"
    return f"{text}first seen in the forward of {where}"


@dataclass(frozen=True, order=True)
class Finding:
    """A non-finite value, sorted along the data: weights, forwards, backwards; then microbatch, stage, rank."""

    phase: int
    microbatch: int
    flow: int  # stages in the order in which the phase passes them
    rank: int
    text: str


def repeat_step(runtime: TrainingRuntime, microbatches: Microbatches, objective: Any) -> str:
    """Run the step again and say where the first bad value arises; called by all ranks of a synchronous schedule.

    microbatches, objective: those of the step (`LossAverage.objective`). The gradients are lost; weights and optimizer
    state stay.
    """
    step = runtime.step(microbatches, objective, trains=True)
    rank, search = runtime.groups.world.global_rank, _Search(runtime, microbatches, step.microbatches)
    bad_weights = []
    for stage, module in runtime.stages.items():
        with runtime.stores.whole([stage]):
            for name, parameter in module.named_parameters():
                if not _is_finite(parameter):
                    text = f"weight {name} of stage {stage} on rank {rank} was not finite before the step"
                    bad_weights.append(Finding(WEIGHTS, -1, stage, rank, text))
    runtime.stores.finish_weights()
    if runtime.graphs is not None:
        runtime.graphs.release()  # a replay runs no hooks
    try:
        runtime.stores.begin_step(len(step.microbatches))
        # whole stages, whose modules are called, also where training runs them in parts
        engine = runtime.engine if runtime.plan.parts is None else runtime.stage_engine
        engine(len(microbatches)).run(step)
        runtime.stores.finish_gradients()
    finally:
        for undo in reversed(search.undo):
            undo()
    gradients = [finding for _, finding in search.bad_gradients.values()]
    found = list(chain(*gather_objects([*bad_weights[:1], *search.findings, *gradients], runtime.groups.world)))
    if not found:
        return NOT_REPEATED
    first = min(found)
    slices = runtime.plan.num_slices
    number = len({finding.microbatch // slices for finding in found if finding.phase == first.phase})
    count = "" if first.phase == WEIGHTS else f" ({number} of {len(microbatches)} microbatches are affected)"
    return f"repeated, {first.text}{count}"


class _Search:
    """Hooks that check the output of every module, the gradients of activations and the weight gradients."""

    def __init__(self, runtime: TrainingRuntime, microbatches: Microbatches, given: Sequence[Microbatch]) -> None:
        """given: what the stages are called with, the microbatches or their slices; findings have their numbers."""
        self.findings: list[Finding] = []  # besides bad_gradients
        self.undo: list[Callable[[], None]] = []  # removes the hooks
        self._rank = runtime.groups.world.global_rank
        self._microbatches, self._given, self._slices = microbatches, given, runtime.plan.num_slices
        self._current = 0  # microbatch of the running forward
        self._last_stage = runtime.plan.placement.num_stages - 1
        self.bad_gradients: dict[tuple[int, int], tuple[Tensor, Finding]] = {}  # by microbatch and stage
        self._bad_weights: set[str] = set()
        for stage, module in runtime.stages.items():
            self.undo.append(module.register_forward_pre_hook(partial(self._enter, stage)).remove)
            for name, part in module.named_modules():
                self.undo.append(part.register_forward_hook(partial(self._leave, stage, name)).remove)
            for operation in ("backward", "backward_weight"):
                self._check_weight_gradients(runtime, stage, operation)

    def _check_weight_gradients(self, runtime: TrainingRuntime, stage: int, operation: str) -> None:
        """Check the weight gradients of a stage after each call of an operation of its runner."""
        runner = runtime.runners[stage]
        original = getattr(runner, operation)

        def checked(microbatch: int, *rest: Any) -> Any:
            result = original(microbatch, *rest)
            for name in runtime.buffers[stage].trained_names:
                if name not in self._bad_weights and not _is_finite(runtime.buffers[stage].main_grad(name)):
                    self._bad_weights.add(name)
                    if not self._has_forward(microbatch, stage) and (microbatch, stage) not in self.bad_gradients:
                        text = f"the gradient of weight {name} is not finite while the gradients of activations are"
                        self._find(WEIGHT_GRADIENT, microbatch, stage, text)
            return result

        setattr(runner, operation, checked)
        self.undo.append(partial(delattr, runner, operation))

    def _enter(self, stage: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._current = next(k for k in range(len(self._given)) if self._given[k] is inputs[-1])
        if not _is_finite(inputs):
            self._find(FORWARD, self._current, stage, "the activations received from the stage before are not finite")

    def _leave(self, stage: int, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        microbatch, what = self._current, f"{name or 'the stage'} ({type(module).__name__})"
        if not _is_finite(output) and not self._has_forward(microbatch, stage):
            blame = " from finite inputs" if _is_finite(inputs) else ""
            self._find(FORWARD, microbatch, stage, f"{what} returns values that are not finite{blame}")
        if torch.is_grad_enabled():
            is_received = name == "" and stage != self._last_stage  # the gradient that a later stage sends
            for tensors, text, received in (
                (_tensors(inputs), f"the backward of {what}", False),
                (_tensors(output), f"the backward of what follows {what}", is_received),
            ):
                for tensor in tensors:
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self._gradient, microbatch, stage, text, received))

    def _gradient(self, microbatch: int, stage: int, text: str, received: bool, gradient: Tensor) -> None:
        """Check the gradient of an activation. received: a later stage sent it.

        All hooks of one tensor get the same gradient; the hook on a module's input says more than that on another's
        output.
        """
        if _is_finite(gradient) or self._has_forward(microbatch, stage):
            return
        known = self.bad_gradients.get((microbatch, stage))
        if known is None or (known[0] is gradient and ("what follows" in known[1].text or received)):
            place = "" if received else self._placed(stage, microbatch, f"{text} gives a gradient that is not finite")
            flow = -stage + 1 if received else -stage  # sorted behind the sender's own finding
            self.bad_gradients[microbatch, stage] = gradient, Finding(BACKWARD, microbatch, flow, self._rank, place)

    def _find(self, phase: int, microbatch: int, stage: int, text: str) -> None:
        flow = stage if phase == FORWARD else -stage
        self.findings.append(Finding(phase, microbatch, flow, self._rank, self._placed(stage, microbatch, text)))

    def _placed(self, stage: int, microbatch: int, text: str) -> str:
        ids = self._microbatches.sample_ids.get(microbatch // self._slices, ())
        samples = f", samples {', '.join(map(str, ids))}" if ids else ""
        which = with_slices(f"microbatch {microbatch}", self._slices)
        return f"{text}: stage {stage} on rank {self._rank}, {which}{samples}"

    def _has_forward(self, microbatch: int, stage: int) -> bool:
        return any((f.phase, f.microbatch, f.flow) == (FORWARD, microbatch, stage) for f in self.findings)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a module's input or output."""
    if isinstance(value, StageLoss):
        yield value.loss_sum
        yield from _tensors(value.ahead)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))
