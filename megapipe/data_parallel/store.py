"""`Store`: one flat buffer of a stage, of which the ranks that hold the same parameters keep all, or each a shard.

What they divide is the level (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277):

    level            weights                      main gradients               optimizer's state
    0                whole                        whole                        whole
    1 (ZeRO-1)       whole                        whole; reduced: a shard      a shard
    2 (ZeRO-2)       whole                        a shard                      a shard
    3 (ZeRO-3, FSDP) a shard                      a shard                      a shard

Where a shard is kept, the whole tensor exists only while it is needed. Parameters and main gradients are views of that
memory throughout, so that what autograd saved in a forward is valid again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_gather, all_reduce, reduce_scatter
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.sharding.boxes import Piece
from megapipe.sharding.buffers import Bucket, BufferLayout, shard_pieces

ALIGNMENT_BYTES = 64  # results of kernels may depend on alignment


@dataclass(frozen=True)
class Sharing:
    """How the ranks that hold the same parameters share them.

    level: what they divide; see above. shards: those that each keep another shard; one rank at level 0. instances:
    those that keep the same one, at level 0 all. cut: this rank's place among those that cut the parameters, and how
    many there are. gatherers: `shards` with the communicator over which weights are gathered; None: that of `shards`.
    """

    level: int = 0
    shards: Group = field(default_factory=lambda: Group.alone("shards"))
    instances: Group = field(default_factory=lambda: Group.alone("instances"))
    cut: tuple[int, int] = (0, 1)
    gatherers: Group | None = None

    @classmethod
    def of(cls, groups: ProcessGroups, level: int, is_expert: bool = False) -> Sharing:
        """Return how dense parameters or experts are shared. One shard has nothing to divide: level 0."""
        shards = groups.expert_shards if is_expert else groups.shards
        instances = groups.expert_instances if is_expert else groups.instances
        if level == 0:
            shards = Group.alone("shards", groups.world.global_rank)
            instances = groups.expert_replicas if is_expert else groups.replicas
        return cls(level if shards.size > 1 else 0, shards, instances, groups.cut_of(is_expert))

    @property
    def reducers(self) -> Group:
        """The ranks over which gradients are reduced bucket by bucket, and updates shared out."""
        return self.shards if self.level else self.instances

    @property
    def counts_shards(self) -> bool:
        """True if of all ranks that keep the same shard this one counts and saves it."""
        return self.instances.rank == 0


ALONE = Sharing()


class Store:
    """A flat buffer: its tensors, and the collectives by which shards become whole and gradients become shards.

    versions: [layout.numel] in the parameters' dtype, one for each version of the weights that is needed at the same
    time: a single one, unless the schedule is asynchronous. newest: index of the version that was updated last.
    gradients: [layout.numel], fp32 (fp64 in fp64 runs), none of frozen parameters. Padding between slots is zero and
    stays zero. accumulated: where backwards add to them, the same memory unless is_apart: then `close` moves the
    gradients of a step, so that those of the next one can be added up while these are reduced and used.
    changes_in_flight: parameters are updated between the forward and the backward of microbatches.
    parameter_shards, gradient_shards: [layout.numel / layout.num_shards], this rank's shards of all buckets, where
    these are what is kept; None elsewhere. The memory of the whole tensors is then allocated and freed as they are
    needed: at first it exists, because torch makes no views of a tensor without memory.

    Buckets are reduced in their order, which is that of a backward, and gathered in reverse. starts_early: a bucket is
    reduced once it has all gradients of a step. in_bf16: gradients are sent and summed in bf16.
    gathering: collectives in flight by the first element of a bucket. reducing: those of (work, result, target).
    Raises ValueError if the layout has another number of shards than ranks that keep one, or for versions at level 3.
    """

    def __init__(
        self,
        layout: BufferLayout,
        sharing: Sharing,
        device: torch.device,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype | None,
        num_versions: int = 1,
        is_apart: bool = False,
        changes_in_flight: bool = False,
    ) -> None:
        if layout.num_shards != sharing.shards.size:
            raise ValueError(f"a buffer ({layout.kind}) has {layout.num_shards} shards for {sharing.shards.size} ranks")
        self.layout, self.sharing, self.level = layout, sharing, sharing.level
        size = layout.numel // layout.num_shards
        self.versions: tuple[Tensor, ...]
        self.parameter_shards = self.gradient_shards = self._gradients = None
        if self.level == 3:
            if num_versions > 1:
                raise ValueError(f"sharded parameters have one version, not {num_versions}")
            self.parameter_shards = _aligned_zeros(size, param_dtype, device)
            self.versions = (torch.empty(layout.numel, dtype=param_dtype, device=device),)
        else:
            num_own = num_versions if layout.trainable else 1  # what is frozen is the same in all versions
            own = tuple(_aligned_zeros(layout.numel, param_dtype, device) for _ in range(num_own))
            self.versions = own * (num_versions // num_own)
        self.newest = 0
        grad_dtype = grad_dtype if layout.trainable else None
        if grad_dtype is not None and self.level >= 2:
            self.gradient_shards = _aligned_zeros(size, grad_dtype, device)
            self._gradients = torch.empty(layout.numel, dtype=grad_dtype, device=device)
        elif grad_dtype is not None:
            self._gradients = _aligned_zeros(layout.numel, grad_dtype, device)
        self.is_apart, self.changes_in_flight = is_apart and grad_dtype is not None, changes_in_flight
        self._accumulated = self._gradients
        if is_apart and grad_dtype is not None:
            self._accumulated = _aligned_zeros(layout.numel, grad_dtype, device)
        self.starts_early = self.in_bf16 = False
        self.gathering: dict[int, Work] = {}
        self.reducing: list[tuple[Work, Tensor, Tensor]] = []
        self._users = 0  # gathered stages that use the weights
        self._num_launched = len(layout.buckets)  # of the gradients that are whole now
        self._missing: dict[str, int] = {}  # gradients that each parameter lacks in this step
        self._place = {slot.spec.name: n for n, bucket in enumerate(layout.buckets) for slot in bucket.slots}

    @property
    def parameters(self) -> Tensor:
        """The newest version."""
        return self.versions[self.newest]

    @property
    def gradients(self) -> Tensor:
        if self._gradients is None:
            raise RuntimeError("these buffers have no gradients: they are frozen, or were created with grad_dtype=None")
        return self._gradients

    @property
    def accumulated(self) -> Tensor:
        assert self._accumulated is not None
        return self._accumulated

    @property
    def kept_parameters(self) -> tuple[Tensor, ...]:
        """The parameters that exist at any time: all versions, or this rank's shards."""
        return self.versions if self.parameter_shards is None else (self.parameter_shards,)

    @property
    def kept_gradients(self) -> tuple[Tensor, ...]:
        """The gradients that exist at any time: all, also those of the next step, or this rank's shards."""
        if self.gradient_shards is not None:
            return (self.gradient_shards,)
        return (self.gradients, self.accumulated) if self.is_apart else (self.gradients,)

    def free_shared(self) -> None:
        """Free the whole tensors of which shards are kept, once there are views of them."""
        for whole, shards in ((self.parameters, self.parameter_shards), (self._gradients, self.gradient_shards)):
            if whole is not None and shards is not None:
                free(whole)

    def shard_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements of a bucket that this rank updates."""
        return bucket.shard(self.sharing.shards.rank, self.layout.num_shards)

    def pieces(self, bucket: Bucket, start: int, stop: int) -> Iterator[tuple[int, Piece]]:
        """Yield (position in the buffer, piece) for elements [start, stop), in order; padding is skipped."""
        return shard_pieces(bucket, *self.sharing.cut, start, stop)

    def held_parameters(self, bucket: Bucket) -> tuple[int, Tensor]:
        """Return (first element, values) of what this rank keeps of a bucket's newest parameters: all, or its shard."""
        if self.parameter_shards is None:
            return bucket.start, self.parameters[bucket.start : bucket.stop]
        return self.shard_range(bucket)[0], self.own_parameters(bucket)

    def own_parameters(self, bucket: Bucket) -> Tensor:
        """Return the memory of the newest parameters that this rank updates."""
        return self._own(bucket, self.parameters, self.parameter_shards)

    def own_gradients(self, bucket: Bucket) -> Tensor:
        """Return the memory of the reduced gradients of those."""
        return self._own(bucket, self.gradients, self.gradient_shards)

    def all_own_gradients(self) -> list[Tensor]:
        """Return the reduced gradients of this rank in as few tensors as possible."""
        if self.gradient_shards is not None:
            return [self.gradient_shards]
        return [self.own_gradients(bucket) for bucket in self.layout.buckets]

    def _own(self, bucket: Bucket, whole: Tensor, shards: Tensor | None) -> Tensor:
        if shards is None:
            return whole[slice(*self.shard_range(bucket))]
        return shards[bucket.start // self.layout.num_shards : bucket.stop // self.layout.num_shards]

    # Weights

    def unshard(self) -> None:
        """Start to gather the weights for one more stage; they may be there already."""
        self._users += 1
        if self._users == 1:
            allocate(self.parameters)
            for bucket in reversed(self.layout.buckets):
                self.gather(bucket)

    def reshard(self) -> None:
        """Free the weights if no further stage uses them."""
        self._users -= 1
        if not self._users:
            self.wait()
            free(self.parameters)

    def gather(self, bucket: Bucket) -> None:
        """Start to collect a bucket of the newest parameters from the ranks that keep or update its shards."""
        # .data: gloo writes when it completes, which autograd would take for a change of saved weights
        whole, own = self.parameters.data[bucket.start : bucket.stop], self.own_parameters(bucket).data
        group = self.sharing.gatherers or self.sharing.shards
        self.gathering[bucket.start] = all_gather(whole, own, group, async_op=True)

    def wait(self) -> None:
        """Wait for all buckets that are being gathered."""
        for start in list(self.gathering):
            self.gathering.pop(start).wait()

    # Gradients

    @property
    def is_reduced(self) -> bool:
        """True if there are no whole gradients whose reduction has not been started."""
        return self._num_launched == len(self.layout.buckets)

    @property
    def is_read(self) -> bool:
        """True if reductions in flight read the memory of whole gradients that is freed after them."""
        return self.level >= 2 and bool(self.reducing) and is_allocated(self.gradients)

    def begin_step(self, num_microbatches: int) -> None:
        """Zero the gradients and expect those of num_microbatches; drop what an aborted step has left."""
        self.complete()
        self._num_launched = 0
        if self.level >= 2:
            free(self.gradients)
            self._num_launched = len(self.layout.buckets)
        for gradients in self.kept_gradients:
            gradients.zero_()
        self._missing = dict.fromkeys(self._place, num_microbatches) if self.starts_early else {}

    def close(self) -> None:
        """Take the gradients that were added up apart as those of a step, and begin those of the next one at zero."""
        self.gradients.copy_(self.accumulated)
        self.accumulated.zero_()
        self._num_launched = 0

    def accumulate(self) -> None:
        """Provide the memory of whole gradients, zero at first, where it was freed."""
        if not is_allocated(self.gradients):
            allocate(self.gradients)
            self.gradients.zero_()
            self._num_launched = 0

    def added(self, name: str) -> None:
        """Account for one gradient of a parameter; start the reductions of buckets that are now complete, in order."""
        if name not in self._missing:
            return
        if self._place[name] < self._num_launched:
            raise RuntimeError(
                f"{name} got a gradient after the reduction of its bucket had started: its module uses it more often "
                "per microbatch than declared, or more microbatches ran than were passed to begin_step"
            )
        self._missing[name] -= 1
        if self._missing[name]:
            return
        for bucket in self.layout.buckets[self._num_launched :]:
            if any(self._missing[slot.spec.name] > 0 for slot in bucket.slots):
                break
            self._launch(bucket)

    def reduce(self) -> None:
        """Start the remaining reductions of the gradients that are whole now."""
        if self.is_reduced:
            return
        for bucket in self.layout.buckets[self._num_launched :]:
            self._launch(bucket)
        if self.level >= 2 and self.in_bf16 and self.gradients.dtype != torch.bfloat16:
            free(self.gradients)  # copies are sent

    def complete(self) -> None:
        """Wait for the reductions in flight; add their results to the shards where gradients are reduced in parts."""
        is_read, reducing, self.reducing = self.is_read and self.is_reduced, self.reducing, []
        for work, result, target in reducing:
            work.wait()
            if self.level >= 2:
                target.add_(result)
            elif result.dtype != target.dtype:
                target.copy_(result)
        if is_read:
            free(self.gradients)

    def end_step(self) -> None:
        """Expect no further gradients."""
        self._missing = {}

    def _launch(self, bucket: Bucket) -> None:
        """Start to reduce a bucket: to this rank's shard, or where nothing is divided as a whole."""
        self._num_launched += 1
        group = self.sharing.reducers
        if group.size == 1:
            return
        gradients = self.gradients[bucket.start : bucket.stop]
        sent, target = gradients.to(torch.bfloat16) if self.in_bf16 else gradients, self.own_gradients(bucket)
        if self.level == 0:
            self.reducing.append((all_reduce(sent, group, async_op=True), sent, target))
            return
        low, high = (position - bucket.start for position in self.shard_range(bucket))
        self.reducing.append((reduce_scatter(sent[low:high], sent, group, async_op=True), sent[low:high], target))


def allocate(tensor: Tensor) -> None:
    """Allocate the memory of a flat tensor that has none; the values are arbitrary.

    All views of it refer to the new memory, those that autograd has saved included.
    """
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    if tensor.device.type != "meta" and tensor.data_ptr() % ALIGNMENT_BYTES:
        raise RuntimeError(f"the allocator returned memory at {tensor.data_ptr():#x}, not on {ALIGNMENT_BYTES} bytes")


def free(tensor: Tensor) -> None:
    """Free the memory of a flat tensor; its views keep their shapes."""
    tensor.untyped_storage().resize_(0)


def is_allocated(tensor: Tensor) -> bool:
    """Return True if a flat tensor has memory."""
    return tensor.untyped_storage().size() > 0


def _aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [numel] whose memory starts at a multiple of ALIGNMENT_BYTES."""
    raw = torch.zeros(numel + ALIGNMENT_BYTES // dtype.itemsize, dtype=dtype, device=device)
    start = -raw.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    return raw[start : start + numel]
