"""The explanation of a flag, and its cost in memory and time for a configuration.

The cost: alternatives to the value of the field are resolved to plans and compared by predicted memory and time.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.config import Config, value_of
from megapipe.config.fields import out_of_bounds, value_text
from megapipe.config.flags import REQUESTS, field_flags, normalised, suggestion, unit_and_help
from megapipe.config.load import load_config
from megapipe.config.megatron_flags import DELIBERATE_DIFFERENCES, REMOVED, SUPPORTED, row_of
from megapipe.config.options import TAKES_VALUE, ConfigField
from megapipe.errors import ConfigError, MegapipeError
from megapipe.formatting import bytes_text, text_table
from megapipe.plan.hardware import Hardware, hardware_named
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.schedule_choice import SCHEDULE_NAMES
from megapipe.plan.step_time import expected_bubble, predict_step

MOST_COLUMNS = 100


def explained(word: str, configuration: Sequence[str], hardware: Hardware | None = None) -> str:
    """Return the explanation of a flag. configuration: flags of a model and a world, or none. Raises ConfigError."""
    name = normalised(word if word.startswith("--") else "--" + word)
    if name in REQUESTS:
        return f"{name}  [megapipe]\n  {REQUESTS[name].help}\n  It is a request, not a setting of the run."
    row = row_of(name)
    if name not in field_flags():
        if row is None:
            raise ConfigError(f"{name} is not a flag{suggestion(name)} (docs/flags.md lists all)")
        whose = "a flag of an earlier version" if row.kind == REMOVED else "a flag of Megatron-LM"
        return f"{name}  {whose}, {row.kind}\n  {row.note}"
    field, flag = field_flags()[name]
    is_megatrons = row is not None and row.kind == SUPPORTED
    lines = [f"{name}  {'as in Megatron-LM' if is_megatrons else '[megapipe]'}, sets {field.key}"]
    if flag.value is not TAKES_VALUE:
        lines.append(f"  sets it to {value_text(flag.value)}{'; ' + flag.help if flag.help else ''}")
    lines.append(f"  {unit_and_help(field, SCHEDULE_NAMES) if flag.read is None else flag.help}")
    for difference in DELIBERATE_DIFFERENCES:
        if difference.flag in (name, field.main_flag):
            lines.append(f"  Megatron: {difference.megatron}; here: {difference.here} ({difference.reason})")
    paper = papers().get(name) or papers().get(field.main_flag)
    if paper:
        lines.append(f"  paper: {paper}")
    return "\n".join([*lines, *_costs(field, configuration, hardware or hardware_named("h100"))])


def _costs(field: ConfigField, configuration: Sequence[str], hardware: Hardware) -> Iterator[str]:
    if not configuration:
        yield "  cost: give a configuration (--config FILE, or flags) to see it"
        return
    loaded = load_config(["--plan", *configuration], is_job=False)
    config, parallel = with_vocabulary(loaded.config), loaded.config.parallel
    least = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    world_size = loaded.requests.world_size or least
    found = alternatives(field, config, world_size, loaded.requests.ranks_per_node, hardware)
    current = next(iter(found.values()))
    if isinstance(current, str):
        raise ConfigError(f"the configuration itself cannot run on {world_size} ranks: {current}")
    costs = {value: cost for value, cost in found.items() if isinstance(cost, Cost)}
    if len(found) == 1:
        yield "  cost: unknown to the model of memory and time; its values are not compared"
        return
    if len(set(costs.values())) == 1 and len(costs) == len(found):  # no value changes memory or time
        yield f"  cost: none in memory or time, by the plan's model ({', '.join(found)} compared)"
        return
    yield f"  cost on {world_size} x {hardware.name}, by the plan's model (docs/time_model.md):"
    rows = [_row(value, cost, current) for value, cost in costs.items()]
    yield from text_table([("value", "fullest rank", "step", "", "bubble"), *rows], indent=4)
    for value, why in found.items():
        if isinstance(why, str):
            yield f"    {value} is refused: {why}"
    if current.seconds is None:
        yield f"    no step time: {hardware.name} has no matrix rate for this dtype; give --hardware FILE, or --bf16"


def _row(value: str, cost: Cost, current: Cost) -> tuple[str, ...]:
    seconds = "unknown" if cost.seconds is None else f"{cost.seconds:.4g} s"
    change = "as it is" if cost is current else ""
    if not change and cost.seconds is not None and current.seconds:
        change = f"{cost.seconds / current.seconds - 1:+.1%}"
    shown = value if len(value) < MOST_COLUMNS else value[:MOST_COLUMNS] + "..."
    return shown, bytes_text(max(cost.rank_bytes)), seconds, change, f"{cost.bubble_share:.1%}"


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a configuration."""

    rank_bytes: tuple[int, ...]  # of each pp_rank
    seconds: float | None  # of a step; None if the hardware has no rate for the dtype
    bubble_share: float


def alternatives(
    field: ConfigField, config: Config, world_size: int, ranks_per_node: int | None, hardware: Hardware
) -> dict[str, Cost | str]:
    """Return the field's value in the configuration as text, then the others: with the cost, or why it is illegal."""
    current = value_of(config, field)
    found: dict[str, Cost | str] = {}
    for value in [current, *other_values(field, current)]:
        section = replace(getattr(config, field.section), **{field.name: value})
        changed = replace(config, **{field.section: section})
        try:
            plan = resolve(changed, world_size, ranks_per_node)
            bubble = expected_bubble(plan, plan.batch.num_microbatches).share
            memory = tuple(rank.total for rank in all_rank_memory(plan))
        except MegapipeError as error:
            found[value_text(value)] = str(error)
            continue
        seconds = None
        with suppress(MegapipeError):  # the hardware has no rate for the dtype
            seconds = predict_step(plan, hardware).seconds
        found[value_text(value)] = Cost(memory, seconds, bubble)
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


@cache
def papers() -> dict[str, str]:
    """Return the paper in which each flag's technique was published."""
    with Path(__file__).with_name("papers.csv").open(encoding="utf-8", newline="") as file:
        return {row["flag"]: row["paper"] for row in csv.DictReader(file)}
