"""Compare predicted steps with those published for H100, by source.

python -m tools.h100_accuracy

Prints every row of tests/extras/search/published_h100.py and of Llama-3's paper, and for each source the bias
(geometric mean) and the rms of log(predicted / published): with the efficiencies of megapipe/plan/hardware.py, and with
factors of the parts of a step that are fitted to all other sources. The factors apply to the seconds of 16-bit GEMMs,
of fp8 GEMMs, of attention and of pointwise kernels, each within the range that hardware allows; a source counts as much
as another, however many rows it has. They are a check of what such efficiencies can reach on a source not seen;
nothing uses them. The last line is a floor of the error within a source: how tokens per second and GPU scatter where
only the number of GPUs differs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapipe.plan.step_time import predict_step
from tests.extras.search.published import PublishedRun, published_runs
from tests.extras.search.published_h100 import REPEATED, mosaicml_attention_share, published_h100_runs

# factors of seconds, from the least (GEMMs at 0.96 of the peak, pointwise kernels fused away) to the most
RANGES = {"16-bit gemm": (0.6, 1.5), "fp8 gemm": (0.6, 1.5), "attention": (0.7, 2.5), "pointwise": (0.3, 1.6)}
FACTORS = tuple(RANGES)
Factors = tuple[float, ...]
AS_THEY_ARE: Factors = (1.0,) * len(FACTORS)


@dataclass(frozen=True)
class Predicted:
    """A published run with the predicted seconds of the parts of its step."""

    run: PublishedRun
    parts: Mapping[str, float]

    def error(self, factors: Factors = AS_THEY_ARE) -> float:
        """Return log(predicted / published) with these factors of the parts."""
        gemm = "fp8 gemm" if self.run.config.precision.fp8_format else "16-bit gemm"
        of_part = dict(zip(FACTORS, factors, strict=True)) | {"gemm": factors[FACTORS.index(gemm)]}
        busy = {part: self.parts[part] for part in ("gemm", "attention", "pointwise", "tp")}
        scaled = sum(seconds * of_part.get(part, 1.0) for part, seconds in busy.items())
        # the bubble shrinks and grows with the stages
        bubble = self.parts["bubble"] * scaled / sum(busy.values())
        rest = sum(seconds for part, seconds in self.parts.items() if part not in busy and part != "bubble")
        return math.log((scaled + bubble + rest) / self.run.seconds)


def rms(rows: Sequence[Predicted], factors: Factors = AS_THEY_ARE) -> float:
    return math.sqrt(sum(row.error(factors) ** 2 for row in rows) / len(rows))


def fit(by_source: Mapping[str, Sequence[Predicted]]) -> Factors:
    """Return the factors with the least mean square error, by ever smaller steps along each axis."""

    def loss(factors: Factors) -> float:
        return sum(rms(rows, factors) ** 2 for rows in by_source.values())

    best, width = AS_THEY_ARE, 0.2
    while width > 1e-3:
        around = [
            tuple(
                min(most, max(least, value * (1.0 + width) ** (sign if name == moved else 0)))
                for value, (name, (least, most)) in zip(best, RANGES.items(), strict=True)
            )
            for moved in FACTORS
            for sign in (-1, 1)
        ]
        near = min(around, key=loss)
        if loss(near) < loss(best):
            best = near
        else:
            width /= 2
    return best


def main() -> None:
    by_source: dict[str, list[Predicted]] = {}
    for run in (*published_h100_runs(), *(run for run in published_runs() if run.gpu == "h100")):
        row = Predicted(run, predict_step(run.plan(), run.hardware).parts)
        by_source.setdefault(run.source, []).append(row)
        print(f"{run.source:9} {run.name:42} {run.seconds:8.3f} s  predicted / published {math.exp(row.error()):.2f}")
    print(f"\n{'source':9} rows   bias    rms   held out: bias    rms   {', '.join(FACTORS)}")
    for source, rows in by_source.items():
        factors = fit({name: others for name, others in by_source.items() if name != source})
        bias, held_out = (math.exp(sum(row.error(f) for row in rows) / len(rows)) - 1 for f in (AS_THEY_ARE, factors))
        print(
            f"{source:9} {len(rows):4} {bias:+6.1%} {rms(rows):6.1%} {held_out:+15.1%} {rms(rows, factors):6.1%}   "
            + ", ".join(f"{factor:.2f}" for factor in factors)
        )
    factors = fit(by_source)
    errors = ", ".join(f"{source} {rms(rows, factors):.1%}" for source, rows in by_source.items())
    print(f"fitted to all of {', '.join(by_source)}: rms {errors}   {', '.join(f'{factor:.2f}' for factor in factors)}")
    share, rows = mosaicml_attention_share(), by_source["mosaicml"]
    slower = (1.0, 1.0, rows[0].run.hardware.attention_share / share, 1.0)
    print(f"mosaicml with attention at {share:.3f} of the peak, by its longest sequences: rms {rms(rows, slower):.1%}")
    logs = [[math.log(tokens) for tokens in of_model] for of_model in REPEATED.values()]
    away = [value - statistics.fmean(of_model) for of_model in logs for value in of_model]
    degrees = len(away) - len(logs)
    print(f"scatter within a source: {math.sqrt(sum(value**2 for value in away) / degrees):.1%} of {len(away)} rows")


if __name__ == "__main__":
    main()
