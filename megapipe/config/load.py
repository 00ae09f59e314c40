"""From the command line to a `LoadedConfig`: defaults < YAML files < flags, checked, each value with its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config, all_fields, make_config, value_of
from megapipe.config.fields import BOOL_WORDS, NONE_WORDS, TAKES_VALUE, Flag, nearest, read_value, value_text
from megapipe.config.flags import (
    Requests,
    Setting,
    field_flags,
    help_text,
    normalised,
    off_flag,
    read_command_line,
    settings_of,
)
from megapipe.config.megatron_flags import MegatronFlag, megatron_flags
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


def load_config(argv: Sequence[str], *, is_job: bool = True, schedules: Sequence[str] = ()) -> LoadedConfig:
    """Read argv (without the program's name) and the files it names. Raises ConfigError; `--help` prints and exits.

    The rules that need no world size are checked, with `--use-checkpoint-args` later, by `with_checkpoint_model`.
    is_job False: no rule is checked here, so that an incomplete job can be inspected; `resolve` checks what it needs.
    schedules: names that `--help` lists for --pipeline-schedule.
    """
    line = read_command_line(argv)
    if line.requests.help:
        print(help_text(schedules))
        raise SystemExit(0)
    remarks = list(line.remarks)
    files = [settings_of_yaml(read_file(path), path, remarks) for path in line.requests.config_files]
    values, origins = merge([*files, line.settings])
    loaded = LoadedConfig(make_config(values), origins, line.requests, tuple(remarks))
    if is_job and not loaded.config.checkpoint.use_checkpoint_args:
        check_complete(loaded)
    return loaded


def from_yaml(text: str, name: str = "configuration") -> Config:
    """Read the configuration of a YAML text, with defaults for the rest: the inverse of `to_yaml`.

    Each value is checked, but not the rules between fields: a resolved configuration has its lengths in two units.
    """
    values, _ = merge([settings_of_yaml(text, name, [])])
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
            given = f"{field.key} is {value_text(values[field.key])} by {origins[field.key]}"
            rule = f"{value_text(stored)} in the checkpoint {where}, from which --use-checkpoint-args takes the model"
            raise ConfigError(f"{given}, but {rule}; leave one of the two out")
        values[field.key], origins[field.key] = stored, f"checkpoint {where}"
    merged = dataclasses.replace(loaded, config=make_config(values), origins=origins)
    check_complete(merged)
    return merged


def check_complete(loaded: LoadedConfig) -> None:
    """Raise ConfigError if a field that a job must give was left to its default, or the job breaks a rule."""
    missing = []
    for field in all_fields():
        is_optional = field.key == "optimizer.lr" and loaded.config.training.skip_train
        if field.option.required and loaded.origins[field.key] == DEFAULT and not is_optional:
            in_yaml = f"(in a YAML file: {field.name} in the section {field.section})"
            missing.append(f"{field.main_flag} is missing: {field.option.help} {in_yaml}")
    raise_all(missing)
    check_job(loaded.config)


def settings_of_yaml(text: str, name: str, remarks: list[str]) -> list[Setting]:
    """Return the settings of a YAML file. remarks: receives those on Megatron flags that change nothing here."""
    return [setting for entry in read_entries(text, name) for setting in settings_of_entry(entry, remarks)]


def settings_of_entry(entry: Entry, remarks: list[str]) -> list[Setting]:
    """Return the settings of one line of a YAML file. Raises ConfigError at an unknown key, with the nearest one."""
    subject = f"{entry.where}: {entry.section}.{entry.key}" if entry.section else f"{entry.where}: {entry.key}"
    by_name = {field.name: field for field in all_fields()}
    name = "--" + normalised(entry.key)
    if entry.key in by_name:
        field = by_name[entry.key]
        flag = Flag(field.main_flag)
    elif name in field_flags():
        field, flag = field_flags()[name]
    elif name in megatron_flags():
        remarks += megatron_remarks(entry, megatron_flags()[name])
        return []
    else:
        names = [field.name for field in all_fields() if entry.section in (None, field.section)]
        every = [*by_name, *(flag[2:].replace("-", "_") for flag in field_flags())]
        meant = nearest(entry.key, names) or nearest(entry.key, every)
        raise ConfigError(f"unknown key {subject}{meant}; --help lists all names")
    if entry.section is not None and entry.section != field.section:
        raise ConfigError(f"{subject}: {entry.key} belongs to the section {field.section}")
    if flag.value is not TAKES_VALUE:
        is_on = BOOL_WORDS.get(entry.raw.lower()) if isinstance(entry.raw, str) else None
        if is_on is None:
            raise ConfigError(f"{subject} {value_text(entry.raw)}: expected true or false")
        if not is_on and field.kind.scalar is not bool:
            return []  # `bf16: false` changes nothing
        value = flag.value if is_on else not flag.value
    elif entry.raw is not None:
        raw = flag.read(entry.raw) if flag.read is not None and isinstance(entry.raw, str) else entry.raw
        value = read_value(field, raw, subject, literal=entry.quoted)
    elif field.kind.optional:
        value = None
    else:
        raise ConfigError(f"{subject} is empty; leave the line out for the default, {value_text(field.default)}")
    return settings_of(field, flag, value, f"yaml {entry.where}", subject)


def megatron_remarks(entry: Entry, row: MegatronFlag) -> list[str]:
    """Return the remark on a key that is a flag of Megatron's; none if it asks for nothing. Raises ConfigError."""
    given = [entry.raw] if isinstance(entry.raw, str) else list(entry.raw or ())
    if entry.raw is None or (not entry.quoted and given[0].lower() in NONE_WORDS):
        return []
    if row.values == "" and len(given) == 1:
        if not BOOL_WORDS.get(given[0].lower()):
            return []  # a switch that is off
        given = []
    try:
        return [row.judge(given)]
    except ConfigError as error:
        raise ConfigError(f"{entry.where}: {error}") from None


def merge(sources: Sequence[Sequence[Setting]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Apply each source over the earlier ones and over the defaults; return values and origins by 'section.name'.

    If a flag is given twice, or in its on and off forms, the last one holds, as in every launch script. Two different
    flags of one source that set a field to different values (--bf16 and --fp16) raise ConfigError.
    """
    values: dict[str, Any] = {field.key: field.default for field in all_fields()}
    origins = dict.fromkeys(values, DEFAULT)
    for settings in sources:
        firm: dict[str, Setting] = {}
        # those with only_from come last, since they depend on the value that the others give
        for setting in sorted(settings, key=lambda one: one.only_from is not None):
            key, subject = setting.field.key, setting.subject
            if setting.only_from is not None and values[key] not in setting.only_from:
                continue
            earlier = firm.get(key)
            if earlier is not None and earlier.value != setting.value:
                is_same_flag = earlier.subject in (subject, off_flag(subject)) or off_flag(earlier.subject) == subject
                if not is_same_flag:
                    both = f"{value_text(earlier.value)} and {value_text(setting.value)}"
                    flags = f"{earlier.subject} and {subject}"
                    raise ConfigError(f"{flags} contradict each other: {key} would be {both}; give one of the two")
            if setting.only_from is None:
                firm[key] = setting
            values[key], origins[key] = setting.value, setting.origin
    return values, origins
