"""The precision section: the dtype of weights and activations, fp16's loss scale, and fp8 for the GEMMs of linears."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import TAKES_VALUE, Flag, Need, option
from megapipe.dtypes import TENSOR_DTYPES

FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = ("tensorwise", "delayed")
FP8_AMAX_ALGORITHMS = ("most_recent", "max")

FP16 = Need("precision.dtype", "--fp16 (only then is the loss scaled)", ("fp16",))
FP8 = Need("precision.fp8_format", "--fp8-format e4m3 or hybrid")


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtype of weights and activations; master weights, moments and main gradients are fp32 (fp64 with fp64)."""

    dtype: str = option(
        "fp32",
        "weights and activations",
        choices=tuple(TENSOR_DTYPES),
        more_flags=(
            Flag("--bf16", value="bf16", help="same as --dtype bf16"),
            Flag("--fp16", value="fp16", help="same as --dtype fp16"),
            Flag("--fp64", value="fp64", help="same as --dtype fp64: for verification"),
        ),
    )
    loss_scale: float | None = option(None, "fp16: a fixed loss scale; unset: dynamic", above=0, needs=FP16)
    initial_loss_scale: float = option(
        float(2**32), "fp16: initial value of the dynamic loss scale", above=0, needs=FP16
    )
    min_loss_scale: float = option(1.0, "fp16: smallest value of the dynamic loss scale", above=0, needs=FP16)
    loss_scale_window: int = option(
        1000, "fp16: steps without overflow before the scale doubles", unit="steps", at_least=1, needs=FP16
    )
    hysteresis: int = option(2, "fp16: overflows before the scale halves", unit="steps", at_least=1, needs=FP16)
    fp8_format: str | None = option(
        None,
        "run the GEMMs of the layers' linears in 8 bits, forward and backward, with one scale per tensor: e4m3, or "
        "hybrid with e5m2 for output gradients; weights, activations between the GEMMs and messages stay in "
        "--dtype; unset: no fp8",
        choices=FP8_FORMATS,
        more_flags=(Flag("--fp8", value=TAKES_VALUE, help="same as --fp8-format"),),
    )
    fp8_recipe: str = option(
        "delayed",
        (
            "fp8: a tensor's scale is computed from its own largest value (tensorwise), or from those of earlier steps "
            "(delayed)"
        ),
        choices=FP8_RECIPES,
        needs=FP8,
    )
    fp8_margin: int = option(0, "fp8: scales are divided by 2 to this power", at_least=0, needs=FP8)
    fp8_amax_history_len: int = option(
        1, "fp8, delayed: steps whose largest values are kept", unit="steps", at_least=1, needs=FP8
    )
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "fp8, delayed: compute the scale from the latest or the largest of them",
        choices=FP8_AMAX_ALGORITHMS,
        needs=FP8,
    )
    first_last_layers_bf16: bool = option(
        False, "fp8: some first and last layers of the model stay in --dtype", needs=FP8
    )
    num_layers_at_start_in_bf16: int = option(
        1, "number of layers at the start, with --first-last-layers-bf16", unit="layers", at_least=0
    )
    num_layers_at_end_in_bf16: int = option(
        1, "number of layers at the end, with --first-last-layers-bf16", unit="layers", at_least=0
    )
