"""The table of all rules, and the two doors to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megapipe.config.config import Config
from megapipe.config.fields import all_fields, value_of
from megapipe.config.rules.asynchronous import ASYNCHRONOUS_RULES
from megapipe.config.rules.data import DATA_RULES, JOB_RULES
from megapipe.config.rules.graphs import GRAPH_RULES
from megapipe.config.rules.kernels import KERNEL_RULES
from megapipe.config.rules.model import MODEL_RULES
from megapipe.config.rules.offload import OFFLOAD_RULES
from megapipe.config.rules.parallel import PARALLEL_RULES
from megapipe.config.rules.training import TRAINING_RULES
from megapipe.config.values import out_of_bounds
from megapipe.errors import ConfigError

Rule = Callable[[Config], str | None]

CONSISTENCY_RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *PARALLEL_RULES,
    *OFFLOAD_RULES,
    *TRAINING_RULES,
    *DATA_RULES,
    *ASYNCHRONOUS_RULES,
    *KERNEL_RULES,
    *GRAPH_RULES,
)


def check(config: Config) -> None:
    """Raises ConfigError with one line for each choice, range and rule that the configuration breaks."""
    raise_all(bounds_broken(config) or broken(CONSISTENCY_RULES, config))


def check_job(config: Config) -> None:
    """`check`, and what only a training job has to have: a length, a learning rate, data and a vocabulary."""
    check(config)
    raise_all(broken(JOB_RULES, config))


def broken(rules: Iterable[Rule], config: Config) -> list[str]:
    """The messages of the rules that do not hold."""
    return [message for rule in rules if (message := rule(config)) is not None]


def bounds_broken(config: Config) -> list[str]:
    """Fields outside their choices or ranges: only where it was made in code, for flags and files are checked as they are read."""
    messages = []
    for field in all_fields():
        value = value_of(config, field)
        for item in value if isinstance(value, tuple) else (value,):
            trouble = "" if item is None else out_of_bounds(field.option, item)
            if trouble:
                messages.append(f"{field.key} {item}: {trouble}")
    return messages


def raise_all(messages: list[str]) -> None:
    """One ConfigError with all messages, a line each."""
    if messages:
        raise ConfigError("\n".join(messages))
