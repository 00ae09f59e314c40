"""Contenders and GEMMs that take turns, in the opposite order every second round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from gpu_bench.contenders import Contender
from gpu_bench.figures import Measured, Turn
from gpu_bench.timing import seconds_of


def take_turns(
    contenders: Mapping[str, Contender],
    rates: Mapping[str, Callable[[], float]],
    flops: float,
    device: torch.device,
    rounds: int,
    warm_ups: int,
    until: float = float("inf"),
) -> Measured:
    """Time the steps of all contenders, and call `rates`, in every round.

    flops: of forward and backward of a step. until: time.monotonic() after which no second round begins.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    found: dict[str, list[float]] = {name: [] for name in rates}
    for contender in contenders.values():
        for _ in range(warm_ups):
            contender.gradients()
            contender.update()
    for number in range(rounds):
        if number and time.monotonic() > until:
            break
        for name, rate in rates.items():
            found[name].append(rate())
        for name in contenders if number % 2 == 0 else reversed(list(contenders)):
            contender = contenders[name]
            turns[name].append(Turn(seconds_of(contender.gradients, device), seconds_of(contender.update, device)))
    return Measured(turns, found, flops)
