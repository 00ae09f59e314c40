"""Weights and gradients of which each rank keeps a shard: `ShardedWeights`, `ShardedGradients` (ZeRO-2, ZeRO-3, FSDP).

Rajbhandari et al. 2020 (arXiv:1910.02054), Zhao et al. 2023 (arXiv:2304.11277). The schedule's row says when: UNSHARD
starts the all-gathers of a stage, its next computation waits for them, RESHARD frees the memory; REDUCE_GRAD starts the
reduce-scatters of the gradients since the last one. Parameters and main gradients are views of that memory throughout,
so that what autograd saved in a forward is valid again in the backward. A word embedding that two stages use stays
whole (`buffers.SHARDED_KINDS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_gather, all_reduce, reduce_scatter
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import FlatBuffer, StageBuffers, allocate, free, is_allocated
from megapipe.data_parallel.reducer import GradientReducer, TpSums, sum_over_tp, tp_sums


class ShardedWeights:
    """The whole weights of this rank's stages, while they exist. Buffers that are not sharded are left alone.

    stages: buffers by stage index. overlap: gathers run under computation; otherwise `unshard` waits for them.
    tracer: records waits, such as "weights of stage 2".

    All members of a shard group start the same gathers in the same order: that of the row, within a stage buffer by
    buffer, and the buckets of a buffer in the order of a forward.
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        groups: ProcessGroups,
        *,
        overlap: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        self._stages = {
            stage: [buffer for buffer in held.buffers if buffer.parameter_shards is not None]
            for stage, held in sorted(stages.items())
        }
        self._groups, self._overlap, self._tracer = groups, overlap, tracer
        self._pending: dict[int, list[Work]] = {}  # gathers in flight of each stage
        self._gathered: set[int] = set()  # stages whose weights are whole, or on their way

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage (UNSHARD). Raises RuntimeError if they are gathered already."""
        if stage in self._gathered:
            raise RuntimeError(f"the weights of stage {stage} are gathered already")
        self._gathered.add(stage)
        for buffer in self._stages[stage]:
            allocate(buffer.parameters)
        self._pending[stage] = [work for buffer in self._stages[stage] for work in self._gather(buffer)]
        if not self._overlap:
            self.use(stage)

    def use(self, stage: int) -> None:
        """Wait for the gathers of a stage, before it computes. Raises RuntimeError if none was started."""
        if self._stages[stage] and stage not in self._gathered:
            raise RuntimeError(f"stage {stage} computes, but its weights are not gathered: its row lacks an UNSHARD")
        pending = self._pending.pop(stage, None)
        if not pending:
            return
        start = 0 if self._tracer is None else self._tracer.now()
        for work in pending:
            work.wait()
        if self._tracer is not None:
            self._tracer.event(f"weights of stage {stage}", "wait", start, self._tracer.now())

    def reshard(self, stage: int) -> None:
        """Free the weights of a stage (RESHARD). Raises RuntimeError if they are not gathered."""
        self.use(stage)
        self._gathered.remove(stage)
        for buffer in self._stages[stage]:
            free(buffer.parameters)

    def finish(self) -> None:
        """Wait for all gathers in flight, before the shards are written."""
        for stage in list(self._pending):
            self.use(stage)

    def clear(self) -> None:
        """Free all weights that are gathered, for a row that begins again."""
        for stage in sorted(self._gathered):
            self.reshard(stage)

    @contextmanager
    def whole(self, stages: Iterable[int]) -> Iterator[None]:
        """Hold the weights of these stages inside the block, between rows: a collective of the shard groups."""
        held = sorted(stages)
        for stage in held:
            self.unshard(stage)
        for stage in held:
            self.use(stage)
        try:
            yield
        finally:
            for stage in held:
                self.reshard(stage)

    def _gather(self, buffer: FlatBuffer) -> Iterator[Work]:
        group = self._groups.shards_of(buffer.layout.is_expert)
        for bucket in reversed(buffer.layout.buckets):
            _, shard = buffer.held_parameters(bucket)
            # .data: the values are those of before, which autograd would take for a change of saved weights
            yield all_gather(buffer.parameters.data[bucket.start : bucket.stop], shard.data, group, async_op=True)


class ShardedGradients:
    """Reduces main gradients into shards, in place of `GradientReducer`, which still reduces the buffers kept whole.

    The whole gradients of a stage exist from its first backward (`accumulate`) to the end of its next reduction
    (`reduce_part`, `reduce`), which adds them to the shards. At most one reduction is in flight: the next one first
    waits for it, as does the next backward of its stage. After `finish` the shards hold raw sums over microbatches and
    replicas. They are summed in the order of the row, which is the same in every run.

    stages: buffers by stage index. groups: tp, kv, shards and instances are used. overlap: reductions run under
    computation. reduce_in_bf16: communicate a bf16 copy. pending: reductions in flight: (work, result, shard).
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        groups: ProcessGroups,
        *,
        overlap: bool = True,
        reduce_in_bf16: bool = False,
    ) -> None:
        self._groups, self._overlap, self._reduce_in_bf16 = groups, overlap, reduce_in_bf16
        self._whole = GradientReducer(stages, groups, overlap=overlap, reduce_in_bf16=reduce_in_bf16)
        self._stages = {
            stage: [buffer for buffer in held.buffers if buffer.gradient_shards is not None]
            for stage, held in sorted(stages.items())
        }
        self._tp_sums: dict[FlatBuffer, TpSums] = {}
        for buffer in (buffer for buffers in self._stages.values() for buffer in buffers):
            if buffer.layout.kind == "partial":
                allocate(buffer.gradients)  # for the views
                self._tp_sums[buffer] = tp_sums([buffer], groups)
                free(buffer.gradients)
        self.pending: list[tuple[Work, Tensor, Tensor]] = []
        self._in_flight: list[FlatBuffer] = []  # whose whole gradients the reductions in flight read

    def begin_step(self, num_microbatches: int) -> None:
        """Zero all shards and gradients, and free what an aborted step has left."""
        self._complete()
        for buffers in self._stages.values():
            for buffer in buffers:
                free(buffer.gradients)
        self._whole.begin_step(num_microbatches)

    def accumulate(self, stage: int) -> None:
        """Provide the memory of a stage's whole gradients, zero at first; called before each part of its backwards."""
        for buffer in self._stages[stage]:
            if buffer in self._in_flight:
                self._complete()
            if not is_allocated(buffer.gradients):
                allocate(buffer.gradients)
                buffer.gradients.zero_()

    def reduce_part(self, stage: int) -> None:
        """Start a reduction that is not the last of the stage in this step (REDUCE_GRAD of a microbatch)."""
        self._launch(stage)

    def reduce(self, stage: int) -> None:
        """Start the last reduction of a stage in this step (REDUCE_GRAD)."""
        self._launch(stage)
        self._whole.reduce(stage)

    def finish(self) -> None:
        """Complete all reductions of the step: sums over replicas within an instance, then over instances."""
        self._whole.finish()
        self._complete()
        sharded = (buffer.gradient_shards for buffers in self._stages.values() for buffer in buffers)
        works = [all_reduce(shard, self._groups.instances, async_op=True) for shard in sharded if shard is not None]
        for work in works:
            work.wait()

    def _launch(self, stage: int) -> None:
        self._complete()
        for buffer in self._stages[stage]:
            sum_over_tp(self._tp_sums.get(buffer, []))
            group = self._groups.shards_of(buffer.layout.is_expert)
            for bucket in buffer.layout.buckets:
                gradients = buffer.gradients[bucket.start : bucket.stop]
                sent = gradients.to(torch.bfloat16) if self._reduce_in_bf16 else gradients
                low, high = (position - bucket.start for position in buffer.shard_range(bucket, group.rank))
                work = reduce_scatter(sent[low:high], sent, group, async_op=True)
                self.pending.append((work, sent[low:high], buffer.reduced_gradients(bucket, group.rank)))
            self._in_flight.append(buffer)
        if not self._overlap:
            self._complete()

    def _complete(self) -> None:
        """Wait for the reductions in flight, add them to the shards and free what they have read."""
        pending, self.pending = self.pending, []
        in_flight, self._in_flight = self._in_flight, []
        for work, result, shard in pending:
            work.wait()
            shard.add_(result)
        for buffer in in_flight:
            free(buffer.gradients)


@dataclass(frozen=True)
class ShardedStages:
    """What the engine does at the actions of sharded weights and gradients. gradients: None if none are sharded."""

    weights: ShardedWeights
    gradients: ShardedGradients | None = None

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage (UNSHARD)."""
        self.weights.unshard(stage)

    def use(self, stage: int) -> None:
        """Wait for the weights of a stage, before a computation that reads them."""
        self.weights.use(stage)

    def reshard(self, stage: int) -> None:
        """Free the weights of a stage (RESHARD)."""
        self.weights.reshard(stage)

    def accumulate(self, stage: int) -> None:
        """Provide the memory of a stage's gradients, before a computation that adds to them."""
        if self.gradients is not None:
            self.gradients.accumulate(stage)

    def reduce_part(self, stage: int) -> None:
        """Start a reduction that is not the last of a stage in the step (REDUCE_GRAD of a microbatch)."""
        if self.gradients is not None:
            self.gradients.reduce_part(stage)
