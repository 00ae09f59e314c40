"""AdamW and SGD over flat runs, by torch's fused kernels or another library's: one pass over gradient, master weight and moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.optimizer.shards import Run, Shard

FUSED_DEVICES = ("cpu", "cuda", "xpu", "meta")


class UpdateRule(Protocol):
    """Updates the master weights of all shards from their gradients."""

    num_steps: int

    def set_num_steps(self, num_steps: int) -> None: ...

    def step(self, factor: float, lr: float, decoupled_lr: float, weight_decay: float) -> None: ...


class AdamLibrary(Protocol):
    """A library's Adam: kernels.apex, kernels.transformer_engine."""

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer: ...


def moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """The flat tensors of state that the rule keeps beside the master weights."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum",) if config.sgd_momentum else ()


def make_update_rule(
    config: OptimizerConfig, shards: Sequence[Shard], library: AdamLibrary | None = None
) -> UpdateRule:
    """library: whose Adam it is, None: torch's."""
    if library is not None and config.optimizer == "adam":
        return LibraryAdamRule(config, shards, library)
    return AdamRule(config, shards) if config.optimizer == "adam" else SgdRule(config, shards)


class _FlatRule(ABC):
    """torch.optim over views of flat tensors, one parameter group for each kind of run.

    step multiplies the gradients by `factor`, in the kernel where it can: they hold the scaled values afterwards. A rank whose shards
    are all padding has no runs and only counts its steps.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._kinds: dict[tuple[bool, bool], list[Tensor]] = {}  # (weight_decay, decoupled_lr) -> master runs
        self._runs: list[tuple[Tensor, Shard, Run]] = []
        for shard in shards:
            for run in shard.runs:
                master = shard.master.detach()[run.start : run.stop]
                master.grad = shard.updated_from[run.start : run.stop]
                self._kinds.setdefault((run.weight_decay, run.decoupled_lr), []).append(master)
                self._runs.append((master, shard, run))
        self._fused = all(master.device.type in FUSED_DEVICES for master, _, _ in self._runs)
        self.num_steps = 0
        # torch refuses to build what runs fused on the meta device, and runs it
        self._asks_for_fused = self._fused and all(master.device.type != "meta" for master, _, _ in self._runs)
        self._optimizer = (
            self._build([{"params": masters, "kind": kind} for kind, masters in self._kinds.items()])
            if self._runs
            else None
        )
        if self._optimizer is not None and self._fused and not self._asks_for_fused:
            for group in self._optimizer.param_groups:
                group["fused"] = True

    @abstractmethod
    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        """torch's optimizer over the runs, its state in the shards' moments."""

    def set_num_steps(self, num_steps: int) -> None:
        """Go on as if num_steps updates had been made (they are the t of Adam's bias correction)."""
        self.num_steps = num_steps

    def step(self, factor: float, lr: float, decoupled_lr: float, weight_decay: float) -> None:
        """One update with gradient x factor.

        weight_decay: of the runs that have any. decoupled_lr: of embedding and output layer.
        """
        self.num_steps += 1
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            decayed, decoupled = group["kind"]
            group["lr"] = decoupled_lr if decoupled else lr
            group["weight_decay"] = weight_decay if decayed else 0.0
        gradients = [shard.updated_from[run.start : run.stop] for _, shard, run in self._runs]
        divisor = None
        if factor != 1.0:
            # the kernels divide by an fp32 scalar: too coarse for fp64
            if self._fused and gradients[0].dtype == torch.float32:
                divisor = torch.full(
                    (), 1.0 / factor, dtype=torch.float32, device=gradients[0].device
                )  # no copy from the host
            else:
                torch._foreach_mul_(gradients, factor)
        self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._optimizer.found_inf = None  # type: ignore[attr-defined]
        self._optimizer.step()


class AdamRule(_FlatRule):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decoupled weight decay."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        self._config = config
        super().__init__(shards)

    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        betas = (self._config.adam_beta1, self._config.adam_beta2)
        optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=betas, eps=self._config.adam_eps, fused=self._asks_for_fused
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


class LibraryAdamRule(_FlatRule):
    """AdamW of a library whose optimizer keeps exp_avg and exp_avg_sq by parameter and counts steps in its groups' 'step'."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard], library: AdamLibrary) -> None:
        self._config, self._library = config, library
        super().__init__(shards)
        self._fused = False  # gradients are scaled before it

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


class SgdRule(_FlatRule):
    """SGD with momentum; weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        self._config = config
        super().__init__(shards)

    def _build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=self._config.sgd_momentum, fused=self._asks_for_fused)
        for master, shard, run in self._runs:
            if "momentum" in shard.moments:  # zeros give the same first step as torch's none
                optimizer.state[master]["momentum_buffer"] = shard.moments["momentum"][run.start : run.stop]
        return optimizer
