"""Figures from the measurements: FLOP/s in both conventions, ratios within a round, the bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench_table import Quartiles

from gpu_bench.shapes import Shape, configuration
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.resolve import resolve

GEMM, FP8_GEMM = "GEMM", "fp8 GEMM"  # among the rates


@dataclass(frozen=True)
class Turn:
    """Seconds of one step of one contender."""

    gradients: float
    update: float


@dataclass(frozen=True)
class Bar:
    """A bar: the minimum speed of a contender's forward and backward relative to another contender's, or to a GEMM's
    FLOP/s.

    A goal is reported when it is missed, and fails nothing.
    """

    name: str
    against: str
    least: float
    is_goal: bool = False


BARRED_SHAPES = ("8b-4k", "8b-8k")  # in bf16, on a card
BARS = (
    Bar("megapipe", GEMM, 0.75),
    Bar("megapipe", "transformers", 1.15),
    Bar("megapipe", "plain", 1.0),
    Bar("megapipe-fp8", "megapipe", 1.25, is_goal=True),
)
# reported only
REMARKS = (("megapipe-fp8", FP8_GEMM), (FP8_GEMM, GEMM))


@dataclass(frozen=True)
class Measured:
    """The measurements of one shape.

    turns: by contender; rates: FLOP/s of GEMM and FP8_GEMM; each by round. flops: of forward and backward of a step,
    causal attention counted half.
    """

    turns: Mapping[str, Sequence[Turn]]
    rates: Mapping[str, Sequence[float]]
    flops: float

    def speeds(self, name: str) -> Sequence[float] | None:
        """Return the FLOP/s of a contender or of a GEMM, by round; None if it was not measured."""
        if name in self.turns:
            return [self.flops / turn.gradients for turn in self.turns[name]]
        return self.rates.get(name)

    def ratio(self, name: str, against: str) -> Quartiles | None:
        """Return the ratio over the rounds; None if one of the two was not measured."""
        mine, other = self.speeds(name), self.speeds(against)
        if mine is None or other is None:
            return None
        return Quartiles.of([a / b for a, b in zip(mine, other, strict=True)])


def flops_of_step(shape: Shape, causal: bool) -> float:
    """Return the FLOPs of forward and backward of one step; causal: attention counted half."""
    return step_flops(resolve(configuration(shape, "bf16", "cpu"), 1).config.model, shape.step_sequences, causal)


def table(shape: Shape, measured: Measured, peak: float | None) -> list[tuple[str, ...]]:
    """Return the cells, headings first. peak: FLOP/s of the data sheet in the dtype of the run, that of fp8's rows
    too."""
    full = flops_of_step(shape, causal=False)
    rows: list[tuple[str, ...]] = [
        (
            "",
            "tokens/s",
            "fwd+bwd TFLOP/s, causal",
            "full",
            "of the GEMM",
            "of the data sheet, causal",
            "whole step, ms",
        )
    ]
    for name, mine in measured.turns.items():
        steps = [turn.gradients + turn.update for turn in mine]
        of_gemm = measured.ratio(name, GEMM)
        assert of_gemm is not None
        median = statistics.median(turn.gradients for turn in mine)
        rows.append(
            (
                name,
                f"{shape.step_tokens / statistics.median(steps):,.0f}",
                f"{measured.flops / median / 1e12:.1f}",
                f"{full / median / 1e12:.1f}",
                of_gemm.text(".3f"),
                "" if peak is None else f"{measured.flops / median / peak:.3f}",
                f"{1e3 * statistics.median(steps):.1f}",
            )
        )
    return rows


def remarks(measured: Measured) -> Iterator[str]:
    """Return the rows to compare the fp8 rows with."""
    for name, against in REMARKS:
        found = measured.ratio(name, against)
        if found is not None:
            yield f"{name} to {against}: {found.text('.3f')}"


def verdicts(measured: Measured) -> list[tuple[str, bool]]:
    """Return (sentence, passed) of every bar. A bar that was not measured fails; a goal always passes."""
    said = []
    for bar in BARS:
        found = measured.ratio(bar.name, bar.against)
        asked = f"{'goal' if bar.is_goal else 'at least'} {bar.least}"
        if found is None:
            missing = [name for name in (bar.name, bar.against) if measured.speeds(name) is None]
            said.append(
                (
                    f"{bar.name} to {bar.against}: NOT MEASURED, {' and '.join(missing)} did not run; {asked}",
                    bar.is_goal,
                )
            )
            continue
        is_met = found.median >= bar.least
        verdict = (
            "met" if is_met else f"{'not reached' if bar.is_goal else 'NOT MET'}, {found.median / bar.least:.1%} of it"
        )
        said.append((f"{bar.name} to {bar.against}: {found.text('.3f')}, {asked}: {verdict}", is_met or bar.is_goal))
    return said
