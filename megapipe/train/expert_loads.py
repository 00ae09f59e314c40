"""`ExpertLoads`: the tokens that each expert gets in a step, and the biases that balance them without a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.config.layers import expert_layers


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
        self._routers = [found[layer] for layer in self.layers]
        self._groups = (runtime.groups.tp, runtime.groups.replicas)  # whose ranks route other tokens
        model = runtime.plan.config.model
        self._updates = model.moe_router_enable_expert_bias
        self._rate = model.moe_router_bias_update_rate
        self._runtime = runtime
        self._kept: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []  # of the last step: loads, dropped, losses
        self._before: list[Tensor] | None = None  # biases before an update that may be undone

    def clear(self) -> None:
        """Forget the loads of forwards that belong to no step."""
        for router in self._routers:
            router.clear()

    def start(self, is_ahead: bool) -> None:
        """Sum the loads of the step's forwards. is_ahead: the next forwards precede `settle`, so update now."""
        self._kept = [router.take() for router in self._routers]
        if not self._updates or not self._routers:
            return
        self._loads = torch.stack([loads for loads, _, _ in self._kept])  # [layers, experts]
        for group in self._groups:
            all_reduce(self._loads, group)
        if is_ahead:
            self._update()

    def settle(self, skipped: bool) -> None:
        """Update the biases once it is known that the step is not skipped, or undo an update of a skipped one."""
        if not self._updates or not self._routers:
            return
        before, self._before = self._before, None
        if before is None and not skipped:
            self._update()
            self._before = None
        elif before is not None and skipped:
            for router, bias in zip(self._routers, before, strict=True):
                assert router.expert_bias is not None
                router.expert_bias.copy_(bias)

    def report(self, num_microbatches: int) -> ExpertReport | None:
        """Return what all ranks' routers did in the last step; None without experts. A collective of the world.

        num_microbatches: of the global batch.
        """
        plan = self._runtime.plan
        model = plan.config.model
        layers = expert_layers(model)
        if not layers:
            return None
        names = [name for name in ("z_loss", *model.balance_losses) if name != "z_loss" or model.moe_z_loss_coeff]
        experts = model.num_experts or 0
        numbers = torch.zeros(len(layers), experts + 1 + len(names), dtype=torch.float64, device=self._runtime.device)
        for layer, (loads, dropped, losses) in zip(self.layers, self._kept, strict=False):
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

    def _update(self) -> None:
        excess = self._loads * self._loads.shape[1] - self._loads.sum(1, keepdim=True)  # exact: int64
        biases = [router.expert_bias for router in self._routers if router.expert_bias is not None]
        self._before = [bias.clone() for bias in biases]
        for bias, sign in zip(biases, excess.sign().to(torch.float32), strict=True):
            bias.sub_(sign, alpha=self._rate)
