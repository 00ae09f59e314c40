"""The experts that every token chose on the grid, against those that it chose in the oracle.

A token that chooses another expert changes every later number by far more than rounding does, so that the first tensor
that differs says little about the cause. Compared are sets of experts: their order is that of scores, which two equal
ones may exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import broadcast
from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedConfig
from megapipe.config.layers import expert_layers
from megapipe.extras.reference.experts import MoE as PlainMoE
from megapipe.model.context import Unit


@dataclass(frozen=True)
class OtherChoice:
    """One token that chose other experts on the grid."""

    layer: int
    microbatch: int  # of the global batch
    sequence: int  # of the microbatch
    token: int  # of the sequence
    grid: tuple[int, ...]
    plain: tuple[int, ...]


@dataclass(frozen=True)
class Routing:
    """The choices of one rank's tokens in one step. first: by layer, microbatch and token; None if all are the same."""

    num_choices: int = 0
    num_other: int = 0
    first: OtherChoice | None = None


NO_CHOICES = Routing()  # of a model without experts


class PlainChoices:
    """The choices in the oracle's model during one step, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        self._chosen: list[list[Tensor]] = []
        for module in model.modules():
            if isinstance(module, PlainMoE):
                self._chosen.append([])
                module.register_forward_hook(partial(self._keep, self._chosen[-1]))

    def _keep(self, kept: list[Tensor], module: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(module, PlainMoE) and module.chosen is not None
        if not module.sets.collects:  # a pass that only counts, before the one that is differentiated
            kept.append(module.chosen)

    def take(self) -> Tensor:
        """Return the choices since the last call [layers with experts, microbatches, b, s, k] int64."""
        taken = torch.stack([torch.stack(kept) for kept in self._chosen])
        for kept in self._chosen:
            kept.clear()
        return taken


class GridChoices:
    """The choices of this rank's routers during one step, by layer and microbatch of the global batch.

    A replay of recompute chooses again, in place of the first choice.
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._runtime = runtime
        self.chosen: dict[tuple[int, Unit], Tensor] = {}
        for module in runtime.stages.values():
            for number, router in module.routers().items():
                router.register_forward_hook(partial(self._keep, number))

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        context = inputs[1]  # of Router.forward
        self.chosen[layer, context.unit] = output[1].detach()

    def compare(self, plain: Tensor) -> Routing:
        """Return what differs from the oracle's choices, and forget those of the grid. plain: see PlainChoices.take."""
        plan, place = self._runtime.plan, self._runtime.coordinates
        held = []  # positions of each slice on this rank
        for of_slice in plan.slices:
            runs = self._runtime.sequence_part.runs(of_slice)
            positions = torch.cat([torch.arange(run.start, run.stop) for run in runs])
            held.append(positions.chunk(plan.topology.tp)[place.tp_rank].to(plain.device))
        layers = expert_layers(plan.config.model)
        num_choices = num_other = 0
        first: OtherChoice | None = None
        for (layer, (microbatch, number)), grid in sorted(self.chosen.items(), key=lambda item: item[0]):
            whole = plain[layers.index(layer), microbatch].transpose(0, 1)  # [s, b, k]
            own = whole[held[number]]
            grid, own = grid.view(own.shape).sort(-1).values, own.sort(-1).values
            other = (grid != own).any(-1)
            num_choices += other.numel()
            num_other += int(other.sum())
            if first is None and other.any():
                position, sequence = other.nonzero()[0].tolist()
                chosen = (tuple(each[position, sequence].tolist()) for each in (grid, own))
                first = OtherChoice(layer, microbatch, sequence, int(held[number][position]), *chosen)
        self.chosen.clear()
        return Routing(num_choices, num_other, first)


def broadcast_choices(
    choices: Tensor | None, config: ResolvedConfig, num_microbatches: int, world: Group, device: torch.device
) -> Tensor:
    """Return the oracle's choices, which rank 0 has, on every rank."""
    model = config.model
    shape = (len(expert_layers(config.model)), num_microbatches, config.training.micro_batch_size, model.seq_length)
    everywhere = torch.empty(*shape, model.moe_router_topk, dtype=torch.int64, device=device)
    if choices is not None:
        everywhere.copy_(choices)
    broadcast(everywhere, world)
    return everywhere


def check_all_compared(found: Sequence[Routing], config: ResolvedConfig, num_microbatches: int) -> None:
    """Raise RuntimeError unless the choice of every token in every layer was compared, on one rank each."""
    tokens = num_microbatches * config.training.micro_batch_size * config.model.seq_length
    wanted, compared = len(expert_layers(config.model)) * tokens, sum(routing.num_choices for routing in found)
    if compared != wanted:
        raise RuntimeError(
            f"the experts of {compared:,} tokens were compared, not of all {wanted:,}: the comparison proves nothing "
            "about the others"
        )
