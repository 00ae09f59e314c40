"""NaN and infinity: which rank, stage and microbatch was first.

Each stage's output is summed as it comes, without a synchronisation; only when the loss or the gradient norm of a step is not finite are
the sums looked at, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import gather_objects
from megapipe.errors import TrainingError
from megapipe.model.microbatch import StageLoss
from megapipe.train.step import StepResult

Sums = Mapping[tuple[int, int], Tensor]  # (microbatch, stage) -> sum of the stage's output


class OutputWatch:
    """The sum of every stage's output of this step. An evaluation's forwards are not looked at."""

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._sums: dict[tuple[int, int], Tensor] = {}
        for stage, runner in runtime.runners.items():
            runner.observe = self._observer(stage)

    def take(self) -> Sums:
        """The sums of the step that has been run; those of the next one are gathered apart."""
        taken, self._sums = self._sums, {}
        return taken

    def _observer(self, stage: int) -> Callable[[int, Any], None]:
        def observe(microbatch: int, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            value = output.loss_sum if isinstance(output, StageLoss) else output
            self._sums[microbatch, stage] = value.detach().sum()

        return observe


def unsound(
    runtime: TrainingRuntime,
    sums: Sums,
    result: StepResult,
    step: int,
    sample_ids: Mapping[int, tuple[int, ...]],
    search: Callable[[], str],
) -> TrainingError:
    """An error that names where a loss or gradient norm stopped being finite. Called by all ranks of a step that did. search: asked
    last, for it may overwrite the gradients; says more, or ''."""
    first = min((key for key, total in sums.items() if not torch.isfinite(total)), default=None)  # (microbatch, stage)
    samples = () if first is None else sample_ids.get(first[0], ())
    bad_gradients = runtime.optimizer.nonfinite_gradients()[:3]
    found = gather_objects((first, samples, bad_gradients), runtime.groups.world)
    outputs = [(where, rank, samples) for rank, (where, samples, _) in enumerate(found) if where is not None]
    scale = "" if result.update.loss_scale == 1.0 else f", loss scale {result.update.loss_scale:g}"
    text = f"step {step}: loss {result.loss}, gradient norm {result.update.grad_norm}{scale}"
    if outputs:
        (microbatch, stage), rank, samples = min(outputs)
        layers = runtime.plan.partition.stages[stage]
        place = (
            f"layers {layers.first_layer} to {layers.last_layer_exclusive - 1}" if layers.num_layers else "no layers"
        )
        shown = f", samples {', '.join(map(str, samples))} of the training data" if samples else ""
        text += f"; first seen in the forward of stage {stage} ({place}) on rank {rank}, microbatch {microbatch}{shown}"
    else:
        rank, names = next(((rank, names) for rank, (_, _, names) in enumerate(found) if names), (0, []))
        text += f"; all forwards were finite, so it arose in a backward: gradient of {', '.join(names) or 'unknown'} on rank {rank}"
    searched = search()
    text += f"; {searched}" if searched else ""
    return TrainingError(
        f"{text}. Lower --lr, look at the data, or go on in spite of it with --no-check-for-nan-in-loss-and-grad"
    )
