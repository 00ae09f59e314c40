"""Compare predicted steps with published ones, by source, and choices among published layouts with the best measured.

python -m tools.accuracy [--rows] [--write] [SOURCE ...]

Reads all files of tests/extras/search/published_data/. Prints a table of errors with a line a source, of dense models
and of mixtures, what is outside or refused, and a line for each sweep: layouts of one model and batch that a source
measured on the same GPUs. --rows: also published and predicted seconds of each row. --write: write the tables into
docs/accuracy.md. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megapipe.formatting import text_table
from tests.extras.search.published import IN_BF16, Row, published_rows, sweeps

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
NEAR = 1.05  # of the best measured step: as good as the best
DENSE, MIXTURES, IN_16_BITS = "dense", "mixtures", "fp8 mixtures in bf16"


def kind(row: Row) -> str:
    if row.is_mixture:
        return IN_16_BITS if IN_BF16 in row.approximated else MIXTURES
    return DENSE


def predicted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the planner can predict."""
    return [row for row in rows if row.why_outside is None and row.why_refused is None]


def rms(rows: Sequence[Row]) -> float:
    """Root mean square of log(predicted / published)."""
    return math.sqrt(sum(math.log(row.ratio) ** 2 for row in rows) / len(rows))


def bias(rows: Sequence[Row]) -> float:
    """Geometric mean of predicted / published, less 1."""
    return math.exp(sum(math.log(row.ratio) for row in rows) / len(rows)) - 1


def error_line(source: str, of: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a line of the table of errors."""
    worst = max(rows, key=lambda row: abs(math.log(row.ratio))).ratio - 1
    gpus = sorted({row.settings["gpu"] for row in rows})
    cells = (source, of, ", ".join(gpus), str(len(rows)), f"{bias(rows):+.1%}", f"{rms(rows):.1%}", f"{worst:+.0%}")
    return cells if of != IN_16_BITS else (*cells[:4], f"({cells[4]})", "-", "-")


def error_lines(sources: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the table of errors: a line for each source and kind of model, and the mean of the sources."""
    lines, squares = [], {DENSE: list[float](), MIXTURES: list[float]()}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in predicted([row for row in published_rows() if not sources or row.source.name in sources]):
        groups.setdefault((kind(row), row.source.name), []).append(row)
    for of in (DENSE, MIXTURES, IN_16_BITS):
        for (_, source), rows in sorted(item for item in groups.items() if item[0][0] == of):
            lines.append(error_line(source, of, rows))
            if of in squares:
                squares[of].append(rms(rows) ** 2)
    for of, values in squares.items():
        if values:
            mean = math.sqrt(sum(values) / len(values))
            count = str(sum(len(rows) for key, rows in groups.items() if key[0] == of))
            lines.append((f"all {len(values)} sources, equal weight", of, "", count, "", f"{mean:.1%}", ""))
    return lines


def outside_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return how many rows of each source are not predicted, by reason."""
    counts = Counter((row.source.name, why) for row in rows if (why := row.why_outside or row.why_refused))
    return [(source, str(count), why) for (source, why), count in sorted(counts.items())]


def source_lines() -> list[tuple[str, ...]]:
    """Return where each source's figures are from, and how many rows it has and how many of them are predicted."""
    by_source: dict[str, list[Row]] = {}
    for row in published_rows():
        by_source.setdefault(row.source.name, []).append(row)
    lines = []
    for name, rows in sorted(by_source.items()):
        head, known = rows[0].source, sum(row.why_outside is None for row in rows)
        commit = f", commit {head.commit[:7]}" if head.commit else ""
        lines.append((name, f"{head.where}{commit}", head.stack, f"{known} of {len(rows)}", str(len(head.guessed))))
    total = sum(int(line[3].split()[0]) for line in lines)
    return [*lines, (f"all {len(lines)}", "", "", f"{total} of {len(published_rows())}", "")]


def sweep_line(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a line of the table of sweeps."""
    known = predicted(rows)
    best, chosen = min(known, key=lambda row: row.seconds), min(known, key=lambda row: row.predicted_seconds())
    lost, seen = chosen.seconds / best.seconds, best.predicted_seconds() / chosen.predicted_seconds()
    pairs = [(a, b) for i, a in enumerate(known) for b in known[:i] if abs(math.log(a.seconds / b.seconds)) > 0.02]
    agree = sum((a.seconds < b.seconds) == (a.predicted_seconds() < b.predicted_seconds()) for a, b in pairs)
    answer = "yes" if lost <= NEAR else "no"
    share = f"{agree / len(pairs):.0%}" if pairs else "-"
    return (name, str(len(known)), f"{lost - 1:+.1%}", answer, f"{seen:.3f}", share)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


SOURCES = ("source", "where", "stack", "predicted rows", "guesses")
ERRORS = ("source", "models", "GPUs", "rows", "bias", "rms", "worst")
OUTSIDE = ("source", "rows", "why not")
SWEEPS = (
    "sweep",
    "layouts",
    "choice over best, measured",
    "within 5 %",
    "best over choice, predicted",
    "pairs in order",
)


def tables() -> dict[str, str]:
    """Return the tables of docs/accuracy.md, by the name of their marker."""
    lines = [sweep_line(name, rows) for name, rows in sweeps().items()]
    near = sum(line[3] == "yes" for line in lines)
    return {
        "sources": markdown(SOURCES, source_lines()),
        "errors": markdown(ERRORS, error_lines()),
        "outside": markdown(OUTSIDE, outside_lines(published_rows())),
        "sweeps": markdown(SWEEPS, [*lines, (f"all {len(lines)}", "", "", f"{near} of {len(lines)}", "", "")]),
    }


def write(page: Path = PAGE) -> None:
    """Replace the tables between the markers of the page."""
    text = page.read_text()
    made = tables()

    def replaced(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{made[found[1]]}\n<!-- end -->"

    page.write_text(re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/accuracy.md")
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="only these")
    given = parser.parse_args(arguments)
    if given.write:
        write()
        return
    rows = [row for row in published_rows() if not given.sources or row.source.name in given.sources]
    if given.rows:
        for row in predicted(rows):
            print(
                f"{row.source.name:13} {row.seconds:9.3f} {row.predicted_seconds():9.3f} {row.ratio:5.2f}  {row.name}"
            )
    print("\n".join(text_table([ERRORS, *error_lines(given.sources)], left=(0, 1, 2))))
    print("\n".join(["", *text_table([OUTSIDE, *outside_lines(rows)], left=(0, 2))]))
    lines = [sweep_line(name, of) for name, of in sweeps().items() if of[0] in rows]
    print("\n".join(["", *text_table([SWEEPS, *lines], left=(0,))]))


if __name__ == "__main__":
    main(sys.argv[1:])
