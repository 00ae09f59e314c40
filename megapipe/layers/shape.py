"""`RankShape`: one microbatch on one rank, and how the rank computes it. Every table of `layers` is made for one."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapipe.config.config import Config
from megapipe.config.files import DataConfig
from megapipe.config.parallel import ParallelConfig, RecomputeConfig
from megapipe.dtypes import ELEMENT_BYTES

MASK_BYTES = 1  # dropout masks are bool


@dataclass(frozen=True)
class Documents:
    """The inputs that a microbatch carries besides tokens and labels; each of them costs memory."""

    position_ids: bool = False
    attention_mask: bool = False
    loss_mask: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> Documents:
        """Return the inputs that the data section asks for."""
        return cls(data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


@dataclass(frozen=True)
class CommChunks:
    """Number of chunks that a linear's collectives over tp are cut into, so that they overlap with its GEMM; 1: not
    cut.

    gather: all-gathers. reduce: reduce-scatters, and all-reduces without sequence parallelism.
    """

    gather: int = 1
    reduce: int = 1


WHOLE = CommChunks()


def comm_chunks(parallel: ParallelConfig) -> CommChunks:
    """Return the chunks that --tp-comm-overlap asks for; one of each without it, and in a tp group of one rank."""
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size == 1:
        return WHOLE
    count = parallel.tp_comm_overlap_chunks
    return CommChunks(count if parallel.tp_comm_overlap_ag else 1, count if parallel.tp_comm_overlap_rs else 1)


@dataclass(frozen=True)
class RankShape:
    """One microbatch of `batch` sequences of `seq` tokens on one tp rank, and the options that change what the rank
    keeps or computes.

    sequence_parallel: the rank holds 1 / tp of the tokens between the tensor-parallel regions; never with tp = 1.
    splits_backward: the backward runs as I and W, so that linears' inputs and output gradients wait for W.
    chunks_loss: --cross-entropy-chunk-size. is_cuda: kernels of CUDA, which keep and make other tensors than those of
    CPUs.
    """

    batch: int
    seq: int
    dtype: str
    tp: int = 1
    sequence_parallel: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    documents: Documents = Documents()
    chunks: CommChunks = WHOLE
    attention_impl: str = "sdpa"
    transformer_impl: str = "local"
    compile_pointwise: bool = False
    chunks_loss: bool = False
    is_cuda: bool = True
    splits_backward: bool = False

    @classmethod
    def of(cls, config: Config, tp: int, sequence_parallel: bool, micro_batch_size: int) -> RankShape:
        """Return the shape for a configuration's options on another grid or with another microbatch than its own."""
        return cls(
            batch=micro_batch_size,
            seq=config.model.seq_length,
            dtype=config.precision.dtype,
            tp=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            recompute=config.recompute,
            documents=Documents.of(config.data),
            chunks=comm_chunks(config.parallel) if tp > 1 else WHOLE,
            attention_impl=config.kernels.attention_impl,
            transformer_impl=config.kernels.transformer_impl,
            compile_pointwise=config.kernels.compile_pointwise,
            chunks_loss=config.training.cross_entropy_chunk_size is not None,
            is_cuda=config.training.device != "cpu",
        )

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
        """Bytes of one element of at least fp32: statistics, logits of the loss, main gradients."""
        return max(ELEMENT_BYTES[self.dtype], 4)

    def hidden_bytes(self, hidden_size: int) -> int:
        """Return the bytes of the hidden states between layers and stages: [s, b, h], [s / tp, b, h] under sequence
        parallelism.
        """
        return self.own_tokens * hidden_size * self.element

    def gathered_bytes(self, hidden_size: int) -> int:
        """Return the bytes of hidden states of the whole sequence that had to be gathered over tp; 0 where nothing
        is.
        """
        return self.tokens * hidden_size * self.element if self.sequence_parallel else 0

    def recomputes(self, module: str) -> bool:
        """Return True if selective recompute makes this module's activations again."""
        return self.recompute.recompute_granularity == "selective" and module in self.recompute.recompute_modules
