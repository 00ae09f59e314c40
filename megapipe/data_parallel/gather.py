"""`ParameterGather`: after the distributed optimizer every rank collects the shards the others updated, under the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from megapipe.comm.collectives import Work, all_gather
from megapipe.comm.groups import Group
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import FlatBuffer, StageBuffers
from megapipe.sharding.buffers import Bucket


class ParameterGather:
    """All-gathers the parameter buffers over the replica group, in place, bucket by bucket.

    stages: buffers by stage index. order: the stages in the order in which the schedule first uses them. replicas: the group of that name.
    overlap: start() returns at once; what `wait_inside` was told about waits for its own buckets only, so that the later ones travel
    under its computation. Otherwise start() itself waits for everything. tracer: records waits, "parameters of stage 2".
    Buffers that are not sharded need nothing. Reading parameters before wait or finish gives stale values: saving, evaluating,
    checksums, generation and leaving begin with finish().
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        order: Sequence[int],
        replicas: Group,
        *,
        overlap: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        if sorted(order) != sorted(stages):
            raise ValueError(f"the order of first use names stages {sorted(order)}, this rank holds {sorted(stages)}")
        self._buckets = {stage: _sharded_buckets(stages[stage]) for stage in order}
        self._replicas = replicas
        self._overlap = overlap
        self._tracer = tracer
        self._pending: dict[int, dict[Bucket, Work]] = {stage: {} for stage in order}

    def wait_inside(self, stage: int, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        """Let each of `parts`, submodules in order of first use, wait for its own parameters when it is called.

        Buckets are collected in that order from now on. Raises ValueError if a parameter of the module lies in none of the parts.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        rank_of: dict[str, int] = {}
        for part in parts:
            own = [names[id(parameter)] for parameter in part.parameters()]
            for name in own:
                rank_of.setdefault(name, len(rank_of))
            for (
                holder,
                held,
            ) in self._buckets.items():  # not always `stage`: the tied head of a V is the first stage's embedding
                buckets = tuple(bucket for bucket, _ in held if any(slot.spec.name in own for slot in bucket.slots))
                if buckets and self._overlap:
                    part.register_forward_pre_hook(lambda _module, _inputs, at=(holder, buckets): self._wait_for(*at))
        missing = sorted(set(names.values()) - set(rank_of))
        if missing:
            raise ValueError(f"stage {stage}: nobody would wait for {', '.join(missing)}")
        self._buckets[stage].sort(key=lambda held: min(rank_of[slot.spec.name] for slot in held[0].slots))

    def start(self) -> None:
        """Start collecting all stages' parameters, those used first first."""
        self.finish()
        for stage, buckets in self._buckets.items():
            for bucket, buffer in buckets:
                low, high = buffer.shard_range(bucket, self._replicas.rank)
                # .data: gloo writes when it completes, which autograd would take for a change of weights that a forward has saved
                whole, shard = buffer.parameters.data[bucket.start : bucket.stop], buffer.parameters.data[low:high]
                self._pending[stage][bucket] = all_gather(whole, shard, self._replicas, async_op=True)
        if not self._overlap:
            self.finish()

    def wait(self, stage: int) -> None:
        """Return when the parameters of the stage are up to date."""
        self._wait_for(stage, tuple(self._pending[stage]))

    def finish(self) -> None:
        """Return when all parameters are up to date."""
        for stage in self._pending:
            self.wait(stage)

    @property
    def pending(self) -> tuple[int, ...]:
        """Stages whose parameters are still on their way, in order."""
        return tuple(stage for stage, works in self._pending.items() if works)

    def _wait_for(self, stage: int, buckets: Iterable[Bucket]) -> None:
        pending = self._pending[stage]
        if not pending:
            return
        start = 0 if self._tracer is None else self._tracer.now()
        for bucket in buckets:
            work = pending.pop(bucket, None)
            if work is not None:
                work.wait()
        if self._tracer is not None:
            self._tracer.event(f"parameters of stage {stage}", "wait", start, self._tracer.now())


def _sharded_buckets(buffers: StageBuffers) -> list[tuple[Bucket, FlatBuffer]]:
    """Buckets lie in the order of a backward; a forward uses the last one first."""
    return [
        (bucket, buffer)
        for buffer in buffers.buffers
        if buffer.layout.num_shards > 1
        for bucket in reversed(buffer.layout.buckets)
    ]
