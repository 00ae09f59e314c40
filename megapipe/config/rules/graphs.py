"""Rules of CUDA graphs: a replay launches what was recorded, so whatever a step decides anew on the host is refused."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.gpu import GpuConfig
from megapipe.config.parallel import ASYNCHRONOUS_SCHEDULES

FLAG = "--cuda-graph-impl local"
PAIRED_SCHEDULES = ("dualpipe", "dualpipe-v")


def graph_settings_need_graphs(config: Config) -> str | None:
    gpu = config.gpu
    if gpu.cuda_graph_impl != "none" or gpu.cuda_graph_warmup_steps == GpuConfig().cuda_graph_warmup_steps:
        return None
    return f"--cuda-graph-warmup-steps {gpu.cuda_graph_warmup_steps}: there are no CUDA graphs without {FLAG}; give it, or leave this out"


def graphs_record_a_gpu(config: Config) -> str | None:
    if config.gpu.cuda_graph_impl == "none" or config.training.device != "cpu":
        return None
    return f"{FLAG} records what a GPU is given to do, and --device cpu is none; leave the one or the other out"


def graphs_repeat_themselves(config: Config) -> str | None:
    if config.gpu.cuda_graph_impl == "none":
        return None
    broken = list(_anew(config))
    return f"{FLAG} does in every step what was recorded in one: " + "; ".join(broken) if broken else None


def _anew(config: Config) -> Iterator[str]:
    """What would have to change between replays or cannot be recorded, each with its way out."""
    model, parallel, precision = config.model, config.parallel, config.precision
    dropout = [
        f"--{name}-dropout {rate:g}"
        for name, rate in (("hidden", model.hidden_dropout), ("attention", model.attention_dropout))
        if rate
    ]
    if dropout:
        yield f"{' and '.join(dropout)} would drop the same elements for ever; give --hidden-dropout 0 --attention-dropout 0"
    if precision.dtype == "fp16" and precision.loss_scale is None:
        yield "--fp16 finds its loss scale as it goes; use --bf16, or a fixed --loss-scale"
    if (
        precision.fp8_format is not None
        and precision.fp8_recipe == "delayed"
        and config.gpu.cuda_graph_warmup_steps < 2
    ):
        yield "delayed scales of --fp8-format are there from the second step on; give --cuda-graph-warmup-steps 2 or more"
    libraries = [
        f"{flag} {value}"
        for flag, value, theirs in (
            ("--transformer-impl", config.kernels.transformer_impl, "transformer_engine"),
            ("--attention-impl", config.kernels.attention_impl, "te"),
        )
        if value == theirs
    ]
    if libraries:
        yield f"{' and '.join(libraries)}: Transformer Engine keeps state in Python; use --transformer-impl local with sdpa or flash"
    if parallel.pipeline_schedule in ASYNCHRONOUS_SCHEDULES:
        yield f"--pipeline-schedule {parallel.pipeline_schedule} computes with several versions of the weights in turn; use 1f1b"
    if parallel.pipeline_schedule in PAIRED_SCHEDULES:
        yield f"--pipeline-schedule {parallel.pipeline_schedule} runs two graphs at one time, which share cuBLAS's workspace; use zb-v"
    if config.offload.cpu_offloading_num_layers:
        yield (
            f"--cpu-offloading-num-layers {config.offload.cpu_offloading_num_layers} moves activations as autograd asks for them, which a "
            "replay does not; leave it out, or use --recompute-granularity"
        )
    if config.optimizer.optimizer_post_validation:
        yield "--optimizer-post-validation may run forwards twice while their first messages travel; leave it out"
    if parallel.distributed_backend == "gloo" and parallel.tensor_model_parallel_size > 1:
        yield "--distributed-backend gloo takes tensor-parallel sums over the host; use nccl, or --tensor-model-parallel-size 1"


GRAPH_RULES = (graph_settings_need_graphs, graphs_record_a_gpu, graphs_repeat_themselves)
