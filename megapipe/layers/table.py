"""Descriptions of a part of the model on one rank: `RankShape`, one microbatch and the options that costs depend on;
`Kept`, a tensor that waits for the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megapipe.config.parallel import RecomputeConfig
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.sharding.sequence import SequenceSlice

ALL_REDUCE = 2  # collectives that an all-reduce counts as: a reduce-scatter and an all-gather


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
    """A tensor that is kept from the forward to the backward of its microbatch. name: of the element that makes it."""

    name: str
    elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.elements * self.element_bytes


def total_bytes(tensors: Iterable[Kept]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.num_bytes for tensor in tensors)
