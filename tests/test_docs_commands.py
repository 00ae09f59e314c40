"""Every command of README.md, CONTRIBUTING.md and docs is run by a test, or listed with the reason why not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.extras.preprocess.tokenizer_training import train_tokenizer
from tests.docs_commands import REPOSITORY, Command, Training, commands_of, pages, plan_run, table, training_of

BLOCKS = re.DOTALL | re.MULTILINE
HERE = {row.command: row.how for row in table() if row.how == "here"}


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    shown = [command for page in pages() for command in commands_of(page)]
    listed = [row.command for row in table()]
    missing = set(shown) - set(listed)
    assert not missing, f"say in tests/docs_commands.txt how these are tried: {sorted(missing)}"
    gone = set(listed) - set(shown)
    assert not gone, f"no page shows these any more; take them out of tests/docs_commands.txt: {sorted(gone)}"
    assert len(listed) == len(set(listed))


def test_every_row_names_a_test_or_a_reason() -> None:
    for row in table():
        if row.how.startswith("test "):
            path, _, name = row.how.removeprefix("test ").partition("::")
            text = (REPOSITORY / path).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{row.how}: there is no such test"
        else:
            assert row.how == "here" or re.fullmatch(r"not: \w.{10,}", row.how), row


@pytest.mark.parametrize("page", sorted({command.page for command in HERE}))
def test_commands_run_as_they_stand(page: str, tmp_path: Path) -> None:
    for name in ("configs", "tools", "megapipe", "pretrain_gpt.py", "launch"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for name, text in here_documents(REPOSITORY / page).items():
        (tmp_path / name).write_text(text)
    shell = f"set -e\nexport PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1\n"
    shell += f'megapipe() {{ "{sys.executable}" -m megapipe "$@"; }}\n'
    lines = [command.text for command in HERE if command.page == page and "<<" not in command.text]
    bash = [shutil.which("bash") or "bash", "-c", shell + "\n".join(lines)]
    ended = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert lines and ended.returncode == 0, ended.stderr
    printed = [line.strip() for line in ended.stdout.splitlines()]
    assert printed
    stale = [line for line in shown_lines(REPOSITORY / page, lines) if not is_printed(line, printed)]
    assert not stale, f"{page} shows lines that its commands do not print: {stale}"


def shown_lines(page: Path, commands: list[str]) -> list[str]:
    """Return the lines that a page shows as the output of some of its commands: those of the block after a command."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block, shown in re.findall(
        r"^```bash\n(.*?)^```\n(?:(?!```|#)[^\n]*\n)*?```(?:text)?\n(.*?)^```", text, BLOCKS
    ):
        joined = [" ".join(line.split()) for line in re.sub(r"\\\n\s*", "", block).splitlines()]
        if any(line in commands for line in joined):
            found += [line.strip() for line in shown.splitlines() if line.strip() not in ("", "...")]
    return found


def is_printed(shown: str, printed: list[str]) -> bool:
    """Return whether a shown line is among the printed ones, where `...` stands for any text."""
    pattern = re.compile(".*".join(map(re.escape, shown.split("..."))))
    return any(pattern.fullmatch(line) for line in printed)


def test_a_line_that_is_not_printed_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\na --x \\\n    1\n```\n\nprints\n\n```\n  one\n...\ntwo ... 3\n```\n", encoding="utf-8")
    assert shown_lines(page, ["a --x 1"]) == ["one", "two ... 3"]
    assert shown_lines(page, ["a --x 2"]) == []
    assert is_printed("two ... 3", ["one", "two and 3"]) and not is_printed("two", ["two and 3"])


def here_documents(page: Path) -> dict[str, str]:
    """Return the files that the page's commands write with `cat > NAME <<END`."""
    found = re.findall(r"^cat > (\S+) <<-?\s*'?(\w+)'?\n(.*?)^\2$", page.read_text(), re.DOTALL | re.MULTILINE)
    return {name: text for name, _, text in found}


def test_commands_are_found_without_comments_continuations_and_here_documents(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "```bash\na --x \\\n    1  # why\n# no command\ncat > f <<'END'\nb\nEND\na --x 1\n```\n```yaml\nc: 1\n```\n"
    page.write_text(text, encoding="utf-8")
    assert [command.text for command in commands_of(page)] == ["a --x 1", "cat > f <<END"]
    assert here_documents(page) == {"f": "b\n"}


# pages whose commands start from files that the page does not make, or are parts of a script
NOT_PLANNED = {f"docs/{name}.md" for name in ("convert", "finetuning", "migrate")}
STARTING = [
    (command, training)
    for page in pages()
    for command in commands_of(page)
    if command.page not in NOT_PLANNED
    and "--tuned" not in command.text  # a file that `calibrate --tune` writes
    and (training := training_of(command.text)) is not None
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines(), folder, 320)
    return folder


@pytest.mark.parametrize(("command", "training"), STARTING, ids=[command.text[:60] for command, _ in STARTING])
def test_a_command_that_starts_training_is_complete(
    command: Command, training: Training, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    for name, text in here_documents(REPOSITORY / command.page).items():
        (tmp_path / name).write_text(text)
    for name in ("tokenizer", "data/tokenizer"):  # pages train one
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tokenizer)
    plan_run(training.flags, training.num_ranks, training.ranks_per_node)


def test_the_training_of_a_command_is_found_with_its_ranks() -> None:
    found = training_of("X=1 sbatch --nodes=2 launch/slurm/pretrain.sbatch --config a --lr 'b c'")
    assert found == Training(["--config", "a", "--lr", "b c"], 16, 8)
    found = training_of("docker run -v a:a megapipe:cuda launch --nproc-per-node 4 pretrain --config a")
    assert found == Training(["--config", "a"], 4, 4)
    assert training_of("megapipe launch --nproc-per-node 2 -m megapipe doctor") is None
    assert len(STARTING) >= 10
