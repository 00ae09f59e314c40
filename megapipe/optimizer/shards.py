"""`Shard`: the part of one bucket whose master weights and moments this rank holds and updates."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megapipe.data_parallel.store import Store
from megapipe.sharding.boxes import Piece
from megapipe.sharding.buffers import ALIGNMENT, Bucket
from megapipe.sharding.spec import ParamSpec
from megapipe.sharding.state_dtypes import CHUNK, LAST_CHANGE, MASTER


@dataclass(frozen=True)
class UpdateRange:
    """Elements [start, stop) of a shard that are updated with the same rates, and zero padding, which stays zero."""

    start: int
    stop: int
    weight_decay: bool
    decoupled_lr: bool


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a shard, all of one parameter and the padding after it; at most CHUNK."""

    start: int
    stop: int
    spec: ParamSpec


class Shard:
    """Elements [start, stop) of a flat buffer: this rank's shard of one bucket.

    parameter, gradient: [stop - start], views of the buffer or of its shards; parameter is the newest version.
    states: master weights and moments by name, each in at least fp32 but for the moments in `narrow`.
    master: the memory of parameter, if that has at least fp32 and does not change in flight; else a copy.
    updated_from: the gradient that the update rule uses, on the device of master.
    on_host: master, moments and updated_from are in host memory.
    is_copy: another stage owns these parameters (the tied embedding at the head), so norms leave them out.
    exact_ranges: the element ranges that this rank counts, so that every element of the model counts once over the
    world, without padding of buffers and vocabulary. merged_ranges: the same with padding, fewer and longer, for sums
    of gradients, where padding is zero.
    """

    def __init__(
        self,
        stage: int,
        store: Store,
        bucket: Bucket,
        moment_names: tuple[str, ...],
        on_host: bool = False,
        narrow: Collection[str] = (),  # the moments in bf16
    ) -> None:
        self.stage = stage
        self.store, self.bucket, self.layout = store, bucket, store.layout
        self.start, self.stop = store.shard_range(bucket)
        self.is_copy = store.layout.kind == "tied" and stage != 0
        self._on_host = on_host
        self.gradient = store.own_gradients(bucket)
        self.narrow = narrow
        wide = torch.promote_types(self.parameter.dtype, torch.promote_types(self.gradient.dtype, torch.float32))
        self.has_own_master = on_host or self.parameter.dtype != wide or store.changes_in_flight
        self.updated_from = self._zeros(self.gradient.dtype) if on_host else self.gradient
        self._host_parameter = self._zeros(self.parameter.dtype).copy_(self.parameter) if on_host else None
        master = self._zeros(wide).copy_(self.parameter) if self.has_own_master else self.parameter
        self.states = {MASTER: master}
        for name in moment_names:
            self.states[name] = self._zeros(torch.bfloat16 if name in narrow else wide)
        self.runs: list[UpdateRange] = []  # the longest ones of neighbouring parameters with the same rates
        held = (slot for slot in bucket.slots if max(slot.start, self.start) < min(slot.stop, self.stop))
        for rates, slots in groupby(held, key=lambda slot: (slot.spec.weight_decay, slot.spec.decoupled_lr)):
            run = list(slots)
            first, end = max(run[0].start, self.start), min(run[-1].stop, self.stop)
            self.runs.append(UpdateRange(first - self.start, end - self.start, *rates))
        self.exact_ranges: list[tuple[int, int]] = []
        self.merged_ranges: list[tuple[int, int]] = []
        if store.sharing.counts_shards and not self.is_copy:
            self._count_elements()

    @property
    def parameter(self) -> Tensor:
        return self.store.own_parameters(self.bucket)

    @property
    def master(self) -> Tensor:
        """Master weights of at least fp32."""
        return self.states[MASTER]

    @property
    def moments(self) -> dict[str, Tensor]:
        return {name: state for name, state in self.states.items() if name not in (MASTER, LAST_CHANGE)}

    @property
    def host_copies(self) -> tuple[Tensor, ...]:
        """The gradient and the parameter in host memory, where the update is there."""
        return () if self._host_parameter is None else (self.updated_from, self._host_parameter)

    @property
    def _rounded_parameter(self) -> Tensor:
        """The parameter where the master weights are."""
        return self.parameter if self._host_parameter is None else self._host_parameter

    def write_parameter(self) -> None:
        """Copy master to parameter, in its dtype. A copy from the host is not waited for."""
        # .data: autograd may not notice that weights change which it keeps for a backward (asynchronous schedules)
        self._rounded_parameter.data.copy_(self.master)
        if self._host_parameter is not None:
            self.parameter.copy_(self._host_parameter, non_blocking=True)

    def take_parameter(self) -> None:
        """Copy parameter to master."""
        if self._host_parameter is not None:
            self._host_parameter.copy_(self.parameter)
        self.master.copy_(self.parameter)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the elements of all parameters, each chunk with a multiple of ALIGNMENT elements.

        Kernels may round the last elements of a tensor differently: so no bits depend on the cut into shards.
        """
        for slot in self.bucket.slots:
            start, stop = max(slot.start, self.start), min(slot.stop, self.stop)
            if start < stop:
                stop = start + -(-(stop - start) // ALIGNMENT) * ALIGNMENT
                for low in range(start - self.start, stop - self.start, CHUNK):
                    yield Chunk(low, min(low + CHUNK, stop - self.start), slot.spec)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        """Return zeros as long as the shard; pinned in host memory if there is a GPU, for asynchronous copies."""
        device = self.gradient.device
        if not self._on_host or device.type == "meta":
            return torch.zeros(self.stop - self.start, dtype=dtype, device=device)
        return torch.zeros(self.stop - self.start, dtype=dtype, pin_memory=device.type == "cuda")

    def pieces(self) -> Iterator[tuple[slice, Piece]]:
        """Yield (elements of the shard, the piece of a parameter in them) in order."""
        for position, piece in self.store.pieces(self.bucket, self.start, self.stop):
            start = position - self.start
            yield slice(start, start + piece.box.num_elements), piece

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


def _append(ranges: list[tuple[int, int]], low: int, high: int, across_gaps: bool) -> None:
    """Append a range; extend the last one instead if they touch, or if across_gaps bridges the padding between."""
    if low == high:
        return
    if ranges and (across_gaps or ranges[-1][1] == low):
        low, _ = ranges.pop()
    ranges.append((low, high))
