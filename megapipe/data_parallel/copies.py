"""`Copies`: parameters that several ranks hold alike, compared bit by bit through checksums.

    replicas    every flat buffer, over the ranks that hold the same stages and tp slice
    tp          what tensor parallelism does not cut: norms, biases of row-parallel layers, position embeddings
    kv          rows of q|k|v that tp neighbours share where there are fewer KV heads than tp
    embedding   the tied word embedding at both ends of a pipeline

In a healthy run all of these stay equal to the bit. They part when memory, a core or a link has changed bits, or by a bug. What is not
found: a change in a weight that no other rank holds, and one in the weight from which the others copy theirs (the own shard of a
distributed optimizer in fp32), for then all are wrong alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.comm.collectives import all_gather
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.checksum import checksum, raw_bytes
from megapipe.sharding.boxes import pieces
from megapipe.sharding.buffers import Slot

BLOCK_BYTES = 1 << 22  # of each rank's copy, gathered at once when elements are compared


@dataclass(frozen=True)
class Place:
    """Where two copies of a parameter part. num_elements: that differ, of `of`; index: of the first in this rank's flat copy, row-major;
    bits: its value on each rank of the group, hexadecimal."""

    num_elements: int
    of: int
    index: int
    bits: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """Copies that are not alike in one group. ranks: global, of the group. suspects: of them those that are not of the majority; all where
    there is none. names: of the parameters, those of the first first. place: in the first of them."""

    group: str
    ranks: tuple[int, ...]
    suspects: tuple[int, ...]
    names: tuple[str, ...]
    place: Place


@dataclass(frozen=True)
class _Held:
    """One thing this rank holds a copy of: flat, contiguous."""

    name: str
    values: Tensor


class Copies:
    """What this rank's parameters share with other ranks. stages: buffers by stage index. Every method is called by all ranks together,
    with no gather under way."""

    def __init__(self, stages: Mapping[int, StageBuffers], groups: ProcessGroups) -> None:
        self._stages = dict(sorted(stages.items()))
        self._device = next(iter(stages.values())).device
        self._tp_rank, self._tp = groups.tp.rank, groups.tp.size
        compared = (groups.replicas, groups.tp, groups.kv, groups.embedding)
        self._groups = [group for group in compared if group is not None and group.size > 1]

    @torch.no_grad()
    def differ(self) -> bool:
        """Whether any copy this rank holds differs from another rank's. Cost: one reading of the parameters, a few bytes a group."""
        agreed = [self._agree(group) for group in self._groups]  # all of them: every group's collective is joined
        return not all(agreed)

    @torch.no_grad()
    def differences(self) -> list[Difference]:
        """What differs in this rank's groups, parameter by parameter; the same on all ranks of a group."""
        found = []
        for group in self._groups:
            held = list(self._by_parameter(group))
            sums = self._gathered(
                torch.stack([checksum(one.values) for one in held]) if held else self._nothing(), group
            )
            unlike = [i for i in range(len(held)) if (sums[:, i] != sums[0, i]).any()]
            if unlike:
                suspects = _suspects([tuple(row) for row in sums[:, unlike].tolist()])
                place = self._place(held[unlike[0]].values, group)
                names = tuple(held[i].name for i in unlike)
                found.append(Difference(group.name, group.ranks, tuple(group.ranks[i] for i in suspects), names, place))
        return found

    def _agree(self, group: Group) -> bool:
        held = [one.values for one in self._at_once(group)]
        total = torch.stack([checksum(values) for values in held]) if held else self._nothing()
        sums = self._gathered(total, group)
        return bool((sums == sums[0]).all())

    def _at_once(self, group: Group) -> Iterator[_Held]:
        """As few tensors as there can be."""
        if group.name == "replicas":
            for buffers in self._stages.values():
                for buffer in buffers.buffers:
                    for values in buffer.versions:
                        yield _Held(buffer.layout.kind, values)
            return
        parts = [raw_bytes(one.values) for one in self._by_parameter(group)]
        if parts:
            yield _Held(group.name, torch.cat(parts))

    def _by_parameter(self, group: Group) -> Iterator[_Held]:
        if group.name == "embedding":
            yield from self._tied(group)
            return
        for stage, buffers in self._stages.items():
            for buffer in buffers.buffers:
                for slot in buffer.layout.slots:
                    for version, whole in enumerate(buffer.versions):
                        words = f"{slot.spec.name} of stage {stage}" + (
                            f", version {version}" if len(buffer.versions) > 1 else ""
                        )
                        values = whole[slot.start : slot.stop]
                        shared = [(0, slot.numel)] if group.name == "replicas" else self._shared(slot, group)
                        for start, stop in shared:
                            yield _Held(words, values[start:stop])

    def _shared(self, slot: Slot, group: Group) -> Iterator[tuple[int, int]]:
        """Flat ranges of a parameter that the ranks of `tp`, or of `kv`, hold alike; to `tp` belongs what all of them share."""
        for interval, (start, stop) in zip(
            slot.spec.intervals(self._tp_rank, self._tp), self._ranges(slot), strict=True
        ):
            everybody = len(interval.replicas) == self._tp
            if len(interval.replicas) > 1 and everybody == (group.name == "tp"):
                yield start, stop

    def _ranges(self, slot: Slot) -> Iterator[tuple[int, int]]:
        """The flat range of each interval of a parameter, in order."""
        for interval in slot.spec.intervals(self._tp_rank, self._tp):
            rows = range(interval.start, interval.stop)
            dim = slot.spec.slicing.dim or 0
            own = [p for p in pieces(slot.spec, self._tp_rank, self._tp) if p.box.offset[dim] in rows]
            yield own[0].start, own[-1].stop

    def _tied(self, group: Group) -> Iterator[_Held]:
        """The word embedding of each end. A rank that holds both ends (two directions) starts with another one than its peer does."""
        ends = [
            _Held(f"{slot.spec.name} of stage {stage}", buffer.parameters[slot.start : slot.stop])
            for stage, buffers in self._stages.items()
            for buffer in buffers.buffers
            if buffer.layout.kind == "tied"
            for slot in buffer.layout.slots
        ]
        turn = group.rank % max(len(ends), 1)
        yield from [*ends[turn:], *ends[:turn]]

    def _gathered(self, sums: Tensor, group: Group) -> Tensor:
        """[ranks of the group, sums]."""
        whole = sums.new_empty(group.size * sums.numel())
        all_gather(whole, sums, group)
        return whole.view(group.size, -1).cpu()

    def _nothing(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self._device)

    def _place(self, values: Tensor, group: Group) -> Place:
        """Where the copies of one tensor part, block by block."""
        size, raw = values.element_size(), raw_bytes(values)
        num_elements, first = 0, -1
        bits: tuple[str, ...] = ()
        for start in range(0, raw.numel(), BLOCK_BYTES):
            own = raw[start : start + BLOCK_BYTES].contiguous()
            whole = own.new_empty(group.size * own.numel())
            all_gather(whole, own, group)
            elements = whole.view(group.size, -1, size)
            unlike = (elements != elements[0]).any(2).any(0).nonzero().flatten()
            if unlike.numel() and first < 0:
                at = int(unlike[0])
                first = start // size + at
                bits = tuple(
                    "0x" + bytes(reversed(element)).hex() for element in elements[:, at].tolist()
                )  # little-endian
            num_elements += unlike.numel()
        return Place(num_elements, values.numel(), first, bits)


def _suspects(copies: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Indices of the copies that are not what more than half of them are; all of them if there is no such thing."""
    (most, count), *_ = Counter(copies).most_common(1)
    if 2 * count <= len(copies):
        return tuple(range(len(copies)))
    return tuple(index for index, copy in enumerate(copies) if copy != most)
