"""AdamW and SGD over flat runs, by torch's fused kernels: one pass over gradient, master weight and moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.optimizer.shards import Run, Shard

FUSED_DEVICES = ("cpu", "cuda", "xpu")


class UpdateRule(Protocol):
    """Updates the master weights of all shards from their gradients."""

    num_steps: int

    def step(self, factor: float, lr: float, decoupled_lr: float, weight_decay: float) -> None: ...


def moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """The flat tensors of state that the rule keeps beside the master weights."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum",) if config.sgd_momentum else ()


def make_update_rule(config: OptimizerConfig, shards: Sequence[Shard]) -> UpdateRule:
    return AdamRule(config, shards) if config.optimizer == "adam" else SgdRule(config, shards)


class _FlatRule:
    """torch.optim over views of flat tensors, one parameter group for each kind of run.

    step multiplies the gradients by `factor`, in the kernel where it can: they hold the scaled values afterwards.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._kinds: dict[tuple[bool, bool], list[Tensor]] = {}  # (weight_decay, decoupled_lr) -> master runs
        self._runs: list[tuple[Tensor, Shard, Run]] = []
        for shard in shards:
            for run in shard.runs:
                master = shard.master.detach()[run.start : run.stop]
                master.grad = shard.gradient[run.start : run.stop]
                self._kinds.setdefault((run.weight_decay, run.decoupled_lr), []).append(master)
                self._runs.append((master, shard, run))
        self._fused = all(master.device.type in FUSED_DEVICES for master, _, _ in self._runs)

    def _groups(self) -> list[dict[str, object]]:
        return [{"params": masters, "kind": kind} for kind, masters in self._kinds.items()]

    def step(self, factor: float, lr: float, decoupled_lr: float, weight_decay: float) -> None:
        """One update with gradient x factor.

        weight_decay: of the runs that have any. decoupled_lr: of embedding and output layer.
        """
        for group in self.optimizer.param_groups:
            decayed, decoupled = group["kind"]
            group["lr"] = decoupled_lr if decoupled else lr
            group["weight_decay"] = weight_decay if decayed else 0.0
        self._scale_gradients(factor)
        self.optimizer.step()

    def _scale_gradients(self, factor: float) -> None:
        gradients = [master.grad for master, _, _ in self._runs if master.grad is not None]
        # the kernels divide by an fp32 scalar: too coarse for fp64
        in_kernel = self._fused and factor != 1.0 and all(gradient.dtype == torch.float32 for gradient in gradients)
        divisor = torch.tensor(1.0 / factor, dtype=torch.float32, device=gradients[0].device) if in_kernel and gradients else None
        self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if divisor is None and factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)


class AdamRule(_FlatRule):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decoupled weight decay."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        super().__init__(shards)
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=0.0, betas=betas, eps=config.adam_eps, fused=self._fused)
        for master, shard, run in self._runs:
            self.optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device if self._fused else None),
                **{name: moment[run.start : run.stop] for name, moment in shard.moments.items()},
            }

    @property
    def num_steps(self) -> int:
        """Updates made, the t of the bias correction."""
        return int(self.optimizer.state[self._runs[0][0]]["step"].item()) if self._runs else 0

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for master, _, _ in self._runs:
            self.optimizer.state[master]["step"].fill_(value)


class SgdRule(_FlatRule):
    """SGD with momentum; weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        super().__init__(shards)
        self.num_steps = 0
        self.optimizer = torch.optim.SGD(self._groups(), lr=0.0, momentum=config.sgd_momentum, fused=self._fused)
        for master, shard, run in self._runs:
            if "momentum" in shard.moments:  # zeros give the same first step as torch's none
                self.optimizer.state[master]["momentum_buffer"] = shard.moments["momentum"][run.start : run.stop]

    def step(self, factor: float, lr: float, decoupled_lr: float, weight_decay: float) -> None:
        super().step(factor, lr, decoupled_lr, weight_decay)
        self.num_steps += 1
