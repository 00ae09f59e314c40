"""YAML of launchers around Megatron-LM -> the arguments of pretrain_gpt.py.

MODEL_ARGS    flags as keys: Megatron-MoE-ModelZoo and NVIDIA's functional tests
modules       Primus: names of Megatron's arguments, in files that extend others, below primus/configs
_target_      Megatron-Bridge's resolved run_config.yaml: names of Megatron's settings in sections

A name stands for the flag of the same name unless yaml_names.csv has another one for it; without a flag there the name
is left out. A value that is Megatron's default, null or false asks for nothing, nor does one that Megatron does not
read, such as the scale of a precision that is not chosen: these files set every argument.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megapipe.config.fields import BOOL_WORDS
from megapipe.config.files import HUGGING_FACE_TOKENIZER
from megapipe.config.flags import field_flags, normalised, read_command_line
from megapipe.config.load import make_config, merge
from megapipe.config.megatron_flags import megatron_flags
from megapipe.config.options import NONE_WORDS, number_in
from megapipe.config.problems import Problems
from megapipe.config.rules.check import unmet_needs
from megapipe.errors import ConfigError
from megapipe.extras.migrate.shell_script import Call, Reading, placeholder
from megapipe.formatting import shortened
from megapipe.input_files import read_table

VARIABLE = re.compile(r"\$\{(\w+)(?::-?([^{}]*))?\}|\$(\w+)")
CONFIGS = Path("primus", "configs")
LISTED = re.compile(r"\[([^\]]+)\]")
TOKENS = {"bf16_mixed": ["--bf16"], "16-mixed": ["--fp16"], "bf16-mixed": ["--bf16"]}  # recipes of mixed precision
# names of Primus that its build_tokenizer reads as HuggingFaceTokenizer (primus/backends/megatron/training/tokenizer)
OF_HUGGING_FACE = re.compile("(DeepSeekV[234]|Llama[234]|Mixtral|Lfm2|KimiK2)Tokenizer")
ACTING_WITH = {"data_parallel_sharding_strategy": "use_megatron_fsdp"}  # name -> the switch that it needs
Tree = dict[str, Any]


def read_yaml(text: str, path: Path, given: Mapping[str, str]) -> Reading:
    """Return the one call that a YAML text stands for. given: variables of its environment. Raises ConfigError."""
    tree = _loaded(text, path, given)
    for key, read in FORMS.items():
        if key in tree:
            notes: list[str] = []
            words = tuple(read(tree, path, given, notes))
            return Reading([Call(0, ("python",), "pretrain_gpt.py", words, frozenset())], notes=notes)
    expected = "MODEL_ARGS (Megatron-MoE-ModelZoo), modules (Primus) or _target_ (Megatron-Bridge)"
    way = "check files of megapipe with pretrain_gpt.py --config FILE --plan"
    raise ConfigError(f"{path}: a YAML file of a launcher has {expected} at its top; {way}")


def _loaded(text: str, path: Path, given: Mapping[str, str]) -> Tree:
    """Return the mapping of a YAML text, all values as written, with known variables in place."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return given.get(name, match[0] if match[2] is None else match[2])

    try:
        tree = yaml.BaseLoader(VARIABLE.sub(value, text)).get_single_data()  # all values as texts
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping")
    return tree


def _words(flag: str, value: Any) -> list[str]:
    """Return a flag with a value as words; what stays open in it is a placeholder."""
    row = megatron_flags().get(flag)
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]  # for the shell that the launcher puts it into
    items = value if isinstance(value, list) else [value]
    if isinstance(value, str) and (match := LISTED.fullmatch(value)):
        items = match[1].replace(",", " ").split()
    elif isinstance(value, str) and row is not None and row.values == "+":
        items = value.split()
    return [flag, *(VARIABLE.sub(lambda found: placeholder(found[0]), str(item)) for item in items)]


def _of_flags(tree: Tree, path: Path, given: Mapping[str, str], notes: list[str]) -> Iterator[str]:
    for flag, value in tree["MODEL_ARGS"].items():
        if BOOL_WORDS.get(str(value).lower()) is not False:
            yield from [flag] if str(value).lower() == "true" else _words(flag, value)


def _of_primus(tree: Tree, path: Path, given: Mapping[str, str], notes: list[str]) -> Iterator[str]:
    modules = [module for module in tree["modules"].values() if module.get("framework") == "megatron"]
    if not modules:
        raise ConfigError(f"{path}: no module has `framework: megatron`")
    root = next((folder / CONFIGS for folder in path.resolve().parents if (folder / CONFIGS).is_dir()), None)
    if root is None:
        notes.append(f"no {CONFIGS} above the file: the model {modules[0].get('model')} is not read")
    settings: Tree = {}
    for kind, key in (("modules", "config"), ("models", "model")):
        if root is not None and key in modules[0]:
            settings |= _extended(root / kind / "megatron" / modules[0][key], given)
    own = modules[0].get("overrides") or {}
    if OF_HUGGING_FACE.fullmatch((settings | own).get("tokenizer_type", "")):
        own = own | {"tokenizer_type": HUGGING_FACE_TOKENIZER}
    known = {name: value for name, value in settings.items() if _flag_of("primus", "", name) is not None}
    yield from _read_ones([*_of_names("primus", "", known | own, notes)])


def _extended(path: Path, given: Mapping[str, str]) -> Tree:
    """Return the settings of a file over those of the files that it extends."""
    try:
        tree = _loaded(path.read_text(encoding="utf-8"), path, given)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    found: Tree = {}
    for name in tree.pop("extends", None) or tree.pop("bases", None) or []:
        found |= _extended(path.parent / name, given)
    return found | tree


def _of_bridge(tree: Tree, path: Path, given: Mapping[str, str], notes: list[str]) -> Iterator[str]:
    recipe = tree.get("mixed_precision")
    yield from TOKENS.get(recipe, []) if isinstance(recipe, str) else []
    model = tree.get("model", {})
    if "silu" not in str(model.get("activation_func")):
        model = model | {"gated_linear_unit": "false"}
    if model.get("num_query_groups", "null") != "null":
        yield "--group-query-attention"
    words: list[str] = []
    for section, settings in {**tree, "model": model}.items():
        if isinstance(settings, dict):
            words += _of_names("bridge", section, settings, notes)
    yield from _read_ones(words)


SWITCHES = {name for name, row in megatron_flags().items() if row.values == ""}
FORMS: dict[str, Callable[[Tree, Path, Mapping[str, str], list[str]], Iterator[str]]] = {
    "MODEL_ARGS": _of_flags,
    "modules": _of_primus,
    "_target_": _of_bridge,
}


@cache
def _names() -> list[list[str]]:
    return read_table(Path(__file__).with_name("yaml_names.csv"))


def _flag_of(kind: str, section: str, name: str) -> tuple[str, str] | None:
    """Return the flag that a name stands for ("": none) and the value with which it is given; None if unknown."""
    for of_kind, pattern, flag, value in _names():
        if of_kind in (kind, "megatron") and fnmatch.fnmatchcase(name, pattern.removeprefix(f"{section}.")):
            return flag, value
    flags = [f"{prefix}{normalised(name)}" for prefix in ("--", "--no-", "--disable-")]
    known = [flag for flag in flags if flag in megatron_flags() or flag in field_flags()]
    return (known[0], "") if known else None


def _of_names(kind: str, section: str, settings: Tree, notes: list[str]) -> Iterator[str]:
    """Yield the words of settings by name."""
    for name, value in settings.items():
        found, text = _flag_of(kind, section, name), str(value).lower()
        is_on = BOOL_WORDS.get(text)
        if found is not None and text in ("0", "1") and f"--{normalised(name)}" in SWITCHES:
            is_on = text == "1"
        is_idle = name in ACTING_WITH and BOOL_WORDS.get(str(settings.get(ACTING_WITH[name])).lower()) is not True
        is_unset = text in (*NONE_WORDS, "", "[]") or (found is None and (is_on is False or isinstance(value, dict)))
        if is_idle or is_unset:
            continue
        if found is None and kind == "bridge":
            notes.append(f"{section}.{name}: {shortened(value)} has no flag in Megatron-LM")
        elif found is None:
            yield from _words(f"--{normalised(name)}", value)
        elif not found[0]:
            notes += [f"{name}: {value} is left out: it is no setting of Megatron-LM's"] * (not name.startswith("_"))
        elif found[1]:
            yield from [found[0]] if text == found[1] else []
        elif is_on is not None:
            yield from _switch(found[0], name, is_on)
        elif not _is_default(found[0], text):
            yield from _words(found[0], value)


def _read_ones(words: list[str]) -> Iterator[str]:
    """Yield the words without flags that have no effect because another option is not given."""
    line = read_command_line(words, Problems())
    values, _ = merge([line.settings], Problems())
    unread = {flag.partition(" ")[0] for _, flags in unmet_needs(make_config(values)) for flag in flags}
    spelled = {one.subject for one in line.settings if one.needs is not None and not values[one.needs.key]}
    is_kept = True
    for word in words:
        if word.startswith("--"):
            field, _ = field_flags().get(word, (None, None))
            is_kept = word not in spelled and (field is None or field.main_flag not in unread)
        if is_kept:
            yield word


def _switch(flag: str, name: str, is_on: bool) -> Iterator[str]:
    """Yield the flag that sets a switch, nothing where that is Megatron's default."""
    opposites = [f"--{prefix}-{normalised(name)}" for prefix in ("no", "disable")]
    off = next((each for each in opposites if each in megatron_flags()), None)
    if is_on and flag != off:
        yield flag
    elif not is_on and off is not None:
        yield off


def _is_default(flag: str, text: str) -> bool:
    """Return True if a value is Megatron's default of a flag."""
    row = megatron_flags().get(flag)
    default = "" if row is None else row.default
    number = number_in(text)
    return bool(default) and (text == default.lower() or (number is not None and number == number_in(default)))
