"""Ranks of a command that differ: every option, file and checkpoint that one rank alone may not have is named."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.comm.meeting import Side, disagreement
from megapipe.environment import read_environment
from megapipe.extras.cli.agreement import MAY_DIFFER, option_facts
from megapipe.extras.cli.calibrate import calibrate_machine, doctor, profile_layers
from megapipe.extras.cli.chat import chat
from megapipe.extras.cli.frame import Command, Option
from megapipe.extras.cli.inference import evaluate, generate
from megapipe.registry import EXTENSIONS
from tests.harness import RankPool
from tests.tables import rows
from tests.train.jobs import job

Pools = Callable[[int], RankPool]
COMMANDS = {one.name: one for one in (evaluate, generate, chat, doctor, calibrate_machine, profile_layers)}
MODEL = "--vocab-size 257 --tokenizer-type ByteTokenizer --num-experts 4 --disable-bias-linear"
NEEDED = {  # by every rank
    "megapipe evaluate": "--load {root}/run --data {root}/one.txt --device cpu",
    "megapipe generate": "--load {root}/run --prompt once --max-new-tokens 2 --device cpu --ignore-eod",
    "megapipe chat": "{root}/run",
    "megapipe doctor": "",
    "megapipe calibrate": "",
    "megapipe profile-layers": "--output {root}/times.json",
}
# option -> words of rank 1 alone. A new option needs a row here
OTHER = dict(rows(Path(__file__).with_name("other_words.tsv")))
NAMES = {name: [one.names[-1] for one in found.options if isinstance(one, Option)] for name, found in COMMANDS.items()}
CASES = [(command, option) for command, options in NAMES.items() for option in options]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one model from other seeds, and two texts of equal length."""
    root = tmp_path_factory.mktemp("agreement")
    for name, seed in (("run", 1), ("other", 2)):
        code, said = job(f"--train-iters 2 --save-interval 1 --seed {seed} --save {root}/{name} {MODEL}")
        assert code == 0, said
    (root / "one.txt").write_text("Once upon a time, there was a text of some length.\n")
    (root / "two.txt").write_text("Once upon a time, there was a test of some length.\n")
    return root


def parsed(command: Command, words: str) -> Any:
    """Parse words. !--flag takes an earlier --flag away."""
    given = words.split()
    for word in [word for word in given if word.startswith("!")]:
        given.remove(word)
        given.remove(word[1:])
    return command.parse(given)


def words_of(command: str, option: str, root: Path) -> tuple[str, str]:
    """Return the words of rank 0, and those of rank 1, which differ in one option."""
    common = NEEDED[command].format(root=root)
    odd = OTHER[option].format(root=root, device="auto" if "--device cpu" in common else "cpu")
    if option == "load":  # in place of the other
        return common, odd
    return common, f"{common} {odd}"


def difference(one: Any, other: Any) -> list[str]:
    """Return the keys in the message of two ranks."""
    sides = [Side((0,), "host-a", option_facts(one)), Side((1,), "host-b", option_facts(other))]
    return [line.split(": ")[0].strip() for line in disagreement(sides, 2).splitlines()[1:-1]]


@pytest.mark.parametrize(("command", "option"), CASES)
def test_every_declared_option_is_compared_or_may_differ(command: str, option: str, root: Path) -> None:
    one, other = (parsed(COMMANDS[command], words) for words in words_of(command, option, root))
    assert difference(one, other) == ([] if option in MAY_DIFFER else [option])


def test_what_may_differ_are_options_of_some_command_and_have_a_reason() -> None:
    assert set(MAY_DIFFER) <= {option for options in NAMES.values() for option in options}
    assert all(MAY_DIFFER.values())


def on_rank(rank: int, world_size: int, name: str, of_ranks: list[str]) -> tuple[str, str, str, str]:
    """Run a command on a rank; return type and text of its error, and what it prints."""
    environment = replace(
        read_environment({}), global_rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
    )
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            COMMANDS[name].body(parsed(COMMANDS[name], of_ranks[rank]), environment)
        except Exception as error:
            return type(error).__name__, str(error), printed.getvalue(), said.getvalue()
    return "", "", printed.getvalue(), said.getvalue()


# a rank whose own --tokenizer-model is no tokenizer refuses it before it meets the others
RUN = [
    case for case in CASES if case[0] in ("megapipe evaluate", "megapipe generate") and case[1] != "--tokenizer-model"
]


@pytest.mark.parametrize(("command", "option"), RUN)
def test_ranks_of_one_option_apart_end_with_its_name_or_with_the_same_result(
    command: str, option: str, root: Path, rank_pools: Pools
) -> None:
    found = rank_pools(2).run(on_rank, command, list(words_of(command, option, root)), timeout=60.0)
    if option in MAY_DIFFER:
        assert [kind for kind, *_ in found] == ["", ""], found
        return
    assert {kind for kind, *_ in found} == {"DisagreementError"}, found
    assert all(f"\n  {option}: " in text and "on rank 0 (" in text and "on rank 1 (" in text for _, text, *_ in found)


def test_checkpoints_and_data_are_compared_by_content(root: Path, rank_pools: Pools, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "copy")
    shutil.copy(root / "one.txt", tmp_path / "copy.txt")
    words = NEEDED["megapipe evaluate"].format(root=root)
    moved = words.replace(f"{root}/run", f"{tmp_path}/copy").replace(f"{root}/one.txt", f"{tmp_path}/copy.txt")
    assert moved != words
    found = rank_pools(2).run(on_rank, "megapipe evaluate", [words, moved])
    assert [kind for kind, *_ in found] == ["", ""], found
    assert found[0][2].count(" nats a token") == 1 and not found[1][2]


def test_one_command_is_not_taken_for_another(root: Path) -> None:
    words = f"--load {root}/run"
    one, other = parsed(evaluate, f"{words} --data x"), parsed(generate, f"{words} --prompt x")
    assert "command" in difference(one, other)


def test_an_extension_is_compared_by_content_whatever_its_path(root: Path, tmp_path: Path) -> None:
    facts = []
    for number, text in enumerate(("", "", "# other\n")):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "mine.py"
        path.write_text(f"from megapipe.extend import register_norm\nregister_norm('mine')(print)\n{text}")
        words = f"{NEEDED['megapipe evaluate'].format(root=root)} --extension {path}"
        facts.append(option_facts(parsed(evaluate, words)))
        EXTENSIONS.unload(str(path))
    here, there, other = (found["--extension"] for found in facts)
    assert here.value == there.value != other.value and here.shown != there.shown


@pytest.mark.parametrize(
    ("command", "common", "odd", "key"),
    [
        ("megapipe doctor", "--seconds 0.001", "--sequence-parallel", "--sequence-parallel"),
        ("megapipe calibrate", "--device cpu --seconds 0.01", "--timeout-seconds 61", "--timeout-seconds"),
    ],
    ids=["doctor", "calibrate"],
)
def test_measurements_of_different_settings_are_not_started(
    command: str, common: str, odd: str, key: str, rank_pools: Pools, tmp_path: Path
) -> None:
    if command == "megapipe calibrate":
        common += f" --output {tmp_path}/here.yaml"
    found = rank_pools(2).run(on_rank, command, [common, f"{common} {odd}"])
    assert {kind for kind, *_ in found} == {"DisagreementError"}, found
    assert all(f"\n  {key}: " in text for _, text, *_ in found)
