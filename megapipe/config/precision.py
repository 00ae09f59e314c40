"""The precision section: the dtype of weights and activations, and fp16's loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, option

DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class PrecisionConfig:
    """Master weights, moments and main gradients are fp32 (fp64 under fp64) whatever the dtype."""

    dtype: str = option(
        "fp32",
        "weights and activations",
        choices=DTYPES,
        more_flags=(
            Flag("--bf16", value="bf16", help="same as --dtype bf16"),
            Flag("--fp16", value="fp16", help="same as --dtype fp16"),
            Flag("--fp64", value="fp64", help="same as --dtype fp64: for verification"),
        ),
    )
    loss_scale: float | None = option(None, "fp16: a fixed loss scale; unset: dynamic", above=0)
    initial_loss_scale: float = option(float(2**32), "fp16: where the dynamic loss scale starts", above=0)
    min_loss_scale: float = option(1.0, "fp16: the dynamic loss scale never falls below this", above=0)
    loss_scale_window: int = option(1000, "fp16: good steps before the scale doubles", unit="steps", at_least=1)
    hysteresis: int = option(2, "fp16: overflows before the scale halves", unit="steps", at_least=1)
