"""Commands of README.md, AGENTS.md, CONTRIBUTING.md and docs, for tests/test_docs_commands.py.

`python -m tests.docs_commands` prints a row for every command that tests/docs_commands.txt lacks.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from megapipe.assembly.datasets import planned
from megapipe.config.load import load_config

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "tests" / "docs_commands.txt"
LANGUAGES = ("bash", "sh", "shell", "console")


class Command(NamedTuple):
    """A command of a page, on one line; a here-document is left out after its first line."""

    page: str
    text: str


class Row(NamedTuple):
    """A row of the table. how: 'test FILE::NAME', 'here', or 'not: REASON'."""

    command: Command
    how: str


def pages() -> list[Path]:
    """Return the pages of the project, each once: docs that only include another file have no commands."""
    named = [REPOSITORY / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")]
    return [*named, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def commands_of(page: Path) -> list[Command]:
    """Return the commands of the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: dict[str, None] = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language not in LANGUAGES:
            continue
        block = re.sub(r"<<-?\s*'?(\w+)'?\n.*?^\1$", r"<<\1", block, flags=re.DOTALL | re.MULTILINE)
        block = re.sub(r"\\\n\s*", "", block)
        quoted = re.sub(r"'[^']*'", lambda text: text[0].replace("\n", " "), block)  # a quoted text is one argument
        for line in quoted.splitlines():
            line = " ".join(re.sub(r"\s#\s.*", "", line).split())
            if line and not line.startswith("#"):
                found[line] = None
    name = page.relative_to(REPOSITORY).as_posix() if page.is_relative_to(REPOSITORY) else page.name
    return [Command(name, line) for line in found]


def table() -> list[Row]:
    """Return the rows of tests/docs_commands.txt: lines of HOW and COMMAND under the name of each page."""
    rows, page = [], ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            page = line[3:]
        elif line.strip() and not line.startswith("# "):
            how, _, text = line.partition(" | ")
            rows.append(Row(Command(page, text), how))
    return rows


class Training(NamedTuple):
    """Training that a command starts: the flags of pretrain_gpt.py and the ranks."""

    flags: list[str]
    num_ranks: int
    ranks_per_node: int


STARTS_TRAINING = re.compile(  # what starts it, before the flags of pretrain_gpt.py
    r"(?:(?:^|\s)pretrain_gpt\.py|launch/torchrun\.sh|launch/slurm/pretrain\.sbatch|launch/slurm/sweep\.sbatch \S+"
    r"|(?:megapipe|launch|megapipe:cuda)(?: --?\S+(?: \d\S*)?)* pretrain|:pretrain .* --)(?:\s+(?P<flags>.*))?$"
)


def training_of(text: str) -> Training | None:
    """Return the training that a command starts, None for another command."""
    found = STARTS_TRAINING.search(text)
    if found is None:
        return None

    def number(pattern: str, default: int) -> int:
        given = re.search(rf"(?:{pattern})[ =](\d+)", text)
        return int(given[1]) if given else default

    is_job = ".sbatch" in text
    per_node = number("--nproc-per-node|--ranks_per_node|--ntasks-per-node|NPROC_PER_NODE", 8 if is_job else 1)
    hosts = re.search(r'HOSTS="([^"]*)"', text)
    nodes = len(hosts[1].split()) if hosts else number("--nnodes|--num_nodes|--nodes", 1)
    world = number("--world-size", nodes * per_node)
    return Training(shlex.split(found["flags"] or ""), world, min(per_node, world) if nodes > 1 else world)


def plan_run(flags: list[str], num_ranks: int, ranks_per_node: int) -> None:
    """Plan the run of some flags of pretrain_gpt.py; the token files need not exist. Raises ConfigError."""
    words = [word for word in flags if word not in ("--verify-grid", "--dry-run")]  # requests in place of --plan
    planned(load_config(["--plan", *words]), num_ranks, ranks_per_node)


def main() -> None:
    """Print a row for every command without one."""
    known = {row.command for row in table()} if TABLE.exists() else set()
    for page in pages():
        missing = [command for command in commands_of(page) if command not in known]
        if missing:
            print(f"## {missing[0].page}")
            print("\n".join(f"? | {command.text}" for command in missing))


if __name__ == "__main__":
    main()
