"""One optimizer step: forwards and backwards, average of the loss, gradient reduction, update;
`ExpertLoads`: the tokens that each expert gets in a step, and the biases that balance them without a loss.

The reported loss is the mean over the tokens of the global batch that a loss mask leaves, as in Megatron. What is
differentiated is the mean of the microbatches' means, or with --calculate-per-token-loss the reported one; they differ
only under a loss mask. Gradients are raw sums over microbatches and replicas; the optimizer divides them by
`PendingLoss.denominator_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.assembly.microbatches import Microbatches
from megapipe.assembly.runtime import InferenceRuntime, TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.config.layers import expert_layers
from megapipe.data.batch import Batch
from megapipe.data.loader import Loader
from megapipe.gpu.device_clock import Timers
from megapipe.gpu.streams import HostCopy
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.monitor.heartbeat import READING
from megapipe.optimizer.optimizer import StepReport
from megapipe.optimizer.schedule import Rates
from megapipe.pipeline.engine import Step
from megapipe.plan.run_plan import RunPlan


class StepLoss(NamedTuple):
    """The loss of a global batch, the same on every rank. ahead: of each module of multi-token prediction."""

    loss: float
    num_tokens: float
    ahead: tuple[float, ...] = ()


@dataclass(frozen=True)
class PendingLoss:
    """This rank's part of a `StepLoss`.

    totals: [3 + 2 modules of multi-token prediction] fp64: loss sum, tokens, sum of the microbatches' means; of each
    module loss sum and tokens. They are summed over the world.
    """

    totals: Tensor
    world: Group
    per_token: bool
    num_microbatches: float  # of the global batch
    all_tokens: float  # of the global batch, also those that a loss mask hides

    def denominator_of(self, num_tokens: float) -> float:
        """Return the divisor of the raw gradient sums. num_tokens: of the global batch, for those over tokens."""
        return max(num_tokens, 1.0) if self.per_token else self.num_microbatches

    def gradient_factor(self, totals: Sequence[float]) -> float:
        """Return the factor that makes the average of the raw gradient sums. totals: the values of the summed ones."""
        return 1.0 / self.denominator_of(self.of(totals).num_tokens)

    @cached_property
    def summed(self) -> StepLoss:
        """The loss of the totals summed over the world, which is waited for. A collective."""
        totals = self.totals.clone()
        return self.of(HostCopy(totals, all_reduce(totals, self.world, async_op=True)).values())

    def of(self, totals: Sequence[float]) -> StepLoss:
        """Return the loss from the values of the summed totals: without a mask the mean of means, which is that over
        tokens."""
        loss_sum, num_tokens, means, *ahead = totals
        is_over_tokens = self.per_token or num_tokens != self.all_tokens
        loss = loss_sum / max(num_tokens, 1.0) if is_over_tokens else means / self.num_microbatches
        pairs = zip(ahead[::2], ahead[1::2], strict=True)
        return StepLoss(loss, num_tokens, tuple(each / max(tokens, 1.0) for each, tokens in pairs))


@dataclass(frozen=True)
class LossAverage:
    """The rule of the average that is differentiated and of the reported one, which is always over tokens."""

    per_token: bool  # over the tokens of the global batch; else over each microbatch's tokens, then over microbatches
    microbatch_tokens: int  # of whole sequences, also those that a loss mask hides
    num_ahead: int = 0  # modules of multi-token prediction
    ahead_factor: float = 0.0  # on the mean of their losses

    @classmethod
    def of(cls, plan: RunPlan) -> LossAverage:
        """Return the rule of a run."""
        training = plan.config.training
        model = plan.config.model
        tokens, ahead = training.micro_batch_size * model.seq_length, model.mtp_num_layers or 0
        return cls(training.calculate_per_token_loss, tokens, ahead, model.mtp_loss_scaling_factor)

    def objective(self, loss_scale: Callable[[], float]) -> Any:
        """Return the engine's `loss`: StageLoss -> (scalar to differentiate, the same detached).

        loss_scale: called for every microbatch.
        """

        def scaled(output: StageLoss, payload: Any) -> tuple[Tensor, StageLoss]:
            objective = output.loss_sum if self.per_token else output.loss_sum / output.num_tokens.clamp(min=1)
            if output.ahead:
                # the mean over its own tokens weighs as much as that of the model's loss, as in Megatron
                means = sum(each.loss_sum / each.num_tokens.clamp(min=1) for each in output.ahead)
                weight = output.num_tokens if self.per_token else 1.0
                objective = objective + means * weight * (self.ahead_factor / len(output.ahead))
            scale = loss_scale()
            return (objective if scale == 1.0 else objective * scale), _detached(output)

        return scaled

    def pending(
        self, reports: list[StageLoss], groups: ProcessGroups, device: torch.device, num_microbatches: int
    ) -> PendingLoss:
        """Return the totals of this rank's reports, which only ranks of the last stage have.

        Each cp rank reports the loss of its tokens, and the number of tokens of whole sequences. They are summed over
        the world, so that every rank, whatever its stage, learns the loss. So does each slice of a microbatch.
        """
        slices = max(1, len(reports) // num_microbatches)
        if slices > 1:
            reports = [_joined(reports[start : start + slices]) for start in range(0, len(reports), slices)]
        totals = torch.zeros(3 + 2 * self.num_ahead, dtype=torch.float64, device=device)
        if reports and groups.tp.rank == 0:  # tp ranks report the same loss
            totals[0] = torch.stack([report.loss_sum for report in reports]).double().sum()
            if groups.cp.rank == 0:
                totals[1] = torch.stack([report.num_tokens for report in reports]).double().sum()
            # a microbatch whose tokens are all masked out counts 0
            means = [report.loss_sum / report.num_tokens.clamp(min=1) for report in reports]
            totals[2] = torch.stack(means).double().sum()
            for place, ahead in enumerate(zip(*(report.ahead for report in reports), strict=True)):
                totals[3 + 2 * place] = torch.stack([each.loss_sum for each in ahead]).double().sum()
                if groups.cp.rank == 0:
                    totals[4 + 2 * place] = torch.stack([each.num_tokens for each in ahead]).double().sum()
        count = float(num_microbatches * groups.dp.size)
        return PendingLoss(totals, groups.world, self.per_token, count, count * self.microbatch_tokens)


def _joined(slices: Sequence[StageLoss]) -> StageLoss:
    """Return the loss of a microbatch from those of its slices."""
    ahead = zip(*(each.ahead for each in slices), strict=True)
    total = torch.stack([each.loss_sum for each in slices]).sum()
    return StageLoss(total, slices[0].num_tokens, tuple(map(_joined, ahead)))


def _detached(output: StageLoss) -> StageLoss:
    return StageLoss(output.loss_sum.detach(), output.num_tokens, tuple(map(_detached, output.ahead)))


Routed = tuple[Tensor, Tensor, dict[str, Tensor]]  # by a router in a step: loads, dropped rows, losses


def sum_of_routed(one: Routed, other: Routed) -> Routed:
    """Return what a router did in the forwards of two sets of microbatches."""
    losses = {name: loss + other[2][name] for name, loss in one[2].items()}
    return one[0] + other[0], one[1] + other[1], losses


class StepResult(NamedTuple):
    """The outcome of one step: its `StepLoss`, before the update, and the update, the same on every rank."""

    loss: float
    num_tokens: float
    ahead: tuple[float, ...]
    update: StepReport
    routed: Sequence[Routed]  # what this rank's routers did, in the order of the layers


@dataclass(frozen=True)
class StepBatch:
    """The global batch of one training step, and the rates of the update."""

    step: int  # from 1
    first_sample: int  # samples consumed before it
    num_samples: int  # over all ranks
    microbatches: Microbatches  # of this rank
    rates: Rates


def read_microbatches(
    runtime: InferenceRuntime, loader: Loader, consumed: int, count: int, step: int | None
) -> Microbatches:
    """Return this rank's `count` microbatches after `consumed` samples of all ranks, each read when first asked for.

    step: None for evaluation, without dropout.
    """
    plan, dp_rank = runtime.plan, runtime.coordinates.dp_rank

    def read(k: int) -> Batch:
        with runtime.heartbeat.phase(READING):
            return loader.microbatch(consumed, k, dp_rank, plan.topology.dp, plan.config.training.micro_batch_size)

    return runtime.microbatches(count, read, step)


class TrainStep:
    """Forward and backward, reduction, update.

    The order: zero the gradients, run this rank's row of the schedule, finish the reductions, sum the loss and the norm
    over the world in one message, update the shards. The parameter all-gather that follows overlaps with the next
    step's forwards.
    """

    def __init__(self, runtime: TrainingRuntime, timers: Timers | None = None) -> None:
        self.runtime = runtime
        self._timers = timers or Timers(0, torch.device("cpu"))
        self._average = LossAverage.of(runtime.plan)
        self.expert_loads = ExpertLoads(runtime)
        self._count_zero_gradients = runtime.plan.config.logging.log_num_zeros_in_grad

    def run(self, microbatches: Microbatches, rates: Rates) -> StepResult:
        """Run one whole step. Raises nothing for a NaN: `update.skipped` and the loss show it."""
        pending, optimizer = self.gradients(microbatches), self.runtime.optimizer
        with self._timers.phase("optimizer"):
            # loss and norm in one message and one copy: the host waits for the device once per step
            update = optimizer.step(pending.gradient_factor, rates, self._count_zero_gradients, pending.totals)
            routed = self.expert_loads.take()
            if not update.skipped:
                self.expert_loads.balance(routed, self.expert_loads.biases)
        return StepResult(*pending.of(update.beside), update, routed)

    def advance(self, batch: StepBatch, following: StepBatch | None) -> list[tuple[StepBatch, StepResult]]:
        """Run one more step of a stream; return the steps whose results are known now, in order.

        following: the step after it, if the stream goes on; read by asynchronous schedules alone (`train.stream`).
        """
        return [(batch, self.run(batch.microbatches, batch.rates))]

    def gradients(self, microbatches: Sequence[Microbatch]) -> PendingLoss:
        """Run forward and backward and leave the reduced raw gradients in the buffers."""
        runtime, count = self.runtime, len(microbatches)
        engine, step = runtime.engine(count), self._engine_step(microbatches)
        self.expert_loads.clear()
        with self._timers.phase("forward-backward"):
            runtime.stores.begin_step(len(step.microbatches))  # with slices, each has gradients of its own
            reports = engine.run(step)
        with self._timers.phase("gradient-reduce"):
            runtime.stores.finish_gradients()
        if runtime.graphs is not None:
            runtime.graphs.after_step(step)
        return self._average.pending(reports, runtime.groups, runtime.device, count)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        """Return the loss of one global batch, by forwards without dropout."""
        runtime, count = self.runtime, len(microbatches)
        runtime.stores.finish_weights()
        step = runtime.step(microbatches, self._average.objective(lambda: 1.0), trains=False)
        reports = runtime.forward_engine(count, runtime.plan.num_slices).run(step)
        return self._average.pending(reports, runtime.groups, runtime.device, count).summed

    def _engine_step(self, microbatches: Sequence[Microbatch]) -> Step:
        runtime = self.runtime
        return runtime.step(microbatches, self._average.objective(lambda: runtime.optimizer.loss_scale), trains=True)


@dataclass(frozen=True)
class ExpertReport:
    """The routers' choices in one step, over the global batch. Lists are by layer with experts."""

    layers: tuple[int, ...]  # their numbers
    load: list[list[float]]  # of each expert, relative to the mean
    dropped: list[float]  # share of the rows
    losses: dict[str, list[float]]  # with their coefficients, the mean over microbatches

    @property
    def imbalance(self) -> list[float]:
        """The largest load of an expert."""
        return [max(load) for load in self.load]


class ExpertLoads:
    """The loads of the experts in this rank's layers over a global batch, and the routers' biases.

    Once a step each bias changes by --moe-router-bias-update-rate x sign(mean load - load), unless the step is skipped
    (Wang et al. 2024, arXiv:2408.15664). Loads count what tokens choose, before any is dropped. Called by all ranks
    together; nothing is done without experts.
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        found = {layer: router for module in runtime.stages.values() for layer, router in module.routers().items()}
        self.layers = tuple(sorted(found))
        self.routers = [found[layer] for layer in self.layers]
        self._groups = (runtime.groups.tp, runtime.groups.replicas)  # whose ranks route other tokens
        model = runtime.plan.config.model
        self._updates = model.moe_router_enable_expert_bias
        self._rate = model.moe_router_bias_update_rate
        self._runtime = runtime

    def clear(self) -> None:
        """Forget the loads of forwards that belong to no step."""
        for router in self.routers:
            router.clear()

    @property
    def biases(self) -> list[Tensor]:
        """The routers' biases, [experts] each."""
        return [router.expert_bias for router in self.routers if router.expert_bias is not None]

    def take(self) -> list[Routed]:
        """Return what the routers have done since the last call."""
        return [router.take() for router in self.routers]

    def balance(self, routed: Sequence[Routed], biases: Sequence[Tensor]) -> None:
        """Move biases by the loads of an update's forwards."""
        if not self._updates or not self.routers:
            return
        loads = torch.stack([loads for loads, _, _ in routed])  # [layers, experts]
        for group in self._groups:
            all_reduce(loads, group)
        excess = loads * loads.shape[1] - loads.sum(1, keepdim=True)  # exact: int64
        for bias, sign in zip(biases, excess.sign().to(torch.float32), strict=True):
            bias.sub_(sign, alpha=self._rate)

    def report(self, routed: Sequence[Routed], num_microbatches: int) -> ExpertReport | None:
        """Return what all ranks' routers did in a step; None without experts. A collective of the world.

        routed: of this rank. num_microbatches: of the global batch.
        """
        plan = self._runtime.plan
        model = plan.config.model
        layers = expert_layers(model)
        if not layers:
            return None
        names = [name for name in ("z_loss", *model.balance_losses) if name != "z_loss" or model.moe_z_loss_coeff]
        experts = model.num_experts or 0
        numbers = torch.zeros(len(layers), experts + 1 + len(names), dtype=torch.float64, device=self._runtime.device)
        for layer, (loads, dropped, losses) in zip(self.layers, routed, strict=True):
            row = numbers[layers.index(layer)]
            row[:experts], row[experts] = loads, dropped
            for place, name in enumerate(names, experts + 1):
                row[place] = losses[name]
        all_reduce(numbers, self._runtime.groups.world)  # every rank routes other tokens, or holds other layers
        rows = numbers.tolist()
        totals = [max(sum(row[:experts]), 1.0) for row in rows]
        return ExpertReport(
            layers,
            [[load * experts / total for load in row[:experts]] for row, total in zip(rows, totals, strict=True)],
            [row[experts] / total for row, total in zip(rows, totals, strict=True)],
            {name: [row[place] / num_microbatches for row in rows] for place, name in enumerate(names, experts + 1)},
        )
