"""Published training runs to compare predictions with: configuration, step time, source.

    narayanan   Narayanan et al. 2021 (arXiv:2104.04473), table 1: GPT models of 1.7 to 1,008 billion parameters on
                A100-80. TFLOP/s by their equation (3), which counts full attention and the recomputed forward. Full
                recompute, interleaved schedule with scatter/gather. The table gives neither chunks nor microbatch
                size: we assume 2 chunks (3 where 2 do not divide the layers) and a microbatch of 1, or of 4 without
                a pipeline.
    korthikanti Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5: seconds per iteration on A100-80 with full
                recompute, and with sequence parallelism and selective recompute of core attention; one data-parallel
                replica.
    llama       Dubey et al. 2024 (arXiv:2407.21783), table 4: Llama-3 405B on H100, TFLOP/s per GPU. The paper does
                not state how attention is counted (we assume causal), the number of chunks (we assume 8, a layer per
                stage) or what is recomputed (we assume nothing). The row with context parallelism is left out.

Model FLOPs and layouts are those of the papers; the kernels differ: Megatron-LM fuses scale, mask and softmax, for
example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapipe.config.config import Config, resolve_model
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig, RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.layers.model import model_spec
from megapipe.layers.table import RankShape
from megapipe.plan.hardware import TERA, Hardware, hardware_named
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.layer_time import OpSeconds, layer_seconds
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step

FULL = RecomputeConfig("full", "uniform", 1)
CORE_ATTENTION = RecomputeConfig("selective", recompute_modules=("core_attn",))


@dataclass(frozen=True)
class PublishedRun:
    """One row of a table.

    seconds: step time, as published or computed from TFLOP/s by the paper's own formula.
    """

    source: str
    name: str
    gpu: str
    num_gpus: int
    config: Config = field(repr=False)
    seconds: float
    changes: Mapping[str, float] = field(default_factory=dict)  # of the table's hardware, by the name of the field

    @property
    def hardware(self) -> Hardware:
        """The GPU of the table's row."""
        changes: dict[str, Any] = dict(self.changes)
        return dataclasses.replace(hardware_named(self.gpu), **changes)

    def plan(self) -> RunPlan:
        return resolve(self.config, self.num_gpus, 8)

    def predicted_seconds(self, hardware: Hardware | None = None) -> float:
        """Predict the step time on `hardware`, or on the GPU of the table's row if None."""
        return predict_step(self.plan(), hardware or self.hardware).seconds


def published_runs() -> tuple[PublishedRun, ...]:
    """Return all rows in the order of the papers."""
    return (*_narayanan(), *_korthikanti(), *_llama())


def gpt(num_layers: int, hidden_size: int, num_attention_heads: int) -> ModelConfig:
    """Return a GPT model of the first two papers: sequences of 2,048 tokens, a vocabulary of 51,200."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        seq_length=2048,
        vocab_size=51200,
    )


# heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
NARAYANAN: dict[str, tuple[int, int, int, int, int, int, int, int]] = {
    "1.7B": (24, 2304, 24, 1, 1, 32, 512, 137),
    "3.6B": (32, 3072, 30, 2, 1, 64, 512, 138),
    "7.5B": (32, 4096, 36, 4, 1, 128, 512, 142),
    "18.4B": (48, 6144, 40, 8, 1, 256, 1024, 135),
    "39.1B": (64, 8192, 48, 8, 2, 512, 1536, 138),
    "76.1B": (80, 10240, 60, 8, 4, 1024, 1792, 140),
    "145.6B": (96, 12288, 80, 8, 8, 1536, 2304, 148),
    "310.1B": (128, 16384, 96, 8, 16, 1920, 2160, 155),
    "529.6B": (128, 20480, 105, 8, 35, 2520, 2520, 163),
    "1008B": (160, 25600, 128, 8, 64, 3072, 3072, 163),
}


def narayanan_flops(model: ModelConfig, batch: int) -> float:
    """Return the FLOPs of a step with full recompute by equation (3): 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    assert model.vocab_size
    s, h, layers, vocabulary = model.seq_length, model.hidden_size, model.num_layers, model.vocab_size
    return 96.0 * batch * s * layers * h * h * (1.0 + s / (6.0 * h) + vocabulary / (16.0 * layers * h))


def _narayanan() -> tuple[PublishedRun, ...]:
    runs = []
    for name, (heads, hidden, layers, tp, pp, gpus, batch, tflops) in NARAYANAN.items():
        model = gpt(layers, hidden, heads)
        chunks = 1 if pp == 1 else 2 if layers % (2 * pp) == 0 else 3
        config = _config(model, tp, pp, chunks, batch, 4 if pp == 1 else 1, FULL, sliced=False)
        runs.append(
            PublishedRun(
                "narayanan", name, "a100-80", gpus, config, narayanan_flops(model, batch) / gpus / (tflops * TERA)
            )
        )
    return tuple(runs)


# heads, hidden, layers, pp, chunks, batch, microbatch, all with tp 8; then seconds with full recompute, and with
# sequence parallelism and selective recompute
KORTHIKANTI: dict[str, tuple[int, int, int, int, int, int, int, float, float]] = {
    "22B": (64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    "530B": (128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
    "1T": (160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
}


def _korthikanti() -> tuple[PublishedRun, ...]:
    runs = []
    for name, (heads, hidden, layers, pp, chunks, batch, micro, full, selective) in KORTHIKANTI.items():
        model, gpus = gpt(layers, hidden, heads), 8 * pp
        for what, recompute, sliced, seconds in (
            ("full", FULL, False, full),
            ("selective, sp", CORE_ATTENTION, True, selective),
        ):
            config = _config(model, 8, pp, chunks, batch, micro, recompute, sliced)
            runs.append(PublishedRun("korthikanti", f"{name} {what}", "a100-80", gpus, config, seconds))
    return tuple(runs)


LLAMA = {"405B on 8,192": (8192, 430), "405B on 16,384": (16384, 400)}  # GPUs, TFLOP/s per GPU
LLAMA_BATCH = 2048  # sequences of 8,192 tokens: 16 million tokens


def _llama() -> tuple[PublishedRun, ...]:
    model = ModelConfig(
        num_layers=126,
        hidden_size=16384,
        ffn_hidden_size=53248,
        num_attention_heads=128,
        num_query_groups=8,
        seq_length=8192,
        vocab_size=128256,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    runs = []
    for name, (gpus, tflops) in LLAMA.items():
        config = _config(model, 8, 16, 1, LLAMA_BATCH, 1, RecomputeConfig(), sliced=True)
        parallel = dataclasses.replace(
            config.parallel,
            num_virtual_stages_per_pipeline_rank=None,
            pipeline_model_parallel_layout="E|(t|)*126L",
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        flops = step_flops(resolve_model(model, 8), LLAMA_BATCH, causal=True)
        config = dataclasses.replace(config, parallel=parallel, precision=PrecisionConfig(dtype="bf16"))
        runs.append(PublishedRun("llama", name, "h100", gpus, config, flops / gpus / (tflops * TERA)))
    return tuple(runs)


def _config(
    model: ModelConfig, tp: int, pp: int, chunks: int, batch: int, micro: int, recompute: RecomputeConfig, sliced: bool
) -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
            sequence_parallel=sliced,
        ),
        training=TrainingConfig(micro_batch_size=micro, global_batch_size=batch),
        recompute=recompute,
        precision=PrecisionConfig(dtype="fp16"),
    )


# Korthikanti et al. 2022, table 4: milliseconds of forward and backward of one layer of the 22B model, tp 8, microbatch
# 4
LAYER_OF_22B: dict[str, tuple[RecomputeConfig, bool, float, float]] = {
    "no recompute": (RecomputeConfig(), False, 7.7, 11.9),
    "sequence parallel": (RecomputeConfig(), True, 7.2, 11.8),
    "full recompute": (FULL, False, 7.7, 19.5),
    "selective recompute": (CORE_ATTENTION, False, 7.7, 13.2),
    "selective, sequence parallel": (CORE_ATTENTION, True, 7.2, 13.1),
}


def layer_of_22b(recompute: RecomputeConfig, sliced: bool, hardware: Hardware) -> OpSeconds:
    """Predict a row of table 4."""
    model = resolve_model(gpt(48, 6144, 64), 8)
    shape = RankShape(4, model.seq_length, "fp16", tp=8, sequence_parallel=sliced, recompute=recompute)
    return layer_seconds(model_spec(model, PrecisionConfig()).layers[0], shape, hardware, hardware.node)
