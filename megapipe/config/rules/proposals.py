"""Proposals in error messages: values that would work, and the names of conflicting flags."""

from __future__ import annotations

import math

from megapipe.config.config import Config, fields_by_key, value_of
from megapipe.formatting import one_of

MOST_DIVISOR = 10**6  # up to which divisors are searched


def divisors(*numbers: int) -> list[int]:
    """Return the common divisors, ascending; of numbers above MOST_DIVISOR squared not all of them."""
    common = math.gcd(*numbers)
    small = [d for d in range(1, min(math.isqrt(common), MOST_DIVISOR) + 1) if common % d == 0]
    return sorted({*small, *(common // d for d in small)})


def use_divisors(*numbers: int, wanted: int) -> str:
    """Return 'use 1, 2, 4, 8 or 16': the common divisors, at most six, nearest to the wanted value."""
    return "use " + one_of(nearest_values(divisors(*numbers), wanted))


def use_multiples(unit: int, wanted: int) -> str:
    """Return 'use 16 or 24': the multiples on both sides of the wanted value."""
    below, above = wanted // unit * unit, -(-wanted // unit) * unit
    return "use " + one_of(sorted({value for value in (below, above) if value > 0}))


def nearest_values(values: list[int], wanted: int, count: int = 6) -> list[int]:
    """Return the values nearest to a wanted one, ascending."""
    return sorted(sorted(values, key=lambda value: abs(value - wanted))[:count])


def chosen(*flags: tuple[str, bool]) -> list[str]:
    """Return the names of the flags whose condition holds."""
    return [name for name, is_given in flags if is_given]


def given(config: Config, *keys: str) -> list[str]:
    """Return the flags of those fields ('section.name') that have another value than their default."""
    fields = [fields_by_key()[key] for key in keys]
    return [field.main_flag for field in fields if value_of(config, field) != field.default]
