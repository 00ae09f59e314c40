"""Padding tokens in the data are said, since Megatron gives them no loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.load import load_config
from megapipe.data.batch import padding_remarks
from tests.train import jobs
from tests.train.jobs import job

CORPUS = Path(__file__).parents[1] / "fixtures" / "megatron_runs" / "corpus"


class Samples:
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = [np.array(row, dtype=np.int64) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]

    def grow(self, num_samples: int) -> None: ...


@pytest.mark.parametrize(
    ("pad", "expected"),
    [(3, "3 of the 6 labels in the first 2 training samples"), (9, None), (7, None), (None, None)],
    ids=["padding", "absent", "end_of_document_too", "none"],
)
def test_padding_is_counted_among_labels_unless_it_is_another_special_token(
    pad: int | None, expected: str | None
) -> None:
    remarks = padding_remarks(Samples([[3, 3, 1, 3], [7, 3, 7, 0]]), pad, (7, None))
    assert len(remarks) == (expected is not None)
    assert expected is None or (expected in remarks[0] and "Megatron gives them none" in remarks[0])


def test_a_run_says_that_its_data_holds_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("tokenizers")
    words = {("<pad>" if number == 2 else f"w{number}"): number for number in range(101)}
    library.Tokenizer(library.models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "w100"}))
    monkeypatch.setattr(jobs, "TINY", "--num-workers 0 --eval-iters 0 --log-interval 1 --device cpu")
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    code, said = job(
        f"{sizes} --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-3 --data-path {CORPUS} "
        f"--split 100,0,0 --data-cache-path {tmp_path / 'cache'} --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {tmp_path}"
    )
    assert code == 0, said
    lines = [line for line in said.splitlines() if "the tokenizer's padding token 2" in line]
    assert len(lines) == 1 and "of the 256 labels" in lines[0]


@pytest.mark.parametrize("is_script", [True, False], ids=["script", "own"])
def test_a_megatron_script_hears_of_the_token_that_null_tokenizer_adds(is_script: bool) -> None:
    line = "--num-layers 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
    remarks = load_config([*line.split(), *(["--use-mcore-models"] if is_script else [])], is_job=False).remarks
    assert [remark for remark in remarks if "NullTokenizer has 101 tokens" in remark] == [
        remark for remark in remarks if "--vocab-size 99 is the same here" in remark
    ]
    assert any("NullTokenizer" in remark for remark in remarks) == is_script
