from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from megapipe.data.corpus import corpus_documents, write_jsonl
from megapipe.errors import ConfigError, DataError


def tree(folder: Path) -> None:
    for i in range(40):
        path = folder / f"{i % 4}" / f"{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number = {i}\n")


def test_standard_library_gives_real_text_up_to_the_limit():
    documents = corpus_documents(None, 2)
    size = sum(len(document.encode()) for document in documents)
    assert 1.8e6 < size <= 2e6
    assert len(documents) > 50
    assert sum("import " in document for document in documents) > 0.8 * len(documents)
    assert documents == corpus_documents(None, 2)
    argparse = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    assert argparse in corpus_documents()


def test_order_is_shuffled_and_depends_on_names_only(tmp_path):
    tree(tmp_path / "a")
    tree(tmp_path / "b")
    first = corpus_documents(tmp_path / "a")
    assert first == corpus_documents(tmp_path / "b")
    in_order = [f"number = {i}\n" for i in range(40)]
    assert sorted(first) == sorted(in_order)
    folders = [int(text.split()[-1]) % 4 for text in first]
    assert len(set(folders[:20])) == len(set(folders[-10:])) == 4  # every part of the tree in every part of the order


def test_binary_hidden_and_foreign_files_are_left_out(tmp_path):
    tree(tmp_path)
    (tmp_path / "x.py").write_bytes(b"\xff\xfe")
    (tmp_path / "y.py").write_bytes(b"a\0b")
    (tmp_path / "z.png").write_text("text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "w.py").write_text("text")
    assert len(corpus_documents(tmp_path)) == 40


def test_json_lines_give_a_document_a_line(tmp_path):
    documents = [f"text {i}" for i in range(30)]
    write_jsonl(documents, tmp_path / "c.jsonl")
    assert [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_text().splitlines()] == documents
    assert sorted(corpus_documents(tmp_path / "c.jsonl")) == sorted(documents)


def test_one_long_text_is_cut_without_loss(tmp_path):
    lines = [
        f"line {i} of a long text, which has a blank one now and then\n" + "\n" * (i % 10 == 0) for i in range(3000)
    ]
    (tmp_path / "book.txt").write_text("".join(lines))
    documents = corpus_documents(tmp_path / "book.txt")
    assert len(documents) > 25
    assert sorted("".join(documents).split("\n")) == sorted("".join(lines).split("\n"))
    assert max(map(len, documents)) < 5000


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "x.txt").write_text("short")
    with pytest.raises(DataError, match=r"gives 1 documents of text; at least 20"):
        corpus_documents(tmp_path / "x.txt")


def test_missing_source_is_an_error():
    with pytest.raises(ConfigError, match="--corpus nowhere"):
        corpus_documents("nowhere")


def test_binary_file_is_an_error(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"a\0b")
    with pytest.raises(DataError, match=r"x\.bin is not a text file in UTF-8"):
        corpus_documents(tmp_path / "x.bin")
