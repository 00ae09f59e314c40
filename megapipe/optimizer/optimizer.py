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
from megapipe.data_parallel.checksum import raw_bytes
from megapipe.data_parallel.gather import ParameterGather
from megapipe.optimizer.gradient_norm import ModelSum, clip_coefficient, count_zeros, sum_of_squares
from megapipe.optimizer.loss_scale import LossScaler
from megapipe.optimizer.rollback import Confidence, KeptShards
from megapipe.optimizer.shards import make_shards
from megapipe.optimizer.update_rule import AdamLibrary, make_update_rule, moment_names
from megapipe.sharding.boxes import Piece


@dataclass(frozen=True)
class StepReport:
    """What one step did; equal on all ranks.

    grad_norm: global norm of the averaged gradient before clipping, NaN or infinite after an overflow. skipped: nothing was updated,
    because of that. loss_scale: what this step's losses were multiplied with. num_zeros: elements of the gradient that are exactly zero,
    None unless asked for. rolled_back: the update was made before its verdict and taken back; skipped, or made again with the clip, it
    left what an update after the verdict leaves. remark: what a person should know, else ''.
    """

    grad_norm: float
    clip_coefficient: float
    skipped: bool
    loss_scale: float
    num_zeros: int | None
    rolled_back: bool = False
    remark: str = ""


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


@dataclass(frozen=True)
class _Underway:
    """A step between `start` and `settle`. factor: what gradients are multiplied with, clip aside. is_ahead: the update has been made."""

    sums: ModelSum
    factor: float
    loss_scale: float
    rates: tuple[float, float, float]  # lr, decoupled lr, weight decay
    is_ahead: bool


class Optimizer:
    """AdamW or SGD over the shards of this rank's stages, with loss scale, global-norm clipping and fp32 (fp64) master weights.

    stages: buffers by stage index, their parameters filled: masters start as copies of them. groups: replicas, dp_cp, tp, model are used.
    gather: started after each update; needed with sharded buffers and more than one replica. library: whose Adam it is, None: torch's.

    A step is `start`, which needs no other pipeline rank, and `settle`, which waits for the verdict: the global norm, that is the clip,
    and whether anything overflowed. With --optimizer-post-validation `start` also updates, as if the verdict were that nothing is due;
    else `settle` does. Between the two nothing may be saved or measured: it raises RuntimeError.
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        groups: ProcessGroups,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        gather: ParameterGather | None = None,
        library: AdamLibrary | None = None,
    ) -> None:
        self.scaler = LossScaler.of(precision)
        self._gather = gather
        self._clip_grad = config.clip_grad
        self._replica = groups.replicas.rank
        self._sharded = any(buffer.layout.num_shards > 1 for buffers in stages.values() for buffer in buffers.buffers)
        holders = [rank for rank in groups.model.ranks if rank in groups.replicas.ranks]  # two in a mirrored pipeline
        counts = self._sharded or groups.model.global_rank == holders[0]
        self._shards = make_shards(
            stages,
            self._replica,
            groups.tp.rank,
            groups.tp.size,
            moment_names(config),
            counts,
            config.optimizer_cpu_offload,
        )
        self._rule = make_update_rule(config, self._shards, library)
        if self._sharded and gather is None:
            raise ValueError("sharded buffers need a ParameterGather: without it ranks keep stale parameters")
        self._device, self._on_host = next(iter(stages.values())).device, config.optimizer_cpu_offload
        # the shards of a sharded optimizer add up; unsharded, every copy of the model holds the same gradients
        self._sum_groups: list[Group] = [groups.dp_cp, groups.model] if self._sharded else [groups.model]
        self._kept = KeptShards(self._shards) if config.optimizer_post_validation else None
        self._confidence = Confidence()
        self._underway: _Underway | None = None

    @property
    def loss_scale(self) -> float:
        """What the losses of the next backward are multiplied with."""
        return self.scaler.scale

    @property
    def masters_are_parameters(self) -> bool:
        """True where weights and master weights are the same memory (fp32, fp64), so that a checkpoint needs one of them."""
        return not any(shard.has_own_master for shard in self._shards)

    @property
    def is_ahead(self) -> bool:
        """The last update was made before its verdict and has not been settled: weights and state may still be taken back."""
        return self._underway is not None and self._underway.is_ahead

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
        self.start(gradient_factor, lr, weight_decay, decoupled_lr, count_zero_gradients=count_zero_gradients)
        return self.settle()

    @torch.no_grad()
    def start(
        self,
        gradient_factor: float,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        *,
        count_zero_gradients: bool = False,
    ) -> None:
        """The first half of `step`: send off this rank's part of the norm and, if updates go ahead of their verdict, update."""
        self._check_settled()
        if self._gather is not None:
            self._gather.finish()
        loss_scale = self.scaler.scale
        rates = lr, lr if decoupled_lr is None else decoupled_lr, weight_decay
        is_ahead = self._kept is not None and self._confidence.holds
        factor, sums = gradient_factor / loss_scale, self._measure(count_zero_gradients)
        if self._kept is not None and is_ahead:
            self._kept.keep()
            self._update(factor, rates)
        self._underway = _Underway(sums, factor, loss_scale, rates, is_ahead)

    @torch.no_grad()
    def settle(self) -> StepReport:
        """The second half of `step`: wait for the verdict and make the weights what it asks for. Raises RuntimeError without a start."""
        underway, self._underway = self._underway, None
        if underway is None:
            raise RuntimeError("no step is under way: call start first")
        raw_square, *zeros = underway.sums.wait()
        norm = underway.factor * math.sqrt(raw_square)
        coefficient = clip_coefficient(norm, self._clip_grad)
        skipped = not math.isfinite(norm)
        amended = skipped or coefficient != 1.0
        rolled_back = underway.is_ahead and amended
        if rolled_back:
            self._roll_back()
        if not skipped and (amended or not underway.is_ahead):
            self._update(underway.factor * coefficient, underway.rates)
        elif rolled_back:
            self.masters_to_parameters()
        self.scaler.update(skipped)
        remark = "" if self._kept is None else self._confidence.learn(amended)
        return StepReport(
            norm, coefficient, skipped, underway.loss_scale, int(zeros[0]) if zeros else None, rolled_back, remark
        )

    @torch.no_grad()
    def update(self, gradient_factor: float, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> None:
        """Update the newest version of the parameters by this rank alone: without a norm, without clipping, without a look for NaN.

        For asynchronous schedules, whose ranks update at times of their own. Arguments and gradients as in `step`.
        """
        if self._gather is not None:
            self._gather.finish()
        self._update(
            gradient_factor / self.scaler.scale, (lr, lr if decoupled_lr is None else decoupled_lr, weight_decay)
        )

    @torch.no_grad()
    def last_update(self, count_zero_gradients: bool = False) -> StepReport:
        """What `step` would have reported of the gradients that the last `update` has left; called by all ranks."""
        square, *zeros = self._measure(count_zero_gradients).wait()
        return StepReport(math.sqrt(square), 1.0, False, self.scaler.scale, int(zeros[0]) if zeros else None)

    @torch.no_grad()
    def masters_to_parameters(self) -> None:
        """Write this rank's master weights into the parameters, cast to their dtype, and start collecting those of the other ranks."""
        for shard in self._shards:
            if shard.has_own_master:
                shard.write_parameter()
        if self._gather is not None:
            self._gather.start()

    @torch.no_grad()
    def parameters_to_masters(self) -> None:
        """Take the parameters as master weights: after weights were loaded without optimizer state."""
        self._check_settled()
        if self._gather is not None:
            self._gather.finish()
        for shard in self._shards:
            if shard.has_own_master:
                shard.master.copy_(shard.parameter)

    @torch.no_grad()
    def parameters_norm(self) -> float:
        """Global norm of the master weights, vocabulary padding left out."""
        self._check_settled()
        owned = (shard.master[low:high] for shard in self._shards for low, high in shard.counted.exact)
        return math.sqrt(ModelSum([sum_of_squares(owned, self._device)], self._sum_groups).wait()[0])

    @torch.no_grad()
    def nonfinite_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are infinite or NaN in this rank's shards: where to look after a skipped step."""
        found: dict[str, None] = {}
        for shard in self._shards:
            for position, piece in shard.pieces():
                if not torch.isfinite(shard.gradient[position : position + piece.box.num_elements]).all():
                    found[piece.spec.name] = None
        return list(found)

    @torch.no_grad()
    def stale_parameters(self) -> list[str]:
        """Names of the parameters that are not what this rank's master weights round to, bit by bit: the memory of one has changed."""
        self._check_settled()
        found: dict[str, None] = {}
        for shard in self._shards:
            if shard.has_own_master and not torch.equal(
                raw_bytes(shard.parameter), raw_bytes(shard.master.to(shard.parameter))
            ):
                rounded = shard.master.to(shard.parameter)
                for position, piece in shard.pieces():
                    part = slice(position, position + piece.box.num_elements)
                    if not torch.equal(raw_bytes(shard.parameter[part]), raw_bytes(rounded[part])):
                        found[piece.spec.name] = None
        return list(found)

    def state(self) -> Iterator[StatePiece]:
        """This rank's optimizer state as boxes of global tensors. Loading writes into `values` and ends with masters_to_parameters()."""
        self._check_settled()
        for shard in self._shards:
            for key, tensor in (("master", shard.master), *shard.moments.items()):
                for position, piece in shard.pieces():
                    primary = piece.owned and not shard.is_copy and (self._sharded or self._replica == 0)
                    yield StatePiece(
                        key, shard.stage, piece, primary, tensor[position : position + piece.box.num_elements]
                    )

    def held(self) -> dict[str, list[Tensor]]:
        """All it keeps on the device from step to step, by the planner's item: masters of their own and moments, and copies for taking an
        update back."""
        if self._on_host:
            return {"optimizer": [], "rollback": []}
        own = [
            tensor
            for shard in self._shards
            for tensor in (*shard.moments.values(), *([shard.master] if shard.has_own_master else []))
        ]
        return {"optimizer": own, "rollback": [] if self._kept is None else self._kept.copies}

    def plain_state(self) -> dict[str, Any]:
        """What is not a tensor: updates made, loss scaler."""
        self._check_settled()
        return {"num_steps": self._rule.num_steps, "loss_scaler": self.scaler.state()}

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        self._rule.set_num_steps(int(state["num_steps"]))
        self.scaler.load_state(state["loss_scaler"])

    def _measure(self, count_zero_gradients: bool) -> ModelSum:
        """Square of the norm of the raw gradients, and how many of them are zero, on their way."""
        owned = (shard.gradient[low:high] for shard in self._shards for low, high in shard.counted.merged)
        values = [sum_of_squares(owned, self._device)]
        if count_zero_gradients:
            exact = (shard.gradient[low:high] for shard in self._shards for low, high in shard.counted.exact)
            values.append(count_zeros(exact, self._device))
        return ModelSum(values, self._sum_groups)

    def _update(self, factor: float, rates: tuple[float, float, float]) -> None:
        if self._on_host:
            for shard in self._shards:
                shard.fetch_gradient()
            if self._device.type == "cuda":
                torch.cuda.current_stream(
                    self._device
                ).synchronize()  # the last copies of weights from the host are done by then too
        self._rule.step(factor, *rates)
        self.masters_to_parameters()

    def _roll_back(self) -> None:
        """Undo the update, but for the parameters: whoever calls writes them next."""
        assert self._kept is not None
        if self._gather is not None:
            self._gather.finish()  # it writes parameters, which may be the masters
        self._kept.put_back()
        self._rule.set_num_steps(self._rule.num_steps - 1)

    def _check_settled(self) -> None:
        if self._underway is not None:
            raise RuntimeError("the verdict on the last update is not known yet: call settle first")
