"""`Oracle`: the plain model of megapipe.extras.reference, trained in one process on the global batches that the grid sees; as the grid's
schedule would train it, where that is not synchronous."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.microbatches import to_microbatch
from megapipe.config.config import Config
from megapipe.extras.reference.asynchronous import Delays, asynchronous_step
from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import Microbatch, StepResult, build_optimizer, reference_step
from megapipe.extras.verify.batches import GlobalBatch
from megapipe.extras.verify.masks import GridMasks
from megapipe.plan.run_plan import RunPlan
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.train.step import Rates

FROM_TRAINING = ("label_smoothing", "z_loss")
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}


@dataclass(frozen=True)
class OracleStep:
    """loss: before the update. grad_norm, gradients: averaged over the global batch, before clipping. weights: after the update. Whole
    tensors by name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Oracle:
    """config: resolved; its grid matters only for the dropout masks. weights: whole tensors by name, vocabulary padding included.

    dtype: of everything. The optimizer is the configuration's.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, torch.device(device)
        self.model = ReferenceGPT(reference_config(config)).to(self._device, dtype)
        self.model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
        optimizer = config.optimizer
        self._optimizer = build_optimizer(
            self.model,
            OPTIMIZERS[optimizer.optimizer],
            weight_decay=1.0,  # marks the groups that decay; their rate is each step's
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            momentum=optimizer.sgd_momentum,
        )
        self._decaying = [group for group in self._optimizer.param_groups if group["weight_decay"]]

    def step(self, batch: GlobalBatch, step: int, rates: Rates) -> OracleStep:
        """One optimizer step. step: the number that the grid's dropout keys carry."""
        for group in self._decaying:
            group["weight_decay"] = rates.weight_decay
        result = self._train([self._arguments(batch, number, step) for number in range(len(batch))], rates)
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        gradients = {name: result.grads.get(name, torch.zeros_like(weight)) for name, weight in weights.items()}
        return OracleStep(result.loss, result.grad_norm, gradients, weights)

    def _train(self, microbatches: Sequence[Microbatch], rates: Rates) -> StepResult:
        config = self._config
        return reference_step(
            self.model,
            self._optimizer,
            microbatches,
            per_token_loss=config.training.calculate_per_token_loss,
            clip_grad=config.optimizer.clip_grad,
            lr=rates.lr,
            decoupled_lr=rates.decoupled_lr,
        )

    def _arguments(self, batch: GlobalBatch, number: int, step: int) -> dict[str, Any]:
        key = DropoutKey(self._config.training.seed, step, number)
        microbatch = to_microbatch(batch[number], self._device, key)
        return {
            "tokens": microbatch.tokens,
            "labels": microbatch.labels,
            "loss_mask": torch.ones_like(microbatch.tokens) if microbatch.loss_mask is None else microbatch.loss_mask,
            "position_ids": microbatch.position_ids,
            "document_ids": microbatch.document_ids,
            "dropout_masks": GridMasks(self._config, key, self._dtype, self._device),
        }


class AsynchronousOracle(Oracle):
    """The emulation of an asynchronous schedule: gradients are those of the step's last update, weights those after it.

    plan: says on which stage each parameter lies, how many microbatches make an update, and how many replicas there are.
    """

    def __init__(
        self,
        plan: RunPlan,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(plan.config, weights, dtype, device)
        group = plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or 1
        self._dp = plan.topology.dp
        self._delays = {"pipedream": Delays.pipedream(plan.topology.pp), "pipedream-2bw": Delays.pipedream_2bw(group)}[
            plan.schedule_name
        ]
        self._stage_of = {spec.name: stage for stage, specs in enumerate(plan.stage_specs) for spec in specs}

    def _train(self, microbatches: Sequence[Microbatch], rates: Rates) -> StepResult:
        by_number = [microbatches[first : first + self._dp] for first in range(0, len(microbatches), self._dp)]
        return asynchronous_step(
            self.model, self._optimizer, by_number, self._stage_of, self._delays, rates.lr, rates.decoupled_lr
        )


def oracle_of(plan: RunPlan, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Oracle:
    """What the plan's grid has to equal."""
    if plan.is_synchronous:
        return Oracle(plan.config, weights, dtype, device)
    return AsynchronousOracle(plan, weights, dtype, device)


def run_oracle(
    config: Config,
    weights: Mapping[str, Tensor],
    batches: Sequence[GlobalBatch],
    rates: Sequence[Rates],
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> list[OracleStep]:
    """The oracle's steps over the given global batches, the first being step 0."""
    oracle = Oracle(config, weights, dtype, device)
    return [oracle.step(batch, step, rate) for step, (batch, rate) in enumerate(zip(batches, rates, strict=True))]


def reference_config(config: Config) -> ReferenceConfig:
    """The shape of the reference model; every option of a resolved model section has a field of its own name there, or no effect."""
    names = {field.name for field in dataclasses.fields(ReferenceConfig)}
    values = {name: value for name, value in vars(config.model).items() if name in names}
    return ReferenceConfig(**values, **{name: getattr(config.training, name) for name in FROM_TRAINING})
