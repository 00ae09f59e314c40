from __future__ import annotations

import gzip
import itertools
import json
import os
import resource
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megapipe.errors import ConfigError, DataError
from megapipe.extras.preprocess.text_source import (
    Problem,
    Record,
    corpus_documents,
    find_files,
    infer_document_unit,
    read_records,
    write_jsonl,
)


def texts(files, unit="file", keys=("text",)):
    return [record.texts(keys) for record in read_records(files, unit, keys=keys)]


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
    "not-json": (b'{"text": "a', r"c.jsonl line 7, byte 109: not JSON .* at column 10\)"),
    "a-list": (b"[1]", "c.jsonl line 7, byte 100: holds a JSON list"),
    "an-array-over-lines": (b"[\n", "a JSON array is not JSON lines: convert it with jq"),
    "no-key": (b'{"body": "a"}', "c.jsonl line 7, byte 100: no text under the key 'text' .it has the keys 'body'"),
    "a-number": (b'{"text": 3}', "no text under the key 'text' .it has int under 'text'"),
    "not-utf8": (b'{"text": "\xff"}', "c.jsonl line 7, byte 110: not UTF-8"),
    "half-a-character": (b'{"text": "\\ud800"}', "line 7, byte 100: an unpaired surrogate escape"),
    "deep": (b"[" * 100_000, "line 7, byte 100: not JSON"),
    "many-digits": (b'{"text": ' + b"9" * 5000 + b"}", "line 7, byte 100: not JSON"),
}


@pytest.mark.parametrize(("content", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_line_is_named_with_file_line_and_byte(content, message):
    with pytest.raises(DataError, match=message):
        Record("c.jsonl", 7, content, True, byte=100).texts(["text"])


def test_both_halves_of_an_escape_are_a_character():
    assert Record("c.jsonl", 1, b'{"text": "\\ud83d\\ude00"}', True).texts(["text"]) == ["😀"]


def zstd(content: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor()
    half = len(content) // 2  # two frames, as from `cat a.zst b.zst`
    return compressor.compress(content[:half]) + compressor.compress(content[half:])


PACKED = {"gz": gzip.compress, "zst": zstd}
LINES = b"".join(b'{"text": "%d"}\n\n' % i for i in range(1000))


@pytest.mark.parametrize("suffix", PACKED)
def test_packed_text_is_read_by_its_first_bytes(suffix, tmp_path):
    path, misnamed = tmp_path / f"c.jsonl.{suffix}", tmp_path / "d.jsonl"
    path.write_bytes(PACKED[suffix](LINES))
    misnamed.write_bytes(PACKED[suffix](LINES))
    assert texts([path]) == texts([misnamed]) == [[str(i)] for i in range(1000)]


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_packed_file_ends_in_a_bad_record(suffix, damage, tmp_path):
    path = tmp_path / f"c.jsonl.{suffix}"
    whole = PACKED[suffix](LINES)
    middle = 3 * len(whole) // 4
    changed = whole[:middle] + bytes(255 - byte for byte in whole[middle:])
    path.write_bytes({"cut": whole[:middle], "empty": b"", "changed": changed}[damage])
    (tmp_path / "z.jsonl").write_text('{"text": "next"}')
    *records, bad, last = list(read_records([path, tmp_path / "z.jsonl"]))
    whole_lines = list(itertools.takewhile(lambda r: not isinstance(r.parse(["text"]), Problem), records))
    assert [record.texts(["text"]) for record in whole_lines] == [[str(i)] for i in range(len(whole_lines))]
    assert bool(whole_lines) == (damage != "empty")
    found = bad.parse(["text"])
    assert isinstance(found, Problem)
    assert "the rest of the file cannot be read" in found.reason
    assert last.texts(["text"]) == ["next"]


def table(texts, **columns):
    return pa.table({"text": texts, "id": list(range(len(texts))), **columns})


def write_parquet(rows, path):
    pq.write_table(rows, path, row_group_size=7)


def write_arrow(rows, path, make=pa.ipc.new_file):
    with make(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)


TABLES = {
    "c.parquet": write_parquet,
    "c.arrow": write_arrow,
    "stream.arrow": lambda rows, path: write_arrow(rows, path, pa.ipc.new_stream),
}
TEXTS = [f"text {i} é" for i in range(30)]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
    ids=["string", "large-string", "dictionary"],
)
def test_a_table_gives_a_document_a_row(name, kind, tmp_path):
    rows = table(pa.array(TEXTS).cast(kind), title=[f"t{i}" for i in range(30)])
    TABLES[name](rows, tmp_path / name)
    assert texts([tmp_path / name], keys=("title", "text")) == [[f"t{i}", text] for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("name", TABLES)
def test_bad_rows_are_named_and_do_not_hide_others(name, tmp_path):
    rows = table(pa.array([b"a", None, b"\xff", b"d"]).cast(pa.binary()).view(pa.string()))
    TABLES[name](rows, tmp_path / name)
    found = [record.parse(["text"]) for record in read_records([tmp_path / name])]
    assert [found[0], found[3]] == [["a"], ["d"]]
    assert found[1].text == f"{tmp_path / name} row 2: null in the column 'text'"
    assert found[2].text == f"{tmp_path / name} row 3: the column 'text' is not UTF-8 at byte 0"


@pytest.mark.parametrize("name", TABLES)
def test_a_cut_table_ends_in_a_bad_record(name, tmp_path):
    TABLES[name](table(TEXTS * 20), tmp_path / name)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    found = [record.parse(["text"]) for record in read_records([tmp_path / name])]
    assert isinstance(found[-1], Problem)
    assert "the rest of the file cannot be read" in found[-1].reason
    assert found[:-1] == [[text] for text in TEXTS * 20][: len(found) - 1]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_the_column_or_text_in_it_is_refused(name, tmp_path):
    TABLES[name](table(TEXTS), tmp_path / name)
    with pytest.raises(DataError, match=r"'body' .*'text', 'id'.*--json-keys"):
        texts([tmp_path / name], keys=("body",))
    with pytest.raises(DataError, match="the column 'id' holds int64, not strings"):
        texts([tmp_path / name], keys=("id",))


@pytest.mark.parametrize(("name", "package"), [("c.parquet", "pyarrow"), ("c.jsonl.zst", "zstandard")])
def test_a_missing_package_is_one_line_that_says_what_to_install(name, package, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package '{package}': run pip install 'megapipe\[data\]'"):
        texts([tmp_path / name])


def saved_dataset(folder, num_files=2, **state):
    folder.mkdir()
    names = [f"data-{i:05d}-of-{num_files:05d}.arrow" for i in range(num_files)]
    for i, name in enumerate(names):
        write_arrow(table([f"{i}"]), folder / name, pa.ipc.new_stream)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train", **state}))
    (folder / "dataset_info.json").write_text("{}")
    return names


def test_a_folder_of_datasets_gives_its_data_files(tmp_path):
    saved_dataset(tmp_path / "train")
    assert texts(find_files([str(tmp_path / "train")])) == [["0"], ["1"]]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"with several splits; name one: .*train"):
        find_files([str(tmp_path)])


def test_a_folder_of_datasets_that_is_not_whole_is_refused(tmp_path):
    names = saved_dataset(tmp_path / "a")
    (tmp_path / "a" / names[1]).unlink()
    with pytest.raises(ConfigError, match=f"its data files are missing: {names[1]}"):
        find_files([str(tmp_path / "a")])
    saved_dataset(tmp_path / "b", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ConfigError, match=r"flatten_indices"):
        find_files([str(tmp_path / "b")])


def test_the_same_file_twice_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    for inputs in (["a.jsonl", "a.*"], ["a.jsonl", "b.jsonl"], ["."]):
        with pytest.raises(ConfigError, match=r"the same file twice: .*a\.jsonl and "):
            find_files([str(tmp_path / name) for name in inputs])


def test_another_compression_is_refused_before_reading(tmp_path):
    (tmp_path / "a.jsonl.xz").write_text("")
    with pytest.raises(ConfigError, match=r"\.gz or \.zst"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "unit"),
    [
        ("a\nb\n\nc\n", "blank-line"),
        ("a\nb\nc\n", "line"),
        ("a\n", "file"),
        ("", "file"),
        ("line\n" * 200 + "\n" + "line\n" * 200, "line"),  # one stray blank line
    ],
    ids=["paragraphs", "lines", "one-line", "empty", "stray"],
)
def test_the_document_unit_of_a_file_is_inferred(content, unit, tmp_path):
    (tmp_path / "x.txt").write_text(content)
    assert infer_document_unit(tmp_path / "x.txt")[0] == unit


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "b"}')
    assert texts([tmp_path / "x.txt", tmp_path / "x.jsonl"]) == [["a"], ["b"]]


MIXED_UNITS = ["file", "line", "blank-line"]


@pytest.mark.parametrize("unit", MIXED_UNITS)
def test_reading_goes_on_after_any_record(unit, tmp_path):
    write_parquet(table(TEXTS), tmp_path / "a.parquet")
    write_arrow(table(TEXTS), tmp_path / "b.arrow")
    (tmp_path / "c.txt").write_text("a\nb\n\n\nc d\n\n e")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "e.jsonl.zst").write_bytes(zstd(LINES[:500]))
    (tmp_path / "f.jsonl").write_bytes(LINES[:100])
    files = sorted(tmp_path.iterdir())
    whole = list(read_records(files, unit))
    for place, record in enumerate(whole):
        assert list(read_records(files, unit, start=record.end)) == whole[place + 1 :]


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


@pytest.mark.parametrize("suffix", ["zst", "gz"])
@pytest.mark.parametrize("unit", ["line", "blank-line", "file"])
def test_a_document_without_end_is_a_bad_record_in_bounded_memory(unit, suffix, tmp_path):
    """A line of 512 MiB in 16 KB of zst takes less than half of that."""
    huge, path = 1 << 29, tmp_path / f"c.txt.{suffix}"
    if suffix == "zst":
        packer = zstandard.ZstdCompressor().compressobj()
        with open(path, "wb") as file:
            file.write(packer.compress(b"first\n\n"))
            for _ in range(huge >> 24):
                file.write(packer.compress(bytes(1 << 24)))
            file.write(packer.compress(b"\n\nlast\n") + packer.flush())
    else:
        huge = 1 << 26  # which gzip unpacks more slowly
        content = b"first\n\n" + bytes(huge) + b"\n\nlast\n"
        path.write_bytes(gzip.compress(content, 1))
    limit = 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = [record.parse(["text"]) for record in read_records([path], unit, most_bytes=limit)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 250 << 10
    rule = "the document has more than 1,048,576 bytes (--max-document-bytes)"
    if unit == "file":
        assert found == [Problem(str(path), "", 0, 0, rule)]
    else:
        first = "first" if unit == "line" else "first\n"
        assert [found[0][0].rstrip(), found[1], found[2][0].rstrip()] == [
            first.rstrip(),
            Problem(str(path), "line", 3, 7, rule),
            "last",
        ]
        assert len(found) == 3


def test_the_limit_of_a_document_is_in_bytes_of_its_text(tmp_path):
    path = tmp_path / "c.txt"
    path.write_bytes(b"12345\n123456\n\n1234567\n123456\r7\n       8\n9")
    found = [record.parse(["text"]) for record in read_records([path], "line", most_bytes=6)]
    assert [one if isinstance(one, list) else one.number for one in found] == [["12345"], ["123456"], 4, 5, 6, ["9"]]
