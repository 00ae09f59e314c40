"""From the command line to a `LoadedConfig`: defaults < YAML files < flags, checked, each value with its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megapipe.config.changes import FUNCTION, classes
from megapipe.config.config import Config, all_fields, make_config, value_of
from megapipe.config.fields import BOOL_WORDS, nearest, nearest_word, read_value, value_text
from megapipe.config.files import is_hugging_face
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
from megapipe.config.megatron_flags import SUPPORTED, MegatronFlag, differences_line, removed_flags, row_of
from megapipe.config.model import ModelConfig
from megapipe.config.options import NONE_WORDS, TAKES_VALUE, Flag
from megapipe.config.problems import Problems
from megapipe.config.rules.check import RULES, Rule, broken_rules, remarks
from megapipe.config.rules.training import IMPLIED, job
from megapipe.config.tuned import tuned_settings
from megapipe.config.yaml_file import Entry, read_entries, read_file, to_yaml
from megapipe.errors import ConfigError
from megapipe.registry import EXTENSIONS

# origins; "default of flag --x" if that flag gives the field another one, "checkpoint FOLDER"
DEFAULT, CHECKPOINT = "default", "checkpoint "
EXTENSION = "extension"  # the field of the training section


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each value, and the other requests of the command line."""

    config: Config
    origins: dict[str, str]  # 'section.field' -> 'default', 'yaml FILE line N', 'flag --x' or 'checkpoint DIR'
    requests: Requests = dataclasses.field(default_factory=Requests)
    accepted: tuple[str, ...] = ()  # flags of Megatron, with values, that change no result here

    @property
    def is_bare(self) -> bool:
        """True if --load is given and none of what a job must give of its model: a run is continued as it is."""
        needed = [field.key for field in all_fields() if field.option.required and classes()[field.key] == FUNCTION]
        return self.config.checkpoint.load is not None and not any(is_given(self.origins[key]) for key in needed)

    @property
    def takes_model(self) -> bool:
        """True if the model section comes from --load."""
        checkpoint = self.config.checkpoint
        return checkpoint.use_checkpoint_args or is_hugging_face(checkpoint.load) or self.is_bare

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines on what --load gave, on what was accepted without an effect, and for a script of Megatron's on defaults
        that differ.
        """
        parts = {"model section": "model.num_layers", "tokenizer": "data.tokenizer_type"}
        origins = {part: self.origins[key] for part, key in parts.items()}
        taken = [f"{part} from the {origin}" for part, origin in origins.items() if origin.startswith(CHECKPOINT)]
        lines = [*taken, *remarks(self.config)]
        if self.accepted:
            lines.append(f"flags of Megatron that change no result here (docs/flags.md): {', '.join(self.accepted)}")
        if self.accepted or self.requests.explain_defaults:
            lines.append(differences_line())
            size = self.config.model.vocab_size
            if self.config.data.tokenizer_type == "NullTokenizer" and size is not None:
                lines.append(
                    f"NullTokenizer has {size + 1} tokens with --vocab-size {size}, as in Megatron before 0.17; in "
                    f"0.19 it has {size}, of which the last ends a document: --vocab-size {size - 1} is the same here"
                )
        return tuple(lines)

    def text(self, resolved: Config | None = None) -> str:
        """Return the YAML of `--print-config` and of checkpoints, with origins and derived values as comments."""
        return to_yaml(self.config, self.origins, resolved)


def load_config(
    argv: Sequence[str],
    *,
    is_job: bool = True,
    schedules: Sequence[str] = (),
    more: Callable[[Requests], Sequence[Rule]] = lambda _: (),
    if_refused: Sequence[Rule] = (),
) -> LoadedConfig:
    """Read argv (without the program's name) and the files it names. Raises ConfigError; `--help` prints and exits.

    The error has a line for everything that is wrong; rules are checked where the values that they need could be read.
    Those that need no world size are checked, or where the model comes from --load later, by `with_checkpoint_model`.
    is_job False: no rule is checked here, so that an incomplete job can be inspected; `resolve` checks what it needs.
    schedules: names that `--help` lists for --pipeline-schedule. more: rules to check besides `RULES`, for the requests
    of the command line. if_refused: rules that are only asked if something is wrong.
    """
    problems = Problems()
    load_extensions(argv)
    line = read_command_line(argv, problems)
    if line.requests.help:
        print(help_text(schedules))
        raise SystemExit(0)
    accepted = list(line.accepted)
    files: list[list[Setting]] = []
    for path in line.requests.config_files:
        before = len(files)
        with problems.caught():
            files.append(settings_of_yaml(read_file(path), path, accepted, problems))
        problems.hides_fields |= len(files) == before
    values, origins = merge([*files, line.settings], problems)
    if values["gpu.tuned"] is not None:
        with problems.caught():
            measured = tuned_settings(values["gpu.tuned"])
            values, origins = merge([measured, *files, line.settings], Problems())
    fill_implied(values, origins, problems)
    loaded = LoadedConfig(make_config(values), origins, line.requests, tuple(accepted))
    rules = more(line.requests)
    if not loaded.takes_model:
        check_query_groups([*files, line.settings], loaded.config.model, problems)
    if is_job and not loaded.takes_model:
        check_complete(loaded, problems, rules)
    elif problems.messages and not loaded.takes_model:
        problems.add(*broken_rules(loaded.config, (*RULES, *rules), problems.unread))
    if problems.messages:
        problems.add(*broken_rules(loaded.config, if_refused, problems.unread))
    problems.raise_all()
    return loaded


def is_given(origin: str) -> bool:
    """Return True if a flag, a file or a checkpoint gives a value of this origin."""
    return not origin.startswith(DEFAULT)


def load_extensions(argv: Sequence[str]) -> None:
    """Run the extensions that flags and the files of --config name, before their names are read. Raises ConfigError.

    Nothing else is checked here: what cannot be read is reported when it is read.
    """
    given: dict[str, list[str]] = {"--config": [], "--extension": []}
    words = given.setdefault("", [])
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            words = given.get(normalised(name), [])
            words += [value] if equals else []
        else:
            words.append(token)
    named: list[str] = []
    for path in given["--config"]:
        with suppress(ConfigError):
            text = read_file(path)
            for entry in read_entries(text, path, Problems()) if EXTENSION in text else ():
                if entry.key == EXTENSION and entry.raw is not None:
                    named += [entry.raw] if isinstance(entry.raw, str) else entry.raw
    wanted: list[str] = []
    for name in (*named, *given["--extension"]):
        wanted = [] if name.lower() in NONE_WORDS else [*wanted, name]
    for name in wanted:
        EXTENSIONS.load(name)


def from_yaml(text: str, name: str = "configuration") -> Config:
    """Read the configuration of a YAML text, with defaults for the rest: the inverse of `to_yaml`.

    Each value is checked, but not the rules between fields: a resolved configuration has its lengths in two units.
    Options and values of training that only an earlier version had get their defaults, so that its models are read.
    """
    problems = Problems()
    values, _ = merge([settings_of_yaml(text, name, [], problems, is_saved=True)], problems)
    problems.raise_all()
    return make_config(values)


def check_query_groups(sources: Sequence[Sequence[Setting]], model: ModelConfig, problems: Problems) -> None:
    """Refuse the flag --num-query-groups alone, which Megatron ignores: each head then has its own keys and values.

    In a YAML file num_query_groups alone is a number of groups.
    """
    flag, groups, heads = "--num-query-groups", model.num_query_groups, model.num_attention_heads
    subjects = {one.subject for settings in sources for one in settings if one.field.name == "num_query_groups"}
    if subjects == {flag} and groups not in (None, heads):
        rule = f"Megatron ignores the number, and each of the {heads} attention heads has its own keys and values"
        problems.add(f"{flag} {groups} without --group-query-attention: {rule}; add that flag, or leave {flag} out")


def fill_implied(values: dict[str, Any], origins: dict[str, str], problems: Problems) -> None:
    """Set the tokenizer that Megatron's pretrain_gpt.py takes by default, if its two files are given, and what --sft
    implies; the opposite is a problem.
    """
    files = ("data.vocab_file", "data.merge_file")
    if values["data.tokenizer_type"] is None and all(values[key] is not None for key in files):
        values["data.tokenizer_type"], origins["data.tokenizer_type"] = "GPT2BPETokenizer", origins[files[0]]
    for key, meaning in IMPLIED.items() if values["data.sft"] else ():
        if is_given(origins[key]) and not values[key]:
            problems.add(f"{key} is false by {origins[key]}, but --sft {meaning}; leave one of the two out")
        elif not values[key]:
            values[key], origins[key] = True, origins["data.sft"]


def with_checkpoint_model(
    loaded: LoadedConfig,
    saved: Config,
    where: str,
    more: Sequence[Rule] = (),
    taker: str = "--use-checkpoint-args",
) -> LoadedConfig:
    """Take the model section from a checkpoint's configuration (`--use-checkpoint-args`), and check the result.

    A field of another class than the model's function, such as a dropout, keeps the value that is given here. The
    padded vocabulary depends on tp and is derived again. more: rules to check besides `RULES`. taker: the flag that
    takes the model. Raises ConfigError with a line for each field of the function that is set to another value.
    """
    conflicts = []
    values = {field.key: value_of(loaded.config, field) for field in all_fields()}
    origins = dict(loaded.origins)
    for field in all_fields():
        if field.section != "model" or field.name == "padded_vocab_size":
            continue
        stored = value_of(saved, field)
        if is_given(origins[field.key]) and classes()[field.key] != FUNCTION:
            continue
        if is_given(origins[field.key]) and values[field.key] != stored:
            given = f"{field.key} is {value_text(values[field.key])} by {origins[field.key]}"
            rule = f"{value_text(stored)} in the checkpoint {where}, from which {taker} takes the model"
            conflicts.append(f"{given}, but {rule}; leave one of the two out")
        values[field.key], origins[field.key] = stored, CHECKPOINT + where
    if conflicts:
        raise ConfigError("\n".join(conflicts))
    merged = dataclasses.replace(loaded, config=make_config(values), origins=origins)
    problems = Problems()
    check_complete(merged, problems, more)
    problems.raise_all()
    return merged


def with_tokenizer(loaded: LoadedConfig, found: Mapping[str, Any], where: str) -> LoadedConfig:
    """Take the tokenizer of a checkpoint, unless the run names one. found: its fields of the data section."""
    if loaded.config.data.tokenizer_type is not None or found.get("tokenizer_type") is None:
        return loaded
    taken = {name: value for name, value in found.items() if not is_given(loaded.origins[f"data.{name}"])}
    config = dataclasses.replace(loaded.config, data=dataclasses.replace(loaded.config.data, **taken))
    origins = loaded.origins | {f"data.{name}": CHECKPOINT + where for name in taken}
    return dataclasses.replace(loaded, config=config, origins=origins)


def check_complete(loaded: LoadedConfig, problems: Problems, more: Sequence[Rule] = ()) -> None:
    """Add to the problems each field that a job must give but was left to its default, unless one of those before may
    hide it, and each broken rule.
    """
    missing, length = [], ("training.train_iters", "training.train_samples")
    if problems.hides_fields and not any(is_given(loaded.origins[key]) for key in length):
        problems.unread.update(length)
    for field in all_fields():
        is_optional = field.key == "optimizer.lr" and loaded.config.training.skip_train
        is_known = is_given(loaded.origins[field.key]) or field.key in problems.unread
        if field.option.required and not is_known and not is_optional:
            in_yaml = f"(in a YAML file: {field.name} in the section {field.section})"
            missing += [] if problems.hides_fields else [f"{field.main_flag} is missing: {field.option.help} {in_yaml}"]
            problems.unread.add(field.key)
    problems.add(*missing, *broken_rules(loaded.config, (*RULES, job, *more), problems.unread))


def settings_of_yaml(
    text: str, name: str, accepted: list[str], problems: Problems, is_saved: bool = False
) -> list[Setting]:
    """Return the settings of a YAML file. accepted: receives the flags of Megatron that change no result here.
    is_saved: leave out what only an earlier version had.
    """
    settings = []
    known = {field.name for field in all_fields()}
    for entry in read_entries(text, name, problems):
        flag = "--" + normalised(entry.key)
        if is_saved and not removed_flags().keys().isdisjoint({flag, f"{flag} {entry.raw}"}):
            continue
        meant = entry.key if entry.key in known else nearest_word(entry.key, known)
        before = len(problems.messages)
        with problems.caught(*(field.key for field in all_fields() if field.name == meant)):
            settings += settings_of_entry(entry, accepted)
        # an unknown key may mean any field
        problems.hides_fields |= entry.key not in known and len(problems.messages) > before
    return settings


def settings_of_entry(entry: Entry, accepted: list[str]) -> list[Setting]:
    """Return the settings of one line of a YAML file. Raises ConfigError at an unknown key, with the nearest one."""
    key = f"{entry.section}.{entry.key}" if entry.section else entry.key
    subject = f"{entry.where}: {key}"
    by_name = {field.name: field for field in all_fields()}
    name = "--" + normalised(entry.key)
    if entry.key in by_name:
        field = by_name[entry.key]
        flag = Flag(field.main_flag)
    elif name in field_flags():
        field, flag = field_flags()[name]
    elif (row := row_of(name)) is not None:
        accepted += accepted_entry(entry, row)
        return []
    else:
        names = [field.name for field in all_fields() if entry.section in (None, field.section)]
        every = [*by_name, *(flag[2:].replace("-", "_") for flag in field_flags())]
        meant = nearest(entry.key, names) or nearest(entry.key, every)
        raise ConfigError(f"{entry.where}: unknown key {key}{meant} (--help lists all names)")
    if entry.section is not None and entry.section != field.section:
        raise ConfigError(f"{subject}: {entry.key} belongs to the section {field.section}")
    if flag.value is not TAKES_VALUE:
        is_on = BOOL_WORDS.get(entry.raw.lower()) if isinstance(entry.raw, str) else None
        if is_on is None:
            raise ConfigError(f"{subject} {value_text(entry.raw)}: expected true or false")
        if not is_on and field.kind.scalar is not bool:
            return []  # `bf16: false` changes nothing
        value = flag.value if is_on else not flag.value
        flag = flag if is_on else Flag(flag.name)  # the opposite of a switch sets nothing else
    elif entry.raw is not None:
        raw = flag.read(entry.raw) if flag.read is not None and isinstance(entry.raw, str) else entry.raw
        value = read_value(field, raw, subject, literal=entry.quoted)
    elif field.kind.optional:
        value = None
    else:
        raise ConfigError(f"{subject} is empty; leave the line out for the default, {value_text(field.default)}")
    return settings_of(field, flag, value, f"yaml {entry.where}", subject)


def asks_for_nothing(entry: Entry) -> bool:
    """Return True for a line without a field that is accepted: in a saved configuration, a flag of an earlier version
    with its default.
    """
    row = row_of("--" + normalised(entry.key))
    if row is None or row.kind == SUPPORTED:
        return False
    try:
        accepted_entry(entry, row)
    except ConfigError:
        return False
    return True


def accepted_entry(entry: Entry, row: MegatronFlag) -> list[str]:
    """Return a key that is a flag without a field, with its value; none if it asks for nothing. Raises ConfigError."""
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


def merge(sources: Sequence[Sequence[Setting]], problems: Problems) -> tuple[dict[str, Any], dict[str, str]]:
    """Apply each source over the earlier ones and over the defaults; return values and origins by 'section.name'.

    If a flag is given twice, or in its on and off forms, the last one holds, as in every launch script. Two different
    flags of one source that set a field to different values (--bf16 and --fp16) are a problem.
    """
    values: dict[str, Any] = {field.key: field.default for field in all_fields()}
    origins = dict.fromkeys(values, DEFAULT)
    implied = [setting for settings in sources for setting in settings if setting.implied_by]
    for settings in sources:
        firm: dict[str, Setting] = {}
        # those with only_from come last, since they depend on the value that the others give
        for setting in sorted(settings, key=lambda one: one.only_from is not None):
            key, subject = setting.field.key, setting.subject
            if setting.implied_by or (setting.only_from is not None and values[key] not in setting.only_from):
                continue
            earlier = firm.get(key)
            if earlier is not None and earlier.value != setting.value:
                is_same_flag = earlier.subject in (subject, off_flag(subject)) or off_flag(earlier.subject) == subject
                if not is_same_flag:
                    both = f"{value_text(earlier.value)} and {value_text(setting.value)}"
                    flags = f"{earlier.subject} and {subject}"
                    problems.add(f"{flags} contradict each other: {key} would be {both}; give one of the two")
                    problems.unread.add(key)
            if setting.only_from is None:
                firm[key] = setting
            if setting.field.option.adds_up and setting.value != setting.field.default:  # which `none` gives
                setting = dataclasses.replace(setting, value=(*values[key], *setting.value))
            values[key], origins[key] = setting.value, setting.origin
    for setting in implied:
        key = setting.field.key
        if not is_given(origins[key]) and origins[setting.implied_by] == setting.origin:
            values[key], origins[key] = setting.value, f"{DEFAULT} of {setting.origin}"
    for setting in (setting for settings in sources for setting in settings if setting.needs is not None):
        assert setting.needs is not None
        if not values[setting.needs.key]:
            problems.add(
                f"{setting.subject} needs {setting.needs.flag}, as in Megatron; add it, or give "
                f"{setting.field.main_flag} and the options with it"
            )
    return values, origins
