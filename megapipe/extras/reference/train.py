"""One plain training step and its optimizer, which the parallel step must equal; asynchronous steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.extras.reference.experts import MoE, Sets
from megapipe.extras.reference.gpt import ReferenceGPT, at_least_fp32
from megapipe.extras.reference.muon import Muon, MuonOptions

# Arguments of ReferenceGPT.forward by name: tokens, labels, loss_mask, and optionally position_ids, document_ids,
# dropout_masks, padding.
Microbatch = Mapping[str, Any]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step."""

    loss: float  # the mean over the tokens that loss masks leave
    grad_norm: float  # L2 over all parameters, before clipping
    grads: dict[str, Tensor]  # by parameter name, before clipping
    ahead: tuple[float, ...] = ()  # means over tokens of the losses of multi-token prediction


def reference_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Microbatch],
    per_token_loss: bool,
    clip_grad: float,
    lr: float,
    decoupled_lr: float | None = None,
    data_parallel: int = 1,
) -> StepResult:
    """Run one optimizer step over a global batch: the microbatches of all data-parallel ranks, with equal weights.

    The reported loss is the sum over all microbatches divided by all their tokens (weighted by loss_mask; at least 1).
    Gradients are those of the mean over a microbatch's tokens, then over microbatches; with per_token_loss of the
    reported loss. They are scaled by clip_grad / (norm + 1e-6) if that is below 1; clip_grad 0: no clipping.
    lr, decoupled_lr: see set_lr. data_parallel: microbatches in a row that ranks run at once, for global_aux_loss.
    Routers' losses are means over a microbatch, and weigh as its loss does. So do those of multi-token
    prediction, which are means over their own tokens.
    """
    set_lr(optimizer, lr, decoupled_lr)
    optimizer.zero_grad(set_to_none=True)
    total_tokens = sum(microbatch["loss_mask"].sum().item() for microbatch in microbatches)
    loss, ahead = 0.0, torch.zeros(0, 2, dtype=torch.float64)
    sets = [module.sets for module in model.experts()] if isinstance(model, ReferenceGPT) else []
    _collect_counts(model, sets, microbatches, data_parallel)
    for number, microbatch in enumerate(microbatches):
        for each in sets:
            each.microbatch = number
        loss_sum, num_tokens = model(**microbatch)
        denominator = max(total_tokens, 1) if per_token_loss else num_tokens.clamp(min=1) * len(microbatches)
        weight = num_tokens / max(total_tokens, 1) if per_token_loss else 1 / len(microbatches)
        objective = loss_sum / denominator + router_losses(model) * weight
        if isinstance(model, ReferenceGPT) and model.losses_ahead:
            factor = model.config.mtp_loss_scaling_factor / len(model.losses_ahead)
            for ahead_sum, count in model.losses_ahead:
                objective = objective + factor * weight * ahead_sum / count.clamp(min=1)
            sums = torch.tensor([[pair[0].item(), pair[1].item()] for pair in model.losses_ahead], dtype=ahead.dtype)
            ahead = sums if number == 0 else ahead + sums
        objective.backward()
        loss += loss_sum.item() / max(total_tokens, 1)
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    result_grads = {name: grad.clone() for name, grad in grads.items()}
    norms = [torch.linalg.vector_norm(grad, dtype=at_least_fp32(grad.dtype)) for grad in grads.values()]
    norm = torch.stack(norms).norm().item()
    coefficient = clip_grad / (norm + 1e-6)
    if clip_grad > 0.0 and coefficient < 1.0:
        for grad in grads.values():
            grad.mul_(coefficient)
    optimizer.step()
    if isinstance(model, ReferenceGPT):
        model.balance()
    return StepResult(loss, norm, result_grads, tuple((ahead[:, 0] / ahead[:, 1].clamp(min=1)).tolist()))


def _collect_counts(
    model: nn.Module, sets: Sequence[Sets], microbatches: Sequence[Microbatch], data_parallel: int
) -> None:
    """Run all forwards of a step for the counts of routers, where a loss needs those of all dp ranks."""
    assert not sets or isinstance(model, ReferenceGPT)
    if not any(
        "global_aux_loss" in module.config.moe_router_load_balancing_type
        for module in model.modules()
        if isinstance(module, MoE)
    ):
        return
    for each in sets:
        each.size, each.collects = data_parallel, True
    with torch.no_grad():
        for microbatch in microbatches:
            model(**microbatch)
    for each in sets:
        each.collects = False


def router_losses(model: nn.Module) -> Tensor | float:
    """Return ReferenceGPT.router_losses; 0.0 for another model."""
    return model.router_losses() if isinstance(model, ReferenceGPT) else 0.0


def build_optimizer(
    model: nn.Module,
    kind: str,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
    update: Callable[..., None] | None = None,
    muon: MuonOptions | None = None,
) -> torch.optim.Optimizer:
    """Build torch.optim.AdamW ("adamw", decoupled decay), torch.optim.SGD ("sgd", decay added to the gradient) or Muon
    ("muon", with options in muon).

    update: another rule instead, (weights, gradient, states, number, lr, weight decay) -> None on whole parameters.

    Each parameter is a group with "name", "weight_decay" (0 for 1-D and bias parameters) and "decoupled": True for the
    word embedding and the head, which may have another learning rate.
    """
    groups = [
        {
            "params": [parameter],
            "name": name,
            "weight_decay": 0.0 if parameter.ndim == 1 or name.endswith(".bias") else weight_decay,
            "decoupled": name in ("embedding.word_embeddings.weight", "output_layer.weight"),
        }
        for name, parameter in model.named_parameters()
    ]
    if update is not None:
        return RuleOptimizer(groups, update)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, foreach=False, fused=False)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum, foreach=False, fused=False)
    if kind == "muon" and muon is not None:
        return Muon(model, groups, muon, betas=betas, eps=eps)
    raise ValueError(f"unknown optimizer {kind!r}; use adamw, sgd or muon")


class RuleOptimizer(torch.optim.Optimizer):
    """A function as update rule of whole parameters; it makes its states itself."""

    def __init__(self, groups: list[dict[str, Any]], update: Callable[..., None]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._update, self._number = update, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._number += 1
        for group in self.param_groups:
            (parameter,) = group["params"]
            if parameter.grad is not None:
                states = self.state[parameter]
                self._update(parameter, parameter.grad, states, self._number, group["lr"], group["weight_decay"])


def set_lr(optimizer: torch.optim.Optimizer, lr: float, decoupled_lr: float | None = None) -> None:
    """Set the learning rate of every group to lr; that of the word embedding and the head to decoupled_lr if given."""
    for group in optimizer.param_groups:
        group["lr"] = decoupled_lr if decoupled_lr is not None and group["decoupled"] else lr


Versions = Callable[[int, int], int]  # (stage, microbatch) -> version


@dataclass(frozen=True)
class Delays:
    """The version of the weights for each microbatch, and microbatches per update (fewer in the last one)."""

    versions: Versions
    group_size: int

    @classmethod
    def pipedream(cls, num_stages: int) -> Delays:
        return cls(lambda stage, k: max(0, k - (num_stages - 1 - stage)), 1)

    @classmethod
    def pipedream_2bw(cls, group_size: int) -> Delays:
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
