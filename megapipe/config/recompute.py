"""The recompute and offload sections: activations that are not kept on the device until their backward."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, Need, option

RECOMPUTE_GRANULARITIES = ("selective", "full")
RECOMPUTE_METHODS = ("uniform", "block")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "activation")
FULL = Need("recompute.recompute_granularity", "--recompute-granularity full", ("full",))
SELECTIVE = Need("recompute.recompute_granularity", "--recompute-granularity selective", ("selective",))
OFFLOADING = Need("offload.cpu_offloading_num_layers", "--cpu-offloading-num-layers N")


@dataclass(frozen=True)
class RecomputeConfig:
    """Recomputation in the backward: none, some modules of every layer (selective) or whole layers (full)."""

    recompute_granularity: str | None = option(
        None,
        "what is recomputed in the backward: some modules of every layer, or whole layers; unset: nothing",
        choices=RECOMPUTE_GRANULARITIES,
        more_flags=(
            Flag("--recompute-activations", value="selective", help="same as --recompute-granularity selective"),
        ),
    )
    recompute_method: str | None = option(
        None,
        "full: uniform keeps the input of every group of N layers; block recomputes the first N layers of each chunk",
        choices=RECOMPUTE_METHODS,
        needs=FULL,
    )
    recompute_num_layers: int | None = option(None, "full: N of the method", unit="layers", at_least=1, needs=FULL)
    recompute_keep_attention: bool = option(
        False,
        "full: keep the results of a fused attention kernel (output and log-sum-exp), so that the backward does not "
        "run it again",
        needs=FULL,
    )
    recompute_modules: tuple[str, ...] = option(
        ("core_attn",), "selective: modules that are recomputed", choices=RECOMPUTE_MODULES, needs=SELECTIVE
    )


@dataclass(frozen=True)
class OffloadConfig:
    """Activations copied to host memory after their forward and back before their backward; never parameters."""

    cpu_offloading_num_layers: int = option(
        0,
        "keep the activations of the first N layers of every stage in host memory until their backward",
        unit="layers",
        at_least=0,
    )
    min_offloaded_tensor_size: int = option(
        1048576, "smaller tensors stay on the device", unit="elements", at_least=1, needs=OFFLOADING
    )
