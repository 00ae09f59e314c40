"""The recompute section: which activations are made again in the backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, option

RECOMPUTE_GRANULARITIES = ("selective", "full")
RECOMPUTE_METHODS = ("uniform", "block")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "activation")


@dataclass(frozen=True)
class RecomputeConfig:
    """None, selective (some modules of every layer) or full (whole layers)."""

    recompute_granularity: str | None = option(
        None,
        "what is recomputed: some modules of every layer, or whole layers; unset: nothing",
        choices=RECOMPUTE_GRANULARITIES,
        more_flags=(
            Flag("--recompute-activations", value="selective", help="same as --recompute-granularity selective"),
        ),
    )
    recompute_method: str | None = option(
        None,
        "full: uniform keeps the input of every group of N layers; block recomputes the first N layers of each chunk",
        choices=RECOMPUTE_METHODS,
    )
    recompute_num_layers: int | None = option(None, "full: N of the method", unit="layers", at_least=1)
    recompute_keep_attention: bool = option(
        False,
        "full: keep what a fused attention kernel returns (output and log-sum-exp), so that the backward does not run it again",
    )
    recompute_modules: tuple[str, ...] = option(
        ("core_attn",), "selective: modules that are recomputed", choices=RECOMPUTE_MODULES
    )
