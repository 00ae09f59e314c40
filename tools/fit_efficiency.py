"""Fit what no benchmark gives to published steps, and print how well the steps of other sources are predicted.

python -m tools.fit_efficiency

First the share of the peak that large GEMMs reach in training (megapipe/plan/hardware.py: HIGHEST) where it is below
that of benchmarks: one number for a GPU and precision, by a few rows of the stack megatron-core. Then what mixtures in
Megatron-Core cost besides their kernels (`FITTED_FIELDS`). Then the overhead of each other stack
(megapipe/plan/stacks.py): the mean of its sources, each with equal weight; and for each of its sources the overhead
that the others give, and the errors with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from megapipe.plan.hardware import HARDWARE, Hardware
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.stacks import STACKS
from megapipe.plan.step_time import predict_step, stage_seconds
from megapipe.schedule.action import Op
from tests.extras.search.published import Row, published_rows
from tools.accuracy import predicted, rms

FITTED = {  # GPU, whether in fp8: source and model of the rows
    ("h100", False): ("megatron-zoo", "mixtral_8x22b"),
    ("b200", True): ("nvidia-bridge", "llama3_8b"),
    ("gb200", True): ("nvidia-bridge", "llama3_8b"),
}
# of mixtures in Megatron-Core: model, GPU and CUDA graphs of the rows, and the most it can be
FITTED_FIELDS: dict[str, tuple[str, str, str | None, float]] = {
    "bias_bytes": ("gpt_oss_120b", "h100", None, 1000.0),
    "launches": ("qwen3_30b", "h100", None, 0.02),
    "launches, partial graphs": ("qwen3_30b", "b200", "partial", 0.02),
}


class Fast:
    """A step's seconds as a function of the layers' efficiencies only: everything else is simulated once and kept."""

    def __init__(self, row: Row, hardware: Hardware) -> None:
        self._row, self._plan = row, row.plan()
        self._rest = predict_step(self._plan, hardware).seconds - self._of_layers(hardware)

    def error(self, hardware: Hardware) -> float:
        """Return log(predicted / published)."""
        return math.log((self._rest + self._of_layers(hardware)) / self._row.seconds)

    def _of_layers(self, hardware: Hardware) -> float:
        plan: RunPlan = self._plan
        stages = stage_seconds(plan, hardware)
        of_rank = max(
            sum(stages[s].of(Op.F) + stages[s].of(Op.B) for s in plan.placement.stages_of(r))
            for r in range(plan.topology.pp)
        )
        count = plan.batch.full // plan.batch.samples_per_microbatch
        return of_rank * (count + (plan.topology.pp - 1) / plan.num_chunks)


def root(error: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function is zero, within 1e-4."""
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) < 0 else (low, middle)
    return (low + high) / 2


def with_highest(hardware: Hardware, is_fp8: bool, share: float) -> Hardware:
    in_16_bits, in_fp8 = hardware.gemm_highest
    return dataclasses.replace(hardware, gemm_highest=(in_16_bits, share) if is_fp8 else (share, in_fp8))


def with_stack(hardware: Hardware, **changes: Any) -> Hardware:
    return dataclasses.replace(hardware, stack=dataclasses.replace(hardware.stack, **changes))


def fitted_rows(gpu: str, is_fp8: bool) -> list[Row]:
    """Return the rows that the share of a GPU and precision is fitted to."""
    of, precision = (*FITTED[gpu, is_fp8], gpu), "fp8" if is_fp8 else "bf16"
    rows = [row for row in published_rows() if row.settings["precision"] == precision]
    return [row for row in rows if (row.source.name, row.settings.get("model"), row.settings["gpu"]) == of]


def fit_highest(gpu: str, is_fp8: bool) -> float:
    """Return the share of the peak of large GEMMs that gives its rows no error in the mean."""
    rows = fitted_rows(gpu, is_fp8)
    base = dataclasses.replace(HARDWARE[gpu], stack=STACKS["megatron-core"])
    share = base.gemm_highest[is_fp8]
    for _ in range(3):  # what is kept of a step depends a little on its layers
        fast = [Fast(row, with_highest(base, is_fp8, share)) for row in rows]
        share = -root(lambda x: fmean(f.error(with_highest(base, is_fp8, -x)) for f in fast), -1.0, -0.2)  # noqa: B023
    return share


def fit_field(name: str) -> float:
    """Return the bytes, or the seconds besides those of experts, that give its rows no error in the mean."""
    model, gpu, graphs, most = FITTED_FIELDS[name]
    of = {"model": model, "gpu": gpu}
    rows = [
        row for row in published_rows() if row.source.name == "nvidia-bridge" and of.items() <= row.settings.items()
    ]
    if name != "bias_bytes":  # with more tokens the device takes longer
        rows = [row for row in rows if row.settings["micro"] == 1 and row.settings.get("graphs") == graphs]
    fast = [(Fast(row, row.hardware), row.hardware) for row in rows]

    def changed(hardware: Hardware, value: float) -> Hardware:
        if name == "bias_bytes":
            return with_stack(hardware, bias_bytes=value)
        return with_stack(hardware, launches=(value, hardware.stack.launches[1]))

    return most * root(lambda share: fmean(each.error(changed(on, share * most)) for each, on in fast), 0.0, 1.0)


def fit_overhead(stack: str, of_source: dict[str, list[Fast]], hardware: dict[int, Hardware]) -> list[str]:
    """Return lines with the overhead of a stack by all of its sources, and by all but each of them."""

    def mean_error(sources: Sequence[str], overhead: float) -> float:
        return fmean(
            fmean(f.error(with_stack(hardware[id(f)], overhead=overhead)) for f in of_source[source])
            for source in sources
        )

    names = sorted(of_source)
    lines = [f"{stack}: {root(lambda x: mean_error(names, x), -0.3, 1.5):.2f}, by {', '.join(names)}"]
    for name in names:
        others = [each for each in names if each != name]
        if others:
            overhead = root(lambda x: mean_error(others, x), -0.3, 1.5)  # noqa: B023
            errors = [f.error(with_stack(hardware[id(f)], overhead=overhead)) for f in of_source[name]]
            lines.append(
                f"  without {name}: {overhead:.2f}, and its {len(errors)} rows with that: rms {rms(errors):.1%}"
            )
    return lines


def main() -> None:
    for (gpu, is_fp8), (source, model) in FITTED.items():
        share, of = fit_highest(gpu, is_fp8), "fp8" if is_fp8 else "16 bits"
        print(f"{gpu}, {of}: {share:.3f}, by {len(fitted_rows(gpu, is_fp8))} rows of {source}, {model}")
    for name in FITTED_FIELDS:
        print(f"megatron-core, {name}: {fit_field(name):.4g}")
    rows = predicted(published_rows())
    for stack in STACKS:
        of_source: dict[str, list[Fast]] = {}
        hardware: dict[int, Hardware] = {}
        for row in rows:
            if row.source.planned_as.name == stack and not row.is_mixture:
                fast = Fast(row, row.hardware)
                of_source.setdefault(row.source.name, []).append(fast)
                hardware[id(fast)] = row.hardware
        if of_source:
            print("\n".join(fit_overhead(stack, of_source, hardware)))


if __name__ == "__main__":
    main()
