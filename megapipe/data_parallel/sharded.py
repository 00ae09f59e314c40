"""Weights and gradients of which each rank keeps a shard: `ShardedWeights`, `ShardedGradients` (ZeRO-2, ZeRO-3, FSDP).

Rajbhandari et al. 2020 (arXiv:1910.02054), Zhao et al. 2023 (arXiv:2304.11277). The schedule's row says when: UNSHARD
starts the all-gathers of a stage, its next computation waits for them, RESHARD frees the memory; REDUCE_GRAD starts the
reduce-scatters of the gradients since the last one. Parameters and main gradients are views of that memory throughout,
so that what autograd saved in a forward is valid again in the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_gather, all_reduce, reduce_scatter
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import FlatBuffer, StageBuffers, allocate, free, is_allocated
from megapipe.data_parallel.reducer import TpSums, sum_over_tp, tp_sums


class ShardedWeights:
    """The whole weights of this rank's stages, while they exist. Buffers whose weights are not sharded are left alone.

    stages: buffers by stage index. overlap: gathers run under computation; otherwise `unshard` waits for them.
    tracer: records waits, such as "parameters of stage 2".

    All members of a shard group start the same gathers in the same order: that of the row, within a stage buffer by
    buffer, and the buckets of a buffer in the order of a forward. A stage that uses a parameter of another stage of
    this rank (a tied embedding) gathers its buffer too, unless it is there already; it is freed with the last of them.
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
            stage: [buffer for buffer in (*held.buffers, *held.borrowed) if buffer.parameter_shards is not None]
            for stage, held in sorted(stages.items())
        }
        self._groups, self._overlap, self._tracer = groups, overlap, tracer
        self._users: Counter[FlatBuffer] = Counter()  # stages that are gathered and use the buffer
        self._gathered: set[int] = set()
        self._pending: dict[FlatBuffer, list[Work]] = {}

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage (UNSHARD). Raises RuntimeError if they are gathered already."""
        if stage in self._gathered:
            raise RuntimeError(f"the weights of stage {stage} are gathered already")
        self._gathered.add(stage)
        for buffer in self._stages[stage]:
            self._users[buffer] += 1
            if self._users[buffer] == 1:
                allocate(buffer.parameters)
                self._pending[buffer] = list(self._gather(buffer))
        if not self._overlap:
            self.use(stage)

    def use(self, stage: int) -> None:
        """Wait for the gathers of a stage, before it computes. Raises RuntimeError if none was started."""
        buffers = self._stages[stage]
        if buffers and stage not in self._gathered:
            raise RuntimeError(f"stage {stage} computes, but its weights are not gathered: its row lacks an UNSHARD")
        if not any(buffer in self._pending for buffer in buffers):
            return
        start = 0 if self._tracer is None else self._tracer.now()
        for buffer in buffers:
            self._finish(buffer)
        if self._tracer is not None:
            self._tracer.event(f"parameters of stage {stage}", "wait", start, self._tracer.now())

    def reshard(self, stage: int) -> None:
        """Free the weights of a stage (RESHARD). Raises RuntimeError if they are not gathered."""
        if stage not in self._gathered:
            raise RuntimeError(f"the weights of stage {stage} are freed, but they are not gathered")
        self._gathered.remove(stage)
        for buffer in self._stages[stage]:
            self._users[buffer] -= 1
            if not self._users[buffer]:
                self._finish(buffer)
                free(buffer.parameters)

    def finish(self) -> None:
        """Wait for all gathers in flight, before the shards are written."""
        for buffer in list(self._pending):
            self._finish(buffer)

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

    def _finish(self, buffer: FlatBuffer) -> None:
        for work in self._pending.pop(buffer, ()):
            work.wait()


class ShardedGradients:
    """Reduces main gradients into the shards of this rank's stages: in place of `GradientReducer`, many times a step.

    The whole gradients of a stage exist from its first backward (`accumulate`) to its next reduction (`reduce`), which
    adds them to the shards; at most those of one reduction are in flight besides. After `finish` the shards hold raw
    sums over microbatches and replicas. Sums are formed in the order of the row, equal in every run.

    stages: buffers by stage index, with shards of gradients; stage 0 holds the embedding. groups: tp, kv, embedding,
    shards and instances are used. overlap: reductions run under computation. reduce_in_bf16: communicate a bf16 copy.

    All members of a shard group start the same reductions in the same order, that of the row. A tied embedding is
    reduced with its stage, and its shards are summed over the embedding group in finish(); one that another stage of
    this rank uses is reduced with stage 0, and at last after all stages.

    Buffers without replicas, such as experts of which the world has one copy, keep whole gradients and communicate
    nothing. Raises ValueError for others that keep whole gradients, and for a tied embedding without its group.
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
        self._used = {stage: (*held.buffers, *held.borrowed) for stage, held in sorted(stages.items())}
        self._own = {stage: _in_order(held.buffers, "shared") for stage, held in sorted(stages.items())}
        self._shared = [buffer for held in stages.values() for buffer in held.buffers if buffer.layout.kind == "shared"]
        self._all = [*(buffer for own in self._own.values() for buffer in own), *self._shared]
        self._tp_sums: dict[FlatBuffer, TpSums] = {}
        for buffer in (each for each in self._all if each.layout.kind == "partial"):
            if buffer.gradient_shards is not None:
                allocate(buffer.gradients)  # for the views
            self._tp_sums[buffer] = tp_sums([buffer], groups)
            if buffer.gradient_shards is not None:
                free(buffer.gradients)
        self._reduced: list[int] = []  # stages whose gradients of the step are complete
        # reductions in flight: (work, result, shard), and the whole gradients that they read
        self.pending: list[tuple[Work, Tensor, Tensor]] = []
        self._in_flight: list[FlatBuffer] = []
        for buffer in self._all:
            if buffer.gradient_shards is None and groups.replicas_of(buffer.layout.is_expert).size > 1:
                raise ValueError(f"a buffer of {buffer.layout.num_shards} shard(s) keeps whole gradients")
        if groups.embedding is None and any(buffer.layout.kind == "tied" for buffer in self._all):
            raise ValueError("this rank holds a tied embedding but has no embedding group")

    def begin_step(self, num_microbatches: int) -> None:
        """Zero the shards, and drop what an aborted step has left."""
        self._complete()
        for buffer in self._all:
            if buffer.gradient_shards is not None:
                free(buffer.gradients)
            buffer.kept_gradients.zero_()
        self._reduced = []

    def accumulate(self, stage: int) -> None:
        """Provide the memory of a stage's whole gradients, zero at first; called before each part of its backwards."""
        if any(buffer in self._in_flight for buffer in self._used[stage]):
            self._complete()
        for buffer in self._used[stage]:
            if not is_allocated(buffer.gradients):
                allocate(buffer.gradients)
                buffer.gradients.zero_()

    def reduce_part(self, stage: int) -> None:
        """Start a reduction that is not the last of a stage in the step (REDUCE_GRAD of a microbatch)."""
        own = [*self._own[stage], *(self._shared if stage == 0 else ())]
        self._launch(buffer for buffer in own if buffer.gradient_shards is not None)

    def reduce(self, stage: int) -> None:
        """Start the last reduction of a stage in a step (REDUCE_GRAD). Raises RuntimeError for a second one."""
        if stage in self._reduced:
            raise RuntimeError(f"stage {stage} has already been reduced in this step")
        self._reduced.append(stage)
        self._launch([*self._own[stage], *(self._shared if len(self._reduced) == len(self._own) else ())])

    def finish(self) -> None:
        """Complete all reductions of the step; then sum over instances, and the tied embedding over its group."""
        for stage in self._own:
            if stage not in self._reduced:
                self.reduce(stage)
        self._complete()
        shards = [buffer.gradient_shards for buffer in self._all if buffer.gradient_shards is not None]
        works = [all_reduce(shard, self._groups.instances, async_op=True) for shard in shards]
        for work in works:
            work.wait()
        for buffer in (each for each in self._all if each.layout.kind == "tied"):
            assert self._groups.embedding is not None
            all_reduce(buffer.kept_gradients, self._groups.embedding)
        self._reduced = []

    def _launch(self, buffers: Iterable[FlatBuffer]) -> None:
        """Start to reduce the gradients of these buffers."""
        self._complete()
        for buffer in buffers:
            if not is_allocated(buffer.gradients):
                continue
            sum_over_tp(self._tp_sums.get(buffer, []))
            if buffer.gradient_shards is None:
                continue  # this rank has the only copy
            group = self._groups.shards_of(buffer.layout.is_expert)
            copies = self._reduce_in_bf16 and buffer.gradients.dtype != torch.bfloat16
            for bucket in buffer.layout.buckets:
                gradients = buffer.gradients[bucket.start : bucket.stop]
                sent = gradients.to(torch.bfloat16) if copies else gradients
                low, high = (position - bucket.start for position in buffer.shard_range(bucket, group.rank))
                work = reduce_scatter(sent[low:high], sent, group, async_op=True)
                self.pending.append((work, sent[low:high], buffer.reduced_gradients(bucket, group.rank)))
            if copies:
                free(buffer.gradients)
            else:
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
    """The handlers of the actions of sharded weights and gradients. gradients: None if none are sharded."""

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


def _in_order(buffers: Iterable[FlatBuffer], without: str) -> list[FlatBuffer]:
    """Return the buffers but those of one kind, in the order of their reductions: partial ones, which wait, last."""
    return sorted((b for b in buffers if b.layout.kind != without), key=lambda b: b.layout.kind == "partial")
