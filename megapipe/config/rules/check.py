"""All rules together, and the two entry points: check and check_job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megapipe.config.config import Config, all_fields, fields_by_key, value_of
from megapipe.config.fields import Need, out_of_bounds, shown
from megapipe.config.rules import gpu, model, training
from megapipe.errors import ConfigError


def check(config: Config) -> None:
    """Raise ConfigError with one line for each choice, range and rule that the configuration breaks."""
    broken = []
    for field in all_fields():  # only a configuration made in code: flags and files are checked as they are read
        value = value_of(config, field)
        items = value if isinstance(value, tuple) else (value,)
        for item in items:
            trouble = "" if item is None else out_of_bounds(field.option, item)
            if trouble:
                broken.append(f"{field.key} {item}: {trouble}")
    raise_all(broken or [message for rule in RULES for message in rule(config)])


def check_job(config: Config) -> None:
    """Check the rules, and what only a training job must have: a length, a learning rate, data and a vocabulary."""
    check(config)
    raise_all(list(training.job(config)))


def needs(config: Config) -> Iterator[str]:
    """Yield a message for the options that have no effect because the option that they need is not given."""
    unmet: dict[Need, list[str]] = {}
    for field in all_fields():
        need, value = field.option.needs, value_of(config, field)
        if need is None or value == field.default:
            continue
        needed = value_of(config, fields_by_key()[need.key])
        if not (needed in need.values if need.values else needed):
            unmet.setdefault(need, []).append(shown(field, value))
    for need, flags in unmet.items():
        verb, them = ("needs", "this") if len(flags) == 1 else ("need", "these")
        yield f"{' and '.join(flags)} {verb} {need.flag}; add it, or leave {them} out"


def raise_all(messages: Sequence[str]) -> None:
    """Raise one ConfigError with all messages, a line each; return if there are no messages."""
    if messages:
        raise ConfigError("\n".join(messages))


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (*model.RULES, *gpu.RULES, *training.RULES, needs)
