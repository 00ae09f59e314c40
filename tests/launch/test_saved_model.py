"""`megapipe generate` and `megapipe evaluate` from the command line, on a checkpoint written by pretraining.

Commands of one rank run in this process, those of two under the launcher.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.extras.cli.command import main
from tests.launch.scripts import REPOSITORY, Command, Ended
from tests.tiny import TINY_FLAGS

MODEL = [word for word in TINY_FLAGS if word not in ("--vocab-size", "32")]
MODEL += ["--tokenizer-type", "ByteTokenizer", "--mock-data", "--train-iters", "2", "--max-position-embeddings", "32"]
RANKS = (sys.executable, "-m", "megapipe", "launch", "--nproc-per-node", "2")
GREEDY = ["--prompt", "abc", "--max-new-tokens", "9", "--ignore-eod", "--temperature", "0"]
TEXT = "What is not seen in training is held out.\n"
Alone = Callable[..., Ended]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("dense"))


def trained(folder: Path, *words: str) -> Path:
    """Return the checkpoints of two steps, beside a text that was not trained on."""
    assert main(["pretrain", *MODEL, *words, "--save", str(folder / "saved")]) == 0
    (folder / "held_out.txt").write_text(TEXT)
    return folder / "saved"


@pytest.fixture
def alone(capfd: pytest.CaptureFixture[str]) -> Alone:
    """A function that runs a command on one rank, in this process."""

    def run(name: str, checkpoints: Path, *words: str) -> Ended:
        capfd.readouterr()
        code = main([name, "--load", str(checkpoints), "--device", "cpu", *words])
        return Ended(code, *capfd.readouterr())

    return run


def on_two_ranks(name: str, checkpoints: Path, *words: str) -> Ended:
    program = str(REPOSITORY / "tools" / f"{name}.py")
    with Command([*RANKS, program, "--load", str(checkpoints), "--device", "cpu", *words], checkpoints.parent) as run:
        return run.ended()


def test_a_grid_continues_prompts_as_one_process_does(dense: Path, alone: Alone) -> None:
    expected = alone("generate", dense, *GREEDY)
    assert expected.code == 0, expected.error
    assert expected.out.startswith("abc")
    together = on_two_ranks("generate", dense, *GREEDY, "--pipeline-model-parallel-size", "2")
    assert (together.code, together.out) == (0, expected.out), together.error


def test_prompts_of_a_file_become_json_lines(dense: Path, tmp_path: Path, alone: Alone) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n')
    files = ["--prompts-file", str(prompts), "--output", str(output)]
    ended = alone("generate", dense, *files, "--max-new-tokens", "4", "--ignore-eod")
    assert ended.code == 0, ended.error
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "a longer one"]
    assert [row["num_tokens"] for row in rows] == [4, 4]


def test_perplexity_is_the_same_on_two_replicas(dense: Path, alone: Alone) -> None:
    text = str(dense.parent / "held_out.txt")
    expected = alone("evaluate", dense, "--data", text, "--json")
    assert expected.code == 0, expected.error
    row = json.loads(expected.out)
    assert row["num_tokens"] == 42
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / 0.6931471805599453)
    together = on_two_ranks("evaluate", dense, "--data", text)
    found = re.search(r"loss ([\d.]+) nats a token.*over 42 tokens", together.out)
    assert found and float(found[1]) == pytest.approx(row["loss"], abs=2e-4), together.error


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("generate", [], "give --prompt TEXT or --prompts-file FILE"),
        ("generate", ["--prompt", "a", "--tempurature", "1"], "did you mean --temperature"),
        ("generate", ["--prompt", "x" * 32], "leaves no position for a new one"),
        ("generate", ["--prompt", "a", "--ckpt-step", "7"], "has no step_00000007"),
        ("generate", ["--prompt", "a", "--top-p", "0"], "--top-p 0.0 must be above 0"),
        ("evaluate", ["--data", "nowhere.txt"], "nowhere.txt"),
        ("evaluate", ["--data", "held_out.txt", "--seq-length", "33"], "--seq-length 33 must be in 1 .. 32"),
    ],
    ids=["no_prompt", "misspelt", "no_room", "no_step", "top_p", "no_file", "too_long"],
)
def test_mistakes_are_reported_in_one_message(
    dense: Path, name: str, words: list[str], message: str, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dense.parent)
    ended = alone(name, dense, *words)
    assert ended.code != 0
    assert message in ended.error
    assert "Traceback" not in ended.error
    assert len(ended.error.strip().splitlines()) == 1


def test_copies_of_a_model_generate_its_text_and_say_that_fewer_ranks_would_do(dense: Path, alone: Alone) -> None:
    ended = on_two_ranks("generate", dense, *GREEDY)
    assert (ended.code, ended.out) == (0, alone("generate", dense, *GREEDY).out), ended.error
    assert "2 ranks hold 2 copies of the model, which write the same text: 1 generate as fast" in ended.error
