"""Flat buffers: where each parameter of a stage starts, how buffers are cut into buckets, and buckets into shards.

A bucket is what one collective moves; over the group of replicas the distributed optimizer gives every rank one equal
shard of every bucket (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054). Parameters and gradients share one layout;
frozen parameters are in buffers of their own, which have no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megapipe.sharding.boxes import Piece, pieces
from megapipe.sharding.spec import ParamSpec

ALIGNMENT = 32  # elements: 64 bytes at bf16 and more at wider types; fp64 kernels change their bits with alignment

BufferKind = Literal["plain", "expert", "partial", "tied", "shared"]
BUFFER_KINDS: tuple[BufferKind, ...] = get_args(BufferKind)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer: elements [start, start + numel) in row-major order of its local shape."""

    spec: ParamSpec
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the buffer, moved by one collective; a multiple of ALIGNMENT x shards."""

    start: int
    stop: int
    slots: tuple[Slot, ...]

    @property
    def has_matrices(self) -> bool:
        """True if all parameters are matrices of hidden layers."""
        return all(slot.spec.matrix is not None for slot in self.slots)

    def shard(self, index: int, num_shards: int) -> tuple[int, int]:
        """Return the element range of the buffer that member `index` of the replica group owns."""
        width = (self.stop - self.start) // num_shards
        return self.start + index * width, self.start + (index + 1) * width


@dataclass(frozen=True)
class BufferLayout:
    """One flat buffer of a stage.

    kind: 'plain' buckets are reduced once their last gradient is there, 'expert' ones too, over the replicas of the
    experts (ep x etp cut them in place of tp); 'partial' ones first need sums over tp replicas, at the end of a stage;
    'tied' holds the word embedding of a model whose head is on another rank, summed over the embedding group at the
    end; 'shared' holds it where the head is another stage of the same rank, whose gradients come into the same memory:
    complete when both are done. trainable: False for a buffer of frozen parameters.
    """

    kind: BufferKind
    buckets: tuple[Bucket, ...]
    num_shards: int
    trainable: bool = True

    @property
    def is_expert(self) -> bool:
        return self.kind == "expert"

    @property
    def numel(self) -> int:
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)


def layout_buffers(
    specs: Sequence[ParamSpec],
    tp_rank: int,
    tp: int,
    num_shards: int,
    bucket_size: int,
    tied_kind: BufferKind = "plain",
    num_expert_ranks: int = 1,
    num_expert_shards: int = 1,
    matrices_apart: bool = False,
) -> tuple[BufferLayout, ...]:
    """Return the buffers of a stage that holds `specs` (model order).

    num_shards, num_expert_shards: ranks that share the optimizer state of dense parameters and of experts; 1 without
    the distributed optimizer. num_expert_ranks: ep x etp, whose ranks hold equal parts.
    bucket_size: approximate number of parameters in a bucket. Buckets fill in reverse model order, the order in which
    a backward finishes them. tied_kind: 'tied' or 'shared' where another stage uses the tied embedding too, so that
    it gets a separate buffer. matrices_apart: a bucket holds only matrices of hidden layers, or none, since the update
    rule keeps other states of them.
    """
    held: dict[tuple[bool, BufferKind], list[ParamSpec]] = {
        (trainable, kind): [] for trainable in (True, False) for kind in BUFFER_KINDS
    }
    for spec in reversed(specs):
        kind: BufferKind = "plain"
        if spec.tied and tied_kind != "plain":
            kind = tied_kind
        elif spec.is_expert:
            kind = "expert"
        elif spec.trainable and spec.summed_over_replicas(tp_rank, tp):
            kind = "partial"
        held[spec.trainable, kind].append(spec)
    dense, expert = (tp_rank, tp, num_shards), (0, num_expert_ranks, num_expert_shards)
    found = []
    for (trainable, kind), members in held.items():
        cut = expert if kind == "expert" else dense
        if members:
            buckets = tuple(_fill(members, *cut, bucket_size, matrices_apart))
            found.append(BufferLayout(kind, buckets, cut[-1], trainable))
    return tuple(found)


def shard_pieces(bucket: Bucket, tp_rank: int, tp: int, start: int, stop: int) -> Iterator[tuple[int, Piece]]:
    """Yield (position in the buffer, piece) for elements [start, stop) of the buffer, in order; padding is skipped."""
    for slot in bucket.slots:
        low, high = max(start, slot.start), min(stop, slot.stop)
        if low < high:
            for piece in pieces(slot.spec, tp_rank, tp, low - slot.start, high - slot.start):
                yield slot.start + piece.start, piece


def _fill(
    specs: Sequence[ParamSpec], tp_rank: int, tp: int, num_shards: int, bucket_size: int, matrices_apart: bool
) -> Iterator[Bucket]:
    """Cut a list of parameters into buckets of about bucket_size elements; in each, those with weight decay first."""
    start = size = 0
    group: list[ParamSpec] = []
    if matrices_apart:
        specs = sorted(specs, key=lambda spec: spec.matrix is None)
    for spec, following in zip(specs, (*specs[1:], None), strict=True):
        group.append(spec)
        size += math.prod(spec.local_shape(tp_rank, tp))
        is_last = following is None or (matrices_apart and (following.matrix is None) != (spec.matrix is None))
        if size < bucket_size and not is_last:
            continue
        slots, position = [], start
        # runs of equal settings for the optimizer's groups
        for member in sorted(group, key=lambda member: (not member.weight_decay, member.decoupled_lr)):
            slots.append(Slot(member, position, member.local_shape(tp_rank, tp)))
            position = _round_up(slots[-1].stop, ALIGNMENT)
        stop = start + _round_up(position - start, ALIGNMENT * num_shards)
        yield Bucket(start, stop, tuple(slots))
        start, size, group = stop, 0, []


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
