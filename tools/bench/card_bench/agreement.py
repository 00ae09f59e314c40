"""The check that contenders train the same model: losses and gradient norms of their first steps, with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from card_bench.contenders import Contender

FP8 = "fp8"
# largest relative difference of (loss, gradient norm); fp8: against the same model without, its operands rounded to
# 2^-4
BOUNDS = {"fp32": (1e-4, 1e-4), "bf16": (3e-2, 3e-2), FP8: (1e-2, 5e-2)}


@dataclass(frozen=True)
class Agreement:
    """The largest relative differences over the steps.

    step: the first that is beyond a bound, counted from 1; None if all are within.
    """

    name: str
    reference: str
    loss: float
    norm: float
    bounds: tuple[float, float]
    step: int | None

    @property
    def holds(self) -> bool:
        return self.step is None

    def __str__(self) -> str:
        where = "" if self.step is None else f" (step {self.step})"
        loss, norm = self.bounds
        return (
            f"{self.name} against {self.reference}{where}: loss differs by {self.loss:.2g} (at most {loss:g}), "
            f"gradient norm by {self.norm:.2g} (at most {norm:g})"
        )


def agreement(contenders: Mapping[str, Contender], dtype: str, steps: int = 2) -> list[Agreement]:
    """Compare each contender with the first without fp8, by some steps of training."""
    found = {
        name: [(float(contender.gradients()), float(contender.update())) for _ in range(steps)]
        for name, contender in contenders.items()
    }
    reference = next((name for name in found if FP8 not in name), next(iter(found)))
    return [compared(name, reference, found[name], found[reference], dtype) for name in found if name != reference]


def compared(
    name: str, reference: str, mine: list[tuple[float, float]], theirs: list[tuple[float, float]], dtype: str
) -> Agreement:
    """Compare two contenders. mine, theirs: (loss, gradient norm) of each step."""
    bounds = BOUNDS[FP8 if FP8 in name or FP8 in reference else dtype]
    differences = [
        tuple(_relative(a, b) for a, b in zip(one, other, strict=True)) for one, other in zip(mine, theirs, strict=True)
    ]
    beyond = [
        number
        for number, pair in enumerate(differences, 1)
        if not all(d <= bound for d, bound in zip(pair, bounds, strict=True))
    ]
    losses, norms = zip(*differences, strict=True)
    return Agreement(name, reference, max(losses), max(norms), bounds, beyond[0] if beyond else None)


def _relative(one: float, other: float) -> float:
    return abs(one / other - 1) if isfinite(one) and isfinite(other) and other else float("inf")
