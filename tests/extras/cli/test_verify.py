"""`megapipe verify`: its help; what --streams prints and returns, and one message for each mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(200)
SMALL = (
    "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 96 --micro-batch-size 1 "
    "--global-batch-size 64 --pipeline-model-parallel-size 2 --bf16 --world-size 2"
)
RACE = """
import torch
from megapipe.extend import register_activation

@register_activation("side")
def squared(x):
    with torch.cuda.stream(torch.cuda.Stream()):  # neither waits for the other stream
        return x * x
"""


def verify(words: str, path: str | None = None) -> tuple[int, str, str]:
    environment = os.environ | ({} if path is None else {"PATH": path})
    command = [sys.executable, "-m", "megapipe", "verify", "--streams", *words.split()]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    return ended.returncode, ended.stdout, ended.stderr.strip()


@pytest.mark.usefixtures("fake_device")
def test_a_right_configuration_has_no_race() -> None:
    code, said, error = verify(SMALL)
    assert code == 0, said + error
    assert said.startswith("checked  2 ranks (the pipeline of rank 0), ")
    assert "of 64 microbatches, which have all pairs of successive actions" in said
    assert "4 of 12 layers, which have all kinds of layers" in said
    assert said.endswith("no race\n")


@pytest.mark.usefixtures("fake_device")
def test_a_race_of_an_extension_has_both_places_and_exit_code_1(tmp_path: Path) -> None:
    extension = tmp_path / "racy.py"
    extension.write_text(RACE, encoding="utf-8")
    code, said, error = verify(f"{SMALL} --activation side --extension {extension}")
    assert code == 1, said + error
    assert "RACE  write on the default stream by" in said and "  and read on stream" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--no-such 3", "error: unknown flag --no-such (--help lists all flags)"),
        (SMALL.replace("--num-attention-heads 4", "--num-attention-heads 3"), "error: --num-attention-heads 3"),
        (SMALL.replace("--world-size 2", ""), "error: megapipe verify --streams needs --world-size N"),
        (f"{SMALL} --device cpu", "error: --device cpu: --streams checks the streams of a GPU"),
        (f"{SMALL} --verify-grid", "error: --streams and --verify-grid are two checks"),
    ],
    ids=["unknown flag", "refused", "no world", "cpu", "two checks"],
)
@pytest.mark.usefixtures("fake_device")
def test_a_mistake_is_one_message(words: str, message: str) -> None:
    code, said, error = verify(words)
    assert (code, said) == (2, "") and error.startswith(message), error
    assert "Traceback" not in error


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    code, said, error = verify(SMALL, path=str(tmp_path))
    assert (code, said) == (2, "")
    assert error.startswith("error: --streams compiles a fake CUDA device: g++ is not installed"), error
