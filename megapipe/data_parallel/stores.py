"""`Stores`: all flat buffers of a rank during a step: who waits for which weights, and when gradients are reduced.

A step: `begin_step(m)`; forwards, whose submodules wait for their own parameters (`wait_inside`); backwards, with
`reduce(stage)` after the last one of a stage; `finish_gradients()`; the optimizer's update, which ends with
`start_gather()`. Main gradients are raw sums over microbatches and replicas; the optimizer scales them.

Where gradients or weights are sharded, the row says more: UNSHARD starts the gathers of a stage, its next computation
waits for them (`use`), RESHARD frees the memory; `accumulate` provides whole gradients, and each REDUCE_GRAD adds those
since the last one to the shards (`reduce_part`, at last `reduce`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megapipe.comm.collectives import Work, all_reduce
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.store import Store
from megapipe.sharding.buffers import Bucket

Entry = tuple[Store, Bucket]


class Stores:
    """The stores of this rank's stages.

    stages: buffers by stage index; stage 0 holds the embedding. groups: tp, kv and embedding are used; each store has
    the groups that share it. order: the stages in the order in which the schedule first uses them.
    overlap_gather: gathers run under computation; otherwise whoever starts them waits for them.
    overlap_reduce: reductions do; otherwise whole gradients are reduced in `finish_gradients`, and sharded ones are
    waited for. reduce_in_bf16: communicate a bf16 copy. tracer: records waits, such as "parameters of stage 2".

    All members of a group start the same collectives in the same order: gathers in the order of first use, or of the
    row; reductions stage by stage as the row completes them, which replicas share, and within a stage buffer by buffer,
    partial ones last. In a mirrored pipeline two rows share their stages but complete them in opposite orders: there a
    bucket waits for `reduce`, which both call in the same order. An embedding that two stages of this rank use is
    reduced after all stages (in parts with stage 0). The shards of instances, and the tied embedding of two ranks, are
    summed at the end of a step.

    Parameters read before `wait`, `use` or `finish_weights` are stale: saving, evaluating, checksums, generation and
    leaving begin with `finish_weights`.
    """

    def __init__(
        self,
        stages: Mapping[int, StageBuffers],
        groups: ProcessGroups,
        order: Sequence[int] | None = None,
        *,
        overlap_gather: bool = True,
        overlap_reduce: bool = True,
        reduce_in_bf16: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.stages = dict(sorted(stages.items()))
        if sorted(order or stages) != list(self.stages):
            raise ValueError(f"the order of first use names stages {order}, this rank holds {list(self.stages)}")
        self._groups, self._tracer = groups, tracer
        self._overlap_gather, self._overlap_reduce = overlap_gather, overlap_reduce
        self._used = {stage: (*held.buffers, *held.borrowed) for stage, held in self.stages.items()}
        self._accumulated = {
            stage: [each for each in used if each.layout.trainable] for stage, used in self._used.items()
        }
        # with gradients; partial ones, which wait for sums over tp, are reduced last
        self._own = {
            stage: sorted(held.trained, key=lambda store: store.layout.kind == "partial")
            for stage, held in self.stages.items()
        }
        self._shared = [store for own in self._own.values() for store in own if store.layout.kind == "shared"]
        self._trained = [store for own in self._own.values() for store in own]
        self.all = [store for held in self.stages.values() for store in held.buffers]
        # buckets that are gathered after an update, in the order of a forward: the reverse of that in the buffer
        self._gathered_once: dict[int, list[Entry]] = {
            stage: [
                (store, bucket)
                for store in self.stages[stage].trained
                if store.level in (1, 2)
                for bucket in reversed(store.layout.buckets)
            ]
            for stage in order or self.stages
        }
        self._whole: set[int] = set()  # stages between UNSHARD and RESHARD
        self._tp_sums: dict[Store, TpSums] = {}
        self._reduced: list[int] = []  # stages whose gradients of the step are complete
        self._tied_sums: list[Work] = []  # in flight
        if groups.embedding is None and any(store.layout.kind == "tied" for store in self.all):
            raise ValueError("this rank holds a tied embedding but has no embedding group")
        is_mirrored = groups.replicas.size > groups.dp_cp.size
        for buffers in self.stages.values():
            if overlap_reduce and not is_mirrored:
                buffers.listener = partial(_added, buffers)
            for store in buffers.buffers:
                store.in_bf16 = reduce_in_bf16
                is_early = buffers.listener is not None and store.layout.kind in ("plain", "expert")
                store.starts_early = is_early and store.level < 2 and not store.is_apart

    # Weights

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
            for holder, entries in self._gathered_once.items():
                needed = [entry for entry in entries if any(slot.spec.name in own for slot in entry[1].slots)]
                if needed and self._overlap_gather:
                    part.register_forward_pre_hook(lambda _module, _inputs, at=(holder, needed): self.wait(*at))
        missing = sorted(set(names.values()) - set(position))
        if missing:
            raise ValueError(f"stage {stage}: no part of the module waits for {', '.join(missing)}")
        self._gathered_once[stage].sort(key=lambda entry: min(position[slot.spec.name] for slot in entry[1].slots))

    def start_gather(self) -> None:
        """Start to gather what other ranks have updated, in order of first use; the row gathers weights in shards."""
        self.finish_weights()
        for store, bucket in (entry for entries in self._gathered_once.values() for entry in entries):
            store.gather(bucket)
        if not self._overlap_gather:
            self.finish_weights()

    def finish_weights(self) -> None:
        """Return when all parameters are up to date, and no shards are being read."""
        for stage in self._gathered_once:
            self.wait(stage)
        for store in self.all:
            store.wait()

    def wait(self, stage: int, entries: Iterable[Entry] | None = None) -> None:
        """Return when these buckets of the stage, or None for all that are gathered after an update, are up to date."""
        entries = self._gathered_once[stage] if entries is None else entries
        pending = [(store, bucket) for store, bucket in entries if bucket.start in store.gathering]
        if not pending:
            return
        start = 0 if self._tracer is None else self._tracer.now()
        for store, bucket in pending:
            store.gathering.pop(bucket.start).wait()
        if self._tracer is not None:
            self._tracer.event(f"parameters of stage {stage}", "wait", start, self._tracer.now())

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage (UNSHARD). Raises RuntimeError if they are gathered already."""
        if stage in self._whole:
            raise RuntimeError(f"the weights of stage {stage} are gathered already")
        self._whole.add(stage)
        for store in self._in_shards(stage):
            store.unshard()
        if not self._overlap_gather:
            self.use(stage)

    def use(self, stage: int) -> None:
        """Wait for the weights of a stage, before it computes. Raises RuntimeError if no gather was started."""
        stores = self._in_shards(stage)
        if stores and stage not in self._whole:
            raise RuntimeError(f"stage {stage} computes, but its weights are not gathered: its row lacks an UNSHARD")
        self.wait(stage, [(store, bucket) for store in stores for bucket in reversed(store.layout.buckets)])

    def reshard(self, stage: int) -> None:
        """Free the weights of a stage (RESHARD). Raises RuntimeError if they are not gathered."""
        if stage not in self._whole:
            raise RuntimeError(f"the weights of stage {stage} are freed, but they are not gathered")
        self._whole.remove(stage)
        for store in self._in_shards(stage):
            store.reshard()

    @contextmanager
    def whole(self, stages: Iterable[int]) -> Iterator[None]:
        """Hold the weights of these stages inside the block, between rows: a collective of those that share them."""
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

    def _in_shards(self, stage: int) -> list[Store]:
        return [store for store in self._used[stage] if store.level == 3]

    # Gradients

    def begin_step(self, num_microbatches: int) -> None:
        """Zero all gradients and expect those of num_microbatches, whether their backwards are split or not."""
        self._reduced = []
        for store in self._trained:
            store.begin_step(num_microbatches)

    def close(self, stage: int) -> None:
        """Start the reductions of a step whose gradients were added up apart, while the next step begins."""
        for store in self._own[stage]:
            store.close()
        self.reduce(stage)

    def accumulate(self, stage: int) -> None:
        """Provide the memory of a stage's whole gradients; called before each part of its backwards."""
        if any(store.is_read for store in self._accumulated[stage]):
            self._complete()
        for store in self._accumulated[stage]:
            store.accumulate()

    def reduce_part(self, stage: int) -> None:
        """Start a reduction that is not the last of a stage in the step (REDUCE_GRAD of a microbatch)."""
        own = [store for store in self._own[stage] if store.level >= 2]
        self._start([store for store in own if stage == 0 or store not in self._shared])

    def reduce(self, stage: int) -> None:
        """Start the last reductions of a stage in a step (REDUCE_GRAD). Raises RuntimeError for a second time."""
        if stage in self._reduced:
            raise RuntimeError(f"stage {stage} has already been reduced in this step")
        self._reduced.append(stage)
        self._start([store for store in self._complete_ones(stage) if self._overlap_reduce or store.level >= 2])

    def finish_gradients(self) -> None:
        """Complete all reductions of the step; then sum over instances, and the tied embedding over its group."""
        self.finish_own_gradients()
        self.finish_tied()

    def finish_own_gradients(self) -> None:
        """Do so without waiting for the sum of the tied embedding, which another stage joins at its own time."""
        for stage in self._own:
            if stage not in self._reduced:
                self.reduce(stage)
        self._complete()
        for store in (each for stage in self._reduced for each in self._complete_ones(stage)):
            self._reduce(store)
        for store in self._trained:
            store.complete()
            store.end_step()
        divided = [store for store in self._trained if store.level]
        sums = [all_reduce(g, s.sharing.instances, async_op=True) for s in divided for g in s.all_own_gradients()]
        for work in sums:
            work.wait()
        for store in (each for each in self._trained if each.layout.kind == "tied"):
            assert self._groups.embedding is not None
            for gradient in store.all_own_gradients():
                self._tied_sums.append(all_reduce(gradient, self._groups.embedding, async_op=True))
        self._reduced = []

    def finish_tied(self) -> None:
        """Wait for the sum of the tied embedding's gradient."""
        while self._tied_sums:
            self._tied_sums.pop().wait()

    def _complete_ones(self, stage: int) -> list[Store]:
        """Return the stores that are complete with this stage."""
        is_last = len(self._reduced) == len(self._own)
        own = [store for store in self._own[stage] if store not in self._shared]
        return [*own, *(self._shared if is_last else ())]

    def _start(self, stores: Iterable[Store]) -> None:
        """Start reductions; at most one at a time is in flight where gradients are reduced in parts."""
        self._complete()
        for store in stores:
            self._reduce(store)
        if not self._overlap_reduce:
            self._complete()

    def _reduce(self, store: Store) -> None:
        if store.layout.kind == "partial" and not store.is_reduced:
            if store not in self._tp_sums:
                self._tp_sums[store] = tp_sums(store, self._groups)
            for group, gradients in self._tp_sums[store]:  # many small tensors with one all-reduce a group
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                all_reduce(flat, group)
                for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(summed.view(gradient.shape))
        store.reduce()

    def _complete(self) -> None:
        for store in self._trained:
            if store.level >= 2:
                store.complete()


def _added(buffers: StageBuffers, name: str) -> None:
    """Account for one gradient of a parameter."""
    if name not in buffers.unpredictable:
        buffers.slots[name][0].added(name)


TpSums = list[tuple[Group, list[Tensor]]]


def tp_sums(store: Store, groups: ProcessGroups) -> TpSums:
    """Return the rows of these partial gradients that are summed over tp or over the ranks that share k and v."""
    tp, kv = groups.tp, groups.kv
    over_tp: list[Tensor] = []
    over_kv: list[Tensor] = []
    for slot in store.layout.slots:
        gradient = store.gradients[slot.start : slot.stop].view(slot.shape)
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
