"""Compare predicted steps with published ones, by source, and choices among published layouts with the best measured.

python -m tools.accuracy [--rows] [--write] [SOURCE ...]

Reads all files of tests/extras/search/published_data/. Prints where each source is from, a table of errors with a line
a source, of dense models and of mixtures, what is outside or refused, and a line for each sweep: layouts of one model
and batch that a source measured on the same GPUs. --rows: also published and predicted seconds of each row. --write:
write the tables into docs/time_model.md, and the spread of differences within sweeps, which `megapipe plan` prints,
into megapipe/extras/search/spread.py. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from megapipe.formatting import text_table
from tests.extras.search.published import LABELS, PUBLISHED, Row, published_rows, sweeps
from tools.write_flags_page import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGE, SPREAD_FILE = ROOT / "docs" / "time_model.md", ROOT / "megapipe" / "extras" / "search" / "spread.py"
LEAST_PAIRS = 10  # of a kind of difference
# settings of rows -> the aspect of layouts in `extras.search.layout.ASPECTS`
ASPECT_OF = {
    "tp": "tp",
    "sequence_parallel": "tp",
    "pp": "the pipeline",
    "vpp": "the pipeline",
    "pipeline_schedule": "the pipeline",
    "decoder_last_pipeline_num_layers": "the pipeline",
    "micro": "microbatch",
    "recompute": "recompute",
    "sharding": "sharding",
    "ep": "experts",
    "overlap_moe_expert_parallel_comm": "experts",
    "moe_token_dispatcher_type": "experts",
    "moe_combine_in_node": "experts",
}
NEAR = 1.05  # of the best measured step: as good as the best
DENSE, MIXTURES = "dense", "mixtures"


def kind(row: Row) -> str:
    return MIXTURES if row.is_mixture else DENSE


def predicted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the planner can predict."""
    return [row for row in rows if row.why_outside is None and row.why_refused is None]


def rms(values: Collection[float]) -> float:
    """Return the root mean square."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def error_line(source: str, of: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a line of the table of errors."""
    errors = [math.log(row.ratio) for row in rows]
    bias, worst = math.exp(fmean(errors)) - 1, math.exp(max(errors, key=abs)) - 1
    gpus = sorted({row.settings["gpu"] for row in rows})
    return (source, of, ", ".join(gpus), str(len(rows)), f"{bias:+.1%}", f"{rms(errors):.1%}", f"{worst:+.0%}")


def error_lines(sources: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the table of errors: a line for each source and kind of model, and the mean of the sources."""
    lines, errors = [], {DENSE: list[float](), MIXTURES: list[float]()}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in predicted([row for row in published_rows() if not sources or row.source.name in sources]):
        groups.setdefault((kind(row), row.source.name), []).append(row)
    for of, values in errors.items():
        for (_, source), rows in sorted(item for item in groups.items() if item[0][0] == of):
            lines.append(error_line(source, of, rows))
            values.append(rms([math.log(row.ratio) for row in rows]))
    for of, values in errors.items():
        if values:
            count = str(sum(len(rows) for key, rows in groups.items() if key[0] == of))
            lines.append((f"all {len(values)} sources, equal weight", of, "", count, "", f"{rms(values):.1%}", ""))
    return lines


def outside_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return how many rows of each source are not predicted, by reason."""
    counts = Counter((row.source.name, why) for row in rows if (why := row.why_outside or row.why_refused))
    return [(source, str(count), why) for (source, why), count in sorted(counts.items())]


def source_lines(published: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return where each source's figures are from, and how many rows it has and how many of them are predicted."""
    by_source: dict[str, list[Row]] = {}
    for row in published:
        by_source.setdefault(row.source.name, []).append(row)
    lines: list[tuple[str, ...]] = []
    for name, rows in sorted(by_source.items()):
        head, known = rows[0].source, len(predicted(rows))
        commit = f", commit {head.commit[:7]}" if head.commit else ""
        lines.append((name, head.planned_as.name, f"{known} of {len(rows)}", f"{head.where}{commit}"))
    return lines


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


def choice_lines(lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a line for each source from the lines of its sweeps, and one for all of them."""
    by_source: dict[str, list[tuple[str, ...]]] = {}
    for line in lines:
        by_source.setdefault(line[0].partition(":")[0], []).append(line)
    return [
        *(choice_line(source, of) for source, of in by_source.items()),
        choice_line(f"all {len(by_source)}", lines),
    ]


def choice_line(source: str, lines: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return how good the choices in the sweeps of a source are."""
    near = sum(line[3] == "yes" for line in lines)
    worst = max((line[2] for line in lines), key=lambda lost: float(lost.rstrip("%")))
    shares = sorted({int(line[5].rstrip("%")) for line in lines if line[5] != "-"})
    between = f"{shares[0]}% to {shares[-1]}%" if len(shares) > 1 else f"{shares[0]}%"
    layouts = sum(int(line[1]) for line in lines)
    return (source, str(len(lines)), str(layouts), f"{near} of {len(lines)}", worst, between)


def spread(found: Mapping[str, Sequence[Row]]) -> dict[str, tuple[float, int]]:
    """Return the rms of log((predicted a / predicted b) / (measured a / measured b)) over pairs of layouts of a sweep,
    and their number, by what the two differ in. The error that all layouts of a sweep share cancels.
    """
    logs: dict[str, list[float]] = {}
    for rows in found.values():
        for a, b in itertools.combinations(predicted(rows), 2):
            settings = {key for row in (a, b) for key in row.settings if key not in {*LABELS, *PUBLISHED}}
            aspects = {ASPECT_OF[key] for key in settings if a.settings.get(key) != b.settings.get(key)}
            for kind in aspects if len(aspects) == 1 else {"several"} if aspects else ():
                logs.setdefault(kind, []).append(math.log(a.ratio / b.ratio))
    return {kind: (rms(values), len(values)) for kind, values in sorted(logs.items()) if len(values) >= LEAST_PAIRS}


def spread_text(found: Mapping[str, Sequence[Row]]) -> str:
    """Return the text of the file that `megapipe plan` reads the spread from."""
    lines = [f'    "{kind}": ({error:.3f}, {count}),' for kind, (error, count) in spread(found).items()]
    return "\n".join([SPREAD_HEAD, *lines, "}\n"])


SPREAD_HEAD = '''"""Errors of predicted differences between two layouts of one model, in published sweeps.

Written by `python -m tools.accuracy --write`. By what the two differ in: the rms of the logarithm of predicted over
measured ratios of their times, and the number of pairs; of other differences there are too few.
"""

SPREAD = {'''


SOURCES = ("source", "stack", "predicted rows", "where")
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
CHOICES = ("source", "sweeps", "layouts", "choice within 5 % of the best", "worst choice over best", "pairs in order")


def tables() -> dict[str, str]:
    """Return the tables of docs/time_model.md, by the name of their marker."""
    return {
        "errors": markdown_table(ERRORS, error_lines()),
        "choices": markdown_table(CHOICES, choice_lines([sweep_line(name, rows) for name, rows in sweeps().items()])),
    }


def write(page: Path = PAGE) -> None:
    """Replace the tables between the markers of the page, and the spread that the search prints."""
    text = page.read_text()
    made = tables()

    def replaced(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{made[found[1]]}<!-- end -->"

    page.write_text(re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL))
    SPREAD_FILE.write_text(spread_text(sweeps()))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--write", action="store_true", help="write docs/time_model.md and spread.py")
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
    print("\n".join(text_table([SOURCES, *source_lines(rows)], left=(0, 1, 3))))
    print("\n".join(["", *text_table([ERRORS, *error_lines(given.sources)], left=(0, 1, 2))]))
    print("\n".join(["", *text_table([OUTSIDE, *outside_lines(rows)], left=(0, 2))]))
    lines = [sweep_line(name, of) for name, of in sweeps().items() if of[0] in rows]
    print("\n".join(["", *text_table([SWEEPS, *lines], left=(0,))]))


if __name__ == "__main__":
    main(sys.argv[1:])
