"""Asynchronous pipelines emulated in one process from the papers' formulas: no schedule, no stages, no messages.

The parameters are assigned to p stages. Stage s (0 is the first) computes microbatch k with version v of its weights,
and update t of a stage, from the gradients of the microbatches of group t, turns version t into version t + 1:

    PipeDream      v(s, k) = max(0, k - (p - 1 - s)), groups of one microbatch (Harlap et al. 2018, arXiv:1806.03377)
    PipeDream-2BW  v(s, k) = max(0, k // g - 1), groups of g microbatches      (Narayanan et al. 2021, arXiv:2006.09503)

so 2BW is W(t + 1) = W(t) - lr x gradient at W(t - 1). A step starts with version 0 on every stage and an empty
pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megapipe.extras.reference.train import Microbatch, StepResult, set_lr

Versions = Callable[[int, int], int]  # (stage, microbatch) -> version


@dataclass(frozen=True)
class Delays:
    """The version of the weights for each microbatch, and microbatches per update (fewer in the last one)."""

    versions: Versions
    group_size: int

    @classmethod
    def pipedream(cls, num_stages: int) -> "Delays":
        return cls(lambda stage, k: max(0, k - (num_stages - 1 - stage)), 1)

    @classmethod
    def pipedream_2bw(cls, group_size: int) -> "Delays":
        return cls(lambda stage, k: max(0, k // group_size - 1), group_size)


def asynchronous_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Sequence[Microbatch]],
    stage_of: Mapping[str, int],
    delays: Delays,
    lr: float,
    decoupled_lr: float | None = None,
) -> StepResult:
    """Run all updates of one step. The model holds the newest weights before and after.

    microbatches: for each k those of all data-parallel ranks. stage_of: parameter name -> stage. Gradients are averaged
    over the microbatches and ranks of an update. The loss is the mean over the step; gradients and their norm are those
    of the last update.
    """
    set_lr(optimizer, lr, decoupled_lr)
    parameters = dict(model.named_parameters())
    history = [_snapshot(parameters)]
    loss_sum = num_tokens = 0.0
    averaged: dict[str, Tensor] = {}
    for first in range(0, len(microbatches), delays.group_size):
        group = range(first, min(first + delays.group_size, len(microbatches)))
        averaged = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for k in group:
            weights = {name: history[delays.versions(stage_of[name], k)][name] for name in parameters}
            for microbatch in microbatches[k]:
                found, count, gradients = _loss_and_gradients(model, weights, microbatch)
                loss_sum, num_tokens = loss_sum + found, num_tokens + count
                for name, gradient in gradients.items():
                    averaged[name] += gradient / (len(group) * len(microbatches[k]))
        for name, parameter in parameters.items():
            parameter.grad = averaged[name].clone()
        optimizer.step()
        history.append(_snapshot(parameters))
    norm = torch.stack([gradient.norm() for gradient in averaged.values()]).norm().item()
    return StepResult(loss_sum / max(num_tokens, 1), norm, averaged)


def _loss_and_gradients(
    model: nn.Module, weights: Mapping[str, Tensor], microbatch: Microbatch
) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss of one microbatch with the given weights, its tokens, and the gradients of the mean over them."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    loss_sum, num_tokens = torch.func.functional_call(model, leaves, kwargs=dict(microbatch))
    (loss_sum / num_tokens.clamp(min=1)).backward()
    return (
        loss_sum.item(),
        num_tokens.item(),
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    )


def _snapshot(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
