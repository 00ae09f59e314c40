"""The gpu section: NCCL, and what shows a card at work. On CPUs these are kept and do nothing, and the start of the run says so."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import option

NCCL_GROUPS = ("tp", "cp", "pp", "dp", "dp_cp", "replicas", "model", "embedding", "kv")  # the world is there before them


@dataclass(frozen=True)
class GpuConfig:
    """NCCL's settings, high-priority streams, names of ranges for Nsight, the allocator's history."""

    nccl_settings: tuple[str, ...] | None = option(
        None, "NCCL's own variables, set on every rank before it starts: NCCL_DEBUG=INFO NCCL_IB_HCA=mlx5 ..."
    )
    nccl_communicator_config_path: str | None = option(
        None, "YAML file: for a kind of group (tp, pp, dp, ...) cga_cluster_size, min_ctas, max_ctas, net_name of its communicators"
    )
    high_priority_stream_groups: tuple[str, ...] = option(
        ("pp",), "kinds of groups whose NCCL kernels go before others: short messages that a pipeline waits for", choices=NCCL_GROUPS
    )
    nvtx_ranges: bool = option(False, "name every action (3B7) and phase for Nsight Systems")
    record_memory_history: bool = option(
        False, "record the CUDA allocator's history, written to --memory-snapshot-path when memory runs out and at the end"
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle", "the allocator's history, for pytorch.org/memory_viz; a rank's number is put before the ending"
    )
