"""`GradientReducer`: sums main gradients over the replicas of their stage, bucket by bucket, during the backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_reduce, reduce_scatter
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.data_parallel.buffers import FlatBuffer, StageBuffers
from megapipe.sharding.buffers import Bucket


@dataclass(eq=False)
class _BucketState:
    """A bucket in the current step. missing: number of gradients that each parameter still lacks."""

    buffer: FlatBuffer
    bucket: Bucket
    missing: dict[str, int] = field(default_factory=dict)
    launched: bool = False  # the reduction has been started


class GradientReducer:
    """Reduces the gradients of this rank's stages over their replicas.

    Afterwards a rank's shard of each bucket (the whole bucket without the distributed optimizer) holds raw sums over
    microbatches and replicas; the rest of the buffer is undefined. With several instances of the distributed optimizer
    shards are reduced within each, and then summed over them.

    stages: buffers by stage index; stage 0 holds the embedding. groups: tp, kv, embedding, shards, instances and both
    kinds of replicas, of dense parameters and of experts, are used.
    overlap: start a bucket's reduction after its last gradient; otherwise all reductions run in finish().
    reduce_in_bf16: communicate a bf16 copy and sum in bf16.
    pending: reductions in flight: (work, result, gradients); a result in other memory is copied at the end.

    All members of a replica group start the same reductions in the same order: within a stage bucket by bucket, and
    stages in the order in which the schedule's row completes them, which replicas share. In a mirrored pipeline two
    rows share their stages but complete them in opposite orders: there a bucket waits for reduce(), which both rows
    call in the same order.
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        groups: ProcessGroups,
        *,
        overlap: bool = True,
        reduce_in_bf16: bool = False,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._groups, self._overlap, self._reduce_in_bf16 = groups, overlap, reduce_in_bf16
        self._plain = {
            stage: [*_states(buffers, "plain"), *_states(buffers, "expert")] for stage, buffers in self._stages.items()
        }
        self._partial = {stage: _states(buffers, "partial") for stage, buffers in self._stages.items()}
        self._tied = [state for buffers in self._stages.values() for state in _states(buffers, "tied")]
        self._shared = [state for buffers in self._stages.values() for state in _states(buffers, "shared")]
        self._tp_sums = {
            stage: tp_sums(dict.fromkeys(state.buffer for state in self._partial[stage]), groups)
            for stage in self._stages
        }
        self._state_of = {
            stage: {slot.spec.name: state for state in states for slot in state.bucket.slots}
            for stage, states in self._plain.items()
        }
        self._in_step = False
        self._reduced: list[int] = []
        self.pending: list[tuple[Work, Tensor, Tensor]] = []
        for stage, buffers in self._stages.items():
            for buffer in buffers.buffers:
                size = groups.shards_of(buffer.layout.is_expert).size
                if buffer.layout.num_shards not in (1, size):
                    raise ValueError(
                        f"stage {stage}: {buffer.layout.num_shards} shards in a shard group of {size}; "
                        f"the number must be 1 or {size}"
                    )
            if overlap and groups.replicas.size == groups.dp_cp.size:  # not in a mirrored pipeline
                buffers.listener = functools.partial(self._added, stage)
        if self._tied and groups.embedding is None:
            raise ValueError("this rank holds a tied embedding but has no embedding group")

    def begin_step(self, num_microbatches: int) -> None:
        """Zero all gradients and expect those of num_microbatches, whether their backwards are split or not."""
        self._reset()
        self._in_step = True
        for stage, buffers in self._stages.items():
            buffers.zero_gradients()
            for state in self._plain[stage]:
                state.missing = {slot.spec.name: num_microbatches for slot in state.bucket.slots}

    def reduce(self, stage: int) -> None:
        """Start the remaining reductions of a stage whose gradients are complete (REDUCE_GRAD).

        Partial gradients are first summed over their tp replicas. Without overlap all of this is left to finish(). The
        tied embedding is not included; if two stages of this rank share it, its reduction starts when all stages of the
        rank are complete.
        """
        if stage in self._reduced:
            raise RuntimeError(f"stage {stage} has already been reduced in this step")
        self._reduced.append(stage)
        if self._overlap:
            self._launch_rest(stage)
            if len(self._reduced) == len(self._stages):
                self._launch(self._shared)

    def finish(self) -> None:
        """Complete all reductions of the step; the tied embedding last, over replicas and then the embedding group."""
        for stage in self._stages:
            if stage not in self._reduced:
                self.reduce(stage)
        if not self._overlap:
            for stage in self._reduced:
                self._launch_rest(stage)
            self._launch(self._shared)
        self._launch(self._tied)
        for work, result, gradients in self.pending:
            work.wait()
            if result is not gradients:
                gradients.copy_(result)
        if self._groups.instances.size > 1:
            by_stage = (state for states in self._replica_states() for state in states)
            works = [all_reduce(shard, self._groups.instances, async_op=True) for shard in map(self._shard, by_stage)]
            for work in works:
                work.wait()
        for state in self._tied:  # both holders of the tied embedding get the sum of their gradients
            assert self._groups.embedding is not None
            all_reduce(self._shard(state), self._groups.embedding)
        self._reset()

    def _shard(self, state: _BucketState) -> Tensor:
        """Return the reduced gradients of a bucket on this rank."""
        return state.buffer.reduced_gradients(state.bucket, self._groups.shards_of(state.buffer.layout.is_expert).rank)

    def _replica_states(self) -> Iterator[list[_BucketState]]:
        """Yield the buckets of this rank whose shards several instances hold."""
        for states in (*self._plain.values(), *self._partial.values(), self._tied, self._shared):
            yield [state for state in states if state.buffer.layout.num_shards > 1]

    def _reset(self) -> None:
        self._in_step = False
        self._reduced = []
        self.pending = []
        by_stage = (state for states in (*self._plain.values(), *self._partial.values()) for state in states)
        for state in (*self._tied, *self._shared, *by_stage):
            state.launched = False

    def _added(self, stage: int, name: str) -> None:
        """Account for one gradient of a parameter; start the reductions of buckets that are now complete, in order."""
        state = self._state_of[stage].get(name)
        if not self._in_step or state is None or name in self._stages[stage].unpredictable:
            return
        if state.launched:
            raise RuntimeError(
                f"{name} got a gradient after the reduction of its bucket had started: its module uses it more often "
                "per microbatch than declared, or more microbatches ran than were passed to begin_step"
            )
        state.missing[name] -= 1
        if state.missing[name] == 0:
            for earlier in self._plain[stage]:
                if earlier.buffer is not state.buffer:
                    continue
                if any(count > 0 for count in earlier.missing.values()):
                    break
                self._launch([earlier])

    def _launch_rest(self, stage: int) -> None:
        self._launch(self._plain[stage])
        sum_over_tp(self._tp_sums[stage])
        self._launch(self._partial[stage])

    def _launch(self, states: Iterable[_BucketState]) -> None:
        """Start the reductions of these buckets that have not been started yet."""
        for state in states:
            if state.launched:
                continue
            state.launched = True
            buffer, bucket = state.buffer, state.bucket
            of_group = self._groups.replicas_of if buffer.layout.num_shards == 1 else self._groups.shards_of
            group = of_group(buffer.layout.is_expert)
            if group.size == 1:
                continue
            gradients = buffer.gradients[bucket.start : bucket.stop]
            sent = gradients.to(torch.bfloat16) if self._reduce_in_bf16 else gradients
            if buffer.layout.num_shards == 1:
                self.pending.append((all_reduce(sent, group, async_op=True), sent, gradients))
                continue
            low, high = (position - bucket.start for position in buffer.shard_range(bucket, group.rank))
            shard = gradients[low:high]
            result = sent[low:high] if self._reduce_in_bf16 else shard
            self.pending.append((reduce_scatter(result, sent, group, async_op=True), result, shard))


TpSums = list[tuple[Group, list[Tensor]]]


def tp_sums(buffers: Iterable[FlatBuffer], groups: ProcessGroups) -> TpSums:
    """Return the rows of these partial gradients that are summed over tp or over the ranks that share k and v."""
    tp, kv = groups.tp, groups.kv
    over_tp: list[Tensor] = []
    over_kv: list[Tensor] = []
    for buffer, slot in ((held, slot) for held in buffers for slot in held.layout.slots):
        gradient = buffer.gradients[slot.start : slot.stop].view(slot.shape)
        summed = slot.spec.summed_over_replicas(tp.rank, tp.size)
        position = 0  # of the interval in the local gradient
        for interval in slot.spec.intervals(tp.rank, tp.size):
            rows = gradient.narrow(slot.spec.slicing.dim or 0, position, interval.stop - interval.start)
            position += interval.stop - interval.start
            if interval not in summed:
                continue
            members = tuple(tp.ranks[replica] for replica in interval.replicas)
            if members not in (tp.ranks, kv.ranks):
                raise ValueError(f"{slot.spec.name}: its replicas {members} are neither the tp nor the kv group")
            (over_tp if members == tp.ranks else over_kv).append(rows)
    return [(group, gradients) for group, gradients in ((tp, over_tp), (kv, over_kv)) if gradients]


def sum_over_tp(sums: TpSums) -> None:
    """Replace gradients by their sums over the replicas: many small tensors with one all-reduce a group."""
    for group, gradients in sums:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce(flat, group)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view(gradient.shape))


def _states(buffers: StageBuffers, kind: str) -> list[_BucketState]:
    return [
        _BucketState(buffer, bucket)
        for buffer in buffers.buffers
        if buffer.layout.kind == kind
        for bucket in buffer.layout.buckets
    ]
