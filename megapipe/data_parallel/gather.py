"""`ParameterGather`: after the distributed optimizer every rank collects the shards the others updated, under the next forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megapipe.comm.collectives import Work, all_gather
from megapipe.comm.groups import Group
from megapipe.data_parallel.buffers import StageBuffers


class ParameterGather:
    """All-gathers the parameter buffers over the replica group, in place, bucket by bucket.

    stages: buffers by stage index. order: the stages in the order in which the schedule first uses them. replicas: the dp_cp group.
    overlap: start() returns at once and wait(stage) waits; otherwise start() itself waits for everything.
    Buffers that are not sharded need nothing. Reading parameters before wait or finish gives stale values: saving, evaluating,
    checksums, generation and leaving begin with finish().
    """

    def __init__(self, stages: Mapping[int, StageBuffers], order: Sequence[int], replicas: Group, *, overlap: bool = True) -> None:
        if sorted(order) != sorted(stages):
            raise ValueError(f"the order of first use names stages {sorted(order)}, this rank holds {sorted(stages)}")
        self._stages = dict(stages)
        self._order = tuple(order)
        self._replicas = replicas
        self._overlap = overlap
        self._pending: dict[int, list[Work]] = {}

    def start(self) -> None:
        """Start collecting all stages' parameters, those used first first."""
        self.finish()
        for stage in self._order:
            self._pending[stage] = self._launch(self._stages[stage])
        if not self._overlap:
            self.finish()

    def wait(self, stage: int) -> None:
        """Return when the parameters of the stage are up to date."""
        for work in self._pending.pop(stage, []):
            work.wait()

    def finish(self) -> None:
        """Return when all parameters are up to date."""
        for stage in self._order:
            self.wait(stage)

    @property
    def pending(self) -> tuple[int, ...]:
        """Stages whose parameters are still on their way, in order."""
        return tuple(self._pending)

    def _launch(self, buffers: StageBuffers) -> list[Work]:
        works = []
        for buffer in buffers.buffers:
            if buffer.layout.num_shards == 1:
                continue
            for bucket in reversed(buffer.layout.buckets):  # buckets lie in backward order, a forward uses the last one first
                low, high = buffer.shard_range(bucket, self._replicas.rank)
                whole = buffer.parameters[bucket.start : bucket.stop]
                works.append(all_gather(whole, buffer.parameters[low:high], self._replicas, async_op=True))
        return works
