"""A field's value as text, both ways, with errors that name what was expected.

Text is read by the type of the field that it is for, never by what it looks like. So the traps of YAML's own types don't exist here:
`1e-3` is a number for a number and a string for a string, `on` is no boolean unless the field is one, `12:30:45` is never 45045.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from megapipe.config.fields import ConfigField
from megapipe.config.option import Option
from megapipe.errors import ConfigError
from megapipe.formatting import one_of

NONE_WORDS = ("none", "null", "~")
TRUE_WORDS = ("true", "yes", "on")
FALSE_WORDS = ("false", "no", "off")
EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
PLAIN_TEXT = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")


def read_value(field: ConfigField, raw: str | Sequence[str], subject: str, *, literal: bool = False) -> Any:
    """The value that a text, or a list of texts, is for this field.

    subject: what is being set, for errors (`--lr`, `tiny.yaml line 3: optimizer.lr`).
    literal: the text was quoted, so that "none" is a word and not the absence of a value.
    Raises ConfigError with subject, text and what was expected.
    """
    kind, option = field.kind, field.option
    if isinstance(raw, str):
        if kind.optional and not literal and raw.lower() in NONE_WORDS:
            return None
        if not kind.many:
            return read_scalar(kind.scalar, option, raw, subject)
        # a path may hold blanks, a number may not
        items: Sequence[str] = [raw] if kind.scalar is str and not option.choices else re.split(r"[\s,]+", raw.strip())
    else:
        items = raw
    if not kind.many:
        raise ConfigError(f"{subject} {' '.join(items)}: expected one value, {describe(field)}, got {len(items)}")
    if kind.optional and len(items) == 1 and not literal and items[0].lower() in NONE_WORDS:
        return None
    if kind.length is not None and len(items) != kind.length:
        raise ConfigError(
            f"{subject} {' '.join(items)}: expected {kind.length} values, got {len(items)} ({option.help})"
        )
    return tuple(read_scalar(kind.scalar, option, item, subject) for item in items)


def read_scalar(scalar: type, option: Option, raw: str, subject: str) -> Any:
    """One text as an int, float, bool or str within the option's choices and range."""
    text = option.read(raw) if option.read is not None else raw
    value: Any
    if scalar is str:
        value = text
    elif scalar is bool:
        value = True if text.lower() in TRUE_WORDS else False if text.lower() in FALSE_WORDS else None
    else:
        value = read_number(scalar, text)
    if value is None:
        raise ConfigError(
            f"{subject} {raw}: expected {', '.join(filter(None, (EXPECTED[scalar], expected_range(option))))}"
        )
    trouble = out_of_bounds(option, value)
    if trouble:
        raise ConfigError(f"{subject} {raw}: {trouble}")
    return value


def read_number(scalar: type, text: str) -> int | float | None:
    """A finite decimal number, None if the text is none. A whole number may be written as 1e6 or 1000.0."""
    try:
        number = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        return None
    if "_" in text or not math.isfinite(number):
        return None
    if scalar is float:
        return float(number)
    return int(number) if number == int(number) else None


def expected_range(option: Option) -> str:
    """The option's range in words: 'at least 1 and below 2', or nothing."""
    limits = (
        ("at least", option.at_least),
        ("above", option.above),
        ("at most", option.at_most),
        ("below", option.below),
    )
    return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def out_of_bounds(option: Option, value: Any) -> str:
    """What is wrong with one value of the right type; empty if nothing."""
    if option.choices and value not in option.choices:
        return f"choose {one_of(option.choices)}{nearest(str(value), option.choices)}"
    if value == "" and isinstance(value, str):
        return "the value is empty"  # an unset variable in a launch script
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    good = (
        (option.at_least is None or value >= option.at_least)
        and (option.above is None or value > option.above)
        and (option.at_most is None or value <= option.at_most)
        and (option.below is None or value < option.below)
    )
    return "" if good else f"expected a value {expected_range(option)}"


def nearest(word: str, words: Sequence[str]) -> str:
    """'; did you mean x?' with the most similar of some words, or nothing if none is similar."""
    import difflib  # only needed for an error

    lower = {candidate.lower(): candidate for candidate in words}
    match = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f"; did you mean {lower[match[0]]}?" if match else ""


def describe(field: ConfigField) -> str:
    """The type of a field in words."""
    words = EXPECTED[field.kind.scalar]
    if field.kind.many:
        words = f"a list, each {words}" if field.kind.length is None else f"{field.kind.length} values, each {words}"
    return words


def value_text(value: Any) -> str:
    """A value as YAML, on one line: what `read_value` reads back, and any other YAML reader too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent_mark, exponent = text.partition("e")
        # YAML 1.1 takes 1e-05 for a string
        return f"{mantissa}.0e{exponent}" if exponent_mark and "." not in mantissa else text
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return plain_or_quoted(str(value))


def plain_or_quoted(text: str) -> str:
    """A string as a YAML scalar: plain where nothing can be misread, else in double quotes with escapes."""
    reserved = (*NONE_WORDS, *TRUE_WORDS, *FALSE_WORDS, "y", "n", ".", "..", ".nan", ".inf")
    if PLAIN_TEXT.fullmatch(text) and text.lower() not in reserved and not text.startswith("..."):
        return text
    return '"' + "".join(escaped(character) for character in text) + '"'


def escaped(character: str) -> str:
    """One character inside YAML double quotes."""
    if character in '"\\':
        return "\\" + character
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
