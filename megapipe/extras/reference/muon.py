"""Muon on whole parameters: the matrices of attention, MLPs and experts, everything else with AdamW."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.extras.reference.experts import MLP, Experts
from megapipe.extras.reference.gpt import LatentAttention, Prediction, SelfAttention

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
        if isinstance(module, LatentAttention):
            linears = (child for child, linear in module.named_children() if isinstance(linear, nn.Linear))
            found |= {f"{name}.{child}.weight": [(None, False)] for child in linears}
        elif isinstance(module, SelfAttention):
            config = module.config
            groups, width = config.num_query_groups, config.kv_channels
            per_group = config.num_attention_heads // groups
            # the kind of each row: 0 query, 1 key, 2 value
            kinds = torch.tensor([0] * per_group + [1, 2]).repeat_interleave(width).repeat(groups)
            rows = [(kinds == kind).nonzero().flatten() for kind in range(3)]
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
    for a, b, c in coefficients(options):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        polynomial = b * gram + c * gram @ gram
        x = a * x + (polynomial @ x if x.shape[0] <= x.shape[1] else x @ polynomial)
    return x


def coefficients(options: MuonOptions) -> Iterator[tuple[float, float, float]]:
    """Yield those of each step."""
    table = QUINTIC if options.coefficient_type == "quintic" else SIMPLE
    for step in range(options.num_steps):
        yield table[step % 5]
