"""The gpu section: NCCL, and what shows a card at work. On CPUs these are kept and do nothing, and the start of the run says so."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, option

CUDA_GRAPH_IMPLS = ("none", "local")
NCCL_GROUPS = (
    "tp",
    "cp",
    "pp",
    "dp",
    "dp_cp",
    "replicas",
    "model",
    "embedding",
    "kv",
)  # the world is there before them


@dataclass(frozen=True)
class GpuConfig:
    """NCCL's settings, high-priority streams, CUDA graphs, names of ranges for Nsight, the allocator's history."""

    nccl_settings: tuple[str, ...] | None = option(
        None, "NCCL's own variables, set on every rank before it starts: NCCL_DEBUG=INFO NCCL_IB_HCA=mlx5 ..."
    )
    nccl_communicator_config_path: str | None = option(
        None,
        "YAML file: for a kind of group (tp, pp, dp, ...) cga_cluster_size, min_ctas, max_ctas, net_name of its communicators",
    )
    high_priority_stream_groups: tuple[str, ...] = option(
        ("pp",),
        "kinds of groups whose NCCL kernels go before others: short messages that a pipeline waits for",
        choices=NCCL_GROUPS,
    )
    cuda_graph_impl: str = option(
        "none",
        "local: the forward and the backward of every stage are recorded once and launched as one CUDA graph each; see docs/gpu.md",
        choices=CUDA_GRAPH_IMPLS,
        more_flags=(Flag("--enable-cuda-graph", value="local", help="same as --cuda-graph-impl local"),),
    )
    cuda_graph_warmup_steps: int = option(3, "steps that run before the graphs are recorded", unit="steps", at_least=1)
    nvtx_ranges: bool = option(False, "name every action (3B7) and phase for Nsight Systems")
    record_memory_history: bool = option(
        False,
        "record the CUDA allocator's history, written to --memory-snapshot-path when memory runs out and at the end",
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        "the allocator's history, for pytorch.org/memory_viz; a rank's number is put before the ending",
    )
