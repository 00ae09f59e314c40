"""`Optimizer`: one update of this rank's shards from raw gradient sums, and the state that a checkpoint keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import ProcessGroups
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OPTIMIZERS, OptimizerConfig
from megapipe.data_parallel.copies import raw_bytes
from megapipe.data_parallel.stores import Stores
from megapipe.gpu.streams import HostCopy
from megapipe.optimizer.gradients import (
    CLIP_EPSILON,
    LossScaler,
    clip_coefficient,
    count_zeros,
    sum_of_squares,
    sums_over_world,
)
from megapipe.optimizer.muon import Muon
from megapipe.optimizer.registered import RegisteredRule
from megapipe.optimizer.schedule import Rates
from megapipe.optimizer.shards import Shard
from megapipe.optimizer.update_rule import AdamLibrary, CompiledAdam, NarrowAdam, Rule, UpdateRule
from megapipe.sharding.boxes import Piece
from megapipe.sharding.state_dtypes import LAST_CHANGE, MASTER, state_dtypes


@dataclass(frozen=True)
class StepReport:
    """The outcome of one step; equal on all ranks."""

    grad_norm: float  # global norm of the averaged gradient before clipping; NaN or infinite after an overflow
    clip_coefficient: float
    skipped: bool  # nothing was updated, because of an overflow
    loss_scale: float  # of this step's losses
    num_zeros: int | None  # elements of the gradient that are exactly zero; None unless requested
    beside: tuple[float, ...] = ()  # sums of the numbers that were given beside those of the gradients
    norm_before: float | None = None  # of the update before, by which this one was clipped (--clip-grad-delay)


@dataclass(frozen=True)
class GradientSums:
    """Sums over the model that are on their way: squares of the raw gradients, zeros if counted, numbers beside."""

    copy: HostCopy
    counts_zeros: bool

    @cached_property
    def values(self) -> tuple[float, int | None, list[float]]:
        """The norm of the raw gradients, the number of zeros among them, and the sums beside, which are waited for."""
        square, *others = self.copy.values()
        num_zeros = int(others.pop(0)) if self.counts_zeros else None
        return math.sqrt(square), num_zeros, others


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state."""

    key: str  # 'master', 'exp_avg', 'exp_avg_sq', 'momentum' or 'last_change'
    stage: int
    piece: Piece
    primary: bool  # this rank writes it to a checkpoint: first tp replica, first dp replica, not the tied copy
    shard: Shard
    part: slice  # of the shard's elements

    @cached_property
    def values(self) -> Tensor:
        """[piece.box.num_elements], in at least fp32: a view; of a narrow moment, a copy in host memory."""
        stored = self.shard.states[self.key][self.part]
        return stored.cpu().float() if self.key in self.shard.narrow else stored


class Optimizer:
    """AdamW or SGD over the shards of this rank's stages, with loss scale, global-norm clipping and master weights.

    stores: their parameters filled: master weights start as copies of them; each update starts their gather.
    groups: replicas, tp and world are used. library: provides Adam; None for torch's. compiler: compiles AdamW instead
    (`CompiledAdam`).
    shards: of every bucket of the stages.
    """

    def __init__(
        self,
        stores: Stores,
        groups: ProcessGroups,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        library: AdamLibrary | None = None,
        compiler: Callable[[Callable[..., Any]], Any] | None = None,
    ) -> None:
        self.scaler = LossScaler.of(precision)
        self._clip_grad, self._on_host = config.clip_grad, config.optimizer_cpu_offload
        self._error_feedback, self._clips_late = config.delay_error_feedback, bool(config.clip_grad_delay)
        self.last_norm: float | None = None  # of the averaged gradient of the last update, with --clip-grad-delay
        self._has_last_change = False  # False until the first update with it
        stages = stores.stages
        self._groups, self._stores, self._device = groups, stores, next(iter(stages.values())).device
        dtypes = state_dtypes(config, precision, any(buffers.changes_in_flight for buffers in stages.values()))
        self.shards = [
            Shard(stage, store, bucket, dtypes.moments(bucket.has_matrices), self._on_host, dtypes.narrow)
            for stage, buffers in stages.items()
            for store in buffers.trained
            for bucket in store.layout.buckets
        ]
        self.rule: Rule
        if OPTIMIZERS[config.optimizer].update is not None:
            self.rule = RegisteredRule(config, self.shards)
        elif dtypes.is_narrow:
            self.rule = NarrowAdam(config, self.shards)
        elif compiler is not None:
            self.rule = CompiledAdam(config, self.shards, compiler)
        elif OPTIMIZERS[config.optimizer].matrix_states is not None:
            self.rule = Muon(config, self.shards, groups, self._device)
        else:
            self.rule = UpdateRule(config, self.shards, library)

    @property
    def loss_scale(self) -> float:
        """The scale of the losses of the next backward."""
        return self.scaler.scale

    @torch.no_grad()
    def step(
        self,
        gradient_factor: float | Callable[[Sequence[float]], float],
        rates: Rates,
        count_zero_gradients: bool = False,
        beside: Tensor | None = None,
    ) -> StepReport:
        """Update the parameters once the global norm is known, which decides on clipping and on skipping the step.

        The reduced gradients are raw sums over microbatches and replicas of loss x loss_scale; afterwards they are the
        clipped averages (their raw sums with `CompiledAdam`). An infinite or NaN norm skips the update; the caller
        decides whether training continues.
        gradient_factor: 1 / (microbatches x dp), or 1 / tokens of the global batch, or a function that returns it for
        the sums of `beside`; the loss scale is divided out here. beside: [n] fp64, numbers to sum over the world in the
        message of the norm.
        """
        sums = self.start_sums(count_zero_gradients, beside)
        return self.finish_step(sums, gradient_factor, rates, self.scaler.scale)

    @torch.no_grad()
    def start_sums(
        self, count_zero_gradients: bool, beside: Tensor | None, side: torch.cuda.Stream | None = None
    ) -> GradientSums:
        """Run the first half of `step`: start to sum what decides on the update, in one message.

        side: the CUDA stream that waits for it; None: the current one.
        """
        merged = (shard.gradient[low:high] for shard in self.shards for low, high in shard.merged_ranges)
        values = [sum_of_squares(merged, self._device)]
        if count_zero_gradients:
            exact = (shard.gradient[low:high] for shard in self.shards for low, high in shard.exact_ranges)
            values.append(count_zeros(exact, self._device))
        return GradientSums(sums_over_world(values, self._groups.world, beside, side), count_zero_gradients)

    @torch.no_grad()
    def finish_step(
        self,
        sums: GradientSums,
        gradient_factor: float | Callable[[Sequence[float]], float],
        rates: Rates,
        loss_scale: float,
    ) -> StepReport:
        """Run the second half of `step`. loss_scale: of the losses of these gradients."""
        self._stores.finish_weights()
        raw_norm, num_zeros, others = sums.values
        factor = (gradient_factor(others) if callable(gradient_factor) else gradient_factor) / loss_scale
        norm = factor * raw_norm
        coefficient, skipped = clip_coefficient(norm, self._clip_grad), not math.isfinite(norm)
        if not skipped:
            self._update(factor * coefficient, rates)
        self.scaler.update(skipped)
        return StepReport(norm, coefficient, skipped, loss_scale, num_zeros, tuple(others))

    @torch.no_grad()
    def update_stage(self, factor: float, rates: Rates, norm: float | None = None) -> None:
        """Update the newest version of the parameters of this rank's stage, for asynchronous schedules whose stages
        update at different times: without a check for NaN, and clipped by the norm of the stage alone.

        factor: of the raw sums of gradients, for their averages. norm: to clip by instead. A collective of the ranks
        that hold the stage, for which the host does not wait.
        """
        self._stores.finish_weights()
        if norm is not None:
            factor *= clip_coefficient(norm, self._clip_grad)
        elif self._clip_grad > 0:
            merged = (shard.gradient[low:high] for shard in self.shards for low, high in shard.merged_ranges)
            square = sum_of_squares(merged, self._device)
            for group in (self._groups.tp, self._groups.replicas):
                all_reduce(square, group)
            coefficient = (self._clip_grad / (factor * square.sqrt() + CLIP_EPSILON)).clamp(max=1.0)
            for shard in self.shards:
                shard.gradient.mul_(coefficient)
        self._update(factor, rates)

    @torch.no_grad()
    def masters_to_parameters(self) -> None:
        """Write this rank's master weights into the parameters, in their dtype, and start to gather those of others."""
        for shard in self.shards:
            if shard.has_own_master:
                shard.write_parameter()
        self._stores.start_gather()

    @torch.no_grad()
    def parameters_to_masters(self) -> None:
        """Copy the parameters to the master weights, after weights were loaded without optimizer state."""
        self._stores.finish_weights()
        for shard in self.shards:
            if shard.has_own_master:
                shard.take_parameter()

    @torch.no_grad()
    def load_state(self, pieces: Iterable[StatePiece]) -> None:
        """Take the values of pieces from `state` that were filled since, and write the parameters."""
        for piece in pieces:
            if piece.key in piece.shard.narrow:  # whose values are copies
                piece.shard.states[piece.key][piece.part].copy_(piece.values)
        self.masters_to_parameters()

    @torch.no_grad()
    def parameters_norm(self) -> float:
        """Return the global norm of the master weights, without vocabulary padding."""
        owned = (shard.master[low:high] for shard in self.shards for low, high in shard.exact_ranges)
        return math.sqrt(sums_over_world([sum_of_squares(owned, self._device)], self._groups.world).values()[0])

    @torch.no_grad()
    def nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters with infinite or NaN gradients in this rank's shards, for a skipped step."""
        names = [
            piece.spec.name
            for shard in self.shards
            for part, piece in shard.pieces()
            if not torch.isfinite(shard.gradient[part]).all()
        ]
        return list(dict.fromkeys(names))

    @torch.no_grad()
    def stale_parameters(self) -> list[str]:
        """Return the names of parameters whose memory was corrupted: they differ from the rounded master weights."""
        names: dict[str, None] = {}
        for shard in self.shards:
            if not shard.has_own_master:
                continue
            rounded = shard.master.to(shard.parameter)
            if torch.equal(raw_bytes(shard.parameter), raw_bytes(rounded)):
                continue
            for part, piece in shard.pieces():
                if not torch.equal(raw_bytes(shard.parameter[part]), raw_bytes(rounded[part])):
                    names[piece.spec.name] = None
        return list(names)

    def state(self) -> Iterator[StatePiece]:
        """Yield this rank's optimizer state as boxes of global tensors.

        Loading writes into `values` and ends with load_state().
        """
        for shard in self.shards:
            for key in shard.states:
                for part, piece in shard.pieces():
                    primary = piece.owned and not shard.is_copy and shard.store.sharing.counts_shards
                    yield StatePiece(key, shard.stage, piece, primary, shard, part)

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that it keeps, by item of the memory plan: 'optimizer' is on the device, 'host' is not."""
        state: list[Tensor] = []
        for shard in self.shards:
            state += [tensor for name, tensor in shard.states.items() if name != MASTER or shard.has_own_master]
        if self._on_host:
            return {"optimizer": [], "host": [*state, *(t for s in self.shards for t in s.host_copies)]}
        return {"optimizer": state}

    def plain_state(self) -> dict[str, Any]:
        """Return the state that is not a tensor: number of updates, loss scaler, whether there is a last change, and
        the norm by which the next update is clipped.
        """
        state = {"num_steps": self.rule.num_steps, "loss_scaler": self.scaler.state()}
        state |= {"has_last_change": self._has_last_change} if self._error_feedback else {}
        return state | ({"last_norm": self.last_norm} if self._clips_late else {})

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        self.rule.set_num_steps(int(state["num_steps"]))
        self.scaler.load_state(state["loss_scaler"])
        self._has_last_change = bool(state.get("has_last_change"))
        self.last_norm = state.get("last_norm")

    def _update(self, factor: float, rates: Rates) -> None:
        if self._on_host:
            for shard in self.shards:
                shard.updated_from.copy_(shard.gradient, non_blocking=True)
            if self._device.type == "cuda":
                # also completes the last copies of weights from the host, whose memory the rule overwrites
                torch.cuda.current_stream(self._device).synchronize()
        before = [shard.master.clone() for shard in self.shards] if self._error_feedback else []
        self.rule.step(factor, rates)
        for shard, weights in zip(self.shards, before, strict=False):
            last, change = shard.states[LAST_CHANGE], torch.sub(shard.master, weights, out=weights)
            if self._has_last_change:
                shard.master.add_(change, alpha=self._error_feedback).sub_(last, alpha=self._error_feedback)
            last.copy_(change)
        if before:
            self._has_last_change = True
            self.masters_to_parameters()
        elif isinstance(self.rule, CompiledAdam):  # it has written the parameters
            self._stores.start_gather()
        else:
            self.masters_to_parameters()
