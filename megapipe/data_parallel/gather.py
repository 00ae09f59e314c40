"""`ParameterGather`: after the distributed optimizer, collects the shards that other ranks updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from megapipe.comm.collectives import Work, all_gather
from megapipe.comm.groups import Group
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.sharded import ShardedWeights
from megapipe.sharding.buffers import Bucket


class ParameterGather:
    """All-gathers the parameter buffers over their replica groups, in place, bucket by bucket.

    stages: buffers by stage index. order: the stages in the order in which the schedule first uses them.
    overlap: start() returns at once, and each submodule registered with `wait_inside` waits only for its own buckets,
    so that later buckets arrive during its computation. Without overlap start() waits for all of them.
    shards, expert_replicas: the ranks that update the shards of dense parameters, and of experts where a stage has any.
    weights: those of which only shards are kept. They are gathered by the row, not here; finish() waits for them, too.
    tracer: records waits, such as "parameters of stage 2". pending: what is still being gathered, by stage.

    Unsharded buffers need no gather. Parameters read before wait() or finish() are stale: saving, evaluating,
    checksums, generation and leaving begin with finish().
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        order: Sequence[int],
        shards: Group,
        *,
        overlap: bool = True,
        tracer: Tracer | None = None,
        expert_replicas: Group | None = None,
        weights: ShardedWeights | None = None,
    ) -> None:
        if sorted(order) != sorted(stages):
            raise ValueError(f"the order of first use names stages {sorted(order)}, this rank holds {sorted(stages)}")
        # sharded buckets in the order of a forward, which is the reverse of their order in the buffer
        self._buckets = {
            stage: [
                (bucket, buffer)
                for buffer in stages[stage].buffers
                if buffer.layout.num_shards > 1 and buffer.parameter_shards is None
                for bucket in reversed(buffer.layout.buckets)
            ]
            for stage in order
        }
        self._overlap, self._tracer = overlap, tracer
        self._shards = {False: shards, True: expert_replicas or shards}  # by BufferLayout.is_expert
        self._weights = weights
        self.pending: dict[int, dict[Bucket, Work]] = {stage: {} for stage in order}

    def wait_inside(self, stage: int, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        """Let each of `parts`, submodules in order of first use, wait for its own parameters when it is called.

        From now on the stage's buckets are gathered in that order. Raises ValueError if no part has one of the module's
        parameters.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        position: dict[str, int] = {}  # of first use
        for part in parts:
            own = [names[id(parameter)] for parameter in part.parameters()]
            for name in own:
                position.setdefault(name, len(position))
            # the holder is not always `stage`: with both ends on one rank, a tied head is the first stage's embedding
            for holder, sharded in self._buckets.items():
                buckets = tuple(bucket for bucket, _ in sharded if any(slot.spec.name in own for slot in bucket.slots))
                if buckets and self._overlap:
                    part.register_forward_pre_hook(lambda _module, _inputs, at=(holder, buckets): self.wait(*at))
        missing = sorted(set(names.values()) - set(position))
        if missing:
            raise ValueError(f"stage {stage}: no part of the module waits for {', '.join(missing)}")
        self._buckets[stage].sort(key=lambda entry: min(position[slot.spec.name] for slot in entry[0].slots))

    def start(self) -> None:
        """Start to gather the parameters of all stages, in order of first use."""
        self.finish()
        for stage, buckets in self._buckets.items():
            for bucket, buffer in buckets:
                group = self._shards[buffer.layout.is_expert]
                low, high = buffer.shard_range(bucket, group.rank)
                # .data: gloo writes when it completes, which autograd would take for a change of saved weights
                whole, shard = buffer.parameters.data[bucket.start : bucket.stop], buffer.parameters.data[low:high]
                self.pending[stage][bucket] = all_gather(whole, shard, group, async_op=True)
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Return when all parameters are up to date."""
        for stage in self.pending:
            self.wait(stage)
        if self._weights is not None:
            self._weights.finish()

    def wait(self, stage: int, buckets: Iterable[Bucket] | None = None) -> None:
        """Return when these buckets of the stage, or None for all of them, are up to date."""
        pending = self.pending[stage]
        if not pending:
            return
        start = 0 if self._tracer is None else self._tracer.now()
        if buckets is None:
            buckets = tuple(pending)
        for bucket in buckets:
            work = pending.pop(bucket, None)
            if work is not None:
                work.wait()
        if self._tracer is not None:
            self._tracer.event(f"parameters of stage {stage}", "wait", start, self._tracer.now())
