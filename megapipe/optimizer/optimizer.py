"""`Optimizer`: one update of this rank's shards from raw gradient sums, and the state that a checkpoint keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.groups import Group, ProcessGroups
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.gather import ParameterGather
from megapipe.optimizer.gradient_norm import clip_coefficient, count_zeros, sum_of_squares, sum_over_model
from megapipe.optimizer.loss_scale import LossScaler
from megapipe.optimizer.shards import make_shards
from megapipe.optimizer.update_rule import make_update_rule, moment_names
from megapipe.sharding.boxes import Piece


@dataclass(frozen=True)
class StepReport:
    """What one step did; equal on all ranks.

    grad_norm: global norm of the averaged gradient before clipping, NaN or infinite after an overflow. skipped: nothing was updated,
    because of that. loss_scale: what this step's losses were multiplied with. num_zeros: elements of the gradient that are exactly zero,
    None unless asked for.
    """

    grad_norm: float
    clip_coefficient: float
    skipped: bool
    loss_scale: float
    num_zeros: int | None


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state: `key` is 'master', 'exp_avg', 'exp_avg_sq' or 'momentum'; values: [piece.box.num_elements], a view.

    primary: of all ranks that hold these elements, this one writes them (first tp replica, first dp replica, not the tied copy).
    """

    key: str
    stage: int
    piece: Piece
    primary: bool
    values: Tensor


class Optimizer:
    """AdamW or SGD over the shards of this rank's stages, with loss scale, global-norm clipping and fp32 (fp64) master weights.

    stages: buffers by stage index, their parameters filled: masters start as copies of them. groups: replicas, dp_cp, tp, model are used.
    gather: started after each update; needed with sharded buffers and more than one replica.
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        groups: ProcessGroups,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        gather: ParameterGather | None = None,
    ) -> None:
        self.scaler = LossScaler.of(precision)
        self._gather = gather
        self._clip_grad = config.clip_grad
        self._replica = groups.replicas.rank
        self._sharded = any(buffer.layout.num_shards > 1 for buffers in stages.values() for buffer in buffers.buffers)
        holders = [rank for rank in groups.model.ranks if rank in groups.replicas.ranks]  # two in a mirrored pipeline
        counts = self._sharded or groups.model.global_rank == holders[0]
        self._shards = make_shards(stages, self._replica, groups.tp.rank, groups.tp.size, moment_names(config), counts)
        self._rule = make_update_rule(config, self._shards)
        if self._sharded and gather is None:
            raise ValueError("sharded buffers need a ParameterGather: without it ranks keep stale parameters")
        self._device = next(iter(stages.values())).device
        # the shards of a sharded optimizer add up; unsharded, every copy of the model holds the same gradients
        self._sum_groups: list[Group] = [groups.dp_cp, groups.model] if self._sharded else [groups.model]

    @property
    def loss_scale(self) -> float:
        """What the losses of the next backward are multiplied with."""
        return self.scaler.scale

    @property
    def masters_are_parameters(self) -> bool:
        """True where weights and master weights are the same memory (fp32, fp64), so that a checkpoint needs one of them."""
        return not any(shard.has_own_master for shard in self._shards)

    @torch.no_grad()
    def step(
        self,
        gradient_factor: float,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        *,
        count_zero_gradients: bool = False,
    ) -> StepReport:
        """Update the parameters from the reduced gradients, which are raw sums over microbatches and replicas of loss x loss_scale.

        gradient_factor: 1 / (microbatches x dp), or 1 / tokens of the global batch; the loss scale is divided out here.
        decoupled_lr: of embedding and output layer, lr if None. Gradients hold the clipped averages afterwards.
        An infinite or NaN norm skips the update; the caller decides whether training goes on.
        """
        if self._gather is not None:
            self._gather.finish()
        loss_scale = self.scaler.scale
        factor = gradient_factor / loss_scale
        raw_norm, num_zeros = self._measure(count_zero_gradients)
        norm = factor * raw_norm
        coefficient = clip_coefficient(norm, self._clip_grad)
        skipped = not math.isfinite(norm)
        if not skipped:
            self._rule.step(factor * coefficient, lr, lr if decoupled_lr is None else decoupled_lr, weight_decay)
            self.masters_to_parameters()
        self.scaler.update(skipped)
        return StepReport(norm, coefficient, skipped, loss_scale, num_zeros)

    @torch.no_grad()
    def update(self, gradient_factor: float, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> None:
        """Update the newest version of the parameters by this rank alone: without a norm, without clipping, without a look for NaN.

        For asynchronous schedules, whose ranks update at times of their own. Arguments and gradients as in `step`.
        """
        if self._gather is not None:
            self._gather.finish()
        self._rule.step(gradient_factor / self.scaler.scale, lr, lr if decoupled_lr is None else decoupled_lr, weight_decay)
        self.masters_to_parameters()

    @torch.no_grad()
    def last_update(self, count_zero_gradients: bool = False) -> StepReport:
        """What `step` would have reported of the gradients that the last `update` has left; called by all ranks."""
        norm, num_zeros = self._measure(count_zero_gradients)
        return StepReport(norm, 1.0, False, self.scaler.scale, num_zeros)

    @torch.no_grad()
    def masters_to_parameters(self) -> None:
        """Write this rank's master weights into the parameters, cast to their dtype, and start collecting those of the other ranks."""
        for shard in self._shards:
            if shard.has_own_master:
                shard.parameter.copy_(shard.master)
        if self._gather is not None:
            self._gather.start()

    @torch.no_grad()
    def parameters_to_masters(self) -> None:
        """Take the parameters as master weights: after weights were loaded without optimizer state."""
        if self._gather is not None:
            self._gather.finish()
        for shard in self._shards:
            if shard.has_own_master:
                shard.master.copy_(shard.parameter)

    @torch.no_grad()
    def parameters_norm(self) -> float:
        """Global norm of the master weights, vocabulary padding left out."""
        owned = (shard.master[low:high] for shard in self._shards for low, high in shard.counted.exact)
        return math.sqrt(sum_over_model([sum_of_squares(owned, self._device)], self._sum_groups)[0])

    @torch.no_grad()
    def nonfinite_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are infinite or NaN in this rank's shards: where to look after a skipped step."""
        found: dict[str, None] = {}
        for shard in self._shards:
            for position, piece in shard.pieces():
                if not torch.isfinite(shard.gradient[position : position + piece.box.num_elements]).all():
                    found[piece.spec.name] = None
        return list(found)

    def state(self) -> Iterator[StatePiece]:
        """This rank's optimizer state as boxes of global tensors. Loading writes into `values` and ends with masters_to_parameters()."""
        for shard in self._shards:
            for key, tensor in (("master", shard.master), *shard.moments.items()):
                for position, piece in shard.pieces():
                    primary = piece.owned and not shard.is_copy and (self._sharded or self._replica == 0)
                    yield StatePiece(key, shard.stage, piece, primary, tensor[position : position + piece.box.num_elements])

    def plain_state(self) -> dict[str, Any]:
        """What is not a tensor: updates made, loss scaler."""
        return {"num_steps": self._rule.num_steps, "loss_scaler": self.scaler.state()}

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        self._rule.set_num_steps(int(state["num_steps"]))
        self.scaler.load_state(state["loss_scaler"])

    def _measure(self, count_zero_gradients: bool) -> tuple[float, int | None]:
        """Global norm of the raw gradients, and how many of them are zero."""
        owned = (shard.gradient[low:high] for shard in self._shards for low, high in shard.counted.merged)
        values = [sum_of_squares(owned, self._device)]
        if count_zero_gradients:
            exact = (shard.gradient[low:high] for shard in self._shards for low, high in shard.counted.exact)
            values.append(count_zeros(exact, self._device))
        summed = sum_over_model(values, self._sum_groups)
        return math.sqrt(summed[0]), int(summed[1]) if count_zero_gradients else None
