"""A full disk or a closed pipe takes output, never the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY, environment
from tests.tiny import TINY_FLAGS

PRINTS = """
import os, sys
from megapipe.monitor.signals import outlive_output
outlive_output()
for number in range(1000):
    print("line", number, flush=True)
print("done", file=sys.stderr)
os.write(3, b"went on")
"""
FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_the_program_continues() -> None:
    read, write = os.pipe()
    with FULL.open("w") as full:
        words = ["bash", "-c", 'exec "$@" 3>&"$0"', str(write), sys.executable, "-c", PRINTS]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, pass_fds=[write], timeout=280)
    os.close(write)
    with os.fdopen(read) as file:
        assert file.read() == "went on"
    told = "standard output cannot be written to (No space left on device); this is lost, the program continues\n"
    assert (ended.returncode, ended.stderr) == (0, f"{told}done\n")


@pytest.mark.parametrize("redirect", ["", "2>&1"], ids=["output", "output and errors"])
def test_a_closed_pipe_ends_no_training(tmp_path: Path, redirect: str) -> None:
    words = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *TINY_FLAGS, "--mock-data"]
    words += ["--global-batch-size", "2", "--train-iters", "3", "--save", str(tmp_path / "saved")]
    line = f'set -o pipefail; "$@" {redirect} | head -n 1'
    ended = subprocess.run(
        ["bash", "-c", line, "bash", *words], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") <= 1 and "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    assert (tmp_path / "saved" / "step_00000003").is_dir()
    assert len((tmp_path / "saved" / "metrics.jsonl").read_text().splitlines()) >= 3


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_the_parent_closed_is_replaced(closed: str) -> None:
    code = "from megapipe.monitor.signals import outlive_output as o; o(); import sys; print(1); sys.stderr.flush()"
    number = {"stdout": 1, "stderr": 2}[closed]
    words = ["bash", "-c", f'exec "$@" {number}>&-', "bash", sys.executable, "-c", f"{code}; sys.{closed}.flush()"]
    assert subprocess.run(words, env=environment(), capture_output=True, timeout=280).returncode == 0


@pytest.mark.parametrize("words", ["--help", "explain --lr", "doctor --help"])
def test_a_command_that_prints_ends_quietly_with_its_reader(words: str) -> None:
    line = 'set -o pipefail; "$@" | true'
    command = ["bash", "-c", line, "bash", sys.executable, "-m", "megapipe", *words.split()]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert (ended.returncode, ended.stderr) in ((141, ""), (0, ""))
