"""Asynchronous training in one process, which keeps old versions of the weights and applies late gradients.

A stream is the steps between two drains of the pipeline. Version v of the weights is that after v updates of the
stream; version 0 are the weights at its start. Microbatches are counted over the steps of a stream too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import (
    Microbatch,
    StepResult,
    accumulate_gradients,
    clip_gradients,
    gradient_copies,
    set_lr,
)


@dataclass(frozen=True)
class StreamRule:
    """The weights that a microbatch meets, and the microbatches of an update.

    version: (stage, microbatch of the stream, microbatches of a step on each dp rank) -> version in the forward.
    """

    version: Callable[[int, int, int], int]
    updates_each_microbatch: bool = False  # else each step
    backward_reads_newest: bool = False  # else the weights of the forward
    clips_each_stage: bool = True  # by the norm of the stage's gradients; else by that of the model's

    @classmethod
    def pipedream_2bw(cls) -> StreamRule:
        """Return the rule of PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503).

        All stages use the weights before the last update; a step is the paper's group of microbatches.
        """
        return cls(lambda stage, k, per_step: max(0, k // per_step - 1), clips_each_stage=False)

    @classmethod
    def pipedream(cls, num_stages: int, vertical_sync: bool = False) -> StreamRule:
        """Return the rule of PipeDream (Harlap et al. 2018, arXiv:1806.03377), which updates after each microbatch.

        vertical_sync: all stages use the version that the first stage does.
        """

        def version(stage: int, k: int, per_step: int) -> int:
            return max(0, k - (num_stages - 1 - (0 if vertical_sync else stage)))

        return cls(version, updates_each_microbatch=True)

    @classmethod
    def paci(cls, num_stages: int) -> StreamRule:
        """Return the rule of PACI (arXiv:2606.07881): one version of the weights, which changes once a step.

        A backward may read newer weights than its forward did, by ceil((num_stages - 1 - stage) / microbatches of a
        step) versions at most.
        """

        def version(stage: int, k: int, per_step: int) -> int:
            return max(0, (k - (num_stages - 1 - stage)) // per_step)

        return cls(version, backward_reads_newest=True)


class StreamTraining:
    """A model that trains as an asynchronous pipeline does. It holds the newest weights between steps.

    Each update is that of a `reference_step` over its own microbatches, except for the weights that they meet: this
    includes the mean that is differentiated, routers' losses, and the change of routers' biases, which have versions as
    weights do. stage_of: parameter name -> stage. per_token_loss, clip_grad, data_parallel: see `reference_step`.
    clips_late: an update is clipped by the norm of the whole gradient of the update before, also of the last stream's;
    the very first one by those of its stages.
    """

    def __init__(
        self,
        model: ReferenceGPT,
        optimizer: torch.optim.Optimizer,
        rule: StreamRule,
        stage_of: Mapping[str, int],
        per_token_loss: bool,
        clip_grad: float,
        data_parallel: int = 1,
        clips_late: bool = False,
    ) -> None:
        self._clips_late = clips_late
        self._last_norm: float | None = None
        self.model, self._optimizer, self._rule = model, optimizer, rule
        self._per_token_loss, self._clip_grad, self._data_parallel = per_token_loss, clip_grad, data_parallel
        # a router's bias belongs to the stage of its weight
        self._stage_of = {name: stage_of[f"{name.rpartition('.')[0]}.weight"] for name in model.states()}
        self._stage_of |= {name: stage_of[name] for name, _ in model.named_parameters()}
        self._versions = [self._copies()]  # all of the stream
        self._num_microbatches = 0  # of the stream so far, on each dp rank
        self._per_step: int | None = None  # microbatches of each step of the stream on a dp rank

    def step(
        self, microbatches: Sequence[Microbatch], lr: float, decoupled_lr: float | None = None, drains: bool = False
    ) -> StepResult:
        """Run one step over a global batch, whose microbatch k * data_parallel + d is microbatch k of dp rank d.

        drains: the pipeline drains after the step, so that the next one is the first of a new stream. Returns the mean
        of the losses, each under the weights it met, and the gradients and the norm of the step's last update, before
        clipping. Raises ValueError if the number of microbatches changes within a stream.
        """
        per_step = len(microbatches) // self._data_parallel
        if self._per_step not in (None, per_step):
            raise ValueError(
                f"a step of {per_step} microbatches follows one of {self._per_step} without a drain between them"
            )
        self._per_step = per_step
        set_lr(self._optimizer, lr, decoupled_lr)
        size = self._data_parallel * (1 if self._rule.updates_each_microbatch else per_step)
        sums: list[Tensor] = []
        for first in range(0, len(microbatches), size):
            of_update = accumulate_gradients(
                self.model,
                microbatches[first : first + size],
                self._per_token_loss,
                self._data_parallel,
                before_forward=self._load_for_forward,
                before_backward=self._load_for_backward,
            )
            sums.append(of_update)
            self._load(lambda stage: -1)
            grads = gradient_copies(self.model)
            norm = self._clip()
            self._optimizer.step()
            self.model.balance()
            self._versions.append(self._copies())
            self._num_microbatches += size // self._data_parallel
        if drains:
            self._versions = self._versions[-1:]
            self._num_microbatches, self._per_step = 0, None
        return StepResult.of(torch.stack(sums).sum(0), norm, grads)

    def _load_for_forward(self, number: int) -> None:
        """Load what the forward of a microbatch of the next update meets. number: counts those of all dp ranks."""
        k, per_step = self._num_microbatches + number // self._data_parallel, self._per_step
        assert per_step is not None
        self._load(lambda stage: self._rule.version(stage, k, per_step))

    def _load_for_backward(self, number: int) -> None:
        """Load what its backward reads. Autograd keeps the tensors of weights, not their values, beside activations."""
        if self._rule.backward_reads_newest:
            self._load(lambda stage: -1)

    def _load(self, version_of: Callable[[int], int]) -> None:
        """Copy a version of each stage into the model. version_of: stage -> version, -1 for the newest."""
        versions = {name: self._versions[version_of(stage)][name] for name, stage in self._stage_of.items()}
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(versions.pop(name))
        self.model.load_states(versions)

    def _copies(self) -> dict[str, Tensor]:
        """Return copies of the weights and states in the model."""
        parameters = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        return parameters | self.model.states()  # a new bias replaces a state, which is not written to

    def _clip(self) -> float:
        """Clip the gradients in the model. Returns their norm before."""
        if not self._rule.clips_each_stage:
            return clip_gradients(self.model.parameters(), self._clip_grad)
        of_stage: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            of_stage.setdefault(self._stage_of[name], []).append(parameter)
        limit, last = self._clip_grad, self._last_norm
        if self._clips_late and last is not None:
            norm = clip_gradients(self.model.parameters(), 0.0)
            if limit > 0.0 and (coefficient := limit / (last + 1e-6)) < 1.0:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(coefficient)
        else:
            norm = math.hypot(*(clip_gradients(parameters, limit) for parameters in of_stage.values()))
        self._last_norm = norm
        return norm


class ErrorFeedback(torch.optim.Optimizer):
    """An optimizer for gradients that are one update late: it applies u + factor * (u - last u).

    u is what a step of rule would change, new - old weights, weight decay included. In the first step last u is u; a
    drain does not reset it. The rule is megapipe's own: that an error feedback makes up for one step of delay is from
    arXiv:2606.30634, whose formula was not available. With factor 1 each step also corrects the step before, which
    applied last u for want of u. So the changes of steps 0 to n - 1 sum up to u_1 + ... + u_(n-1), each one step
    earlier than without the feedback, and u_(n-1) again in place of u_n, which has not come yet.
    """

    def __init__(self, rule: torch.optim.Optimizer, factor: float = 1.0) -> None:
        super().__init__(rule.param_groups, {})
        self.param_groups = rule.param_groups  # learning rates and weight decay that are set here reach the rule
        self._rule, self._factor = rule, factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        self._rule.step()
        for parameter, old in zip(parameters, before, strict=True):
            change = parameter - old
            last = self.state[parameter].get("change", change)
            parameter.copy_(old + change + self._factor * (change - last))
            self.state[parameter]["change"] = change
