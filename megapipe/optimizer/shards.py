"""`Shard`: the part of one bucket whose master weights and moments this rank holds and updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.data_parallel.buffers import FlatBuffer
from megapipe.sharding.boxes import Piece
from megapipe.sharding.buffers import Bucket, shard_pieces


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a shard that are updated with the same rates, and zero padding, which stays zero."""

    start: int
    stop: int
    weight_decay: bool
    decoupled_lr: bool


class Shard:
    """Elements [start, stop) of a flat buffer: the shard of one bucket of member `replica` of the replica group.

    parameter, gradient: [stop - start], views of the buffer; parameter is the newest version.
    master: the memory of parameter, if there is one version in the dtype of the gradients (fp32, fp64); else a copy in
    that dtype. moments: by name, like master.
    updated_from: the gradient that the update rule uses, on the device of master.
    on_host: master, moments and updated_from are in host memory.
    is_copy: another stage owns these parameters (the tied embedding at the head), so norms leave them out.
    counts: False if another rank of the same copy of the model counts these elements.
    exact_ranges: the element ranges that this rank counts, so that every element of the model counts once over tp and
    pp, without padding of buffers and vocabulary. merged_ranges: the same with padding, fewer and longer, for sums of
    gradients, where padding is zero.
    """

    def __init__(
        self,
        stage: int,
        buffer: FlatBuffer,
        bucket: Bucket,
        replica: int,
        tp: Group,
        moment_names: tuple[str, ...],
        counts: bool = True,
        on_host: bool = False,
    ) -> None:
        self.stage = stage
        self.bucket = bucket
        self.start, self.stop = buffer.shard_range(bucket, replica)
        self.is_copy = buffer.layout.kind == "tied" and stage != 0
        self._tp, self._buffer = tp, buffer
        self.gradient = buffer.gradients[self.start : self.stop]
        self.has_own_master = on_host or self.parameter.dtype != self.gradient.dtype or len(buffer.versions) > 1
        self._host_parameter: Tensor | None = None
        if on_host:
            self.updated_from = _host_memory(self.gradient)
            self._host_parameter = _host_memory(self.parameter)
            self.master = _host_memory(self.gradient).copy_(self.parameter)
            self.moments = {name: _host_memory(self.gradient) for name in moment_names}
        else:
            self.updated_from = self.gradient
            self.master = self.parameter.to(self.gradient.dtype, copy=True) if self.has_own_master else self.parameter
            self.moments = {name: torch.zeros_like(self.gradient) for name in moment_names}
        self.runs = tuple(self._find_runs())
        self.exact_ranges: list[tuple[int, int]] = []
        self.merged_ranges: list[tuple[int, int]] = []
        if counts and not self.is_copy:
            self._count_elements()

    @property
    def parameter(self) -> Tensor:
        return self._buffer.parameters[self.start : self.stop]

    def write_parameter(self) -> None:
        """Copy master to parameter, in its dtype. A copy from the host is not waited for."""
        if self._host_parameter is None:
            self.parameter.copy_(self.master)
        else:
            self.parameter.copy_(self._host_parameter.copy_(self.master), non_blocking=True)

    def pieces(self) -> Iterator[tuple[slice, Piece]]:
        """Yield (elements of the shard, the piece of a parameter in them) in order."""
        for position, piece in shard_pieces(self.bucket, self._tp.rank, self._tp.size, self.start, self.stop):
            start = position - self.start
            yield slice(start, start + piece.box.num_elements), piece

    def _find_runs(self) -> Iterator[Run]:
        """Yield the longest runs of neighbouring parameters with the same rates."""
        held = (slot for slot in self.bucket.slots if max(slot.start, self.start) < min(slot.stop, self.stop))
        for rates, slots in groupby(held, key=lambda slot: (slot.spec.weight_decay, slot.spec.decoupled_lr)):
            run = list(slots)
            start, stop = max(run[0].start, self.start), min(run[-1].stop, self.stop)
            yield Run(start - self.start, stop - self.start, *rates)

    def _count_elements(self) -> None:
        """Find the ranges that this rank counts."""
        follows_foreign = False  # there are elements of another rank between this range and the last one
        for part, piece in self.pieces():
            if piece.owned:
                true_stop, true_rows = part.stop, piece.spec.true_rows
                if true_rows is not None:  # vocabulary padding comes last in a piece
                    rows = min(max(true_rows - piece.box.offset[0], 0), piece.box.shape[0])
                    true_stop = part.start + piece.box.num_elements // piece.box.shape[0] * rows
                _append(self.exact_ranges, part.start, true_stop, across_gaps=False)
                _append(self.merged_ranges, part.start, part.stop, across_gaps=not follows_foreign)
            follows_foreign = not piece.owned


class ShardSnapshot:
    """A copy of all that an update changes in this rank's shards: master weights, moments and raw gradients.

    With it, updates made before the gradient norm is known (--optimizer-post-validation) are undone. Qi et al. 2023
    (arXiv:2401.10241, section 4 and appendix) undo AdamW by arithmetic; here the old values are kept, so that an update
    that is undone and repeated gives the bits of one that waited. Gradients are included because the update kernels
    scale them in place.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._live = [
            live for shard in shards for live in (shard.gradient, shard.master.detach(), *shard.moments.values())
        ]
        self.copies = [torch.empty_like(live) for live in self._live]

    def take(self) -> None:
        """Copy the current values."""
        for live, copy in zip(self._live, self.copies, strict=True):
            copy.copy_(live)

    def restore(self) -> None:
        """Write the values of the last `take` back. Parameters that are not master weights are left to the caller."""
        for live, copy in zip(self._live, self.copies, strict=True):
            live.copy_(copy)


def _host_memory(like: Tensor) -> Tensor:
    """Return zeros of the same length and dtype in host memory, pinned for a GPU so that copies are asynchronous."""
    device = "meta" if like.is_meta else "cpu"
    return torch.zeros(like.shape, dtype=like.dtype, device=device, pin_memory=like.is_cuda)


def _append(ranges: list[tuple[int, int]], low: int, high: int, across_gaps: bool) -> None:
    """Append a range; extend the last one instead if they touch, or if across_gaps bridges the padding between."""
    if low == high:
        return
    if ranges and (across_gaps or ranges[-1][1] == low):
        low, _ = ranges.pop()
    ranges.append((low, high))
