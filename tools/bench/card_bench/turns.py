"""Contenders and GEMMs that take turns, in the opposite order every second round, and the ratios of their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from card_bench.contenders import Contender
from card_bench.report import Report
from card_bench.timing import seconds_of

GEMM, FP8_GEMM = "GEMM", "fp8 GEMM"  # among the rates


@dataclass(frozen=True)
class Turn:
    """Seconds of one step of one contender."""

    gradients: float
    update: float

    @property
    def step(self) -> float:
        return self.gradients + self.update


@dataclass(frozen=True)
class Measured:
    """The measurements of contenders of one model.

    turns: by contender; rates: FLOP/s of GEMM and FP8_GEMM; each by round. flops: of forward and backward of a step,
    causal attention counted half.
    """

    turns: Mapping[str, Sequence[Turn]]
    rates: Mapping[str, Sequence[float]]
    flops: float

    def step_seconds(self, name: str) -> float:
        """Return the median of a contender's whole steps."""
        return statistics.median(turn.step for turn in self.turns[name])

    def update_seconds(self, name: str) -> float:
        """Return the median of a contender's updates."""
        return statistics.median(turn.update for turn in self.turns[name])

    def rate(self, name: str) -> float:
        """Return the median FLOP/s of a GEMM."""
        return statistics.median(self.rates[name])

    def speedup(self, name: str, against: str) -> float:
        """Return how much faster the whole steps of a contender are: the median of the ratios within a round."""
        pairs = zip(self.turns[against], self.turns[name], strict=True)
        return statistics.median(other.step / mine.step for other, mine in pairs)

    def ratio(self, name: str, against: str) -> float:
        """Return the ratio of the FLOP/s of two contenders or GEMMs: the median of those within a round."""
        pairs = zip(self._speeds(name), self._speeds(against), strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    def _speeds(self, name: str) -> Sequence[float]:
        """Return the FLOP/s of a contender's forward and backward, or of a GEMM, by round."""
        if name in self.rates:
            return self.rates[name]
        return [self.flops / turn.gradients for turn in self.turns[name]]


def build(report: Report, makers: Mapping[str, Callable[[], Contender]], of: str = "") -> dict[str, Contender]:
    """Build contenders. One that fails is recorded, after `of`, and raises RuntimeError only if there is no other."""
    contenders = {}
    for name, make in makers.items():
        with report.attempt(f"{of}{name}"):
            contenders[name] = make()
    if not contenders:
        raise RuntimeError("no contender could be built")
    return contenders


def take_turns(
    report: Report,
    contenders: Mapping[str, Contender],
    flops: float = 1.0,
    rates: Mapping[str, Callable[[], float]] = MappingProxyType({}),
    rounds: int = 8,
) -> Measured:
    """Time the steps of all contenders, and call `rates`, in every round.

    flops: of forward and backward of a step.
    """
    rounds, warm_ups = (rounds, 3) if report.on_gpu else (2, 1)
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    found: dict[str, list[float]] = {name: [] for name in rates}
    for contender in contenders.values():
        for _ in range(warm_ups):
            contender.gradients()
            contender.update()
    for number in range(rounds):
        for name, rate in rates.items():
            found[name].append(rate())
        for name in contenders if number % 2 == 0 else reversed(list(contenders)):
            contender = contenders[name]
            turns[name].append(
                Turn(seconds_of(contender.gradients, report.device), seconds_of(contender.update, report.device))
            )
    return Measured(turns, found, flops)
