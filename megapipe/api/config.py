"""`Config`: the configuration of a run, from keyword arguments, flags or YAML files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from megapipe.config import config as sections
from megapipe.config.flags import REQUESTS, field_flags, normalised, off_flag
from megapipe.config.load import LoadedConfig, load_config
from megapipe.config.options import NONE_WORDS, TAKES_VALUE
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import ConfigError
from megapipe.plan.schedule_choice import SCHEDULE_NAMES

if TYPE_CHECKING:
    from megapipe.api.options import Options


class Config:
    """The configuration of a run: the options of docs/flags.md, with the same defaults, checks and messages::

        Config(num_layers=12, hidden_size=768, bf16=True, data_path=["corpus_text_document"], lr=6e-4, ...)
        Config.from_yaml("configs/quickstart.yaml", train_iters=100)
        Config.from_flags("--num-layers 12 --hidden-size 768 --bf16")

    options: every flag by its name, with underscores and without the dashes; mypy and editors know them. A switch takes
    True or False, a flag with several values a list, None unsets an optional value or a list. Like a command line, a
    Config need not be a complete job: `Trainer` requires one, `make_plan` what a plan needs; both check the rules
    between options.

    Immutable. flags: the command line that says the same. Raises ConfigError with a line for every unknown name, with
    the nearest known one, and every invalid value.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self.flags = tuple(_words_of(options))
        with _errors_in_python():
            self._loaded = self.load(is_job=False)

    @classmethod
    def from_flags(cls, flags: str | Sequence[str]) -> Config:
        """Read flags as `megapipe pretrain` takes them: a list of words, or a text that is split as a shell does."""
        made = cls.__new__(cls)
        made.flags = tuple(shlex.split(flags) if isinstance(flags, str) else flags)
        made._loaded = made.load(is_job=False)
        return made

    @classmethod
    def from_yaml(cls, *paths: str | PathLike[str], **options: Unpack[Options]) -> Config:
        """Read YAML files; later ones win over earlier ones, and options over all of them."""
        if not paths:
            raise ConfigError("from_yaml() needs the path of a YAML file")
        files = [word for path in paths for word in ("--config", str(path))]
        with _errors_in_python():
            return cls.from_flags([*files, *_words_of(options)])

    def replace(self, **options: Unpack[Options]) -> Config:
        """Return the configuration with other values of some options."""
        with _errors_in_python():
            return Config.from_flags([*self.flags, *_words_of(options)])

    @property
    def values(self) -> sections.Config:
        """The values by section, such as values.model.num_layers; what was not given has its default."""
        return self._loaded.config

    def to_yaml(self) -> str:
        """Return the configuration as a YAML text that `from_yaml` reads, with the origin of each value."""
        return to_yaml(self._loaded.config, self._loaded.origins)

    def load(self, *, is_job: bool) -> LoadedConfig:
        """Read the flags again. is_job: check that a training job can start from them. Raises ConfigError."""
        for word in self.flags:
            name = normalised(word.partition("=")[0])
            if name == "-h" or (name in REQUESTS and name != "--config"):
                raise ConfigError(f"{name} is a request of the command line, not an option of a run; leave it out")
        return load_config(self.flags, is_job=is_job, schedules=SCHEDULE_NAMES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"Config.from_flags({shlex.join(self.flags)!r})"


@contextmanager
def _errors_in_python() -> Iterator[None]:
    """Name options in errors as keyword arguments: num_layers in place of --num-layers."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("unknown flag --", "unknown option --").replace("--help lists", "docs/flags.md lists")
        text = re.sub(r"--([a-z][\w-]*)", lambda found: found[1].replace("-", "_"), text)
        raise ConfigError(text) from None


def _words_of(options: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that give options their values."""
    return [word for name, value in options.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    """Return the words of a command line that give an option its value."""
    flag = "--" + normalised(name)
    by_name = {field.name: field for field, _ in field_flags().values()}
    if flag not in field_flags() and name in by_name:
        flag = by_name[name].main_flag
    field, how = field_flags().get(flag, (None, None))
    if isinstance(value, bool) and how is not None and how.value is not TAKES_VALUE:
        if value:
            return [flag]
        opposite = off_flag(flag)
        if not opposite and field is not None and field.kind.scalar is bool:
            opposite = field.main_flag  # the switch that is turned off is itself a --no-...
        return [opposite] if opposite else []  # bf16=False: another flag gives the value
    if value is None:
        return [f"{flag}={NONE_WORDS[0]}"]
    if isinstance(value, bool):
        return [f"{flag}={str(value).lower()}"]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    companion = ["--group-query-attention"] if flag == "--num-query-groups" else []  # without it, the flag is refused
    return [*companion, f"{flag}={value}"]
