"""`Copies`: bitwise comparison, by checksums, of parameters of which several ranks hold copies.

    replicas    every flat buffer, over the ranks that hold the same stages and tp slice; those of experts over the
                ranks that hold the same experts (expert_replicas)
    tp          parameters that tp does not split: norms, biases of row-parallel layers, position embeddings
                (replicas and tp also compare the biases of experts)
    kv          rows of q|k|v that tp neighbours share where there are fewer KV heads than tp
    embedding   the tied word embedding at both ends of a pipeline

In a healthy run all copies stay bitwise equal. They differ if memory, a core or a link has flipped bits, or because of
a bug. The comparison cannot find changes in a weight that only one rank holds, or in one from which the others are
copied (a rank's own shard of a distributed optimizer in fp32), since then all copies are equally wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.comm.collectives import all_gather
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.data_parallel.store import Store
from megapipe.data_parallel.stores import Stores
from megapipe.sharding.boxes import pieces
from megapipe.sharding.buffers import Slot

BLOCK_BYTES = 1 << 22  # bytes of each rank's copy that one all-gather brings together for the comparison of elements
WHOLE = {"replicas": False, "expert_replicas": True}  # groups that compare whole buffers, of experts or not
STATE_GROUPS = ("replicas", "tp")  # that hold equal states of the stages
LANES = 2048  # lanes of words; each lane is summed, then the sums are weighted
WORD_BYTES = 8
# odd; 2^64 divided by the golden ratio, as a signed number: spreads the weights of neighbouring lanes
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class Place:
    """The elements in which copies of a parameter differ."""

    num_elements: int  # how many of the `of` elements differ
    of: int
    index: int  # of the first one, in this rank's flat row-major copy
    bits: tuple[str, ...]  # its value on each rank of the group, in hexadecimal


@dataclass(frozen=True)
class CopyDifference:
    """Copies that differ in one group of ranks."""

    group: str
    ranks: tuple[int, ...]  # global ranks of the group
    suspects: tuple[int, ...]  # those that differ from the majority; all if there is no majority
    names: tuple[str, ...]  # of the parameters that differ
    place: Place  # where the first of them differs


class Copies:
    """This rank's copies of parameters; those of which it keeps shards are gathered stage by stage. states: tensors
    besides parameters, by name, which all ranks with the same stages hold whole, in the same order; asked for at every
    comparison.

    Every method is called by all ranks together, while no gather is in flight.
    """

    def __init__(
        self,
        stores: Stores,
        groups: ProcessGroups,
        states: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._states = states
        self._stages, self._whole = stores.stages, stores.whole
        self._device = next(iter(stores.stages.values())).device
        self._tp_rank, self._tp = groups.tp.rank, groups.tp.size
        has_experts = any(store.layout.is_expert for store in stores.all)
        experts = groups.expert_replicas if has_experts else None
        compared = (groups.replicas, experts, groups.tp, groups.kv, groups.embedding)
        self._groups = [group for group in compared if group is not None and group.size > 1]

    @torch.no_grad()
    def differ(self) -> bool:
        """Return True if any copy of this rank differs from another rank's.

        Costs one read of the parameters and a few bytes of communication per group.
        """
        differs = False
        for group in self._groups:  # all of them, because other ranks take part in their collectives
            if group.name in WHOLE:
                checksums = []  # of whole buffers
                for stage, buffers in self._stages.items():
                    with self._whole([stage]):
                        held = (each for each in buffers.buffers if each.layout.is_expert == WHOLE[group.name])
                        checksums += [checksum(values) for buffer in held for values in buffer.versions]
                if group.name in STATE_GROUPS:
                    checksums += [checksum(values) for values in self._states().values()]
            else:
                checksums = [checksum(values) for _, values in self._by_parameter(group)]
            sums = self._gather_checksums(checksums, group)
            differs |= bool((sums != sums[0]).any())
        return differs

    @torch.no_grad()
    def differences(self) -> list[CopyDifference]:
        """Return the differences in this rank's groups by parameter, equal on all ranks of a group."""
        found = []
        for group in self._groups:
            copies = [(name, checksum(values)) for name, values in self._by_parameter(group)]
            sums = self._gather_checksums([own for _, own in copies], group)
            differing = [i for i in range(len(copies)) if (sums[:, i] != sums[0, i]).any()]
            place = None
            # by all ranks, since others may gather sharded weights for their groups
            for i, (_, values) in enumerate(self._by_parameter(group)):
                if i in differing[:1]:
                    place = self._find_place(values, group)
            if place is not None:
                by_rank = {rank: tuple(sums[i, differing].tolist()) for i, rank in enumerate(group.ranks)}
                (most, count), *_ = Counter(by_rank.values()).most_common(1)
                has_majority = 2 * count > group.size
                suspects = tuple(rank for rank in group.ranks if by_rank[rank] != most or not has_majority)
                names = tuple(copies[i][0] for i in differing)
                found.append(CopyDifference(group.name, group.ranks, suspects, names, place))
        return found

    def _by_parameter(self, group: Group) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the values, flat and contiguous, of every copy that the group compares; values are valid
        until the next copy is asked for.
        """
        if group.name == "embedding":  # the word embedding at each end of the pipeline
            tied = [
                (stage, name, buffer, slot)
                for stage, buffers in self._stages.items()
                for name, (buffer, slot) in buffers.slots.items()
                if buffer.layout.kind == "tied"
            ]
            # with two directions a rank holds both ends, the other way round than its peer does
            first = group.rank % max(len(tied), 1)
            with self._whole(stage for stage, *_ in tied):
                for stage, name, buffer, slot in [*tied[first:], *tied[:first]]:
                    yield f"{name} of stage {stage}", buffer.parameters[slot.start : slot.stop]
            return
        if group.name in STATE_GROUPS:
            yield from self._states().items()
        for stage, buffers in self._stages.items():
            with self._whole([stage]):
                for parameter, (buffer, slot) in buffers.slots.items():
                    if WHOLE.get(group.name, False) == buffer.layout.is_expert:
                        yield from self._copies(f"{parameter} of stage {stage}", buffer, slot, group)

    def _copies(self, name: str, buffer: Store, slot: Slot, group: Group) -> Iterator[tuple[str, Tensor]]:
        """Yield the copies of one parameter."""
        for version, whole in enumerate(buffer.versions):
            values = whole[slot.start : slot.stop]
            shared = [(0, slot.numel)] if group.name in WHOLE else self._shared(slot, group)
            for start, stop in shared:
                yield name if len(buffer.versions) == 1 else f"{name}, version {version}", values[start:stop]

    def _shared(self, slot: Slot, group: Group) -> Iterator[tuple[int, int]]:
        """Yield the flat ranges of a parameter that all tp ranks share (group tp), or the ranks of a kv group."""
        dim = slot.spec.slicing.dim or 0
        for interval in slot.spec.intervals(self._tp_rank, self._tp):
            is_shared_by_all = len(interval.replicas) == self._tp
            if len(interval.replicas) > 1 and is_shared_by_all == (group.name == "tp"):
                rows = range(interval.start, interval.stop)
                own = [p for p in pieces(slot.spec, self._tp_rank, self._tp) if p.box.offset[dim] in rows]
                yield own[0].start, own[-1].stop

    def _gather_checksums(self, checksums: Sequence[Tensor], group: Group) -> Tensor:
        """Return the checksums on all ranks of the group: int64 [ranks, tensors], on the host."""
        sums = torch.stack(list(checksums)) if checksums else torch.zeros(1, dtype=torch.int64, device=self._device)
        whole = sums.new_empty(group.size * sums.numel())
        all_gather(whole, sums, group)
        return whole.view(group.size, -1).cpu()

    def _find_place(self, values: Tensor, group: Group) -> Place:
        """Return where the copies of one tensor differ, by comparing them block by block."""
        size, raw = values.element_size(), raw_bytes(values)
        num_elements, first = 0, -1
        bits: tuple[str, ...] = ()
        for start in range(0, raw.numel(), BLOCK_BYTES):
            own = raw[start : start + BLOCK_BYTES].contiguous()
            whole = own.new_empty(group.size * own.numel())
            all_gather(whole, own, group)
            elements = whole.view(group.size, -1, size)
            differing = (elements != elements[0]).any(2).any(0).nonzero().flatten()
            if differing.numel() and first < 0:
                index = int(differing[0])
                first = start // size + index
                # memory is little-endian
                bits = tuple("0x" + bytes(reversed(element)).hex() for element in elements[:, index].tolist())
            num_elements += differing.numel()
        return Place(num_elements, values.numel(), first, bits)


def checksum(values: Tensor) -> Tensor:
    """Return a checksum of a contiguous tensor of any dtype: int64 [], on its device. Reads the tensor once.

    The tensor is read as 64-bit words, word i in lane i mod LANES; the checksum is the sum modulo 2^64 of all words,
    each times the odd weight of its lane. A change of any single bit changes the sum, because a power of two times an
    odd number is not 0 modulo 2^64. -0.0 differs from 0.0, and a NaN equals a NaN of the same bits.
    """
    raw = raw_bytes(values)
    if raw.numel() % WORD_BYTES or raw.storage_offset() % WORD_BYTES:  # not whole, aligned words
        padded = raw.new_zeros(math.ceil(raw.numel() / WORD_BYTES) * WORD_BYTES)
        padded[: raw.numel()] = raw
        raw = padded
    words = raw.view(torch.int64)
    whole = words.numel() // LANES * LANES
    weights = (torch.arange(LANES, dtype=torch.int64, device=values.device) * 2 + 1) * FACTOR
    total = (words[:whole].view(-1, LANES).sum(0) * weights).sum() if whole else words.new_zeros(())
    rest = words[whole:]
    return total + (rest * weights[: rest.numel()]).sum()


def raw_bytes(values: Tensor) -> Tensor:
    """Return a view of the same memory as uint8 [bytes]."""
    return values.detach().reshape(-1).view(torch.uint8)
