"""The values of configuration fields as text: reading one by the type of its field, its range, errors, and writing it.

A text is read by the type of its field, never by what it looks like, so that YAML's own guesses play no part: `1e-3` is
a number for a number and a string for a string, `on` is a boolean only for a boolean.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megapipe.config.megatron_flags import check_not_removed
from megapipe.config.options import EXPECTED, LIMITS, NONE_WORDS, ConfigField, Option
from megapipe.errors import ConfigError
from megapipe.formatting import MOST_SHOWN, escaped_text, one_of, shortened
from megapipe.registry import EXTENSIONS, Registry

BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MOST_INT = 2**63 - 1  # torch's largest size
PLAIN_TEXT = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
RESERVED = (*NONE_WORDS, *BOOL_WORDS, "y", "n", ".", "..", ".nan", ".inf")  # in YAML 1.1


def shown(field: ConfigField, value: Any) -> str:
    """Return the flag that sets a field to a value, for messages: '--save DIR', '--no-async-save'."""
    if field.kind.scalar is bool:
        return field.flags[0 if value else 1].name
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value_text(value)
    return f"{field.main_flag} {words}"


def read_value(field: ConfigField, raw: str | Sequence[str], subject: str, *, literal: bool = False) -> Any:
    """Read the value of this field from a text or a list of texts. Raises ConfigError.

    subject: the name of the field in errors (`--lr`, `tiny.yaml line 3: optimizer.lr`).
    literal: the text was quoted or in a list, so that "none" is a string.
    """
    kind, option = field.kind, field.option
    if option.reads_lists and not isinstance(raw, str):
        raw = f"[{', '.join(raw)}]"
    words = [raw] if isinstance(raw, str) else list(raw)
    given = f"{subject} {shortened(' '.join(words))}"
    if not kind.many and not isinstance(raw, str):
        raise ConfigError(f"{given}: expected one value, {EXPECTED[kind.scalar]}, got {len(words)}")
    if option.read is not None and isinstance(raw, str):
        words = [option.read(raw)]
    if kind.many and isinstance(raw, str) and (kind.scalar is not str or option.choices):
        words = re.split(r"[\s,]+", raw.strip())  # other strings are paths, which can contain blanks
    is_literal = literal and words == ([raw] if isinstance(raw, str) else list(raw))  # not rewritten
    can_be_unset = kind.optional or (kind.many and NONE_WORDS[0] not in option.choices)
    if can_be_unset and not is_literal and len(words) == 1 and words[0].lower() in NONE_WORDS:
        return None if kind.optional else field.default
    if not kind.many:
        check_not_removed(field.main_flag, words[0])
        return read_scalar(kind.scalar, option, words[0], subject)
    if kind.length is not None and len(words) != kind.length:
        raise ConfigError(f"{given}: expected {kind.length} values, got {len(words)} ({option.help})")
    return tuple(read_scalar(kind.scalar, option, word, subject) for word in words)


def read_scalar(scalar: type, option: Option, raw: str, subject: str) -> Any:
    """Read one text as an int, float, bool or str within the option's choices and range.

    A number is decimal and finite; an int may be written as 1e6, 1000.0 or, as in Python, 1_000.
    """
    value: Any = None
    if scalar is str:
        value = raw
    elif scalar is bool:
        value = BOOL_WORDS.get(raw.lower())
    elif raw.isascii():
        try:
            number = int(raw) if re.fullmatch(r"[+-]?\d+(_\d+)*", raw) else float(raw)
            if math.isfinite(number) and (scalar is float or number == int(number)):
                value = scalar(number)
        except (ValueError, OverflowError):  # not a number, or an integer of more than 308 digits
            pass
    if value is None:
        expected = ", ".join(filter(None, (EXPECTED[scalar], expected_range(option))))
        raise ConfigError(f"{subject} {shortened(raw)}: expected {expected}")
    trouble = out_of_bounds(option, value)
    if not trouble and scalar is int and abs(value) > MOST_INT:
        trouble = "expected a number below 2^63"
    if trouble:
        raise ConfigError(f"{subject} {shortened(raw)}: {trouble}")
    return value


def expected_range(option: Option) -> str:
    """Return the option's range in words, such as 'at least 1 and below 2', or nothing."""
    return " and ".join(f"{words} {bound:g}" for words, bound in option.limits.items())


def out_of_bounds(option: Option, value: Any) -> str:
    """Return the error in one value of the right type; empty if the value is valid."""
    if (option.choices or isinstance(option.choices, Registry)) and value not in option.choices:
        return unknown_name(value, option.choices)
    if value == "" and isinstance(value, str):
        return "the value is empty"  # such as an unset variable in a launch script
    if value == "--":
        return "the value is missing"
    if isinstance(value, str) and "\0" in value:
        return "the value contains a NUL character"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    is_good = all(LIMITS[words](value, bound) for words, bound in option.limits.items())
    return "" if is_good else f"expected a value {expected_range(option)}"


def unknown_name(value: Any, choices: Collection[str]) -> str:
    """Return the error of a name that is not among some choices."""
    if not isinstance(choices, Registry):
        return f"choose {one_of(tuple(choices))}{nearest(str(value), choices)}"
    ways = [*choices, "one that an extension registers (--extension FILE.py)"]
    return f"choose {one_of(ways)}{nearest(str(value), choices)}{EXTENSIONS.hint}"


def nearest(word: str, words: Iterable[str]) -> str:
    """Return '; did you mean x?' with the most similar of some words, or nothing if no word is similar."""
    meant = nearest_word(word, words)
    return f"; did you mean {meant}?" if meant else ""


def nearest_word(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of some words, empty if no word is similar."""
    lower = {candidate.lower(): candidate for candidate in words}
    match = difflib.get_close_matches(word.lower()[:MOST_SHOWN], list(lower), n=1, cutoff=cutoff)
    return lower[match[0]] if match else ""


def value_text(value: Any) -> str:
    """Return a value as YAML on one line that any YAML reader reads back; a string is plain if it cannot be misread."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        mantissa, exponent_mark, exponent = repr(value).partition("e")
        # YAML 1.1 takes 1e-05 for a string
        return f"{mantissa}.0e{exponent}" if exponent_mark and "." not in mantissa else repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    text = str(value)
    is_plain = PLAIN_TEXT.fullmatch(text) and text.lower() not in RESERVED and not text.startswith("...")
    if is_plain or isinstance(value, int):
        return text
    return '"' + escaped_text(text) + '"'
