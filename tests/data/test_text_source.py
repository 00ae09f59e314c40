from __future__ import annotations

import gzip

import pytest

from megapipe.data.text_source import Record, find_files, read_records
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
def test_plain_text_is_cut_as_asked(unit, documents, tmp_path):
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
        (["nowhere"], [], "--input nowhere: there is no such"),
        (["."], [".none-such"], "holds no file whose name ends in .none-such"),
    ],
    ids=["missing", "no-suffix"],
)
def test_input_that_gives_nothing_is_refused(inputs, suffixes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_files(inputs, suffixes)


FAULTS = {
    "not-json": (b'{"text": "a', "c.jsonl line 7 is not JSON: .* at column"),
    "a-list": (b"[1]", "c.jsonl line 7 holds a JSON list"),
    "no-key": (b'{"body": "a"}', "c.jsonl line 7 has no text under the key 'text' .it has the keys 'body'"),
    "a-number": (b'{"text": 3}', "has no text under the key 'text' .it has int under 'text'"),
    "not-utf8": (b'{"text": "\xff"}', "c.jsonl line 7: byte 10 is not UTF-8"),
    "half-a-character": (b'{"text": "\\ud800"}', "line 7: an escape .* without its other half"),
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
