"""The megapipe command: its subcommands, suggestions for unknown ones, and start-up without torch."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.cli import quickstart
from megapipe.extras.cli.command import SUBCOMMANDS, main
from megapipe.extras.cli.frame import Command, Option, write_file
from megapipe.extras.cli.launch import threads_of_a_rank
from tests.tables import rows

REPOSITORY = Path(__file__).resolve().parents[3]
WRONG_COMMANDS = rows(Path(__file__).with_name("wrong_commands.tsv"))


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_module_and_is_in_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function, _ = SUBCOMMANDS[name]
    assert callable(getattr(importlib.import_module(f"megapipe.extras.cli.{module}"), function))
    assert main(["--help"]) == 0
    assert f"  {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("pretain", "pretrain"), ("lunch", "launch"), ("pre-process", "preprocess")],
    ids=["pretain", "lunch", "pre-process"],
)
def test_an_unknown_subcommand_is_answered_by_the_nearest(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_misspelled_option_is_answered_by_the_nearest(name: str) -> None:
    module, function, _ = SUBCOMMANDS[name]
    command = getattr(importlib.import_module(f"megapipe.extras.cli.{module}"), function)
    if not isinstance(command, Command):
        pytest.skip("not a table of options")
    options = [flag for each in command.options if isinstance(each, Option) for flag in each.names]
    for flag in options:
        if flag.startswith("--"):
            with pytest.raises(ConfigError, match=f"did you mean {flag}\\?"):
                command.parse([flag + flag[-1]])


def test_a_misspelled_flag_of_training_is_left_to_its_own_table() -> None:
    assert quickstart.main.parse(["--train-iter", "5"]).flags == ["--train-iter", "5"]


@pytest.mark.parametrize(("words", "named"), WRONG_COMMANDS, ids=[words for words, _ in WRONG_COMMANDS])
def test_a_wrong_command_is_one_error_that_names_what_is_wrong(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(words)) in (1, 2)
    error = capsys.readouterr().err
    assert any(all(word in line for word in named.split(" & ")) for line in error.splitlines()), error
    assert error.count("error: ") <= 1 and "Traceback" not in error


def test_a_file_is_written_whole_and_a_link_or_a_pipe_is_written_through(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    for path in (target, link, pipe):
        write_file(path, f"{path.name}\n", "--output")
    assert target.read_text() == "link\n" and link.is_symlink()
    assert reader.communicate(timeout=60)[0] == "pipe\n" and pipe.is_fifo()
    with pytest.raises(ConfigError, match=r"cannot be written: .*; say where with --output FILE"):
        write_file(tmp_path, "", "--output")


def test_without_a_subcommand_it_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: megapipe SUBCOMMAND" in capsys.readouterr().out


def test_the_help_of_verify_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: megapipe verify" in shown and "--streams" in shown and "--num-layers" not in shown


def test_verify_is_pretrain_with_verify_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megapipe.extras.cli.pretrain.main", lambda words: 0 if words == ["--verify-grid", "--bf16"] else 1
    )
    assert main(["verify", "--bf16"]) == 0


def test_a_second_plan_for_16384_ranks_needs_no_torch(tmp_path: Path) -> None:
    config = REPOSITORY / "configs" / "llama3_405b.yaml"
    code = (
        "import sys; from megapipe.extras.cli.command import main; "
        f"code = main(['plan', '--world-size', '16384', '--ranks-per-node=8', '--config', {str(config)!r}]); "
        "print('torch' in sys.modules)"
    )
    for needs_torch in (True, False):  # layers are traced once, and kept in the user's cache
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0, ended.stderr
        assert "tp 8 x pp 16 x 8 chunks x dp 128" in ended.stdout
        assert ended.stdout.splitlines()[-1] == str(needs_torch)


def test_a_rank_gets_its_share_of_the_cores_and_at_least_one() -> None:
    assert threads_of_a_rank(1_000_000) == 1
    assert threads_of_a_rank(1) >= threads_of_a_rank(2) >= 1


def test_train_tokenizer_and_preprocess_work_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = REPOSITORY / "tests" / "train"
    model, prefix = tmp_path / "tokenizer", tmp_path / "tokens"
    assert main(["train-tokenizer", "--input", str(text), "--output", str(model), "--vocab-size", "500"]) == 0
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    assert main(["preprocess", "--input", str(text), "--suffixes", ".py", "--output-prefix", str(prefix), *kind]) == 0
    assert (
        main(
            [
                "merge",
                "--input",
                f"{prefix}_text_document",
                f"{prefix}_text_document",
                "--output-prefix",
                str(tmp_path / "two"),
            ]
        )
        == 0
    )
    assert (tmp_path / "two.bin").stat().st_size == 2 * (tmp_path / "tokens_text_document.bin").stat().st_size
    assert main(["train-tokenizer", "--input", str(tmp_path / "nothing"), "--output", str(model)]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["train-tokenizer", "--input", str(text), "--output", str(tmp_path / "tokenizer.model")]) == 2
    assert "is to be a folder" in capsys.readouterr().err


def test_train_tokenizer_takes_what_preprocess_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = Path(argparse.__file__).read_text("utf-8")
    words = [code[start : start + 500] for start in range(0, 49_500, 500)]
    folder, output = tmp_path / "texts", ["--output", str(tmp_path / "a"), "--vocab-size", "420"]
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"content": text}) + "\n" for text in words[::2])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in words[1::2]) + "no\n")
    inputs = ["--input", str(folder), str(tmp_path / "b.jsonl"), "--json-keys", "content"]
    assert main(["train-tokenizer", *inputs, *output]) == 0
    found = capsys.readouterr().out
    assert "trained on 99 documents" in found and "of 2 files; 1 that are no text were left out" in found
    # half of the text of each file
    size = sum(map(len, words)) / 2e6
    assert main(["train-tokenizer", *inputs, *output, "--megabytes", str(size)]) == 0
    assert "of 2 files" in capsys.readouterr().out
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xff")
    assert main(["train-tokenizer", "--input", str(tmp_path / "c.txt"), *output]) == 2
    assert "c.txt holds no text (1 documents are not UTF-8 text)" in capsys.readouterr().err
    (tmp_path / "c.txt").write_text("one and two")
    assert main(["train-tokenizer", "--input", str(tmp_path / "c.txt"), *output]) == 2
    assert "--vocab-size 420: the text supports at most" in capsys.readouterr().err


def test_help_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "megapipe", "plan", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ran.returncode, ran.stderr) == (
        1,
        "error: standard output cannot be written to: No space left on device\n",
    )


def test_a_plan_that_nobody_reads_to_its_end_ends_in_silence() -> None:
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 1 "
        "--lr 1e-3 --mock-data --vocab-size 32 --plan"
    )
    ran = subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *flags.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert ran.stdout is not None
    ran.stdout.close()
    assert ran.stderr is not None
    assert ran.stderr.read() == b""
    assert ran.wait() == 0


READS_A_CUT_MAPPING = """
import os
import sys
import numpy as np
from megapipe.extras.cli.frame import run_on_ranks

def read_the_index(environment):
    numbers = np.memmap(sys.argv[1], mode="r")
    os.truncate(sys.argv[1], 0)
    return int(numbers[-1])

run_on_ranks(read_the_index, "")
"""


def test_a_rank_that_reads_a_file_cut_while_it_is_mapped_says_where(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(1 << 16))
    ended = subprocess.run([sys.executable, "-c", READS_A_CUT_MAPPING, str(file)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr and "in read_the_index" in ended.stderr
