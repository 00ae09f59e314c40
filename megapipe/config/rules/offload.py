"""Rules of the offload section."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.offload import OffloadConfig


def offloaded_layers_are_whole_checkpoints(config: Config) -> str | None:
    count, recompute = config.offload.cpu_offloading_num_layers, config.recompute
    size = recompute.recompute_num_layers
    if recompute.recompute_method != "uniform" or size is None or count % size == 0:
        return None
    return (
        f"--cpu-offloading-num-layers {count} parts a group of --recompute-num-layers {size}, which keeps one input for all its layers; "
        f"use a multiple of {size}"
    )


def offloaded_size_needs_layers(config: Config) -> str | None:
    size = config.offload.min_offloaded_tensor_size
    if config.offload.cpu_offloading_num_layers or size == OffloadConfig().min_offloaded_tensor_size:
        return None
    return f"--min-offloaded-tensor-size {size}: nothing is offloaded without --cpu-offloading-num-layers; give it, or leave this out"


def offloaded_layers_keep_only_activations(config: Config) -> str | None:
    if not config.offload.cpu_offloading_num_layers or config.kernels.transformer_impl != "transformer_engine":
        return None
    return (
        "--cpu-offloading-num-layers: the layers of --transformer-impl transformer_engine keep casts of their weights among their "
        "activations, which would travel too; use --transformer-impl local, or --recompute-granularity"
    )


OFFLOAD_RULES = (
    offloaded_layers_are_whole_checkpoints,
    offloaded_size_needs_layers,
    offloaded_layers_keep_only_activations,
)
