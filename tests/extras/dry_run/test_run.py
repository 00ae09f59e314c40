"""`pretrain_gpt.py --dry-run` from the command line: the printed text and the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.extras.cli.pretrain import main

SMALL = """\
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, seq_length: 32, vocab_size: 100}
parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
training: {micro_batch_size: 1, global_batch_size: 64, train_iters: 5}
data: {mock_data: true}
optimizer: {lr: 1.0e-3}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    return ["--config", str(tmp_path / "small.yaml")]


def test_one_rank_of_each_kind_is_counted(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*small, "--dry-run", "--world-size", "64", "--ranks-per-node", "8"]) == 0
    text = capsys.readouterr().out
    assert "dry run: 64 ranks" in text and "2 kinds" in text
    first, last = (line.split() for line in text.splitlines() if " rank 0  " in line or " rank 32  " in line)
    assert (first[:4], last[:4]) == (["0", "32", "rank", "0"], ["1", "32", "rank", "32"])
    assert "total" in text and "all-reduce" in text


def test_only_the_chosen_rank_is_counted(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*small, "--dry-run", "--world-size", "64", "--rank", "37"]) == 0
    text = capsys.readouterr().out
    assert "of rank 37, which represents 32" in text and "rank 0 " not in text


ELSEWHERE = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere/tokenizer")


@pytest.mark.parametrize("request_flag", ["--plan", "--dry-run"])
def test_files_that_are_elsewhere_are_named_and_not_needed(
    request_flag: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*small, *ELSEWHERE, "--no-mock-data", "--data-path", "/nowhere/text", "--world-size", "8"]
    assert main([*words, request_flag]) == 0
    text = capsys.readouterr().out
    assert "vocabulary 100" in text and "/nowhere/tokenizer" in text
    assert ("/nowhere/text.bin" in text) == (request_flag == "--dry-run")


def test_a_tokenizer_that_is_elsewhere_does_not_define_the_vocabulary(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(small[1]).write_text(SMALL.replace(", vocab_size: 100", ""))
    assert main([*small, *ELSEWHERE, "--plan", "--world-size", "8"]) != 0
    assert "/nowhere/tokenizer" in capsys.readouterr().err
