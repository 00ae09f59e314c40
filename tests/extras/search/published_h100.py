"""Published steps on H100 SXM beyond the Llama-3 paper: tokens per second and GPU, in bf16 and fp8.

    nvidia    NVIDIA/NeMo, docs/source/performance/performance_summary.md, commit 070a0bb (container NeMo 24.07, fp8):
              all pre-training rows without context parallelism. Shapes are those of NeMo's recipes; nothing recomputed
              and sequence parallelism where there is tp (assumed). And NVIDIA-NeMo/Megatron-Bridge,
              docs/performance-summary.md, commit 00b7660 (25.11 container, fp8 with current scaling): the dense row
              without context parallelism and FSDP, Llama-3 70B.
    mosaicml  mosaicml/llm-foundry, scripts/train/benchmarking/README.md, commit 061f2c7: MPT models on 8 GPUs with
              fully sharded data parallelism, here as sharded optimizer states; a selection: sequences of 1,024 to
              8,192.
    titan     pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf (26 December 2024): the
              8B model with torch.compile and selective checkpointing, which recomputes every second matrix product but
              not attention: here half of the layers without their attention. These cards have 2.4 TB/s of memory and
              a limit of 500 W, which is not taken into account.

Copied as facts on 22 November 2026. Fused pointwise kernels are assumed in all of them. The kernels are those of each
source, as far as it names them: the first two multiply in fp8 with Transformer Engine, whose norms and activations
write fp8 themselves, torchtitan with casts that torch.compile fuses. NVIDIA's attention is cuDNN's, for which half of
the peak is assumed; the others are taken to have FlashAttention 2, as the table of hardware.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.config.gpu import KernelsConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig, RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.plan.hardware import TERA
from tests.extras.search.published import FULL, PublishedRun

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
NEMOTRON = LLAMA | {"normalization": "LayerNorm", "activation": "squared_relu"}
MPT: dict[str, Any] = {"add_bias_linear": False}


Shape = tuple[int, int, int, int, int, int]  # layers, hidden, ffn, heads, query groups, vocabulary


def _model(shape: Shape, others: dict[str, Any]) -> ModelConfig:
    layers, hidden, ffn, heads, groups, vocabulary = shape
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=vocabulary,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **others,
    )


MODELS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "GPT3-5B": ((24, 4096, 16384, 32, 32, 51200), {}),
    "GPT3-20B": ((44, 6144, 24576, 48, 48, 51200), {}),
    "GPT3-175B": ((96, 12288, 49152, 96, 96, 51200), {}),
    "LLAMA2-7B": ((32, 4096, 11008, 32, 32, 32000), LLAMA),
    "LLAMA2-13B": ((40, 5120, 13824, 40, 40, 32000), LLAMA),
    "LLAMA2-70B": ((80, 8192, 28672, 64, 8, 32000), LLAMA),
    "LLAMA3-8B": ((32, 4096, 14336, 32, 8, 128256), LLAMA),
    "LLAMA3-70B": ((80, 8192, 28672, 64, 8, 128256), LLAMA),
    "Nemotron-8B": ((32, 4096, 16384, 32, 32, 256000), NEMOTRON),
    "Nemotron-22B": ((40, 6144, 24576, 48, 48, 256000), NEMOTRON),
    "Nemotron-340B": ((96, 18432, 73728, 96, 8, 256000), NEMOTRON),
    "MPT-760m": ((24, 1536, 6144, 12, 12, 50368), MPT),
    "MPT-1b": ((24, 2048, 8192, 16, 16, 50368), MPT),
    "MPT-3b": ((32, 2560, 10240, 20, 20, 50368), MPT),
    "MPT-7b": ((32, 4096, 16384, 32, 32, 50368), MPT),
    "MPT-13b": ((40, 5120, 20480, 40, 40, 50368), MPT),
}


class Row(NamedTuple):
    """A row of a table. tokens: per second and GPU. has_recompute: full activation checkpointing."""

    source: str
    model: str
    dtype: str
    gpus: int
    batch: int
    micro: int
    seq: int
    tp: int
    pp: int
    chunks: int
    tokens: int
    has_recompute: bool = False


ROWS = (
    Row("nvidia", "GPT3-5B", "fp8", 64, 2048, 4, 2048, 1, 1, 1, 22521),
    Row("nvidia", "GPT3-20B", "fp8", 64, 256, 2, 2048, 2, 1, 1, 5851),
    Row("nvidia", "GPT3-175B", "fp8", 128, 256, 1, 2048, 4, 8, 6, 726),
    Row("nvidia", "GPT3-175B", "fp8", 512, 2048, 2, 2048, 4, 8, 6, 782),
    Row("nvidia", "LLAMA2-7B", "fp8", 8, 128, 1, 4096, 1, 1, 1, 16847),
    Row("nvidia", "LLAMA2-13B", "fp8", 16, 128, 1, 4096, 1, 4, 10, 8646),
    Row("nvidia", "LLAMA2-70B", "fp8", 64, 128, 1, 4096, 4, 4, 20, 1707),
    Row("nvidia", "Nemotron-8B", "fp8", 64, 256, 4, 4096, 2, 1, 1, 12701),
    Row("nvidia", "Nemotron-22B", "fp8", 64, 256, 2, 4096, 2, 4, 10, 4256),
    Row("nvidia", "Nemotron-340B", "fp8", 128, 32, 1, 4096, 8, 8, 12, 322),
    Row("nvidia", "LLAMA3-70B", "fp8", 64, 128, 1, 8192, 4, 8, 5, 1602),
    Row("mosaicml", "MPT-13b", "bf16", 8, 240, 10, 4096, 1, 1, 1, 4717, True),
    Row("mosaicml", "MPT-13b", "bf16", 8, 960, 40, 1024, 1, 1, 1, 5502, True),
    Row("mosaicml", "MPT-7b", "bf16", 8, 128, 8, 8192, 1, 1, 1, 6935, True),
    Row("mosaicml", "MPT-7b", "bf16", 8, 256, 16, 4096, 1, 1, 1, 8611, True),
    Row("mosaicml", "MPT-7b", "bf16", 8, 48, 6, 2048, 1, 1, 1, 10643),
    Row("mosaicml", "MPT-7b", "bf16", 8, 1024, 64, 1024, 1, 1, 1, 10203, True),
    Row("mosaicml", "MPT-3b", "bf16", 8, 144, 3, 8192, 1, 1, 1, 16578),
    Row("mosaicml", "MPT-3b", "bf16", 8, 240, 5, 4096, 1, 1, 1, 20964),
    Row("mosaicml", "MPT-3b", "bf16", 8, 960, 20, 1024, 1, 1, 1, 27046),
    Row("mosaicml", "MPT-1b", "bf16", 8, 96, 3, 8192, 1, 1, 1, 29157),
    Row("mosaicml", "MPT-1b", "bf16", 8, 224, 7, 4096, 1, 1, 1, 38535),
    Row("mosaicml", "MPT-1b", "bf16", 8, 112, 14, 2048, 1, 1, 1, 45455),
    Row("mosaicml", "MPT-760m", "bf16", 8, 192, 12, 4096, 1, 1, 1, 55459),
    Row("mosaicml", "MPT-760m", "bf16", 8, 384, 24, 2048, 1, 1, 1, 63147),
    Row("mosaicml", "MPT-3b", "fp8", 8, 144, 3, 8192, 1, 1, 1, 19146),
    Row("mosaicml", "MPT-3b", "fp8", 8, 480, 10, 2048, 1, 1, 1, 30586),
    Row("mosaicml", "MPT-1b", "fp8", 8, 64, 2, 8192, 1, 1, 1, 32010),
    Row("titan", "LLAMA3-8B", "bf16", 8, 16, 2, 8192, 1, 1, 1, 6667),
    Row("titan", "LLAMA3-8B", "fp8", 8, 16, 2, 8192, 1, 1, 1, 8532),
    Row("titan", "LLAMA3-8B", "bf16", 128, 256, 2, 8192, 1, 1, 1, 6514),
    Row("titan", "LLAMA3-8B", "fp8", 128, 256, 2, 8192, 1, 1, 1, 8380),
)


# tokens per second and GPU of MosaicML's table where only the number of GPUs differs (8, 16, 32 or 64): bf16, 2,048
# tokens, the same microbatch; nothing on these GPUs explains that more of them are faster
REPEATED = {
    "MPT-760m": (63147, 68551, 67971),
    "MPT-1b": (46037, 45130, 44402),
    "MPT-3b": (23021, 22525),
    "MPT-13b": (4792, 4767, 4811, 4800),
}

# model -> layers, hidden size, and MosaicML's tokens per second and GPU for sequences of 2,048 and of 32,768 tokens,
# both without checkpointing; the longer ones are not among ROWS
LONG = {"MPT-1b": (24, 2048, 45455, 12025), "MPT-760m": (24, 1536, 63147, 16291)}


def mosaicml_attention_share() -> float:
    """Return the share of the peak that MosaicML's attention reaches by LONG: what a token takes longer in the longer
    sequence is 3.5 forwards of causal attention over 30,720 more tokens.
    """
    shares = []
    for layers, hidden, short_tokens, long_tokens in LONG.values():
        flops = 3.5 * 2 * layers * hidden * (32768 - 2048)
        shares.append(flops / (1 / long_tokens - 1 / short_tokens) / (989 * TERA))
    return sum(shares) / len(shares)


# source -> what its cards and kernels have instead of the table's values, and what it recomputes
HARDWARE_CHANGES = {"nvidia": {"attention_share": 0.5}, "titan": {"memory_bytes_per_second": 2.4e12}}
RECOMPUTES = {"titan": RecomputeConfig("full", "block", 16, recompute_keep_attention=True)}


def published_h100_runs() -> tuple[PublishedRun, ...]:
    """Return all rows as runs to predict."""
    return tuple(map(_run, ROWS))


def _run(row: Row) -> PublishedRun:
    shape, others = MODELS[row.model]
    has_engine = row.dtype == "fp8" and row.source != "titan"
    implementation = "transformer_engine" if has_engine else "local"
    config = Config(
        model=_model(shape, others | {"seq_length": row.seq}),
        parallel=ParallelConfig(
            tensor_model_parallel_size=row.tp,
            pipeline_model_parallel_size=row.pp,
            num_virtual_stages_per_pipeline_rank=row.chunks if row.chunks > 1 else None,
            sequence_parallel=row.tp > 1,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        training=TrainingConfig(micro_batch_size=row.micro, global_batch_size=row.batch),
        recompute=FULL if row.has_recompute else RECOMPUTES.get(row.source, RecomputeConfig()),
        precision=PrecisionConfig(dtype="bf16", fp8_format="hybrid" if row.dtype == "fp8" else None),
        kernels=KernelsConfig(compile_pointwise=True, transformer_impl=implementation),
    )
    seconds, changes = row.batch * row.seq / row.gpus / row.tokens, HARDWARE_CHANGES.get(row.source, {})
    name = f"{row.model}, {row.gpus} GPUs, {row.dtype}, {row.seq} x {row.micro}"
    return PublishedRun(row.source, name, "h100", row.gpus, config, seconds, changes)
