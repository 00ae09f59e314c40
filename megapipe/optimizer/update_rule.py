"""AdamW and SGD over flat tensors, by torch's fused kernels or another library's: one pass over all state.

`NarrowAdam` is AdamW where state is narrower than fp32, `CompiledAdam` one compiled pass that writes the weights, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.config.training import OptimizerConfig
from megapipe.optimizer.schedule import Rates
from megapipe.optimizer.shards import Chunk, Shard, UpdateRange
from megapipe.sharding.buffers import ALIGNMENT
from megapipe.sharding.state_dtypes import MASTER

FUSED_DEVICES = ("cpu", "cuda", "xpu", "meta")
TORCH_NAMES = {"momentum": "momentum_buffer"}  # of the moments, where they differ from ours


class AdamLibrary(Protocol):
    """A library that provides Adam: gpu.libraries.Apex or gpu.libraries.TransformerEngine."""

    def adam(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer: ...


class Rule:
    """The update rule of --optimizer. num_steps: its updates, the t of Adam's bias correction."""

    num_steps = 0

    def set_num_steps(self, num_steps: int) -> None:
        """Continue as after num_steps updates."""
        self.num_steps = num_steps

    def step(self, factor: float, rates: Rates) -> None:
        """Update the master weights with gradient x factor; the gradients hold the product afterwards."""
        raise NotImplementedError


class UpdateRule(Rule):
    """The rule of --optimizer over views of flat tensors, with one parameter group for each kind of run.

    AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) decouples the weight decay; SGD adds it to the gradient.
    library: provides Adam; None for torch's. A rank whose shards contain only padding has no runs and only counts its
    steps.
    """

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard], library: AdamLibrary | None = None) -> None:
        self._runs: list[tuple[Tensor, Shard, UpdateRange]] = []  # with the run's master weights
        kinds: dict[tuple[bool, bool], list[Tensor]] = {}  # (weight_decay, decoupled_lr) -> master weights of its runs
        for shard in shards:
            for run in shard.runs:
                master = shard.master.detach()[run.start : run.stop]
                master.grad = shard.updated_from[run.start : run.stop]
                kinds.setdefault((run.weight_decay, run.decoupled_lr), []).append(master)
                self._runs.append((master, shard, run))
        self._optimizer: torch.optim.Optimizer | None = None
        if not self._runs:
            return
        library = library if config.optimizer == "adam" else None
        device, betas = self._runs[0][0].device, (config.adam_beta1, config.adam_beta2)
        self._fused = library is None and device.type in FUSED_DEVICES  # a library does not scale gradients
        # for meta tensors torch refuses fused=True in the constructor, and SGD again in its first step, but runs it
        fused = self._fused and device.type != "meta"
        groups: list[dict[str, Any]] = [{"params": masters, "kind": kind} for kind, masters in kinds.items()]
        if config.optimizer == "sgd":
            self._optimizer = torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=fused)
        elif library is None:
            self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=fused)
        else:
            self._optimizer = library.adam(groups, config)
        for group in self._optimizer.param_groups:
            if library is None:
                group["fused"] = self._fused
            else:
                group["step"] = 0
        if fused != self._fused:
            self._optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
        for master, shard, run in self._runs:
            state = self._optimizer.state[master]
            for name, moment in shard.moments.items():  # zeros give the same first step as torch's missing momentum
                state[TORCH_NAMES.get(name, name)] = moment[run.start : run.stop]
            if config.optimizer != "sgd" and library is None:
                state["step"] = torch.zeros((), dtype=torch.float32, device=device if self._fused else None)

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        if self._optimizer is not None:
            for state in self._optimizer.state.values():  # torch's Adam counts steps by parameter
                if "step" in state:
                    state["step"].fill_(num_steps)
            for group in self._optimizer.param_groups:  # a library counts them by group
                if "step" in group:
                    group["step"] = num_steps

    def step(self, factor: float, rates: Rates) -> None:
        """Update the master weights with gradient x factor; the gradients hold the product afterwards."""
        self.num_steps += 1
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = rates.of(*group["kind"])
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


class CompiledAdam(Rule):
    """AdamW over fp32 state as one compiled pass over each run, which writes the parameters in their dtype as well.

    torch's fused kernel also writes the gradients that it scales, and the parameters take another pass: 42 bytes for
    each element with the norm, against 34 here. The gradients keep their raw sums. compiler: gpu.kernels.compiled.
    """

    def __init__(
        self, config: OptimizerConfig, shards: Sequence[Shard], compiler: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self._config, self._kernel = config, compiler(adamw_pass)
        self._runs = [(shard, run) for shard in shards for run in shard.runs]

    def step(self, factor: float, rates: Rates) -> None:
        """Update the master weights, and parameters that are copies of them, with gradient x factor."""
        self.num_steps += 1
        config = self._config
        first, second = (1 - beta**self.num_steps for beta in (config.adam_beta1, config.adam_beta2))
        for shard, run in self._runs:
            # with the padding, which stays zero: kernels for any number of rows of a known size are as fast as for one
            part = slice(run.start, run.start + -(-(run.stop - run.start) // ALIGNMENT) * ALIGNMENT)
            lr, weight_decay = rates.of(run.weight_decay, run.decoupled_lr)
            decay = 1 - lr * weight_decay
            # tensors on the host: as numbers each new value would compile the pass again
            scalars = (torch.tensor(value) for value in (factor, decay, lr / first, 1 / math.sqrt(second)))
            flat = [*(shard.states[name] for name in (MASTER, "exp_avg", "exp_avg_sq")), shard.updated_from]
            rows = [each.detach()[part].view(-1, ALIGNMENT) for each in flat]
            parameter = shard.parameter.detach()[part].view(-1, ALIGNMENT) if shard.has_own_master else None
            options = config.adam_beta1, config.adam_beta2, config.adam_eps
            self._kernel(*rows, parameter, *scalars, *options)


def adamw_pass(
    master: Tensor,  # fp32, as the next three, of one shape
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    parameter: Tensor | None,  # a copy of master in the model's dtype
    factor: Tensor,  # of the gradient; a scalar on the host, as the next three
    decay: Tensor,  # of the weights
    step_size: Tensor,
    inverse_root: Tensor,  # 1 / sqrt(1 - beta2^t)
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Update the first three and parameter in place, and return the first three."""
    scaled = gradient * factor
    first = exp_avg + (scaled - exp_avg) * (1 - beta1)
    second = exp_avg_sq * beta2 + scaled * scaled * (1 - beta2)
    updated = master * decay - step_size * first / (second.sqrt() * inverse_root + eps)
    if parameter is not None:
        parameter.copy_(updated)
    return master.copy_(updated), exp_avg.copy_(first), exp_avg_sq.copy_(second)


class NarrowAdam(Rule):
    """AdamW over shards whose gradients or moments are narrow, chunk by chunk: read in fp32, update with torch's fused
    kernel, write.

    Moments are read as they were rounded in the last step; the new ones enter the update before they are rounded.
    """

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        self._config = config
        self._chunks = [(shard, chunk) for shard in shards for chunk in shard.chunks()]

    def step(self, factor: float, rates: Rates) -> None:
        """Update the master weights with gradient x factor; the gradients hold the product afterwards, rounded."""
        self.num_steps += 1
        for shard, chunk in self._chunks:
            self._update(shard, chunk, factor, rates)

    # in a call of its own, so that its tensors are freed before the next chunk's are made
    def _update(self, shard: Shard, chunk: Chunk, factor: float, rates: Rates) -> None:
        """Update the states of a chunk; those in fp32, and such a gradient, where they are."""
        part = slice(chunk.start, chunk.stop)
        stored = {"gradient": shard.updated_from[part]}
        stored |= {name: state.detach()[part] for name, state in shard.states.items()}
        wide = {name: values.to(torch.float32) for name, values in stored.items()}
        gradient = wide["gradient"]
        spec, config = chunk.spec, self._config
        lr, weight_decay = rates.of(spec.weight_decay, spec.decoupled_lr)
        torch._fused_adamw_(
            [wide[MASTER]],
            [gradient],
            [wide["exp_avg"]],
            [wide["exp_avg_sq"]],
            [],
            [torch.full((), float(self.num_steps), device=gradient.device)],
            lr=lr,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            weight_decay=weight_decay,
            eps=config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if factor == 1.0 else torch.full((), 1.0 / factor, device=gradient.device),
        )
        for name, values in wide.items():
            if values is not stored[name]:
                stored[name].copy_(values)
