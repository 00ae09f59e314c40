"""The cost of a configuration field: its alternatives resolved to plans and compared by predicted memory and time."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megapipe.config.config import Config, value_of
from megapipe.config.fields import ConfigField, out_of_bounds, value_text
from megapipe.errors import MegapipeError
from megapipe.plan.hardware import Hardware
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import expected_bubble, predict_step


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a configuration."""

    rank_bytes: tuple[int, ...]  # of each pp_rank
    seconds: float | None  # of a step; None if the hardware has no rate for the dtype
    bubble_share: float


@dataclass(frozen=True)
class Alternative:
    """A value of the field as text, with its cost, or with the reason why it is illegal."""

    value: str
    is_current: bool
    cost: Cost | str


def cost_of(config: Config, world_size: int, ranks_per_node: int | None, hardware: Hardware) -> Cost | str:
    """Return the cost of a configuration, or the reason why it cannot run."""
    try:
        plan = resolve(config, world_size, ranks_per_node)
        bubble = expected_bubble(plan, plan.batch.num_microbatches).share
        memory = tuple(rank.total for rank in all_rank_memory(plan))
    except MegapipeError as error:
        return str(error)
    try:
        return Cost(memory, predict_step(plan, hardware).seconds, bubble)
    except MegapipeError:
        return Cost(memory, None, bubble)


def alternatives(
    field: ConfigField, config: Config, world_size: int, ranks_per_node: int | None, hardware: Hardware
) -> list[Alternative]:
    """Return the field's value in the configuration, then the other values."""
    current = value_of(config, field)
    found: list[Alternative] = []
    for value in [current, *other_values(field, current)]:
        section = dataclasses.replace(getattr(config, field.section), **{field.name: value})
        changed = dataclasses.replace(config, **{field.section: section})
        found.append(Alternative(value_text(value), not found, cost_of(changed, world_size, ranks_per_node, hardware)))
    return found


def other_values(field: ConfigField, current: Any) -> list[Any]:
    """Return the values to compare with: other choices, half and double of a number, on and off; else the default."""
    option, kind = field.option, field.kind
    if kind.scalar is bool:
        return [not current]
    if option.choices:
        values: list[Any] = [None] if kind.optional else []
        values += [(choice,) if kind.many else choice for choice in option.choices]
        return [value for value in values if value != current]
    if kind.many or kind.scalar is str:
        return [] if current == field.default else [field.default]
    if kind.scalar is float and (option.at_least, option.at_most) == (0, 1):
        candidates: list[Any] = [0.0, 0.25, 0.5, 0.75, 1.0]
    elif current is None:
        candidates = [kind.scalar(1), kind.scalar(2)]
    elif kind.scalar is int:
        candidates = [current // 2, current * 2]
    else:
        candidates = [current / 2, current * 2]
    return [value for value in dict.fromkeys(candidates) if value != current and not out_of_bounds(option, value)]


def has_effect(found: list[Alternative]) -> bool:
    """Return True if some value changes the predicted memory or time."""
    return len({alternative.cost for alternative in found if isinstance(alternative.cost, Cost)}) > 1


@cache
def papers() -> dict[str, str]:
    """Return the paper in which each flag's technique was published."""
    with Path(__file__).with_name("papers.csv").open(encoding="utf-8", newline="") as file:
        return {row["flag"]: row["paper"] for row in csv.DictReader(file)}
