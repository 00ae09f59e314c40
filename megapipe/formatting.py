"""Text for people: sizes, times, counts, words, quotes and tables, the same in every message and report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

MOST_SHOWN = 120  # characters of a value in a message


def bytes_text(size: float) -> str:
    """Return a size with three digits and a binary unit, such as '1.50 GiB', '512 MiB' or '17 B'."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    exponent = 0
    while round(size) >= 1000 and exponent < len(units) - 1:
        size, exponent = size / 1024, exponent + 1
    if exponent == 0:
        return f"{size:.0f} B"
    digits = 0 if round(size, 1) >= 100 else 1 if round(size, 2) >= 10 else 2
    return f"{size:.{digits}f} {units[exponent]}"


def flops_text(flops: float) -> str:
    """Return a number of floating-point operations with three digits and a unit, such as '2.1 TFLOP'."""
    exponent = min(max(int(math.log10(max(flops, 1.0)) // 3), 3), 6)
    return f"{flops / 1000.0**exponent:.3g} {'GTPE'[exponent - 3]}FLOP"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with at least three digits, such as '12.3 ms' or '1,234 ms'."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} ms"


def seconds_text(seconds: float) -> str:
    """Return a short time in the unit that fits: '350 us', '12.3 ms' or '2.34 s'."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def duration_text(seconds: float) -> str:
    """Return a long time in its two largest units: '0.3 s', '90 s', '5 min 3 s', '2 h 10 min' or '3 d 4 h'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60} s"
    return f"{hours} h {minutes % 60} min" if days == 0 else f"{days} d {hours % 24} h"


def clock_text(seconds: float) -> str:
    """Return a time as '1:02:03', or '2:03' below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count_text(number: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural: '1 rank', '2,048 ranks', '3 microbatches'."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def grid_text(tp: int, pp: int, dp: int | None = None, cp: int | str = 1, chunks: int = 1) -> str:
    """Return a grid as 'tp 2 x cp 2 x pp 4 x 2 chunks x dp 8'; a cp of 1, one chunk and a dp of None are left out."""
    sizes = [f"tp {tp}", f"cp {cp}" if cp != 1 else "", f"pp {pp}", f"{chunks} chunks" if chunks > 1 else ""]
    return " x ".join(filter(None, [*sizes, "" if dp is None else f"dp {dp}"]))


def range_text(numbers: Sequence[int]) -> str:
    """Return consecutive numbers as '3' or '3 to 7'."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as '0, 2 to 5'."""
    runs = groupby(enumerate(numbers), lambda at: at[1] - at[0])  # the difference is the same in a run
    return ", ".join(range_text([number for _, number in run]) for _, run in runs)


def one_of(words: Sequence[Any]) -> str:
    """Return 'a', 'a or b', or 'a, b or c'."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = (), indent: int = 2) -> Iterator[str]:
    """Yield the lines of a table for a terminal, first the header. left: columns aligned to the left, -1: the last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left_columns = {index % len(widths) for index in left}
    for row in rows:
        cells = [
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (" " * indent + "  ".join(cells)).rstrip()


def shortened(text: str) -> str:
    """Return a text for a message: on one line, and of a long one only the start."""
    line = text if text.isprintable() else escaped_text(text)
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}... ({len(line)} characters)"


def escaped_text(text: str) -> str:
    """Return a text as it is written inside YAML double quotes."""
    found = []
    for character in text:
        code = ord(character)
        if character in '"\\':
            found.append("\\" + character)
        elif 0x20 <= code < 0x7F:
            found.append(character)
        elif code < 0x100:
            found.append(f"\\x{code:02x}")
        else:
            found.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return "".join(found)
