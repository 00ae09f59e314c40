#!/usr/bin/env python3
"""Write docs/composition.md and its picture from the table of refused pairs: `python tools/write_composition_page.py`.

Every pair of features is resolved on its grid, which takes about 15 s. A test compares the page with what this writes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from megapipe.config.rules.pairs import CONTRADICTION, NOT_BUILT, REFUSED, Refusal  # noqa: E402
from megapipe.errors import ConfigError  # noqa: E402
from megapipe.extras.report.drawing import element, entry, legend, paper, rect, squares, text, titled  # noqa: E402
from megapipe.plan.world_rules import REFUSED_BY_SCHEDULES  # noqa: E402
from tests.combinations import planned  # noqa: E402
from tests.features import FEATURES, RECIPES, Recipe  # noqa: E402
from tests.ledger import NUM_SETS, SIZES, Combination, options_of, pairs  # noqa: E402
from tools.write_flags_page import markdown_table  # noqa: E402

PAGE, PICTURE = REPOSITORY / "docs" / "composition.md", REPOSITORY / "docs" / "images" / "composition.svg"
ROWS = (*REFUSED, *REFUSED_BY_SCHEDULES)
NAMES = tuple(feature.name for feature in FEATURES)
COLORS = {"accepted": "#cfe8cf", NOT_BUILT: "#f4c27a", CONTRADICTION: "#e79a92"}
CELL, LABEL = 18, 130  # pixels

HEAD = """# Which features work together

Of {pairs} pairs of {count} features {accepted} are accepted and {refused} are refused, each with a reason that the
error repeats. Pairs that give one option two values, such as two schedules, are left out. `tests/features.py` has the
flags of each feature.

![All pairs of features: accepted, or refused with the number of the reason](images/composition.svg)

Every pair, the features of the [published runs](recipes.md#published-runs) and {sets} drawn sets of four to seven
features are tests. An accepted set takes the planned memory and trains as one process does. Features that need a GPU or
a library are planned and counted, not compared.

{verdict}

`python tools/write_composition_page.py` writes this page.

"""
REASONS_HEAD = """## Reasons

"Not built" means that each works alone but not together yet. "Contradiction" means that together they would mean
nothing or compute another function.

"""


@dataclass(frozen=True)
class Matrix:
    """Refused pairs with their rows, the number of pairs in all, and each recipe with the rows that refuse it."""

    refused: dict[tuple[str, str], tuple[Refusal, ...]]
    num_pairs: int
    recipes: dict[Recipe, tuple[Refusal, ...]]

    @property
    def rows(self) -> tuple[Refusal, ...]:
        """The rows that pairs fall under, in the order of the table: reasons 1, 2, ..."""
        return tuple(row for row in ROWS if any(row in found for found in self.refused.values()))


def matrix() -> Matrix:
    """Resolve every pair, and every recipe, on its grid."""
    rows = {pair: refused_rows(pair) for pair in pairs()}
    recipes = {recipe: refused_rows((*recipe.features, recipe.name)) for recipe in RECIPES}
    return Matrix({pair: found for pair, found in rows.items() if found}, len(rows), recipes)


def refused_rows(features: tuple[str, ...]) -> tuple[Refusal, ...]:
    """Return the rows of the tables that refuse these features; () if they are accepted."""
    combination = Combination(features)
    try:
        planned(combination, [*combination.arguments(SIZES), "--device", "cuda"])
    except ConfigError as error:
        return tuple(rows_of(str(error)))
    return ()


def rows_of(message: str) -> Iterator[Refusal]:
    """Yield the row of each line of an error. Raises ValueError for a refusal outside the table."""
    for line in message.splitlines():
        rows = [row for row in ROWS if f": {row.reason}; {row.way}" in line]
        if len(rows) != 1:
            raise ValueError(f"not one row of the table refuses this: {line}")
        yield from rows


def page(found: Matrix) -> str:
    """Return docs/composition.md."""
    count, refused = found.num_pairs, len(found.refused)
    numbers = {"pairs": count, "count": len(FEATURES), "accepted": count - refused, "refused": refused}
    head = HEAD.format(**numbers, sets=NUM_SETS, verdict=verdict_text(found.recipes))
    cells = [
        (str(number), f"{row.option} with {', '.join(row.others)}", row.kind, row.reason)
        for number, row in enumerate(found.rows, 1)
    ]
    reasons = markdown_table(("reason", "options", "kind", "why"), cells)
    return f"{head}{REASONS_HEAD}{reasons}"


def verdict_text(recipes: dict[Recipe, tuple[Refusal, ...]]) -> str:
    """Return whether all published runs are accepted, and what the others lack."""
    refused = [f"{recipe.name} ({'; '.join(row.reason for row in rows)})" for recipe, rows in recipes.items() if rows]
    words = [f"Refused: {', '.join(refused)}." if refused else "All published runs are accepted."]
    words += [f"Not built for {each.name} ({each.run}): {each.lacks}." for each in recipes if each.lacks]
    return " ".join(words)


def picture(found: Matrix) -> str:
    """Return the triangle of pairs, with the number of the reason in each cell that is refused."""
    numbers = {row: number for number, row in enumerate(found.rows, 1)}
    parts = []
    for down, name in enumerate(NAMES):
        y = down * CELL
        parts.append(text(LABEL - 6, y + 13, name, text_anchor="end"))
        for across, other in enumerate(NAMES[:down]):
            rows = found.refused.get((other, name), ())
            parts.append(_cell(LABEL + across * CELL, y, name, other, rows, numbers))
        parts.append(text(LABEL + y + 4, y + 13, name, fill="#777"))
    kinds = Counter(rows[0].kind for rows in found.refused.values())
    kinds["accepted"] = found.num_pairs - len(found.refused)
    entries = (entry(f"{kind}: {kinds[kind]} pairs", *squares(color)) for kind, color in COLORS.items())
    width, bottom = 2 * LABEL + CELL * len(NAMES), CELL * len(NAMES) + 34
    return paper(width, bottom + 14, [*filter(None, parts), *legend(entries, LABEL, width, bottom)[0]])


def _cell(x: int, y: int, name: str, other: str, rows: tuple[Refusal, ...], numbers: dict[Refusal, int]) -> str:
    """Return one cell: nothing for two values of one option."""
    try:
        options_of((other, name))
    except ValueError:
        return ""
    words = "; ".join(row.reason for row in rows) or "accepted"
    box = rect(x, y, CELL - 1, CELL - 1, fill=COLORS[rows[0].kind if rows else "accepted"])
    number = text(x + 8, y + 12, str(numbers[rows[0]]), text_anchor="middle", font_size=9) if rows else ""
    return element("g", titled(f"{name} with {other}: {words}") + box + number)


if __name__ == "__main__":
    result = matrix()
    PAGE.write_text(page(result), encoding="utf-8")
    PICTURE.write_text(picture(result), encoding="utf-8")
