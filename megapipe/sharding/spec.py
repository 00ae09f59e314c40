"""`ParamSpec`: shape, slicing, initial values and optimizer flags of one parameter of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megapipe.sharding.slicing import Interval, Replicated, Slicing

Owner = int | Literal["embedding", "head"]


@dataclass(frozen=True)
class Init:
    """Initial values: 'normal' with standard deviation `std`, 'zeros' or 'ones'."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model under its global (Megatron) name.

    shape: the global tensor, vocabulary padded. `slicing` says how tp cuts it. `owner` is the layer index that holds
    it, or 'embedding' (first stage) or 'head' (last stage).
    """

    name: str
    shape: tuple[int, ...]
    owner: Owner
    slicing: Slicing = Replicated()  # noqa: RUF009 - frozen and stateless
    init: Init = Init("zeros")
    weight_decay: bool = True  # none on 1-D tensors and biases
    partial_gradient: bool = (
        False  # each tp replica computes only part of the gradient: they are summed over the replicas
    )
    tied: bool = False  # also used by the stage with the head, which holds a replica unless it is on the same rank
    decoupled_lr: bool = False  # takes --decoupled-lr (embedding and head)
    true_rows: int | None = None  # rows of dim 0 without vocabulary padding, which is never saved

    def intervals(self, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        """Return the rows of dimension `slicing.dim` (0 if replicated) that tp_rank holds; concatenated they are its
        local tensor.
        """
        return self.slicing.intervals(self.shape[self.slicing.dim or 0], tp_rank, tp)

    def local_shape(self, tp_rank: int, tp: int) -> tuple[int, ...]:
        """Return the shape of this rank's slice; it is the same on every tp_rank."""
        dim = self.slicing.dim or 0
        rows = sum(interval.stop - interval.start for interval in self.intervals(tp_rank, tp))
        return (*self.shape[:dim], rows, *self.shape[dim + 1 :])

    @property
    def num_elements(self) -> int:
        """Elements of the global tensor, vocabulary padding included."""
        return math.prod(self.shape)

    def summed_over_replicas(self, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        """Return the intervals whose gradient must be summed over their replicas before any use."""
        return tuple(i for i in self.intervals(tp_rank, tp) if len(i.replicas) > 1 and self.needs_replica_sum(i))

    def needs_replica_sum(self, interval: Interval) -> bool:
        """Return True if the replicas of this interval each hold only part of its gradient.

        Rows replicated by a cutting rule (shared k and v heads) always do: each replica sees only its own query heads.
        """
        return self.partial_gradient or self.slicing.dim is not None
