"""The description of a part of the model on one rank, in bytes and shapes of one microbatch: `RankShape`, the options
that it depends on, and `Table`, its operations with what each keeps, multiplies, sends and makes on the way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megapipe.config.parallel import RecomputeConfig
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.sharding.sequence import SequenceSlice

ALL_REDUCE = 2  # collectives that an all-reduce counts as: a reduce-scatter and an all-gather
MASK_BYTES = 1  # dropout masks are bool


@dataclass(frozen=True)
class Documents:
    """The inputs that a microbatch carries besides tokens and labels; each of them costs memory."""

    position_ids: bool = False
    attention_mask: bool = False
    loss_mask: bool = False
    borders: bool = False  # of documents, for kernels that need no mask


@dataclass(frozen=True)
class CommChunks:
    """Number of chunks of a linear's collectives over tp, which overlap with its GEMM; 1: not cut."""

    gather: int = 1  # of all-gathers
    reduce: int = 1  # of reduce-scatters, and of all-reduces without sequence parallelism


WHOLE = CommChunks()


@dataclass(frozen=True)
class RankShape:
    """One microbatch of `batch` sequences on one tp and cp rank, and the options that its costs depend on.

    seq: tokens of a sequence on this cp rank.
    """

    batch: int
    seq: int
    dtype: str
    tp: int = 1
    sequence_parallel: bool = False  # 1 / tp of the tokens between the tensor-parallel regions; never with tp = 1
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    documents: Documents = Documents()
    chunks: CommChunks = WHOLE
    attention_impl: str = "sdpa"
    transformer_impl: str = "local"
    compile_pointwise: bool = False
    compile_loss: bool = False
    loss_chunk: int | None = None  # tokens, --cross-entropy-chunk-size
    fp8_block: int | None = None  # elements that share a scale of an operand in 8 bits; None: all of them
    is_cuda: bool = True  # CUDA kernels keep and make other tensors than those of CPUs
    splits_backward: bool = False  # into I and W: linears' inputs and output gradients wait for W
    ep: int = 1  # ranks among which experts are divided
    ep_inner: int = 1  # of a node, if a token is sent once to each of several
    etp: int = 1  # ranks that share every expert
    gradient_dtype: str | None = None  # of the main gradients; None: at least fp32
    cp: int = 1
    cp_inner: int = 1  # ranks that exchange heads with --cp-comm-type a2a+p2p
    in_parts: bool = False  # layers run in parts, between which tensors are detached
    slice: SequenceSlice | None = None  # the one of which `seq` is the length, where microbatches have slices

    @property
    def whole_seq(self) -> int:
        """Tokens of a sequence on all cp ranks, and in all slices."""
        return self.seq * self.cp if self.slice is None else self.slice.seq

    @property
    def has_levels(self) -> bool:
        """True if ep has several nodes with several ranks each, and a token is sent once to a node."""
        return self.ep_inner not in (1, self.ep)

    @property
    def compiles_casts(self) -> bool:
        """True if a cast to fp8 is compiled, which it always is on CUDA."""
        return self.compile_pointwise or self.is_cuda

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def own_tokens(self) -> int:
        """Tokens of this rank between the tensor-parallel regions."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def element(self) -> int:
        """Bytes of one element of the model's dtype."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of one element of at least fp32: statistics, logits of the loss."""
        return max(ELEMENT_BYTES[self.dtype], 4)

    @property
    def gradient(self) -> int:
        """Bytes of one element of a main gradient."""
        return self.wide if self.gradient_dtype is None else ELEMENT_BYTES[self.gradient_dtype]

    def hidden_bytes(self, hidden_size: int) -> int:
        """Return the bytes of the hidden states between layers: [s, b, h], or [s / tp, b, h] (sequence parallel)."""
        return self.own_tokens * hidden_size * self.element

    def gathered_bytes(self, hidden_size: int) -> int:
        """Return the bytes of hidden states gathered over tp to the whole sequence; 0 where nothing is gathered."""
        return self.tokens * hidden_size * self.element if self.sequence_parallel else 0

    def collective_bytes(self, hidden_size: int) -> float:
        """Return the bytes that each rank sends in one all-gather or reduce-scatter of hidden states over tp."""
        return ring_bytes(self.tokens * hidden_size * self.element, self.tp)

    def recomputes(self, *modules: str) -> bool:
        """Return True if selective recompute makes the activations of one of these modules again."""
        chosen = self.recompute.recompute_modules if self.recompute.recompute_granularity == "selective" else ()
        return any(module in chosen for module in modules)

    def without(self, module: str) -> RankShape:
        """Return the shape with recompute of all chosen modules but this one."""
        modules = tuple(name for name in self.recompute.recompute_modules if name != module)
        return replace(self, recompute=replace(self.recompute, recompute_modules=modules))


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends when a ring gathers, or reduces and scatters, a buffer of num_bytes."""
    return num_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Kept:
    """A tensor that an operation keeps from the forward to the backward of its microbatch."""

    name: str
    elements: int
    element_bytes: int
    with_replay: bool = False  # an output of fused attention: --recompute-keep-attention keeps it with a checkpoint
    with_checkpoint: bool = False  # the routing of experts: every checkpoint keeps it
    in_attention_time: bool = False  # its reads and writes are part of the attention's time, not of pointwise kernels'

    @property
    def num_bytes(self) -> int:
        return self.elements * self.element_bytes

    def outlives_replay(self, recompute: RecomputeConfig) -> bool:
        """Return True if full recompute keeps it from the forward on."""
        return self.with_checkpoint or (self.with_replay and recompute.recompute_keep_attention)


@dataclass(frozen=True)
class Collectives:
    """Number of all-gathers and reduce-scatters of hidden states over tp, in F, I (recomputed ones included) and W.

    One of fewer channels is counted as their share.
    """

    forward: float = 0
    inputs: float = 0
    weights: float = 0

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class Gemm:
    """The product [tokens, inputs] x [inputs, outputs] of a linear on one rank.

    is_column: the outputs are cut over tp, and the input is gathered under sequence parallelism; else the inputs are
    cut, and the output is summed over tp. is_replicated: every rank holds it whole, for its own tokens.
    """

    inputs: int
    outputs: int
    is_column: bool
    is_fp8: bool = False  # the operands have 8 bits
    is_replicated: bool = False
    is_trained: bool = True  # it has a weight gradient

    @property
    def width(self) -> int:
        """Channels that its collectives over tp move: its inputs are gathered, or its outputs summed."""
        return self.inputs if self.is_column else self.outputs

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class AttentionWork:
    """The cost of softmax(q k^T) v."""

    flops: float
    moved_bytes: tuple[float, float]  # by its pointwise kernels, in a forward and in a backward
    backward_forwards: float  # the FLOPs of its backward as a multiple of the forward's
    kernel: str = ""  # which fused one: 'cudnn' (on A100 flash attention) or 'flash2'; '' for others and written out
    keys: float = 0.0  # that a query sees in the mean, of one call
    head_size: int = 0  # channels of a query's head


@dataclass(frozen=True)
class Backward:
    """One operation's backward, in bytes."""

    held: int  # while it runs, beyond what the forward kept and earlier parts of the backward left
    frees: int = 0  # kept bytes that are free afterwards


@dataclass(frozen=True)
class Operation:
    """One step of a part's forward, and its backward."""

    name: str
    keeps: tuple[Kept, ...] = ()
    gemm: Gemm | None = None
    attention: AttentionWork | None = None
    collectives: Collectives = Collectives()
    recompute_modules: tuple[str, ...] = ()  # of --recompute-modules: recomputing one of them runs this again
    flops: float = 0.0  # of the experts' products, which are no `gemm`
    deferred_bytes: int = 0  # wait from I to W, where the backward is split
    reads_weights_in_w: bool = False  # W computes again what was not kept, from weights
    backward: Backward | None = None  # None if it can never be the peak of a backward


@dataclass(frozen=True)
class Table:
    """All operations of one part, in the order of the forward."""

    operations: tuple[Operation, ...]
    left_bytes: int = 0  # by its backward for the parts before it: the gradient of its input, and what waits for W
    weight_gradient_bytes: int = 0  # the largest of its weight gradients, before it is added to the main gradients

    @cached_property
    def keeps(self) -> tuple[Kept, ...]:
        return tuple(tensor for operation in self.operations for tensor in operation.keeps)

    @cached_property
    def kept_bytes(self) -> int:
        return total_bytes(self.keeps)

    @cached_property
    def deferred_bytes(self) -> int:
        return sum(operation.deferred_bytes for operation in self.operations)

    @cached_property
    def collectives(self) -> Collectives:
        return sum((operation.collectives for operation in self.operations), Collectives())

    @cached_property
    def reads_weights_in_w(self) -> bool:
        """True if a W reads weights, which must then be gathered where they are sharded."""
        return any(operation.reads_weights_in_w for operation in self.operations)

    @property
    def backwards(self) -> tuple[Backward, ...]:
        """Backwards of the operations, in the order in which they run."""
        return tuple(operation.backward for operation in reversed(self.operations) if operation.backward is not None)


def total_bytes(tensors: Iterable[Kept]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.num_bytes for tensor in tensors)


def replayed(operations: Sequence[Operation], more: int) -> list[Operation]:
    """Return operations that the backward runs again first: they keep nothing, and hold what the replay keeps.

    more: further bytes that the replay holds until its end.
    """
    held = more + sum(total_bytes(operation.keeps) for operation in operations)
    again: list[Operation] = []
    for operation in reversed(operations):
        backward = operation.backward
        if backward is not None:
            again.append(replace(operation, keeps=(), backward=Backward(backward.held + held)))
            held -= backward.frees
        else:
            again.append(replace(operation, keeps=()))
    return again[::-1]
