"""One plain training step and its optimizers, which the parallel step must equal; asynchronous steps; Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.extras.reference.experts import MLP, Experts
from megapipe.extras.reference.gpt import Block, LatentAttention, Prediction, ReferenceGPT, SelfAttention, at_least_fp32

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

    @classmethod
    def of(cls, sums: Tensor, grad_norm: float, grads: dict[str, Tensor]) -> StepResult:
        """Return the result whose losses are the means of sums, see `accumulate_gradients`."""
        loss, *ahead = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
        return cls(loss, grad_norm, grads, tuple(ahead))


def reference_step(
    model: ReferenceGPT,
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
    sums = accumulate_gradients(model, microbatches, per_token_loss, data_parallel)
    grads = gradient_copies(model)
    norm = clip_gradients(model.parameters(), clip_grad)
    optimizer.step()
    model.balance()
    return StepResult.of(sums, norm, grads)


def _nothing(number: int) -> None:
    """Leave the model as it is before the forward or the backward of a microbatch."""


def accumulate_gradients(
    model: ReferenceGPT,
    microbatches: Sequence[Microbatch],
    per_token_loss: bool,
    data_parallel: int = 1,
    before_forward: Callable[[int], None] = _nothing,
    before_backward: Callable[[int], None] = _nothing,
) -> Tensor:
    """Replace the gradients of the parameters by those of a global batch, averaged as `reference_step` says.

    before_forward, before_backward: called with the number of the microbatch; they may change weights in place through
    `data`, which autograd does not notice. Returns loss sums and tokens [1 + modules of multi-token prediction, 2] fp64
    on the CPU: of the model's loss, then of each module's.
    """
    model.zero_grad(set_to_none=True)
    total_tokens = sum(microbatch["loss_mask"].sum().item() for microbatch in microbatches)
    sums = torch.zeros(1 + (model.config.mtp_num_layers or 0), 2, dtype=torch.float64)
    _collect_counts(model, microbatches, data_parallel, before_forward)
    for number, microbatch in enumerate(microbatches):
        for module in model.experts():
            module.sets.microbatch = number
        before_forward(number)
        loss_sum, num_tokens = model(**microbatch)
        denominator = max(total_tokens, 1) if per_token_loss else num_tokens.clamp(min=1) * len(microbatches)
        weight = num_tokens / max(total_tokens, 1) if per_token_loss else 1 / len(microbatches)
        objective = loss_sum / denominator + model.router_losses() * weight
        for ahead_sum, count in model.losses_ahead:
            factor = model.config.mtp_loss_scaling_factor / len(model.losses_ahead)
            objective = objective + factor * weight * ahead_sum / count.clamp(min=1)
        before_backward(number)
        objective.backward()
        losses = [(loss_sum, num_tokens), *model.losses_ahead]
        sums += torch.tensor([[pair[0].item(), pair[1].item()] for pair in losses], dtype=sums.dtype)
    return sums


def gradient_copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients by parameter name."""
    parameters = model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


def clip_gradients(parameters: Iterable[nn.Parameter], clip_grad: float) -> float:
    """Scale the gradients by clip_grad / (norm + 1e-6) if that is below 1 and clip_grad is not 0.

    Returns their norm before, in at least fp32; 0.0 if no parameter has a gradient.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return 0.0
    norms = [torch.linalg.vector_norm(grad, dtype=at_least_fp32(grad.dtype)) for grad in grads]
    norm = torch.stack(norms).norm().item()
    coefficient = clip_grad / (norm + 1e-6)
    if clip_grad > 0.0 and coefficient < 1.0:
        for grad in grads:
            grad.mul_(coefficient)
    return norm


def _collect_counts(
    model: ReferenceGPT,
    microbatches: Sequence[Microbatch],
    data_parallel: int,
    before_forward: Callable[[int], None],
) -> None:
    """Run all forwards of a step for the counts of routers, where a loss needs those of all dp ranks."""
    mixtures = model.experts()
    if not any("global_aux_loss" in mixture.config.moe_router_load_balancing_type for mixture in mixtures):
        return
    for mixture in mixtures:
        mixture.sets.size, mixture.sets.collects = data_parallel, True
    with torch.no_grad():
        for number, microbatch in enumerate(microbatches):
            before_forward(number)
            model(**microbatch)
    for mixture in mixtures:
        mixture.sets.collects = False


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
        if parameter.requires_grad
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


# -------------------------------- Muon on whole parameters: attention, MLPs and experts; everything else with AdamW

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
SIMPLE = ((3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True)
class MuonOptions:
    """The options of Muon; its learning rate and weight decay are those of AdamW."""

    momentum: float
    nesterov: bool
    coefficient_type: str
    num_steps: int
    scale_mode: str
    extra_scale_factor: float
    splits_qkv: bool
    # (matrix [outputs, inputs], number of the step, lr, weight decay) -> update, instead of Muon's
    direction: Callable[[Tensor, int, float, float], Tensor] | None = None


def hidden_matrices(model: nn.Module, splits_qkv: bool) -> dict[str, Any]:
    """Return, by name of the parameter, a function that yields its matrices as (rows, whether it is transposed)."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            for child, parts in (module.config.mixer_matrices or {}).items():
                weight = f"self_attention.{child}.weight"
                halves = torch.arange(len(module.get_parameter(weight))).chunk(parts)
                found[f"{name}.{weight}"] = [(part, False) for part in halves]
        elif isinstance(module, LatentAttention):
            linears = (child for child, linear in module.named_children() if isinstance(linear, nn.Linear))
            found |= {f"{name}.{child}.weight": [(None, False)] for child in linears}
        elif isinstance(module, SelfAttention):
            config = module.config
            groups, width = config.num_query_groups, config.kv_channels
            per_group = config.num_attention_heads // groups
            # the kind of each row: 0 query, 1 key, 2 value, 3 gate
            gates = [3] * per_group if config.attention_output_gate else []
            kinds = torch.tensor([0] * per_group + gates + [1, 2]).repeat_interleave(width).repeat(groups)
            rows = [(kinds == kind).nonzero().flatten() for kind in range(4) if kind < 3 or gates]
            found[f"{name}.linear_qkv.weight"] = [(part, False) for part in rows] if splits_qkv else [(None, False)]
            found[f"{name}.linear_proj.weight"] = [(None, False)]
        elif isinstance(module, MLP):
            halves = torch.arange(len(module.linear_fc1.weight)).chunk(2 if module.config.gated else 1)
            found[f"{name}.linear_fc1.weight"] = [(part, False) for part in halves]
            found[f"{name}.linear_fc2.weight"] = [(None, False)]
        elif isinstance(module, Prediction):
            found[f"{name}.eh_proj.weight"] = [(None, False)]
        elif isinstance(module, Experts):
            count = module.config.num_experts or 1
            for weight, parts, is_transposed in (("weight1", count * module.gates, False), ("weight2", count, True)):
                chunks = torch.arange(len(getattr(module, weight))).chunk(parts)
                found[f"{name}.{weight}"] = [(part, is_transposed) for part in chunks]
    return found


class Muon(torch.optim.Optimizer):
    """groups: one parameter each, with "name", "weight_decay" and "decoupled". adamw: options of the others' AdamW."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], options: MuonOptions, **adamw: Any) -> None:
        self._matrices, self._options = hidden_matrices(model, options.splits_qkv), options
        self._number = 0
        super().__init__(groups, {"lr": 0.0})
        self._others = [group for group in self.param_groups if group["name"] not in self._matrices]
        self._adamw = torch.optim.AdamW([dict(group) for group in self._others], lr=0.0, foreach=False, **adamw)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, group in zip(self._others, self._adamw.param_groups, strict=True):
            group["lr"], group["weight_decay"] = own["lr"], own["weight_decay"]
        self._adamw.step()
        self._number += 1
        options = self._options
        for group in self.param_groups:
            (parameter,) = group["params"]
            if group["name"] not in self._matrices:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.mul_(options.momentum).add_(gradient, alpha=1 - options.momentum)
            update = momentum.clone()
            if options.nesterov:
                update = options.momentum * momentum + (1 - options.momentum) * gradient
            for rows, is_transposed in self._matrices[group["name"]]:
                part = slice(None) if rows is None else rows
                matrix = update[part]
                rates = self._number, group["lr"], group["weight_decay"]
                found = self._direction(matrix.T if is_transposed else matrix, *rates)
                update[part] = found.T if is_transposed else found
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)

    def _direction(self, matrix: Tensor, number: int, lr: float, decay: float) -> Tensor:
        """matrix: [outputs, inputs]."""
        if self._options.direction is not None:
            return self._options.direction(matrix, number, lr, decay)
        outputs, inputs = matrix.shape
        modes = {
            "spectral": max(outputs, inputs) ** 0.5,
            "unit_rms_norm": (outputs / inputs) ** 0.5,
            "shape_scaling": max(1.0, outputs / inputs) ** 0.5,
        }
        scale = self._options.extra_scale_factor * modes[self._options.scale_mode]
        return scale * newton_schulz(matrix, self._options)


def newton_schulz(matrix: Tensor, options: MuonOptions) -> Tensor:
    """Return U V^T of the matrix U S V^T, roughly."""
    x = matrix / torch.linalg.matrix_norm(matrix).clamp(min=1e-7)
    table = QUINTIC if options.coefficient_type == "quintic" else SIMPLE
    for step in range(options.num_steps):
        a, b, c = table[step % 5]
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        polynomial = b * gram + c * gram @ gram
        x = a * x + (polynomial @ x if x.shape[0] <= x.shape[1] else x @ polynomial)
    return x
