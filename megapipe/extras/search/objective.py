"""The objectives of a search: the fastest step on all accelerators, the fewest accelerators, or the cheapest tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.extras.search.layout import Layout
from megapipe.extras.search.search import Found, search
from megapipe.layers.model import model_parameters
from megapipe.plan.hardware import Hardware
from megapipe.plan.resolve import resolve_model

OBJECTIVES = ("time", "gpus", "cost")
LEAST_BYTES = 4  # per parameter, over all ranks: weight and gradient, at 2 bytes each
SECONDS_OF_AN_HOUR = 3600.0


@dataclass(frozen=True)
class Objective:
    """The goal of a search.

    kind: one of OBJECTIVES.
    tokens_per_second: the throughput that 'gpus' and 'cost' have to reach.
    price_per_hour: the price of one accelerator, for 'cost'.
    """

    kind: str = "time"
    tokens_per_second: float | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Sized:
    """The result of a search on one number of accelerators. cost: of a billion tokens; None without a price."""

    num_gpus: int
    found: Found = field(repr=False)
    cost: float | None = None


@dataclass(frozen=True)
class Chosen:
    """The best result by an objective, and the results of all numbers of accelerators tried, ascending."""

    best: Sized
    tried: tuple[Sized, ...]


def choose(
    config: Config,
    most: int,
    hardware: Hardware,
    objective: Objective,
    pinned: Callable[[Layout], bool] = lambda _: True,
) -> Chosen:
    """Return the best result on up to `most` accelerators.

    'gpus' bisects, which assumes that a goal reached on some number of nodes is reached on more nodes too. 'cost' tries
    `most`, half of it and so on. Raises ConfigError if nothing fits or reaches tokens_per_second.
    """
    sizes = Sizes(config, most, hardware, objective, pinned)
    if objective.kind == "time":
        only = sizes.of(most)
        assert only is not None
        return Chosen(only, (only,))
    best = _fewest(sizes) if objective.kind == "gpus" else _cheapest(sizes)
    if best is None:
        reach = f" and reaches {objective.tokens_per_second:,.0f} tokens/s" if objective.tokens_per_second else ""
        raise ConfigError(
            f"no layout on up to {most} {hardware.name} fits{reach}; use more accelerators, or another kind"
        )
    return Chosen(best, tuple(sized for _, sized in sorted(sizes.tried.items()) if sized is not None))


class Sizes:
    """Searches on different numbers of accelerators, each run once."""

    def __init__(
        self, config: Config, most: int, hardware: Hardware, objective: Objective, pinned: Callable[[Layout], bool]
    ) -> None:
        self._config, self._hardware, self._objective, self._pinned = config, hardware, objective, pinned
        self.most = most
        self.tried: dict[int, Sized | None] = {}

    def of(self, num_gpus: int) -> Sized | None:
        """Return the result on `num_gpus`; None if no layout is legal or fits (objective 'time' raises the error)."""
        if num_gpus not in self.tried:
            try:
                found = search(self._config, num_gpus, self._hardware, self._pinned)
            except ConfigError:
                if self._objective.kind == "time":
                    raise
                self.tried[num_gpus] = None
            else:
                cost, price = None, self._objective.price_per_hour
                if price is not None and found.best:
                    tokens_per_second = found.best[0].time.tokens_per_second
                    cost = num_gpus * price / SECONDS_OF_AN_HOUR / tokens_per_second * 1e9
                self.tried[num_gpus] = Sized(num_gpus, found, cost)
        return self.tried[num_gpus]

    def is_enough(self, num_gpus: int) -> bool:
        sized = self.of(num_gpus)
        if sized is None or not sized.found.best:
            return False
        wanted = self._objective.tokens_per_second
        return wanted is None or sized.found.best[0].time.tokens_per_second >= wanted

    def candidates(self) -> list[int]:
        """Return divisors of a node and multiples of it, from the fewest accelerators that could hold the model."""
        node = self._hardware.ranks_per_node
        numbers = [n for n in range(1, min(node, self.most) + 1) if node % n == 0] + list(
            range(2 * node, self.most + 1, node)
        )
        return [n for n in numbers if n >= self._least()] or [self.most]

    def _least(self) -> int:
        elements = sum(math.prod(spec.shape) for spec in model_parameters(resolve_model(self._config.model, 1), False))
        return math.ceil(elements * LEAST_BYTES / self._hardware.usable_bytes)


def _fewest(sizes: Sizes) -> Sized | None:
    numbers = sizes.candidates()
    if not sizes.is_enough(numbers[-1]):
        return None
    low, high = 0, len(numbers) - 1  # invariant: numbers[high] is enough
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sizes.is_enough(numbers[middle]) else (middle + 1, high)
    return sizes.of(numbers[high])


def _cheapest(sizes: Sizes) -> Sized | None:
    numbers, number = [], sizes.most
    while number >= sizes.candidates()[0]:
        numbers.append(number)
        number //= 2
    enough = [
        sized for n in numbers if sizes.is_enough(n) and (sized := sizes.of(n)) is not None and sized.cost is not None
    ]
    return min(enough, key=lambda sized: sized.cost or math.inf, default=None)
