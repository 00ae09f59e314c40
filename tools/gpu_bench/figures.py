"""What is made of the measurements: FLOP/s in both conventions, ratios formed inside a round, the bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench_table import Quartiles

from gpu_bench.shapes import Shape, configuration
from megapipe.planner.flops import step_flops
from megapipe.planner.resolve import resolve

# (contender, against what, at least): forward and backward
BARRED_SHAPES = ("8b-4k", "8b-8k")
BARS = (("megapipe", "gemm", 0.75), ("megapipe", "transformers", 1.15), ("megapipe", "plain", 1.0), ("megapipe-fp8", "megapipe", 1.25))
GOALS = {("megapipe-fp8", "megapipe")}  # beyond the bar


@dataclass(frozen=True)
class Turn:
    """Seconds of one step of one contender."""

    gradients: float
    update: float


def flops_of_step(shape: Shape, causal: bool) -> float:
    """Of forward and backward of one step; causal: attention counted half."""
    return step_flops(resolve(configuration(shape, "bf16", "cpu"), 1).config.model, shape.step_sequences, causal)


def ratio(turns: Mapping[str, Sequence[Turn]], gemm: Sequence[float], name: str, against: str, flops: float) -> Quartiles | None:
    """Speed of forward and backward over another contender's, or over the GEMM's FLOP/s, round by round."""
    if name not in turns or (against != "gemm" and against not in turns):
        return None
    mine = [flops / turn.gradients for turn in turns[name]]
    other = gemm if against == "gemm" else [flops / turn.gradients for turn in turns[against]]
    return Quartiles.of([a / b for a, b in zip(mine, other, strict=True)])


def table(shape: Shape, turns: Mapping[str, Sequence[Turn]], gemm: Sequence[float], peak: float | None) -> list[tuple[str, ...]]:
    """Cells, headings first. peak: the data sheet's FLOP/s."""
    half, full = flops_of_step(shape, True), flops_of_step(shape, False)
    rows = [("", "tokens/s", "fwd+bwd TFLOP/s, causal", "full", "of the GEMM", "of the data sheet, causal", "whole step, ms")]
    for name, mine in turns.items():
        seconds = [turn.gradients for turn in mine]
        steps = [turn.gradients + turn.update for turn in mine]
        of_gemm = ratio(turns, gemm, name, "gemm", half)
        assert of_gemm is not None
        median = statistics.median(seconds)
        rows.append(
            (
                name,
                f"{shape.step_tokens / statistics.median(steps):,.0f}",
                f"{half / median / 1e12:.1f}",
                f"{full / median / 1e12:.1f}",
                of_gemm.text(".3f"),
                "" if peak is None else f"{half / median / peak:.3f}",
                f"{1e3 * statistics.median(steps):.1f}",
            )
        )
    return rows


def verdicts(shape: Shape, turns: Mapping[str, Sequence[Turn]], gemm: Sequence[float]) -> list[tuple[str, bool]]:
    """(sentence, met) of every bar whose contenders were timed; a goal counts as met."""
    said = []
    for name, against, bar in BARS:
        found = ratio(turns, gemm, name, against, flops_of_step(shape, True))
        if found is not None:
            met, is_goal = found.median >= bar, (name, against) in GOALS
            verdict = "met" if met else "not reached" if is_goal else "NOT MET"
            said.append((f"{name} to {against}: {found.text('.3f')}, {'goal' if is_goal else 'at least'} {bar}: {verdict}", met or is_goal))
    return said
