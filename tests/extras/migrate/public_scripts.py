"""The argument lists of public launch scripts and of NVIDIA's functional tests, and their table in docs/migrate.md.

Every file of scripts/, and of scripts_of_experts/ for mixtures, names its source in its head; below are the flags that
the script passes to pretrain_gpt.py, as `megapipe migrate` read them from the original, with paths and names replaced
by variables. No script is copied here.
`python -m tests.extras.migrate.public_scripts` writes the table of docs/migrate.md again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megapipe.extras.migrate.judge import TO_CHANGE, Migration, text_report
from megapipe.extras.migrate.script_report import reported

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[2] / "docs" / "migrate.md"
# folder of scripts -> where the page has their table
FOLDERS = {"scripts": "<!-- table of public scripts -->\n", "scripts_of_experts": "<!-- table of mixtures -->\n"}
END = "<!-- end of the table -->\n"
EXAMPLE = re.compile(r"(```bash\n# train\.sh\n)(.*?)(```.*?```text\n)(.*?)(```\n)", re.DOTALL)


@dataclass(frozen=True)
class PublicScript:
    """One launch script of a public repository."""

    name: str
    source: str  # repository and path
    commit: str
    licence: str
    ranks: tuple[str, ...]  # in all, and on each node if known
    flags: tuple[str, ...]  # with their values

    def launch(self) -> str:
        """Return a launch script of these flags."""
        total, per_node = (*self.ranks, *self.ranks)[:2] if self.ranks else ("", "")
        launcher = "python"
        if total:
            launcher = f"torchrun --nproc_per_node {per_node} --nnodes {int(total) // int(per_node)}"
        return " \\\n    ".join([f"{launcher} pretrain_gpt.py", *self.flags])

    def migration(self) -> Migration:
        """Return what `megapipe migrate` says of it."""
        return reported(self.launch(), self.name)


def public_scripts(folder: str = "scripts") -> list[PublicScript]:
    """Read all files of a folder."""
    found = []
    for path in sorted((FOLDER / folder).glob("*.txt")):
        lines = path.read_text(encoding="utf-8").splitlines()
        head = [line[2:] for line in lines if line.startswith("# ")]
        ranks = next(line for line in head if line.startswith("ranks: "))
        found.append(
            PublicScript(
                path.stem,
                head[0],
                head[1].removeprefix("commit "),
                head[2].removeprefix("licence: "),
                tuple(re.findall(r"\d+", ranks)),
                tuple(line for line in lines if not line.startswith("#")),
            )
        )
    return found


def functional_tests(file: str = "functional_tests.txt") -> dict[str, list[str]]:
    """Return name -> arguments of NVIDIA's functional tests: the dense ones, or those of another file."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in (FOLDER / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, _, text = line.partition(" = ")
        words = text.split()
        flags: dict[str, list[str]] = {}
        if not words[0].startswith("-"):
            flags = {flag: list(values) for flag, values in found[words.pop(0)].items()}
        for word in words:
            if word.startswith("--"):
                last = flags[word] = []
            elif word.startswith("-") and not word[1].isdigit():
                del flags["--" + word[1:]]
            else:
                last.append(word)
        found[name] = flags
    return {name: [word for flag, values in flags.items() for word in (flag, *values)] for name, flags in found.items()}


@dataclass(frozen=True)
class FunctionalTest:
    """One of NVIDIA's functional tests with experts."""

    ranks: int
    arguments: tuple[str, ...]  # paths are variables

    def migration(self) -> Migration:
        """Return what `megapipe migrate` says of it on its own number of ranks."""
        words = [word if word.startswith("$") else f"'{word}'" for word in self.arguments]
        return reported(f"torchrun --nproc_per_node {self.ranks} pretrain_gpt.py {' '.join(words)}", "test")


def functional_tests_of_experts() -> dict[str, FunctionalTest]:
    """Return NVIDIA's functional tests with experts, by name."""
    found = {}
    for name, (flag, ranks, *arguments) in functional_tests("functional_tests_of_experts.txt").items():
        assert flag == "--ranks"
        found[name] = FunctionalTest(int(ranks), tuple(arguments))
    return found


def to_change(migration: Migration) -> list[str]:
    """Return the flags of a script that must be changed, or else the first flag of each rule that it breaks."""
    flags = [row.flag for row in migration.judgement.rows if row.outcome in TO_CHANGE]
    return flags or [found[0] for rule in migration.to_change if (found := re.findall(r"--[\w-]+", rule))]


def table(folder: str = "scripts", shown: int = 1) -> str:
    """Return a part of docs/migrate.md: repositories whose scripts run, and a table of the others."""
    repositories: dict[str, list[Migration]] = {}
    for script in public_scripts(folder):
        repositories.setdefault(script.source.partition(" ")[0], []).append(script.migration())
    run = {repository: found for repository, found in repositories.items() if all(one.runs for one in found)}
    rows = [f"All {sum(map(len, run.values()))} scripts of {', '.join(run)} run as they are. Other repositories:", ""]
    rows += ["| repository | scripts | run as they are | change in the others |", "|---|---|---|---|"]
    for repository, found in repositories.items():
        if repository in run:
            continue
        flags = list(dict.fromkeys(flag for migration in found for flag in to_change(migration)))
        named = ", ".join(f"`{flag}`" for flag in flags[:shown])
        more = f" and {len(flags) - shown} more" if len(flags) > shown else ""
        rows.append(f"| {repository} | {len(found)} | {sum(one.runs for one in found)} | {named}{more} |")
    return "\n".join(rows) + "\n"


def shortened(report: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a report, of many flags in a row that stay as they are the first two."""
    for same, lines in groupby(
        "\n".join(report).splitlines(), lambda line: line.endswith("the same here") or line.startswith("    --")
    ):
        block = list(lines)
        yield from [*block[:2], "  ..."] if same and len(block) > 3 else block


def example(page: str) -> str:
    """Return the page with the output of `megapipe migrate` for the script that it shows."""

    def written(match: re.Match[str]) -> str:
        report = shortened(text_report(reported(f"# train.sh\n{match[2]}", "train.sh")))
        return "".join([*match.groups()[:3], *(f"{line}\n" for line in report), match[5]])

    return EXAMPLE.sub(written, page, count=1)


if __name__ == "__main__":
    page = example(PAGE.read_text(encoding="utf-8"))
    for folder, begin in FOLDERS.items():
        before, _, rest = page.partition(begin)
        page = before + begin + table(folder) + END + rest.partition(END)[2]
    PAGE.write_text(page, encoding="utf-8")
