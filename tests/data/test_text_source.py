from __future__ import annotations

import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from megapipe.data.text_source import Record, corpus_documents, find_files, read_records, write_jsonl
from megapipe.errors import ConfigError, DataError


def texts(files, unit="file", keys=("text",)):
    return [record.texts(keys) for record in read_records(files, unit)]


@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.jsonl.gz"])
def test_json_lines_give_a_document_a_line_and_skip_blank_ones(name, tmp_path):
    content = b'{"text": "a\\n\\u00e9", "title": "t"}\n\n{"title": "u", "text": ""}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts([tmp_path / name], keys=("text", "title")) == [["a\né", "t"], ["", "u"]]


@pytest.mark.parametrize(
    ("unit", "documents"),
    [("file", ["a\nb\n\n\nc d\n"]), ("line", ["a", "b", "c d"]), ("blank-line", ["a\nb\n", "c d\n"])],
)
def test_plain_text_is_cut_by_document_unit(unit, documents, tmp_path):
    (tmp_path / "x.txt").write_text("a\nb\n\n\nc d\n")
    assert texts([tmp_path / "x.txt"], unit) == [[document] for document in documents]


def test_directory_gives_visible_files_with_the_suffix_in_order(tmp_path):
    for name in ("b/2.py", "b/1.py", "a.py", "c.md", ".git/x.py", "b/.y.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [str(path.relative_to(tmp_path)) for path in find_files([str(tmp_path)], [".py"])] == [
        "a.py",
        "b/1.py",
        "b/2.py",
    ]
    assert len(find_files([str(tmp_path / "b" / "*.py"), str(tmp_path / "c.md")])) == 3


@pytest.mark.parametrize(
    ("inputs", "suffixes", "message"),
    [
        (["nowhere"], [], "--input nowhere: no such file"),
        (["."], [".none-such"], "holds no file whose name ends in .none-such"),
    ],
    ids=["missing", "no-suffix"],
)
def test_input_without_text_is_refused(inputs, suffixes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_files(inputs, suffixes)


FAULTS = {
    "not-json": (b'{"text": "a', "c.jsonl line 7 is not JSON: .* at column"),
    "a-list": (b"[1]", "c.jsonl line 7 holds a JSON list"),
    "no-key": (b'{"body": "a"}', "c.jsonl line 7 has no text under the key 'text' .it has the keys 'body'"),
    "a-number": (b'{"text": 3}', "has no text under the key 'text' .it has int under 'text'"),
    "not-utf8": (b'{"text": "\xff"}', "c.jsonl line 7: byte 10 is not UTF-8"),
    "half-a-character": (b'{"text": "\\ud800"}', "line 7: an unpaired surrogate escape"),
}


@pytest.mark.parametrize(("content", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_line_is_named_with_file_and_number(content, message):
    with pytest.raises(DataError, match=message):
        Record("c.jsonl", 7, content, True).texts(["text"])


def test_both_halves_of_an_escape_are_a_character():
    assert Record("c.jsonl", 1, b'{"text": "\\ud83d\\ude00"}', True).texts(["text"]) == ["😀"]


def test_damaged_gzip_is_named(tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot read .*c\.jsonl\.gz"):
        texts([tmp_path / "c.jsonl.gz"])


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
    assert len(set(folders[:20])) == len(set(folders[-10:])) == 4  # every subtree at every position in the order


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
