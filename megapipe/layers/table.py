"""The columns of a part's table: its operations on one rank, what each keeps for the backward, multiplies, sends and
makes on the way back.

Bytes and shapes are those of one microbatch on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

ALL_REDUCE = 2  # collectives that an all-reduce counts as: a reduce-scatter and an all-gather


@dataclass(frozen=True)
class Kept:
    """A tensor that an operation keeps from the forward to the backward of its microbatch.

    with_replay: an output of fused attention, which --recompute-keep-attention keeps in addition to a checkpoint.
    in_attention_time: its reads and writes are part of the attention's time, not of the pointwise kernels'.
    """

    name: str
    elements: int
    element_bytes: int
    with_replay: bool = False
    in_attention_time: bool = False

    @property
    def num_bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Collectives:
    """Number of all-gathers and reduce-scatters of hidden states over tp, in F, I (with what it computes again) and
    W.
    """

    forward: int = 0
    inputs: int = 0
    weights: int = 0

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    def __mul__(self, count: int) -> Collectives:
        return Collectives(self.forward * count, self.inputs * count, self.weights * count)

    @property
    def total(self) -> int:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class Gemm:
    """The product [tokens, inputs] x [inputs, outputs] of a linear on one rank.

    is_column: the outputs are cut over tp, and the input is gathered under sequence parallelism; else the inputs are
    cut, and the output is summed over tp. is_fp8: the operands have 8 bits.
    """

    inputs: int
    outputs: int
    is_column: bool
    is_fp8: bool = False

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class CoreAttention:
    """The cost of softmax(q k^T) v: its floating-point operations, the bytes that its pointwise kernels move, and the
    time of its backward as a multiple of the forward's.
    """

    flops: float
    moved_bytes: float
    backward_forwards: float


@dataclass(frozen=True)
class Backward:
    """One operation's backward.

    held: bytes that exist while it runs, beyond what the forward kept and earlier parts of the backward left. frees:
    kept bytes that are free afterwards.
    """

    held: int
    frees: int = 0


@dataclass(frozen=True)
class Operation:
    """One step of a part's forward, and its backward.

    recompute_module: the module of --recompute-modules whose recomputation runs this GEMM or attention again.
    deferred_bytes: what waits from I to W, where the backward is split.
    backward: None if it can never be the peak of a backward.
    """

    name: str
    keeps: tuple[Kept, ...] = ()
    gemm: Gemm | None = None
    attention: CoreAttention | None = None
    collectives: Collectives = Collectives()
    recompute_module: str | None = None
    deferred_bytes: int = 0
    backward: Backward | None = None


@dataclass(frozen=True)
class Table:
    """All operations of one part, in the order of the forward.

    left_bytes: what the part's backward leaves for the parts before it: the gradient of its input, and what waits for
    W. weight_gradient_bytes: what the largest of its weight gradients takes before it is added to the main gradients.
    """

    operations: tuple[Operation, ...]
    left_bytes: int = 0
    weight_gradient_bytes: int = 0

    @cached_property
    def keeps(self) -> tuple[Kept, ...]:
        return tuple(tensor for operation in self.operations for tensor in operation.keeps)

    @cached_property
    def kept_bytes(self) -> int:
        return total_bytes(self.keeps)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return tuple(operation.gemm for operation in self.operations if operation.gemm is not None)

    @property
    def deferred_bytes(self) -> int:
        return sum(operation.deferred_bytes for operation in self.operations)

    @property
    def backwards(self) -> tuple[Backward, ...]:
        """Backwards of the operations, in the order in which they run."""
        return tuple(operation.backward for operation in reversed(self.operations) if operation.backward is not None)


def total_bytes(tensors: Iterable[Kept]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.num_bytes for tensor in tensors)
