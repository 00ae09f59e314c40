"""`megapipe generate` and `megapipe evaluate` from the command line, on a checkpoint written by pretraining."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY, Command, Ended
from tests.tiny import TINY_FLAGS

MODEL = [word for word in TINY_FLAGS if word not in ("--vocab-size", "32")]
RANKS = ("-m", "megapipe", "launch", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved_model")
    ended = python(
        folder, str(REPOSITORY / "pretrain_gpt.py"), *MODEL, "--tokenizer-type", "ByteTokenizer", "--mock-data",
        "--train-iters", "2", "--save", "saved", "--max-position-embeddings", "32",
    )  # fmt: skip
    assert ended.code == 0, ended.error
    return folder / "saved"


def python(folder: Path, *words: str) -> Ended:
    with Command([sys.executable, *words], folder) as command:
        return command.ended()


def tool(name: str, checkpoints: Path, *words: str, ranks: bool = False) -> Ended:
    start = (*RANKS, str(REPOSITORY / "tools" / f"{name}.py")) if ranks else ("-m", "megapipe", name)
    return python(checkpoints.parent, *start, "--load", str(checkpoints), "--device", "cpu", *words)


def test_a_grid_continues_prompts_as_one_process_does(checkpoints: Path) -> None:
    words = ["--prompt", "abc", "--max-new-tokens", "9", "--ignore-eod", "--temperature", "0"]
    alone = tool("generate", checkpoints, *words)
    assert alone.code == 0, alone.error
    assert alone.out.startswith("abc")
    together = tool("generate", checkpoints, *words, "--pipeline-model-parallel-size", "2", ranks=True)
    assert (together.code, together.out) == (0, alone.out), together.error


def test_prompts_of_a_file_become_json_lines(checkpoints: Path) -> None:
    prompts = checkpoints.parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n')
    output = checkpoints.parent / "texts.jsonl"
    ended = tool(
        "generate",
        checkpoints,
        "--prompts-file",
        str(prompts),
        "--output",
        str(output),
        "--max-new-tokens",
        "4",
        "--ignore-eod",
    )
    assert ended.code == 0, ended.error
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "a longer one"]
    assert [row["num_tokens"] for row in rows] == [4, 4]


def test_perplexity_is_the_same_on_two_replicas(checkpoints: Path) -> None:
    text = checkpoints.parent / "held_out.txt"
    text.write_text("What is not seen in training is held out.\n")
    alone = tool("evaluate", checkpoints, "--data", str(text), "--json")
    assert alone.code == 0, alone.error
    row = json.loads(alone.out)
    assert row["num_tokens"] == 42
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / 0.6931471805599453)
    together = tool("evaluate", checkpoints, "--data", str(text), ranks=True)
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
def test_mistakes_are_reported_in_one_message(checkpoints: Path, name: str, words: list[str], message: str) -> None:
    (checkpoints.parent / "held_out.txt").write_text("some text")
    ended = tool(name, checkpoints, *words)
    assert ended.code != 0
    assert message in ended.error
    assert "Traceback" not in ended.error
    assert len(ended.error.strip().splitlines()) == 1


def test_copies_of_a_model_generate_its_text_and_say_that_fewer_ranks_would_do(checkpoints: Path) -> None:
    words = ["--prompt", "abc", "--max-new-tokens", "3", "--ignore-eod", "--temperature", "0"]
    ended = tool("generate", checkpoints, *words, ranks=True)
    assert (ended.code, ended.out) == (0, tool("generate", checkpoints, *words).out), ended.error
    assert "2 ranks hold 2 copies of the model, which write the same text: 1 generate as fast" in ended.error


@pytest.mark.timeout(500)
def test_ranks_with_different_experts_generate_and_evaluate_as_one_process_does(tmp_path: Path) -> None:
    experts = ["--num-experts", "4", "--disable-bias-linear", "--moe-router-topk", "2"]
    ended = python(
        tmp_path, str(REPOSITORY / "pretrain_gpt.py"), *MODEL, *experts, "--tokenizer-type", "ByteTokenizer",
        "--mock-data", "--train-iters", "2", "--save", "saved", "--max-position-embeddings", "32",
    )  # fmt: skip
    assert ended.code == 0, ended.error
    (tmp_path / "held_out.txt").write_text("What is not seen in training is held out.\n")
    words = ["--prompt", "abc", "--max-new-tokens", "9", "--ignore-eod", "--temperature", "0"]
    divided = ["--expert-model-parallel-size", "2"]
    alone = tool("generate", tmp_path / "saved", *words)
    together = tool("generate", tmp_path / "saved", *words, *divided, ranks=True)
    assert (together.code, together.out) == (0, alone.out), together.error
    assert "copies" not in together.error
    found = [
        json.loads(
            tool("evaluate", tmp_path / "saved", "--data", "held_out.txt", "--json", *more, ranks=bool(more)).out
        )
        for more in ([], divided)
    ]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=1e-5)
