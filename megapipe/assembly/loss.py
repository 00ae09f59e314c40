"""What a microbatch's loss contributes: per-microbatch means by default, sums under --calculate-per-token-loss.

Gradients are raw sums over microbatches and replicas; `LossAverage.denominator` is what the optimizer divides them by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_reduce
from megapipe.comm.groups import Group
from megapipe.model.microbatch import StageLoss


@dataclass(frozen=True)
class LossReport:
    """One microbatch's loss on the last stage: scalars, on the device."""

    loss_sum: Tensor
    num_tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Over the microbatch's tokens; 0 where all are masked out."""
        return self.loss_sum / self.num_tokens.clamp(min=1)


@dataclass(frozen=True)
class StepLoss:
    """The loss of a global batch, the same on every rank, and what raw gradient sums are to be divided by."""

    loss: float
    num_tokens: float
    denominator: float


@dataclass(frozen=True)
class PendingLoss:
    """A `StepLoss` on its way. totals: loss sum, tokens, sum of the microbatches' means."""

    totals: Tensor
    work: Work
    per_token: bool
    num_microbatches: float  # of the global batch

    @property
    def denominator(self) -> float:
        """Known at once, but for tokens: those are waited for."""
        return self.wait().denominator if self.per_token else self.num_microbatches

    def wait(self) -> StepLoss:
        """The loss, once it is there."""
        self.work.wait()
        loss_sum, num_tokens, means = self.totals.tolist()
        if self.per_token:
            return StepLoss(loss_sum / max(num_tokens, 1.0), num_tokens, max(num_tokens, 1.0))
        return StepLoss(means / self.num_microbatches, num_tokens, self.num_microbatches)


@dataclass(frozen=True)
class LossAverage:
    """per_token: average over the tokens of the global batch, instead of over each microbatch's tokens and then over microbatches."""

    per_token: bool

    def objective(self, loss_scale: Callable[[], float]) -> Any:
        """The engine's `loss`: StageLoss -> (what is differentiated, LossReport). loss_scale: asked at every microbatch."""

        def of(output: StageLoss, payload: Any) -> tuple[Tensor, LossReport]:
            report = LossReport(output.loss_sum.detach(), output.num_tokens)
            objective = output.loss_sum if self.per_token else output.loss_sum / output.num_tokens.clamp(min=1)
            scale = loss_scale()
            return (objective if scale == 1.0 else objective * scale), report

        return of

    def start(
        self,
        reports: list[LossReport],
        counts: bool,
        num_microbatches: int,
        num_replicas: int,
        world: Group,
        device: torch.device,
    ) -> PendingLoss:
        """Start to average over all replicas. reports: this rank's; counts: of the ranks with reports of these microbatches, this one's are
        summed.

        One all-reduce of three numbers over the world, so that every rank, whatever its stage, knows the loss.
        """
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        if reports and counts:
            totals[0] = torch.stack([report.loss_sum for report in reports]).double().sum()
            totals[1] = torch.stack([report.num_tokens for report in reports]).double().sum()
            totals[2] = torch.stack([report.mean for report in reports]).double().sum()
        return PendingLoss(
            totals, all_reduce(totals, world, async_op=True), self.per_token, float(num_microbatches * num_replicas)
        )
