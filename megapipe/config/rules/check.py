"""All rules together, and the two entry points: check and check_job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megapipe.config.config import Config, all_fields, fields_by_key, value_of
from megapipe.config.fields import Need, out_of_bounds, shown
from megapipe.config.rules import gpu, model, training
from megapipe.errors import ConfigError

Rule = Callable[[Config], Iterator[str]]


def check(config: Config) -> None:
    """Raise ConfigError with one line for each choice, range and rule that the configuration breaks."""
    raise_all(list(bounds_broken(config)) or [message for rule in RULES for message in rule(config)])


def check_job(config: Config) -> None:
    """Check the rules, and what only a training job must have: a length, a learning rate, data and a vocabulary."""
    check(config)
    raise_all(list(training.job(config)))


def bounds_broken(config: Config) -> Iterator[str]:
    """Yield a message for each field outside its choices or range.

    Only a configuration made in code can have one: flags and files are checked as they are read.
    """
    for field in all_fields():
        value = value_of(config, field)
        for item in value if isinstance(value, tuple) else (value,):
            trouble = "" if item is None else out_of_bounds(field.option, item)
            if trouble:
                yield f"{field.key} {item}: {trouble}"


def needs(config: Config) -> Iterator[str]:
    """Yield a message for the options that have no effect because the option that they need is not given."""
    unmet: dict[Need, list[str]] = {}
    for field in all_fields():
        need, value = field.option.needs, value_of(config, field)
        if (
            need is not None
            and value != field.default
            and not need.is_met_by(value_of(config, fields_by_key()[need.key]))
        ):
            unmet.setdefault(need, []).append(shown(field, value))
    for need, flags in unmet.items():
        listed, verb, them = (
            " and ".join(flags),
            "need" if len(flags) > 1 else "needs",
            "these" if flags[1:] else "this",
        )
        yield f"{listed} {verb} {need.flag}; add it, or leave {them} out"


def raise_all(messages: list[str]) -> None:
    """Raise one ConfigError with all messages, a line each; return if there are no messages."""
    if messages:
        raise ConfigError("\n".join(messages))


RULES: tuple[Rule, ...] = (*model.RULES, *gpu.RULES, *training.RULES, needs)
