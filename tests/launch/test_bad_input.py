"""Bad input ends all ranks within seconds, with one readable message, a non-zero exit code and no traceback."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launch.scripts import REPOSITORY, Command, Ended, launch
from tests.tiny import TINY_FLAGS
from tests.token_files import IndexedWriter


def assert_one_message(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.error
    assert "Traceback" not in ended.error and "Traceback" not in ended.out
    assert len(ended.error.strip().splitlines()) == 1, ended.error
    for word in words:
        assert word in ended.error


def test_an_error_on_two_ranks_is_reported_once(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "tokens", np.dtype("<u2")) as writer:
        for document in range(40):
            writer.add_document(np.arange(document, document + 30, dtype="<u2") % 32)
    os.truncate(tmp_path / "tokens.bin", 2300)
    words = f"--train-iters 2 --data-path {tmp_path}/tokens --tensor-model-parallel-size 2".split()
    with launch(tmp_path, 2, *TINY_FLAGS, *words) as command:
        ended = command.ended()
    assert_one_message(ended, 1, "data error", "tokens.bin")


def test_a_world_that_does_not_fit_is_refused_by_all_ranks_once(tmp_path: Path) -> None:
    words = ["--train-iters", "2", "--mock-data", "--tensor-model-parallel-size", "2"]
    with launch(tmp_path, 3, *TINY_FLAGS, *words) as command:
        ended = command.ended()
    assert_one_message(ended, 2, "error", "3")


@pytest.mark.timeout(300)
def test_the_quickstart_trains_and_resumes_and_ctrl_c_saves(tmp_path: Path) -> None:
    words = "--ranks 4 --megabytes 0.6 --vocab-size 500 --device cpu --eval-iters 1 --sample-tokens 2".split()
    small = ["--hidden-size", "32", "--ffn-hidden-size", "64", "--seq-length", "32", "--global-batch-size", "8"]
    script = [str(REPOSITORY / "launch" / "quickstart.sh"), "--no-install", "--out", "out", *words, *small]
    environment = {"VENV": sys.prefix}
    with Command(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *script, "--steps", "3"], tmp_path
    ) as command:
        first = command.ended()
    assert (first.code, first.error) == (0, "")
    for line in (
        "== tokenizer: 500",
        "plan: 4 ranks = tp 2 x pp 2 x 2 chunks x dp 1",
        "step 3/3 |",
        "samples:",
        "== done: 3 steps",
    ):
        assert line in first.out
    loss, entropy = (
        float(value) for value in re.findall(r"(?:validation loss|unigram entropy) +(\d\.\d+) nats", first.out)
    )
    assert entropy < 5.5 < loss, "three steps cannot beat the unigram entropy, which is below that of 500 equal tokens"
    with Command(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *script, "--steps", "5000"], tmp_path
    ) as command:
        command.wait_for("step   10/5003 |")
        command.signal(signal.SIGINT)
        second = command.ended()
    assert (second.code, second.error) == (0, "")
    assert "is reused" in second.out and " s: continuing after step 3" in second.out and "SIGINT received" in second.out
    step = int(re.findall(r"== stopped: after step (\d+)", second.out)[0])
    assert step >= 10
    assert (next((tmp_path / "out").glob("*/checkpoints")) / f"step_{step:08d}").is_dir()
