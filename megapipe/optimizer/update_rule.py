"""AdamW and SGD over flat tensors, by torch's fused kernels or another library's: one pass over all state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.config.training import OptimizerConfig
from megapipe.optimizer.shards import Run, Shard

FUSED_DEVICES = ("cpu", "cuda", "xpu", "meta")


class UpdateRates(NamedTuple):
    """Rates of one update. decoupled_lr: of embedding and output layer. weight_decay: of the runs that have any."""

    lr: float
    decoupled_lr: float
    weight_decay: float


class AdamLibrary(Protocol):
    """A library that provides Adam: gpu.libraries.Apex or gpu.libraries.TransformerEngine."""

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer: ...


def moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """Return the names of the flat state tensors that the rule keeps in addition to the master weights."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum",) if config.sgd_momentum else ()


def make_update_rule(
    config: OptimizerConfig, shards: Sequence[Shard], library: AdamLibrary | None = None
) -> UpdateRule:
    """Return the rule of --optimizer over the shards. library: provides Adam; None for torch's."""
    if library is not None and config.optimizer == "adam":
        return LibraryAdamRule(config, shards, library)
    return AdamRule(config, shards) if config.optimizer == "adam" else SgdRule(config, shards)


class UpdateRule(ABC):
    """An optimizer of torch over views of flat tensors, with one parameter group for each kind of run.

    A rank whose shards contain only padding has no runs and only counts its steps.
    """

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        self._config = config
        self.num_steps = 0
        self._runs: list[tuple[Tensor, Shard, Run]] = []  # with the run's master weights
        kinds: dict[tuple[bool, bool], list[Tensor]] = {}  # (weight_decay, decoupled_lr) -> master weights of its runs
        for shard in shards:
            for run in shard.runs:
                master = shard.master.detach()[run.start : run.stop]
                master.grad = shard.updated_from[run.start : run.stop]
                kinds.setdefault((run.weight_decay, run.decoupled_lr), []).append(master)
                self._runs.append((master, shard, run))
        devices = {master.device.type for master, _, _ in self._runs}
        self._fused = devices <= set(FUSED_DEVICES)
        # on the meta device torch refuses fused=True in the constructor, but runs it when set later
        self._fused_at_construction = self._fused and "meta" not in devices
        self._optimizer: torch.optim.Optimizer | None = None
        if self._runs:
            self._optimizer = self._build([{"params": masters, "kind": kind} for kind, masters in kinds.items()])
            if self._fused and not self._fused_at_construction:
                for group in self._optimizer.param_groups:
                    group["fused"] = True

    @abstractmethod
    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        """Return torch's optimizer over the runs, with its state in the shards' moments."""

    def set_num_steps(self, num_steps: int) -> None:
        """Continue as after num_steps updates, the t of Adam's bias correction."""
        self.num_steps = num_steps

    def step(self, factor: float, rates: UpdateRates) -> None:
        """Update the master weights with gradient x factor; the gradients hold the product afterwards."""
        self.num_steps += 1
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            decayed, decoupled = group["kind"]
            group["lr"] = rates.decoupled_lr if decoupled else rates.lr
            group["weight_decay"] = rates.weight_decay if decayed else 0.0
        gradients = [shard.updated_from[run.start : run.stop] for _, shard, run in self._runs]
        divisor = None
        if factor != 1.0:
            # fused kernels divide by an fp32 scalar, which is too coarse for fp64
            if self._fused and gradients[0].dtype == torch.float32:
                # torch.full: filled on the device, no copy from the host
                divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=gradients[0].device)
            else:
                torch._foreach_mul_(gradients, factor)
        self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._optimizer.found_inf = None  # type: ignore[attr-defined]
        self._optimizer.step()


class AdamRule(UpdateRule):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decoupled weight decay."""

    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        betas = (self._config.adam_beta1, self._config.adam_beta2)
        optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=betas, eps=self._config.adam_eps, fused=self._fused_at_construction
        )
        for master, shard, run in self._runs:
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device if self._fused else None),
                **{name: moment[run.start : run.stop] for name, moment in shard.moments.items()},
            }
        return optimizer

    def set_num_steps(self, num_steps: int) -> None:
        super().set_num_steps(num_steps)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                state["step"].fill_(num_steps)


class LibraryAdamRule(UpdateRule):
    """AdamW of a library that keeps exp_avg and exp_avg_sq by parameter and counts steps in its groups' 'step'."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard], library: AdamLibrary) -> None:
        self._library = library
        super().__init__(config, shards)
        self._fused = False  # the library does not scale gradients

    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        optimizer = self._library.adam(groups, self._config)
        for group in optimizer.param_groups:
            group["step"] = 0
        for master, shard, run in self._runs:
            optimizer.state[master] = {name: moment[run.start : run.stop] for name, moment in shard.moments.items()}
        return optimizer

    def set_num_steps(self, num_steps: int) -> None:
        super().set_num_steps(num_steps)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["step"] = num_steps


class SgdRule(UpdateRule):
    """SGD with momentum; weight decay is added to the gradient."""

    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        momentum = self._config.sgd_momentum
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=self._fused_at_construction)
        for master, shard, run in self._runs:
            if "momentum" in shard.moments:  # zeros give the same first step as torch's missing buffer
                optimizer.state[master]["momentum_buffer"] = shard.moments["momentum"][run.start : run.stop]
        return optimizer
