"""A step that gave NaN or infinity, run once more under a watch: which module, of which rank and microbatch, was first.

Nothing of it costs anything before that: random streams are keyed by the step, and a step with an infinite norm has updated nothing, so
that it can be run again as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.assembly.loss import LossAverage
from megapipe.assembly.microbatches import Microbatches
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import gather_objects
from megapipe.model.microbatch import StageLoss
from megapipe.pipeline.engine import Step

NOT_REPEATED = (
    "run once more, the step is finite everywhere: the fault does not repeat itself, which points at hardware"
)


@dataclass(frozen=True, order=True)
class Finding:
    """Sorted by the way of the data: weights before forwards before backwards, then microbatches, then stages, then rank."""

    phase: int
    microbatch: int
    flow: int  # stages in the order in which the phase passes them
    rank: int
    text: str


def search(runtime: TrainingRuntime, microbatches: Microbatches) -> str:
    """Run the step again and say where the first bad number arises; called by all ranks of a synchronous schedule, with their microbatches
    of that step. The gradients are lost; weights and optimizer stay."""
    rank = runtime.groups.world.global_rank
    findings = [
        Finding(
            0, -1, stage, rank, f"weight {name} of stage {stage} on rank {rank} was no number before the step began"
        )
        for stage, module in runtime.stages.items()
        for name, parameter in module.named_parameters()
        if not _is_finite(parameter)
    ][:1]
    watch = _Watch(runtime, microbatches)
    try:
        _run(runtime, microbatches)
    finally:
        watch.remove()
    found = [
        finding for of_rank in gather_objects(findings + watch.findings, runtime.groups.world) for finding in of_rank
    ]
    if not found:
        return NOT_REPEATED
    first = min(found)
    number = len({finding.microbatch for finding in found if finding.phase == first.phase})
    count = "" if first.phase == 0 else f" ({number} of {len(microbatches)} microbatches are hit)"
    return f"run once more: {first.text}{count}"


def _run(runtime: TrainingRuntime, microbatches: Microbatches) -> None:
    runtime.gather.finish()
    if runtime.graphs is not None:
        runtime.graphs.release()  # a replay runs no hooks
    count = len(microbatches)
    average = LossAverage(runtime.plan.config.training.calculate_per_token_loss)
    runtime.reducer.begin_step(count)
    runtime.engine(count).run(
        Step(microbatches, runtime.message, average.objective(lambda: runtime.optimizer.loss_scale))
    )
    runtime.reducer.finish()


class _Watch:
    """Looks at what every module returns, at every gradient that comes back, and after each backward at the weight gradients."""

    def __init__(self, runtime: TrainingRuntime, microbatches: Microbatches) -> None:
        self.findings: list[Finding] = []
        self._rank = runtime.groups.world.global_rank
        self._microbatches = microbatches
        self._last_stage = runtime.plan.placement.num_stages - 1
        self._undo: list[Callable[[], None]] = []
        self._bad_gradient: dict[tuple[int, int], tuple[Tensor, Finding]] = {}
        self._bad_weights: set[str] = set()
        for stage, module in runtime.stages.items():
            self._current = 0
            self._undo.append(module.register_forward_pre_hook(partial(self._enter, stage)).remove)
            for name, part in module.named_modules():
                self._undo.append(part.register_forward_hook(partial(self._leave, stage, name)).remove)
            for operation in ("backward", "backward_weight"):
                self._wrap(runtime, stage, operation)

    def remove(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _wrap(self, runtime: TrainingRuntime, stage: int, operation: str) -> None:
        runner = runtime.runners[stage]
        original = getattr(runner, operation)

        def watched(microbatch: int, *rest: Any) -> Any:
            result = original(microbatch, *rest)
            for name in runtime.buffers[stage].names:
                if name not in self._bad_weights and not _is_finite(runtime.buffers[stage].main_grad(name)):
                    self._bad_weights.add(name)
                    self._find(
                        3,
                        microbatch,
                        stage,
                        f"the gradient of weight {name} is no number while the gradients of activations are",
                    )
            return result

        setattr(runner, operation, watched)
        self._undo.append(partial(delattr, runner, operation))

    def _enter(self, stage: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._current = next(k for k in range(len(self._microbatches)) if self._microbatches[k] is inputs[-1])
        if not all(map(_is_finite, _tensors(inputs))):
            self._find(1, self._current, stage, "the activations that a stage before sent are no numbers")

    def _leave(self, stage: int, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        microbatch, what = self._current, f"{name or 'the stage'} ({type(module).__name__})"
        if not all(map(_is_finite, _tensors(output))) and not self._has(1, microbatch, stage):
            whole = all(map(_is_finite, _tensors(inputs)))
            self._find(
                1, microbatch, stage, f"{what} returns what is no number{', of inputs that are' if whole else ''}"
            )
        if torch.is_grad_enabled():
            for tensors, text in (
                (_tensors(inputs), f"the backward of {what}"),
                (_tensors(output), f"the backward of what follows {what}"),
            ):
                for tensor in tensors:
                    if tensor.requires_grad:
                        came = name == "" and text.startswith("the backward of what") and stage != self._last_stage
                        tensor.register_hook(partial(self._gradient, microbatch, stage, text, came))

    def _gradient(self, microbatch: int, stage: int, text: str, came: bool, gradient: Tensor) -> None:
        """came: the gradient is what a later stage sent. Hooks of one tensor are called with one gradient; that of a module's input says
        more than that of another's output."""
        key = microbatch, stage
        if _is_finite(gradient) or self._has(1, microbatch, stage):
            return
        known = self._bad_gradient.get(key)
        finding = Finding(
            2,
            microbatch,
            -stage,
            self._rank,
            self._text(stage, microbatch, f"{text} gives a gradient that is no number"),
        )
        if came:
            finding = Finding(2, microbatch, -stage + 1, self._rank, "")  # behind what the sender says
        if known is None:
            self._bad_gradient[key] = gradient, finding
            self.findings.append(finding)
        elif known[0] is gradient and ("what follows" in known[1].text or came):
            self._bad_gradient[key] = gradient, finding
            self.findings[self.findings.index(known[1])] = finding

    def _find(self, phase: int, microbatch: int, stage: int, text: str) -> None:
        if phase == 3 and (self._has(1, microbatch, stage) or (microbatch, stage) in self._bad_gradient):
            return
        flow = stage if phase == 1 else -stage
        self.findings.append(Finding(phase, microbatch, flow, self._rank, self._text(stage, microbatch, text)))

    def _text(self, stage: int, microbatch: int, text: str) -> str:
        ids = self._microbatches.sample_ids.get(microbatch, ())
        samples = f", samples {', '.join(map(str, ids))}" if ids else ""
        return f"{text}: stage {stage} on rank {self._rank}, microbatch {microbatch}{samples}"

    def _has(self, phase: int, microbatch: int, stage: int) -> bool:
        return any((f.phase, f.microbatch, abs(f.flow)) == (phase, microbatch, stage) for f in self.findings)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an input or output of a module."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, StageLoss):
        yield value.loss_sum
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
