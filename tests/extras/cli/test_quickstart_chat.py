"""`megapipe quickstart --sft`: its conversations, its steps, and the whole way on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.errors import TrainingError
from megapipe.extras.cli import quickstart, quickstart_chat
from megapipe.extras.cli.quickstart_chat import CONVERSATIONS, QUESTION, finetune_and_export, finetuning_arguments
from tests.extras.cli.test_quickstart import corpus_file

CIRCLES = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "month": "January February March April May June July August September October November December".split(),
}


def test_the_conversations_are_all_questions_on_the_order_of_days_and_months() -> None:
    expected = [
        {"prompt": f"What {kind} comes {where} {name}?", "completion": f"{names[(number + way) % len(names)]}."}
        for kind, names in CIRCLES.items()
        for number, name in enumerate(names)
        for where, way in (("after", 1), ("before", -1))
    ]
    assert [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()] == expected
    assert QUESTION in [row["prompt"] for row in expected]


def test_finetuning_starts_from_the_model_with_a_fresh_optimizer() -> None:
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "t"]
    words += finetuning_arguments(Path("base"), Path("chat"))
    config = load_config([*quickstart.CPU_FLAGS, *words], is_job=True).config
    assert config.data.sft and config.checkpoint.finetune
    assert (config.checkpoint.load, config.checkpoint.save) == ("base", "chat")


def test_another_answer_of_transformers_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chat_3/step_00000001", "export_3"):
        (tmp_path / name).mkdir(parents=True)  # of an earlier run, so neither is made again
    monkeypatch.setattr(quickstart_chat, "exchange", lambda chat: "Tuesday.")
    monkeypatch.setattr(quickstart_chat, "answer_of_transformers", lambda export: "Tuesday.")
    assert finetune_and_export(tmp_path, tmp_path, 3, ()) == 0
    monkeypatch.setattr(quickstart_chat, "answer_of_transformers", lambda export: "Monday.")
    with pytest.raises(TrainingError, match=r"transformers answers 'Monday\.' .* this model answers 'Tuesday\.'"):
        finetune_and_export(tmp_path, tmp_path, 3, ())


def test_the_whole_way_from_text_to_the_same_answer_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="pip install 'megapipe[transformers]'")
    monkeypatch.setattr(quickstart_chat, "FINETUNING_STEPS", 120)
    model = "--num-layers 2 --num-virtual-stages-per-pipeline-rank none --hidden-size 64 --ffn-hidden-size 128"
    grid = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --device cpu --eval-interval 5 --quiet"
    text = corpus_file(tmp_path / "text.txt", "number")
    words = ["--sft", "--corpus", str(text), "--out", str(tmp_path / "out"), "--vocab-size", "500", "--steps", "5"]
    assert quickstart.main([*words, "--ranks", "2", *model.split(), *grid.split()]) == 0
    said = capfd.readouterr().out
    assert f"> {QUESTION}\n" in said and ", texts end at " in said
    assert "== transformers: answers the same with" in said
