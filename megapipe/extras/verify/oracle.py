"""`Oracle`: the plain model of megapipe.extras.reference, trained in one process in fp64 on the global batches that the
grid sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.microbatches import to_microbatch
from megapipe.config.config import ResolvedConfig
from megapipe.extras.reference.asynchronous import Delays, asynchronous_step
from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import Microbatch, StepResult, build_optimizer, reference_step
from megapipe.extras.verify.inputs import GlobalBatch
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.families import SCHEDULES
from megapipe.tensor_parallel.random import DropoutKey, keyed_mask
from megapipe.train.state import Rates

FROM_TRAINING = ("label_smoothing", "z_loss")  # fields of ReferenceConfig that the training section has
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}


@dataclass(frozen=True)
class OracleStep:
    """One step of the oracle.

    loss: before the update. grad_norm, gradients: averaged over the global batch, before clipping. weights: after the
    update. Gradients and weights are whole tensors by name.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Oracle:
    """The reference model with the configuration's optimizer.

    config: its grid matters only for the dropout masks. weights: whole tensors by name, vocabulary padding
    included.
    """

    def __init__(
        self,
        config: ResolvedConfig,
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
            weight_decay=1.0,  # marks the groups that decay; `step` sets their real weight decay
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            momentum=optimizer.sgd_momentum,
        )
        self._decaying = [group for group in self._optimizer.param_groups if group["weight_decay"]]

    def step(self, batch: GlobalBatch, step: int, rates: Rates) -> OracleStep:
        """Make one optimizer step. step: the number that the grid's dropout keys carry."""
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
    """An emulation of an asynchronous schedule: gradients are those of the step's last update, weights those after
    it."""

    def __init__(
        self,
        plan: RunPlan,  # gives each parameter's stage, the microbatches of an update and the number of replicas
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(plan.config, weights, dtype, device)
        group = plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or 1
        self._dp = plan.topology.dp
        has_groups = SCHEDULES[plan.schedule_name].takes_group_size
        self._delays = Delays.pipedream_2bw(group) if has_groups else Delays.pipedream(plan.topology.pp)
        self._stage_of = {spec.name: stage for stage, specs in enumerate(plan.stage_specs) for spec in specs}

    def _train(self, microbatches: Sequence[Microbatch], rates: Rates) -> StepResult:
        by_number = [microbatches[first : first + self._dp] for first in range(0, len(microbatches), self._dp)]
        return asynchronous_step(
            self.model, self._optimizer, by_number, self._stage_of, self._delays, rates.lr, rates.decoupled_lr
        )


def reference_config(config: ResolvedConfig) -> ReferenceConfig:
    """Return the reference model's configuration.

    Every option of a resolved model section has a field of the same name there, or no effect on the result.
    """
    names = {field.name for field in dataclasses.fields(ReferenceConfig)}
    values = {name: value for name, value in vars(config.model).items() if name in names}
    return ReferenceConfig(**values, **{name: getattr(config.training, name) for name in FROM_TRAINING})


@dataclass(frozen=True)
class GridMasks:
    """The reference's `DropoutMasks`: whole masks, concatenated from the slices that the tp ranks of a grid draw.

    The mask of attention probabilities is cut by heads; that of hidden states by the sequence under sequence
    parallelism, else all tp ranks share one stream. The grid draws hidden states as [s, b, h]; the reference wants [b,
    s, h].
    """

    config: ResolvedConfig
    key: DropoutKey
    dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"

    def __call__(self, layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
        """Return the mask divided by 1 - p. shape: [b, heads, s, s] for attention_probs, else [b, s, h]."""
        model, tp = self.config.model, self.config.parallel.tensor_model_parallel_size
        if site == "attention_probs":
            rate, (batch, heads, *square) = model.attention_dropout, shape
            local: tuple[int, ...] = (batch, heads // tp, *square)
            kept = torch.cat([self._kept(local, rate, layer, site, rank) for rank in range(tp)], dim=1)
        else:
            rate, (batch, seq, hidden) = model.hidden_dropout, shape
            if self.config.parallel.sequence_parallel:
                local = (seq // tp, batch, hidden)
                kept = torch.cat([self._kept(local, rate, layer, site, rank) for rank in range(tp)])
            else:
                kept = self._kept((seq, batch, hidden), rate, layer, site, None)
            kept = kept.transpose(0, 1)
        return kept.to(self.dtype) / (1.0 - rate)

    def _kept(self, shape: tuple[int, ...], rate: float, layer: int, site: str, tp_rank: int | None) -> Tensor:
        return keyed_mask(shape, rate, self.key, layer, site, tp_rank, self.device)
