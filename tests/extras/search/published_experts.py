"""Published steps of mixtures of experts: tokens per second and GPU, copied as facts on 23 November 2026.

    automodel  NVIDIA-NeMo/Automodel, docs/performance-summary.md, commit 01926a5 (2 October 2025): DGX-H100, bf16,
               balanced routing, DeepEP's dispatcher. By examples/benchmark/configs: activations of whole layers
               recomputed, interleaved 1F1B, weights sharded (FSDP2), here as sharded optimizer states.
    megatron   NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md, commit 022bcb5: 468 TFLOP/s for Mixtral 8x7B
               in bf16 (v0.9). H100 and layout are those of its table of mappings (v0.8), and attention is counted in
               full: both assumed.
    bridge     NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, commit 0a25f91: containers 25.09 and
               25.11, fp8 with current scaling, dropless and balanced.
    nemo       NeMo Framework user guide, performance summary, container 25.02: DGX-B200, fp8.
    deepseek   DeepSeek-V3 technical report (arXiv:2412.19437), section 1: 180,000 H800 hours for 10^12 tokens on 2,048
               GPUs; fp8, DualPipe, own all-to-alls, norms and up-projections recomputed, one layer of multi-token
               prediction.

megapipe has no fp8 for models with experts, so rows in fp8 are predicted in bf16: no error can be stated for them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.config.load import load_config
from megapipe.config.parallel import RecomputeConfig
from megapipe.plan.hardware import Hardware, hardware_named
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FULL = RecomputeConfig("full", "uniform", 1)


class ExpertRun(NamedTuple):
    """A row as a run to predict. seconds: step time as published."""

    source: str
    name: str
    gpu: str
    num_gpus: int
    config: Config
    seconds: float

    @property
    def hardware(self) -> Hardware:
        return hardware_named(self.gpu)

    def plan(self) -> RunPlan:
        return resolve(self.config, self.num_gpus, 8)

    def predicted_seconds(self) -> float:
        return predict_step(self.plan(), self.hardware).seconds


class Row(NamedTuple):
    """A row of a table. tokens: per second and GPU. chunks: 1 also for DualPipe."""

    source: str
    model: str  # a file of configs/
    dtype: str
    gpu: str
    gpus: int
    batch: int
    micro: int
    tp: int
    pp: int
    chunks: int
    ep: int
    tokens: float
    schedule: str = "auto"
    has_recompute: bool = False


MIXTRAL_FLOPS = 87.0e15 / (
    256 * 4096
)  # of a token, attention in full: megapipe plan --config configs/mixtral_8x7b.yaml
ROWS = (
    Row("automodel", "deepseek_v3", "bf16", "h100", 256, 512, 1, 1, 4, 8, 64, 1002, has_recompute=True),
    Row("automodel", "deepseek_v3", "bf16", "h100", 1024, 8192, 1, 1, 4, 8, 64, 865, has_recompute=True),
    Row("automodel", "qwen3_30b_a3b", "bf16", "h100", 8, 512, 4, 1, 1, 1, 8, 12040, has_recompute=True),
    Row("megatron", "mixtral_8x7b", "bf16", "h100", 64, 256, 1, 1, 4, 8, 8, 468e12 / MIXTRAL_FLOPS),
    Row("bridge", "qwen3_30b_a3b", "fp8", "h100", 16, 512, 2, 1, 2, 24, 8, 5275),
    Row("bridge", "deepseek_v3", "fp8", "h100", 1024, 8192, 1, 2, 8, 4, 64, 1297),
    Row("nemo", "mixtral_8x7b", "fp8", "b200", 64, 256, 2, 1, 1, 1, 8, 15457),
    Row("deepseek", "deepseek_v3", "fp8", "h800", 2048, 15360, 1, 1, 16, 1, 64, 1e12 / (180e3 * 3600), "dualpipe"),
)


def published_expert_runs() -> tuple[ExpertRun, ...]:
    """Return all rows as runs to predict, in bf16."""
    return tuple(map(_run, ROWS))


def _run(row: Row) -> ExpertRun:
    given = load_config(["--config", str(CONFIGS / f"{row.model}.yaml")], is_job=False).config
    parallel = dataclasses.replace(
        given.parallel,
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        num_virtual_stages_per_pipeline_rank=row.chunks if row.chunks > 1 else None,
        expert_model_parallel_size=row.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=row.tp > 1,
        pipeline_schedule=row.schedule,
    )
    config: Config = dataclasses.replace(
        given,
        model=dataclasses.replace(given.model, mtp_num_layers=None, mtp_loss_scaling_factor=0.1),
        parallel=parallel,
        recompute=FULL if row.has_recompute else RecomputeConfig(),
        training=dataclasses.replace(given.training, micro_batch_size=row.micro, global_batch_size=row.batch),
    )
    seconds = row.batch * given.model.seq_length / row.gpus / row.tokens
    name = f"{row.model}, {row.gpus} {row.gpu}, {row.dtype}, tp {row.tp} pp {row.pp} ep {row.ep}"
    return ExpertRun(row.source, name, row.gpu, row.gpus, config, seconds)
