"""Fit the efficiencies of megapipe/plan/hardware.py to published runs, and print how well the others are predicted.

python -m tools.fit_efficiency

Two numbers for A100: `highest` and `half_at` of the curve of GEMMs; least squares of log(predicted / published) over
the steps of Narayanan et al. 2021 and Korthikanti et al. 2022. Then the same fitted to each of the two papers alone, as
a check on the other. One number for H100, `highest`, to one of two rows of Dubey et al. 2024. The share of the memory's
rate is not fitted: as a free parameter it ends at 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from megapipe.plan.hardware import Hardware, hardware_named, saturating
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step, stage_seconds
from megapipe.schedule.action import Op
from tests.extras.search.published import Row, published_runs

Point = tuple[float, float]  # highest, half_at
START: Point = (0.8, 200.0)
ROUNDS = 3


def with_point(hardware: Hardware, point: Point) -> Hardware:
    return dataclasses.replace(hardware, gemm_shares=saturating(*point))


class Fast:
    """A step's seconds as a function of the layers' efficiencies only: everything else is simulated once and kept."""

    def __init__(self, run: Row, plan: RunPlan, hardware: Hardware) -> None:
        self.run, self._plan = run, plan
        self._rest = predict_step(plan, hardware).seconds - self._of_layers(hardware)

    def seconds(self, hardware: Hardware) -> float:
        return self._rest + self._of_layers(hardware)

    def error(self, hardware: Hardware) -> float:
        return math.log(self.seconds(hardware) / self.run.seconds)

    def _of_layers(self, hardware: Hardware) -> float:
        plan = self._plan
        stages = stage_seconds(plan, hardware)
        of_rank = max(
            sum(stages[s].of(Op.F) + stages[s].of(Op.B) for s in plan.placement.stages_of(r))
            for r in range(plan.topology.pp)
        )
        count = plan.batch.full // plan.batch.samples_per_microbatch
        return of_rank * (count + (plan.topology.pp - 1) / plan.num_chunks)


def least(loss: Callable[[Point], float], start: Point) -> Point:
    """Minimize a function by ever smaller steps along both axes and their diagonals."""
    best, width = (loss(start), start), 0.2
    while width > 1e-3:
        around = [
            tuple(value * (1.0 + width) ** sign for value, sign in zip(best[1], signs, strict=True))
            for signs in itertools.product((-1, 0, 1), repeat=2)
        ]
        near = min((loss(point), point) for point in around if point[0] <= 1.0)  # type: ignore[arg-type]
        if near[0] < best[0]:
            best = near  # type: ignore[assignment]
        else:
            width /= 2
    return best[1]


def fit(runs: Sequence[Row]) -> Point:
    base, point = hardware_named("a100-80"), START
    for _ in range(ROUNDS):
        fast = [Fast(run, resolve(run.config, run.num_gpus, 8), with_point(base, point)) for run in runs]
        point = least(lambda p: sum(each.error(with_point(base, p)) ** 2 for each in fast), point)  # noqa: B023
    return point


def told(name: str, point: Point, fitted: Sequence[Row], held_out: Sequence[Row]) -> str:
    hardware = with_point(hardware_named("a100-80"), point)
    parts = [f"{name}: highest {point[0]:.3f}, half_at {point[1]:.0f}"]
    for what, runs in (("fitted", fitted), ("held out", held_out)):
        if runs:
            errors = [math.log(run.predicted_seconds(hardware) / run.seconds) for run in runs]
            rms = math.sqrt(sum(error * error for error in errors) / len(errors))
            parts.append(
                f"{what} {len(runs)} rows: rms {rms:.1%}, from {math.exp(min(errors)) - 1:+.1%} to "
                f"{math.exp(max(errors)) - 1:+.1%}"
            )
    return "; ".join(parts)


def main() -> None:
    runs = published_runs()
    narayanan, korthikanti, llama = (
        [r for r in runs if r.source.name == name] for name in ("narayanan", "korthikanti", "llama3")
    )
    point = fit([*narayanan, *korthikanti])
    print(told("both", point, [*narayanan, *korthikanti], ()))
    print(told("narayanan", fit(narayanan), narayanan, korthikanti))
    print(told("korthikanti", fit(korthikanti), korthikanti, narayanan))
    h100 = hardware_named("h100")
    low, high = 0.3, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        slower = llama[0].predicted_seconds(with_point(h100, (middle, point[1]))) > llama[0].seconds
        low, high = (middle, high) if slower else (low, middle)
    ratio = llama[1].predicted_seconds(with_point(h100, (low, point[1]))) / llama[1].seconds
    print(f"h100, by {llama[0].name}: highest {low:.3f}; held out {llama[1].name}: {ratio - 1:+.1%}")


if __name__ == "__main__":
    main()
