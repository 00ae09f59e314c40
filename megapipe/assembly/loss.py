"""Averaging the loss: per-microbatch means by default, over tokens with --calculate-per-token-loss.

Gradients are raw sums over microbatches and replicas; the optimizer divides them by `PendingLoss.denominator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_reduce
from megapipe.comm.groups import ProcessGroups
from megapipe.model.microbatch import StageLoss


class StepLoss(NamedTuple):
    """The loss of a global batch, the same on every rank."""

    loss: float
    num_tokens: float


@dataclass(frozen=True)
class PendingLoss:
    """A `StepLoss` whose all-reduce is in flight. totals: loss sum, tokens, sum of the microbatches' means."""

    totals: Tensor
    work: Work
    per_token: bool
    num_microbatches: float  # of the global batch

    @property
    def denominator(self) -> float:
        """The divisor of the raw gradient sums. Waits for the all-reduce only if it is the number of tokens."""
        return max(self.wait().num_tokens, 1.0) if self.per_token else self.num_microbatches

    def wait(self) -> StepLoss:
        """Wait for the all-reduce and return the loss."""
        self.work.wait()
        loss_sum, num_tokens, means = self.totals.tolist()
        loss = loss_sum / max(num_tokens, 1.0) if self.per_token else means / self.num_microbatches
        return StepLoss(loss, num_tokens)


@dataclass(frozen=True)
class LossAverage:
    """The rule of the average.

    per_token: over the tokens of the global batch; else over each microbatch's tokens, then over microbatches.
    """

    per_token: bool

    def objective(self, loss_scale: Callable[[], float]) -> Any:
        """Return the engine's `loss`: StageLoss -> (scalar to differentiate, the same detached).

        loss_scale: called for every microbatch.
        """

        def scaled(output: StageLoss, payload: Any) -> tuple[Tensor, StageLoss]:
            report = StageLoss(output.loss_sum.detach(), output.num_tokens)
            objective = output.loss_sum if self.per_token else output.loss_sum / output.num_tokens.clamp(min=1)
            scale = loss_scale()
            return (objective if scale == 1.0 else objective * scale), report

        return scaled

    def start(
        self, reports: list[StageLoss], groups: ProcessGroups, device: torch.device, num_microbatches: int
    ) -> PendingLoss:
        """Start to average this rank's reports, which only ranks of the last stage have, with those of all replicas.

        One all-reduce of three numbers over the world, so that every rank, whatever its stage, learns the loss.
        """
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        if reports and groups.tp.rank == 0:  # tp ranks report the same loss
            totals[0] = torch.stack([report.loss_sum for report in reports]).double().sum()
            totals[1] = torch.stack([report.num_tokens for report in reports]).double().sum()
            # a microbatch whose tokens are all masked out counts 0
            means = [report.loss_sum / report.num_tokens.clamp(min=1) for report in reports]
            totals[2] = torch.stack(means).double().sum()
        work = all_reduce(totals, groups.world, async_op=True)
        return PendingLoss(totals, work, self.per_token, float(num_microbatches * groups.dp_cp.size))
