"""From the command line to a `LoadedConfig`: defaults < YAML files < flags, checked, each value with its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config, all_fields, fields_by_key, make_config, value_of
from megapipe.config.fields import (
    NONE_WORDS,
    TAKES_VALUE,
    TRUE_WORDS,
    ConfigField,
    Flag,
    nearest,
    read_value,
    value_text,
)
from megapipe.config.flags import GivenFlag, Requests, field_flags, help_text, normalised, off_flag, read_command_line
from megapipe.config.megatron_flags import megatron_flags
from megapipe.config.rules.check import check_job, raise_all
from megapipe.config.yaml_file import Entry, read_entries, read_file, to_yaml
from megapipe.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each value, and the other requests of the command line."""

    config: Config
    origins: dict[str, str]  # 'section.field' -> 'default', 'yaml FILE line N', 'flag --x' or 'checkpoint DIR'
    requests: Requests = dataclasses.field(default_factory=Requests)
    remarks: tuple[str, ...] = ()  # one line for each Megatron flag that changes nothing here

    def text(self, resolved: Config | None = None) -> str:
        """Return the YAML of `--print-config` and of checkpoints, with origins and derived values as comments."""
        return to_yaml(self.config, self.origins, resolved)


@dataclass(frozen=True)
class Setting:
    """One field set to one value by one source."""

    field: ConfigField
    value: Any
    origin: str
    subject: str  # for errors: '--bf16', 'tiny.yaml line 3: bf16'
    only_from: tuple[Any, ...] | None = None


def load_config(argv: Sequence[str], *, is_job: bool = True, schedules: Sequence[str] = ()) -> LoadedConfig:
    """Read argv (without the program's name) and the files it names. Raises ConfigError; `--help` prints and exits.

    The result obeys the rules that need no world size. With `--use-checkpoint-args` they are checked later, by
    `with_checkpoint_model`. is_job False: no rule is checked here, so that an incomplete job (a model without data) can
    be inspected; `resolve` checks what it needs. schedules: names that `--help` lists for --pipeline-schedule.
    """
    line = read_command_line(argv)
    if line.requests.help:
        print(help_text(schedules))
        raise SystemExit(0)
    values: dict[str, Any] = {field.key: field.default for field in all_fields()}
    origins = dict.fromkeys(values, DEFAULT)
    remarks = list(line.remarks)
    for path in line.requests.config_files:
        settings: list[Setting] = []
        for entry in read_entries(read_file(path), path):
            settings += settings_of_entry(entry, remarks)
        apply(values, origins, settings)
    apply(values, origins, [setting for given in line.given for setting in settings_of_flag(given)])
    loaded = LoadedConfig(make_config(values), origins, line.requests, tuple(remarks))
    if is_job and not loaded.config.checkpoint.use_checkpoint_args:
        require(loaded)
        check_job(loaded.config)
    return loaded


def from_yaml(text: str, name: str = "configuration") -> Config:
    """Read the configuration of a YAML text, with defaults for the rest: the inverse of `to_yaml`.

    Each value is checked, but not the rules between fields: a resolved configuration has its lengths in two units.
    """
    values: dict[str, Any] = {field.key: field.default for field in all_fields()}
    settings: list[Setting] = []
    for entry in read_entries(text, name):
        settings += settings_of_entry(entry, [])
    apply(values, dict.fromkeys(values, DEFAULT), settings)
    return make_config(values)


def with_checkpoint_model(loaded: LoadedConfig, saved: Config, where: str) -> LoadedConfig:
    """Take the model section from a checkpoint's configuration (`--use-checkpoint-args`), and check the result.

    The padded vocabulary depends on tp and is derived again. Raises ConfigError if a flag or file sets another value.
    """
    values = {field.key: value_of(loaded.config, field) for field in all_fields()}
    origins = dict(loaded.origins)
    for field in all_fields():
        if field.section != "model" or field.name == "padded_vocab_size":
            continue
        stored = value_of(saved, field)
        if origins[field.key] != DEFAULT and values[field.key] != stored:
            raise ConfigError(
                f"{field.key} is {value_text(values[field.key])} by {origins[field.key]}, but {value_text(stored)} in "
                f"the checkpoint {where}, "
                "from which --use-checkpoint-args takes the model; leave one of the two out"
            )
        values[field.key], origins[field.key] = stored, f"checkpoint {where}"
    merged = dataclasses.replace(loaded, config=make_config(values), origins=origins)
    require(merged)
    check_job(merged.config)
    return merged


def require(loaded: LoadedConfig) -> None:
    """Raise ConfigError if a field that a job must give was left to its default."""
    missing: list[str] = []
    for field in all_fields():
        is_optional = field.key == "optimizer.lr" and loaded.config.training.skip_train
        if field.option.required and loaded.origins[field.key] == DEFAULT and not is_optional:
            missing.append(
                f"{field.main_flag} is missing: {field.option.help} (in a YAML file: {field.name} in the section "
                f"{field.section})",
            )
    raise_all(missing)


def settings_of_flag(given: GivenFlag) -> list[Setting]:
    """Return the settings of one flag of the command line."""
    name = given.flag.name
    value = (
        read_value(given.field, given.texts if given.field.kind.many else given.texts[0], name)
        if given.texts
        else given.flag.value
    )
    return settings_of(given.field, given.flag, value, f"flag {name}", name)


def settings_of(field: ConfigField, flag: Flag, value: Any, origin: str, subject: str) -> list[Setting]:
    """Return the settings of a flag's own field and of those that it also sets."""
    others = [
        Setting(fields_by_key()[f"{field.section}.{name}"], constant, origin, subject)
        for name, constant in flag.also_sets
    ]
    return [Setting(field, value, origin, subject, flag.only_from), *others]


def settings_of_entry(entry: Entry, remarks: list[str]) -> list[Setting]:
    """Return the settings of one line of a YAML file. Raises ConfigError at an unknown key, with the nearest one."""
    subject = f"{entry.where}: {entry.section}.{entry.key}" if entry.section else f"{entry.where}: {entry.key}"
    origin = f"yaml {entry.where}"
    field, flag = find_key(entry, remarks, subject)
    if field is None:
        return []
    if entry.section is not None and entry.section != field.section:
        raise ConfigError(f"{subject}: {entry.key} belongs to the section {field.section}")
    if flag.value is not TAKES_VALUE:
        return settings_of_switch(entry, field, flag, origin, subject)
    if entry.raw is None:
        if not field.kind.optional:
            raise ConfigError(f"{subject} is empty; leave the line out for the default, {value_text(field.default)}")
        return settings_of(field, flag, None, origin, subject)
    return settings_of(field, flag, read_value(field, entry.raw, subject, literal=entry.quoted), origin, subject)


def find_key(entry: Entry, remarks: list[str], subject: str) -> tuple[ConfigField | None, Flag]:
    """Return the field and flag that a key names; (None, _) for a Megatron flag that changes nothing here."""
    for field in all_fields():
        if field.name == entry.key:
            return field, Flag(field.main_flag)
    name = "--" + normalised(entry.key)
    if name in field_flags():
        return field_flags()[name]
    if name in megatron_flags():
        row = megatron_flags()[name]
        given = [entry.raw] if isinstance(entry.raw, str) else list(entry.raw or ())
        if entry.raw is None or (not entry.quoted and given[0].lower() in NONE_WORDS):
            return None, Flag(name)  # the key has no value, so nothing is asked for
        if row.values == "" and len(given) == 1:
            if given[0].lower() not in TRUE_WORDS:
                return None, Flag(name)  # a switch of Megatron's that is off
            given = []
        try:
            remarks.append(row.judge(given))
        except ConfigError as error:
            raise ConfigError(f"{entry.where}: {error}") from None
        return None, Flag(name)
    names = [field.name for field in all_fields() if entry.section in (None, field.section)]
    every = [field.name for field in all_fields()] + [flag[2:].replace("-", "_") for flag in field_flags()]
    raise ConfigError(
        f"unknown key {subject}{nearest(entry.key, names) or nearest(entry.key, every)}; --help lists all names"
    )


def settings_of_switch(entry: Entry, field: ConfigField, flag: Flag, origin: str, subject: str) -> list[Setting]:
    """Return the settings of a key that names a flag without value, such as `bf16: true`."""
    raw = entry.raw if isinstance(entry.raw, str) else ""
    wanted = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(raw.lower())
    if wanted is None:
        raise ConfigError(f"{subject} {value_text(entry.raw)}: expected true or false")
    if wanted:
        return settings_of(field, flag, flag.value, origin, subject)
    if field.kind.scalar is bool:
        return settings_of(field, flag, not flag.value, origin, subject)
    return []  # `bf16: false` changes nothing


def apply(values: dict[str, Any], origins: dict[str, str], settings: list[Setting]) -> None:
    """Apply the settings of one source over those of earlier sources.

    If a flag is given twice, or in its on and off forms, the last one holds, as in every launch script. Two different
    flags that set one field to different values (--bf16 and --fp16) raise ConfigError.
    """
    firm: dict[str, Setting] = {}
    for setting in (setting for setting in settings if setting.only_from is None):
        key, earlier = setting.field.key, firm.get(setting.field.key)
        if earlier is not None and earlier.value != setting.value and not same_switch(earlier.subject, setting.subject):
            raise contradiction(earlier, setting)
        firm[key] = setting
        values[key], origins[key] = setting.value, setting.origin
    for setting in (setting for setting in settings if setting.only_from is not None):
        key = setting.field.key
        if values[key] in (setting.only_from or ()):
            if key in firm:
                raise contradiction(firm[key], setting)
            values[key], origins[key] = setting.value, setting.origin


def same_switch(first: str, second: str) -> bool:
    """Return True if two flags are the same, or the on and off form of one."""
    return first == second or off_flag(first) == second or off_flag(second) == first


def contradiction(first: Setting, second: Setting) -> ConfigError:
    """Build the error for two settings of one source that cannot both hold."""
    return ConfigError(
        f"{first.subject} and {second.subject} contradict each other: {first.field.key} would be "
        f"{value_text(first.value)} and {value_text(second.value)}; give one of the two"
    )
