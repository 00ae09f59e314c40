"""All rules together, and `check`, which applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from megapipe.config.config import Config, all_fields, fields_by_key, value_of
from megapipe.config.fields import out_of_bounds, shown
from megapipe.config.options import Need
from megapipe.config.problems import Problems, UnreadError, hiding
from megapipe.config.rules import context, experts, gpu, model, optimizer, pairs, training

Rule = Callable[[Config], Iterator[str]]


def check(config: Config, more: Sequence[Rule] = ()) -> None:
    """Raise ConfigError with one line for each choice, range and rule that the configuration breaks.

    more: rules to check besides RULES.
    """
    config, broken = gpu.with_own_kernels(config), []
    for field in all_fields():  # only a configuration made in code: flags and files are checked as they are read
        value = value_of(config, field)
        items = value if isinstance(value, tuple) else (value,)
        for item in items:
            trouble = "" if item is None else out_of_bounds(field.option, item)
            if trouble:
                broken.append(f"{field.key} {item}: {trouble}")
    Problems(broken or broken_rules(config, (*RULES, *more))).raise_all()


def broken_rules(config: Config, rules: Iterable[Rule], unread: Collection[str] = ()) -> list[str]:
    """Return a message for each broken rule. unread: fields without a value; rules that ask for one are left out."""
    names = [key.partition(".") for key in unread]
    hidden = {name: [field for section, _, field in names if section == name] for name, _, _ in names}
    sections = {name: hiding(getattr(config, name), fields) for name, fields in hidden.items()}
    view, messages = dataclasses.replace(config, **sections), []
    for rule in rules:
        with suppress(UnreadError):
            for message in rule(view):
                messages.append(message)
    return list(dict.fromkeys(messages))


def needs(config: Config) -> Iterator[str]:
    """Yield a message for the options that have no effect because the option that they need is not given."""
    for need, flags in unmet_needs(config):
        verb, them = ("needs", "this") if len(flags) == 1 else ("need", "these")
        if not need.without:
            yield f"{' and '.join(flags)} {verb} {need.flag}; add it, or leave {them} out"


def remarks(config: Config) -> Iterator[str]:
    """Yield a line for the options that are accepted, as in Megatron, though they have no effect, or not their own."""
    for need, flags in unmet_needs(config):
        if need.without:
            yield f"{' and '.join(flags)} without {need.flag}: {need.without}"
    yield from gpu.own_kernels(config)
    yield from model.without_effect(config)
    yield from experts.remarks(config)
    yield from gpu.unused_history(config)
    if config.data.dataloader_type == "cyclic":
        yield "--dataloader-type cyclic: the order of samples depends on the number of dp ranks and --micro-batch-size"


def unmet_needs(config: Config) -> Iterator[tuple[Need, list[str]]]:
    """Yield each option that is missing, with the flags that have no effect without it."""
    unmet: dict[Need, list[str]] = {}
    for field in all_fields():
        need = field.option.needs
        with suppress(UnreadError):
            value = value_of(config, field)
            if need is None or value == field.default:
                continue
            needed = value_of(config, fields_by_key()[need.key])
            if not need.is_met(needed):
                unmet.setdefault(need, []).append(shown(field, value))
    yield from unmet.items()


RULES: tuple[Rule, ...] = (
    *model.RULES,
    *context.RULES,
    *context.SLICE_RULES,
    *experts.RULES,
    *gpu.RULES,
    *pairs.RULES,
    *training.RULES,
    *optimizer.RULES,
    needs,
)
