"""The kernels and gpu sections: which library computes what; NCCL, CUDA graphs and GPU profiling."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.options import EXPERTS, Flag, Need, option
from megapipe.errors import ConfigError
from megapipe.formatting import bytes_text

# kinds of process groups that have their own communicators; the world's is created before them
NCCL_GROUPS = (
    *("tp", "cp", "cp_a2a", "cp_p2p", "pp", "dp", "dp_cp", "replicas", "shards", "instances"),
    *("model", "embedding", "kv", "etp", "ep", "ep_places", "ep_nodes"),
    *("expert_replicas", "expert_shards", "expert_instances"),
)
CONTEXT_BYTES = 1 << 30  # of a rank besides torch's allocator, where ranks share a GPU: CUDA's context (assumed)
OTHER_GRAPHS = ("transformer_engine", "full_iteration")  # Megatron's: of layers' parts, of a whole step
GRAPHS = Need("gpu.cuda_graph_impl", "--cuda-graph-impl local", ("local",), without="no graphs are recorded")


@dataclass(frozen=True)
class KernelsConfig:
    """Libraries that compute the layers, attention and the optimizer, with the same results up to rounding."""

    transformer_impl: str = option(
        "local",
        "linears and norms: megapipe's own on torch's kernels, or NVIDIA's Transformer Engine (installed separately)",
        choices=("local", "transformer_engine"),
    )
    attention_impl: str = option(
        "sdpa",
        "core attention of training: torch's scaled_dot_product_attention, flash_attn_func of the package flash-attn, "
        "or Transformer Engine's DotProductAttention; generation always uses sdpa",
        choices=("sdpa", "flash", "te"),
    )
    optimizer_impl: str = option(
        "auto",
        "AdamW and SGD of torch, or AdamW by torch.compile (one pass that also writes 16-bit weights), or FusedAdam of "
        "NVIDIA's apex or of Transformer Engine; apex also brings its fused norms and the weight gradient that "
        "accumulates inside its GEMM; auto: compiled where --compile-loss is on by default and no other option rules "
        "it out, else torch",
        choices=("auto", "torch", "compiled", "apex", "te"),
    )
    compile_pointwise: bool = option(
        False, "torch.compile the operations between the linears (activations, casts of fp8) in the first step"
    )
    compile_loss: bool | None = option(
        None,
        "torch.compile the passes of the cross entropy over 16-bit logits in the first step",
        derived="on with --compile-pointwise, and on GPUs with Triton and a C compiler, else off",
    )
    compile_blocks: str = option(
        "auto",
        "torch.compile what a transformer block computes between its linears and attention; auto: on GPUs with Triton, "
        "if a block gives equal results and is faster, else not; on: on CPUs too, an error where it cannot work; see "
        "docs/kernels.md",
        choices=("auto", "on", "off"),
    )
    moe_grouped_gemm: bool | None = option(
        None,
        "multiply the rows of all experts of a rank in one kernel, torch's grouped_mm, forward and back; not in fp64",
        derived="on with --bf16 on GPUs of compute capability 9 and 10, where torch has such a kernel, else off",
        needs=EXPERTS,
    )


@dataclass(frozen=True)
class GpuConfig:
    """NCCL's settings, stream priorities, CUDA graphs, NVTX ranges, the allocator's history; without effect on CPUs."""

    nccl_settings: tuple[str, ...] | None = option(
        None, "NCCL's own variables, set on every rank before it starts: NCCL_DEBUG=INFO NCCL_IB_HCA=mlx5 ..."
    )
    nccl_communicator_config_path: str | None = option(
        None, "YAML file with cga_cluster_size, min_ctas, max_ctas, net_name for kinds of groups (tp, pp, dp, ...)"
    )
    high_priority_stream_groups: tuple[str, ...] = option(
        ("tp", "pp"),
        "kinds of groups whose NCCL kernels have priority: sums that a layer and messages that a pipeline waits for",
        choices=NCCL_GROUPS,
    )
    gemm_sm_carveout: int = option(
        0,
        "SMs that GEMMs beside a tensor-parallel collective leave free for it (a hint to cuBLAS, which follows it on "
        "Hopper); megapipe calibrate --tune measures it",
        "SMs",
        at_least=0,
    )
    tuned: str | None = option(
        None,
        "file of settings that megapipe calibrate --tune measured on this kind of device; flags and other files win",
    )
    cuda_graph_impl: str = option(
        "none",
        "local: record forward and backward of every stage once and launch each as one CUDA graph; see "
        "docs/kernels.md; Megatron's other kinds record nothing here",
        choices=("none", "local", *OTHER_GRAPHS),
        more_flags=(Flag("--enable-cuda-graph", "local"),),
    )
    cuda_graph_warmup_steps: int = option(
        3, "steps that run before the graphs are recorded", "steps", at_least=0, needs=GRAPHS
    )
    nvtx_ranges: bool = option(False, "name every action (3B7) and phase for Nsight Systems")
    record_memory_history: bool = option(
        False, "record the CUDA allocator's history to --memory-snapshot-path when memory runs out and at the end"
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        "file of the allocator's history, for pytorch.org/memory_viz, with the rank in its name",
        needs=Need("gpu.record_memory_history", "--record-memory-history", without="no history is recorded"),
    )


def shared_bytes(memory_bytes: int, num_ranks: int) -> int:
    """Return what each of the ranks that share a GPU may allocate of it. Raises ConfigError if that is nothing."""
    share = memory_bytes // num_ranks - CONTEXT_BYTES
    if share <= 0:
        most = max(1, (memory_bytes - 1) // CONTEXT_BYTES)
        raise ConfigError(
            f"--ranks-per-gpu {num_ranks}: a GPU of {bytes_text(memory_bytes)} has no memory for so many ranks, as "
            f"CUDA takes about {bytes_text(CONTEXT_BYTES)} of each; use at most {most}"
        )
    return share
