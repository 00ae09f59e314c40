"""Fingerprints tell tokenizers of one size apart, and their borders refuse another one with both names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.indexed_file import IndexedFile, made_with, tokenizer_path
from megapipe.errors import DataError
from megapipe.extras.cli.data import preprocess
from megapipe.extras.cli.inference import evaluate, generate
from megapipe.extras.preprocess.merge import merge
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, described, is_same, tokenizer_fingerprint
from tests.token_files import IndexedWriter
from tests.tokenizers.chat_tokenizers import write_tokenizer
from tests.train.jobs import TINY, job

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers of equal size, `a` and `b`, in which two ids are exchanged; `c` is `a` with other blanks."""
    root = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(root / "a", "{{ messages[0].content }}")
    for name in "bc":
        (root / name).mkdir()
        content = json.loads((root / "a" / "tokenizer.json").read_text())
        if name == "b":
            vocabulary = content["model"]["vocab"]
            vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (root / name / "tokenizer.json").write_text(json.dumps(content))
        (root / name / "tokenizer_config.json").write_bytes((root / "a" / "tokenizer_config.json").read_bytes())
    (root / "c" / "tokenizer.json").write_bytes((root / "a" / "tokenizer.json").read_bytes())
    (root / "c" / "chat_template.jinja").write_text("another template")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": f"hello world {i} " * 9}) + "\n" for i in range(40)))
    for name in "ab":
        flags = f"--input {root}/text.jsonl --output-prefix {root}/data-{name} --append-eod --workers 1"
        tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {root}/{name}"
        assert preprocess(f"{flags} {tokenizer}".split()) == 0
    return root


def flags_of(folder: Path, name: str, data: str | None = None) -> str:
    source = "--mock-data" if data is None else f"--data-path {folder}/data-{data}_text_document --split 1,0,0"
    files = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/{name}"
    return TINY.replace("--mock-data", f"{source} {files} --train-iters 2").replace("--vocab-size 32 ", "")


def test_a_fingerprint_is_of_what_gives_ids(folder: Path) -> None:
    a, b, c = (tokenizer_fingerprint(HuggingFaceTokenizer(folder / name), name) for name in "abc")
    assert a["vocab_size"] == b["vocab_size"] and not is_same(a, b)
    assert is_same(a, c) and a["source"] != c["source"]  # chat templates change no id
    assert not is_same(a, a | {"eod": 5}) and is_same(a, a | {"eod": 5}, with_eod=False)
    assert described(a).startswith(f"HuggingFaceTokenizer of a ({a['vocab_size']} tokens, end of document 0, SHA-256 ")
    plain = [tokenizer_fingerprint(one) for one in (ByteTokenizer(), NullTokenizer(256), NullTokenizer(255))]
    assert not is_same(plain[0], plain[1]) and not is_same(plain[1], plain[2])


def test_preprocessing_writes_the_tokenizer_beside_the_index(folder: Path) -> None:
    found = made_with(folder / "data-a_text_document")
    assert found is not None and is_same(found, tokenizer_fingerprint(HuggingFaceTokenizer(folder / "a")))
    assert found["source"] == f"{folder}/a"


def test_other_files_of_a_name_take_no_old_tokenizer_over(folder: Path, tmp_path: Path) -> None:
    for tokenizer in ({"files": {}}, None):
        with IndexedWriter(tmp_path / "x", "u2", tokenizer=tokenizer) as writer:
            writer.add_document([1, 2])
        assert made_with(tmp_path / "x") == tokenizer
    tokenizer_path(tmp_path / "x").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        made_with(tmp_path / "x")


def test_merging_keeps_the_tokenizer_of_all_files_and_refuses_two(folder: Path, tmp_path: Path) -> None:
    a, b = (str(folder / f"data-{name}_text_document") for name in "ab")
    merge([a, a], str(tmp_path / "both"))
    assert made_with(tmp_path / "both") == made_with(a)
    with pytest.raises(DataError, match=r"data-a.*/a .*data-b.*/b"):
        merge([a, b], str(tmp_path / "mixed"))
    with IndexedWriter(tmp_path / "unknown", IndexedFile(a).dtype) as writer:
        writer.add_document(np.arange(9))
    merge([a, str(tmp_path / "unknown")], str(tmp_path / "some"))
    assert made_with(tmp_path / "some") is None


def test_training_refuses_data_of_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    code, said = job("", flags_of(folder, "a", "b"))
    assert code == 1 and "data-b_text_document was made with another tokenizer" in said
    assert f"HuggingFaceTokenizer of {folder}/b (" in said and f"HuggingFaceTokenizer of {folder}/a (" in said
    code, said = job("", flags_of(folder, "c", "a"))
    assert code == 0 and "not compared" not in said
    prefix = folder / "data-a_text_document"
    for suffix in ("bin", "idx"):  # as Megatron's tools write them
        (tmp_path / f"megatron.{suffix}").symlink_to(f"{prefix}.{suffix}")
    code, said = job("", flags_of(folder, "a", "a").replace(str(prefix), str(tmp_path / "megatron")))
    assert code == 0 and said.count("no tokenizer is noted beside these token files") == 1


def test_a_checkpoint_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    save = f"--save {tmp_path} --train-iters 2"
    assert job(save, flags_of(folder, "a"))[0] == 0
    for more in ("--train-iters 4 --override-opt-param-scheduler", "--finetune"):
        load = f"--load {tmp_path} {more}"
        code, said = job(load, flags_of(folder, "b"))
        assert code == 1 and "the tokenizer is not the one that" in said, said
        assert f"of {folder}/a (" in said and f"of {folder}/b (" in said
        code, said = job(f"{load} --allow-changed-data", flags_of(folder, "b"))
        assert code == 0 and "the tokenizer is not that of" in said, said
        assert job(load, flags_of(folder, "c"))[0] == 0


def test_generation_and_evaluation_refuse_another_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(f"--save {tmp_path}", flags_of(folder, "a"))[0] == 0
    other = f"--load {tmp_path} --device cpu --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/b"
    for command in (generate, evaluate):
        words = ["--prompt", "hello"] if command is generate else ["--data", f"{folder}/text.jsonl"]
        assert command([*other.split(), *words]) == 1
        said = capsys.readouterr().err
        assert f"of {folder}/a (" in said and f"of {folder}/b (" in said and "--allow-changed-data" not in said
    data = f"--load {tmp_path} --device cpu --data {folder}/data-b_text_document"
    assert evaluate(data.split()) == 1
    assert "data-b_text_document was made with another tokenizer" in capsys.readouterr().err
