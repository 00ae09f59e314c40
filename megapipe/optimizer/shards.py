"""`Shard`: the part of one bucket whose master weights and moments this rank holds and updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.data_parallel.buffers import FlatBuffer, StageBuffers
from megapipe.sharding.boxes import Piece
from megapipe.sharding.buffers import Bucket, shard_pieces


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a shard that are updated alike. Zero padding inside is harmless: its gradient and weight stay zero."""

    start: int
    stop: int
    weight_decay: bool
    decoupled_lr: bool


@dataclass(frozen=True)
class Ranges:
    """Element ranges of a shard that this rank counts, so that every element of the model counts once over tp and pp.

    exact: without padding, the vocabulary's included. merged: with padding inside, fewer and longer: for sums of gradients, where
    padding is zero.
    """

    exact: tuple[tuple[int, int], ...]
    merged: tuple[tuple[int, int], ...]


class Shard:
    """Elements [start, stop) of a flat buffer.

    parameter, gradient: [stop - start] views of the buffer; parameter is the newest version. master: the same memory as parameter where
    there is one version in the dtype of the gradients (fp32, fp64), else a copy in that dtype. moments: by name, like master.
    on_host: master and moments lie in host memory, and an update works on a copy of the gradient there.
    is_copy: another stage owns these parameters (the tied embedding at the head), so that they count for nothing in norms.
    counts: False if another rank of the same copy of the model counts these elements.
    """

    def __init__(
        self,
        stage: int,
        buffer: FlatBuffer,
        bucket: Bucket,
        replica: int,
        coordinate: tuple[int, int],  # tp_rank, tp
        moment_names: tuple[str, ...],
        counts: bool = True,
        on_host: bool = False,
    ) -> None:
        self.stage = stage
        self.bucket = bucket
        self.start, self.stop = buffer.shard_range(bucket, replica)
        self.is_copy = buffer.layout.kind == "tied" and stage != 0
        self._tp_rank, self._tp = coordinate
        self._buffer = buffer
        self.gradient = buffer.gradients[self.start : self.stop]
        self.has_own_master = on_host or self.parameter.dtype != self.gradient.dtype or len(buffer.versions) > 1
        self._host_gradient: Tensor | None = None
        self._host_parameter: Tensor | None = None
        if on_host:
            self._host_gradient = _host_memory(self.gradient, self.gradient.dtype)
            self._host_parameter = _host_memory(self.parameter, self.parameter.dtype)
            self.master = _host_memory(self.gradient, self.gradient.dtype).copy_(self.parameter)
            self.moments = {name: _host_memory(self.gradient, self.gradient.dtype) for name in moment_names}
        else:
            self.master = self.parameter.to(self.gradient.dtype, copy=True) if self.has_own_master else self.parameter
            self.moments = {name: torch.zeros_like(self.gradient) for name in moment_names}
        self.runs = tuple(self._runs())
        counts = counts and not self.is_copy
        self.counted = _counted(bucket, self._tp_rank, self._tp, self.start, self.stop) if counts else Ranges((), ())

    @property
    def parameter(self) -> Tensor:
        return self._buffer.parameters[self.start : self.stop]

    @property
    def updated_from(self) -> Tensor:
        """The gradient where the update rule works on it: [stop - start], where `master` is."""
        return self.gradient if self._host_gradient is None else self._host_gradient

    def fetch_gradient(self) -> None:
        """Start to bring the gradient to the host, where the update works there."""
        if self._host_gradient is not None:
            self._host_gradient.copy_(self.gradient, non_blocking=True)

    def write_parameter(self) -> None:
        """The master as parameter, in its dtype; from the host without waiting until it is there."""
        if self._host_parameter is None:
            self.parameter.copy_(self.master)
        else:
            self.parameter.copy_(self._host_parameter.copy_(self.master), non_blocking=True)

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """What the shard's elements mean: (position in the shard, piece) in order."""
        for position, piece in shard_pieces(self.bucket, self._tp_rank, self._tp, self.start, self.stop):
            yield position - self.start, piece

    def _runs(self) -> Iterator[Run]:
        run: Run | None = None
        for slot in self.bucket.slots:
            low, high = max(slot.start, self.start) - self.start, min(slot.stop, self.stop) - self.start
            if low >= high:
                continue
            following = Run(low, high, slot.spec.weight_decay, slot.spec.decoupled_lr)
            if run is not None and (run.weight_decay, run.decoupled_lr) == (
                following.weight_decay,
                following.decoupled_lr,
            ):
                run = Run(run.start, high, run.weight_decay, run.decoupled_lr)
                continue
            if run is not None:
                yield run
            run = following
        if run is not None:
            yield run


def make_shards(
    stages: Mapping[int, StageBuffers],
    replica: int,
    tp_rank: int,
    tp: int,
    moment_names: tuple[str, ...],
    counts: bool = True,
    on_host: bool = False,
) -> tuple[Shard, ...]:
    """This rank's shard of every bucket of its stages. replica: its rank in the group of replicas. counts, on_host: see `Shard`."""
    return tuple(
        Shard(stage, buffer, bucket, replica, (tp_rank, tp), moment_names, counts, on_host)
        for stage, buffers in sorted(stages.items())
        for buffer in buffers.buffers
        for bucket in buffer.layout.buckets
    )


def _host_memory(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the same length in the host's memory; pinned where the tensor is a GPU's, so that copies need not be waited for."""
    if like.is_meta:
        return torch.zeros(like.shape, dtype=dtype, device="meta")
    return torch.zeros(like.shape, dtype=dtype, pin_memory=like.is_cuda)


def _counted(bucket: Bucket, tp_rank: int, tp: int, start: int, stop: int) -> Ranges:
    exact: list[tuple[int, int]] = []
    merged: list[tuple[int, int]] = []
    foreign = False  # elements of another owner since the last counted range
    for position, piece in shard_pieces(bucket, tp_rank, tp, start, stop):
        if not piece.owned:
            foreign = True
            continue
        low, high = position - start, position - start + piece.box.num_elements
        _append(exact, low, low + _meaningful(piece), touching=True)
        _append(merged, low, high, touching=foreign)
        foreign = False
    return Ranges(tuple(exact), tuple(merged))


def _append(ranges: list[tuple[int, int]], low: int, high: int, touching: bool) -> None:
    """Add a range, as part of the last one if nothing lies between (touching: only if no padding does either)."""
    if low == high:
        return
    if ranges and (ranges[-1][1] == low or not touching):
        ranges[-1] = (ranges[-1][0], high)
    else:
        ranges.append((low, high))


def _meaningful(piece: Piece) -> int:
    """Elements of a piece that are not vocabulary padding; they come first."""
    true_rows = piece.spec.true_rows
    if true_rows is None:
        return piece.box.num_elements
    rows = min(max(true_rows - piece.box.offset[0], 0), piece.box.shape[0])
    return piece.box.num_elements // piece.box.shape[0] * rows
