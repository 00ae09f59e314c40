from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data import indexed_file
from megapipe.data.indexed_file import DTYPES, IndexedFile, merge, prefixes_in, token_dtype
from megapipe.errors import ConfigError, DataError
from tests.data.fixtures import FOLDER, write_file
from tests.token_files import IndexedWriter


def test_reads_uint16_file_of_megatron():
    file = IndexedFile(FOLDER / "tiny_uint16")
    assert file.dtype == np.uint16
    assert file.lengths.tolist() == [4, 2, 4, 2]
    assert file.documents.tolist() == [0, 1, 3, 4]
    assert (file.num_documents, file.num_tokens, file.modes) == (3, 12, None)
    assert file.read(0).tolist() == [1, 2, 3, 0]
    assert file.read(2, 1, 2).tolist() == [7, 8]


def test_reads_modes_of_a_multimodal_file_by_its_length():
    file = IndexedFile(FOLDER / "tiny_multimodal")
    assert file.dtype == np.int32
    assert file.lengths.tolist() == [2, 1]
    assert file.modes is not None
    assert file.modes.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["tiny_uint16", "tiny_multimodal", "corpusA"])
def test_writing_what_was_read_gives_the_same_bytes(name, tmp_path):
    file = IndexedFile(FOLDER / name)
    with IndexedWriter(tmp_path / "copy", file.dtype, multimodal=file.modes is not None) as writer:
        for begin, end in zip(file.documents[:-1], file.documents[1:], strict=True):
            modes = None if file.modes is None else file.modes[begin:end].tolist()
            writer.add_document(
                np.concatenate([file.read(s) for s in range(begin, end)]),
                lengths=file.lengths[begin:end].tolist(),
                modes=modes,
            )
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path / 'copy'}{suffix}").read_bytes() == Path(f"{FOLDER / name}{suffix}").read_bytes()


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), max_size=6),
    code=st.sampled_from(sorted(DTYPES)),
)
def test_written_documents_are_read_back(documents, code, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("file") / "x"
    with IndexedWriter(prefix, DTYPES[code]) as writer:
        for sequences in documents:
            writer.add_document(
                [token for sequence in sequences for token in sequence], lengths=[len(s) for s in sequences]
            )
    file = IndexedFile(prefix)
    assert file.dtype == DTYPES[code]
    read = [
        [file.read(s).tolist() for s in range(a, b)]
        for a, b in zip(file.documents[:-1], file.documents[1:], strict=True)
    ]
    assert read == documents


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32), (257, np.uint16)], ids=["below", "at", "bytes"]
)
def test_dtype_follows_the_vocabulary_at_65500(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


def damaged(tmp_path: Path, suffix: str, change) -> Path:
    write_file(tmp_path / "x", [3, 4, 5])
    path = tmp_path / f"x{suffix}"
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))
    return tmp_path / "x"


def put(position: int, layout: str, value: int):
    def change(content: bytearray) -> bytearray:
        struct.pack_into(layout, content, position, value)
        return content

    return change


FAULTS = {
    "bad-magic": (".idx", put(0, "B", 88), r"x\.idx starts with b'XMIDIDX"),
    "version-2": (".idx", put(9, "<Q", 2), r"x\.idx has format version 2; only version 1"),
    "unknown-dtype": (".idx", put(17, "B", 99), r"x\.idx has dtype code 99"),
    "header-cut": (".idx", lambda c: c[:20], r"x\.idx has 20 bytes, less than the 34"),
    "index-cut": (".idx", lambda c: c[:-1], r"x\.idx has 101 bytes, but 3 sequences and 4 document starts need 102"),
    "index-long": (".idx", lambda c: c + b"12", r"x\.idx has 104 bytes.* need 102 .105 with modes.: it is damaged"),
    "huge-count": (".idx", put(18, "<Q", 1 << 60), r"x\.idx has 102 bytes, but 1152921504606846976 sequences"),
    "bin-cut": (
        ".bin",
        lambda c: c[:-1],
        r"x\.bin has 23 bytes, but x\.idx places sequence 2 \(5 tokens of 2 bytes\) at byte 14",
    ),
    "bin-empty": (".bin", lambda c: b"", r"x\.bin has 0 bytes, but x\.idx places sequence 0"),
    "offset-beyond": (".idx", put(34 + 12 + 8, "<q", 1000), r"sequence 1 \(4 tokens of 2 bytes\) at byte 1000"),
    "offset-negative": (".idx", put(34 + 12 + 8, "<q", -8), r"sequence 1 .* at byte -8"),
    "length-negative": (".idx", put(34 + 4, "<i", -4), r"x\.idx: sequence 1 has a length of -4"),
    "offset-near-2-63": (".idx", put(34 + 12 + 8, "<q", 2**63 - 4), r"sequence 1 .* at byte 9223372036854775804"),
    "offset-changed": (".idx", put(34 + 12 + 8, "<q", 8), r"its 12 tokens of 2 bytes .* do not fill x\.bin"),
    "length-changed": (".idx", put(34, "<i", 2), r"its 11 tokens of 2 bytes .* do not fill x\.bin, which has 24 bytes"),
    "another-dtype": (".idx", put(17, "B", 1), r"its 12 tokens of 1 bytes .uint8. do not fill x\.bin"),
    "bin-long": (".bin", lambda c: c + b"12", r"do not fill x\.bin, which has 26 bytes"),
    "documents-near-2-63": (".idx", put(102 - 24, "<q", 2**63 - 1), r"document 2 starts at sequence 2, before"),
    "documents-end": (".idx", put(102 - 8, "<q", 7), r"must run from 0 to the number of sequences, 3, but hold 0 .. 7"),
    "documents-fall": (".idx", put(102 - 24, "<q", 3), r"document 2 starts at sequence 2, before"),
}


@pytest.mark.parametrize(("suffix", "change", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_damage_is_named_with_file_and_number(suffix, change, message, tmp_path):
    with pytest.raises(DataError, match=message):
        IndexedFile(damaged(tmp_path, suffix, change))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(suffix, tmp_path):
    write_file(tmp_path / "x", [3])
    (tmp_path / f"x{suffix}").unlink()
    with pytest.raises(DataError, match=rf"no token file .*x\{suffix}"):
        IndexedFile(tmp_path / "x")


TINY = str(FOLDER / "tiny_uint16")


def test_an_interrupted_merge_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write_file(tmp_path / "x", [3])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupt(*rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(indexed_file, "write_index", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge([TINY], str(tmp_path / "x"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_crash_between_the_two_renames_leaves_no_index_beside_a_foreign_bin(tmp_path, monkeypatch):
    write_file(tmp_path / "x", [3])
    replace = os.replace

    def crash_at_index(source, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash_at_index)
    with pytest.raises(KeyboardInterrupt):
        merge([TINY], str(tmp_path / "x"))
    with pytest.raises(DataError, match=r"no token file .*x\.idx"):
        IndexedFile(tmp_path / "x")


def test_full_disk_is_a_data_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        merge([TINY], str(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_merge_equals_megatrons_to_the_byte(tmp_path):
    merge([TINY, TINY], str(tmp_path / "merged"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (FOLDER / f"tiny_merged{suffix}").read_bytes()


@settings(max_examples=20)
@given(parts=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4))
def test_merge_holds_the_documents_of_all_in_order(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    files = [write_file(folder / str(i), lengths) for i, lengths in enumerate(parts)]
    merged = merge([file.prefix for file in files], str(folder / "all"))
    assert merged.lengths.tolist() == [length for lengths in parts for length in lengths]
    assert [merged.read(s).tolist() for s in range(len(merged))] == [
        file.read(s).tolist() for file in files for s in range(len(file))
    ]
    assert merged.num_documents == sum(file.num_documents for file in files)


def test_modes_survive(tmp_path):
    multimodal = str(FOLDER / "tiny_multimodal")
    merged = merge([multimodal, multimodal], str(tmp_path / "m"))
    assert merged.modes is not None
    assert merged.modes.tolist() == [0, 1, 0, 1]
    assert merged.documents.tolist() == [0, 2, 4]


def test_merge_puts_sequences_in_order(tmp_path):
    file = write_file(tmp_path / "x", [2, 3])
    index = bytearray(Path(tmp_path / "x.idx").read_bytes())
    index[34:42] = np.array([3, 2], "<i4").tobytes()
    index[42:58] = np.array([4, 0], "<i8").tobytes()  # the second document comes first
    Path(tmp_path / "x.idx").write_bytes(index)
    del file
    merged = merge([str(tmp_path / "x")], str(tmp_path / "y"))
    assert [merged.read(s).tolist() for s in range(2)] == [[2, 3, 4], [0, 1]]
    assert merged.is_contiguous()


def test_different_dtypes_are_refused_and_nothing_is_left(tmp_path):
    write_file(tmp_path / "wide", [3], "i4")
    with pytest.raises(DataError, match=r"wide .*int32, .*uint16"):
        merge([TINY, str(tmp_path / "wide")], str(tmp_path / "all"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wide.bin", "wide.idx"]


def test_plain_and_multimodal_are_not_mixed(tmp_path):
    with IndexedWriter(tmp_path / "plain", "i4") as writer:
        writer.add_document([1])
    with pytest.raises(DataError, match="multimodal, unlike the files before it"):
        merge([str(tmp_path / "plain"), str(FOLDER / "tiny_multimodal")], str(tmp_path / "all"))


def test_output_over_an_input_is_refused(tmp_path):
    write_file(tmp_path / "x", [3])
    with pytest.raises(ConfigError, match="is one of the files to merge"):
        merge([str(tmp_path / "x")], str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="is one of the files to merge"):
        merge([TINY, str(tmp_path / "x")], str(tmp_path / "x"))
    write_file(tmp_path / "y", [3])
    merge([TINY], str(tmp_path / "y"))  # overwriting another file is allowed
    assert IndexedFile(tmp_path / "y").num_tokens == 12
    assert IndexedFile(tmp_path / "x").num_tokens == 3


def test_a_folder_means_its_files_sorted_by_name(tmp_path):
    for name in ("b", "a"):
        write_file(tmp_path / name, [3])
    assert prefixes_in(tmp_path) == [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(ConfigError, match=r"holds no \.idx file"):
        prefixes_in(FOLDER.parent)


@pytest.mark.parametrize("fault", ["offset-beyond", "offset-negative", "length-negative", "bin-cut"])
def test_a_file_opened_without_the_check_refuses_the_damaged_sequence(fault, tmp_path):
    file = IndexedFile(damaged(tmp_path, *FAULTS[fault][:2]), check=False)
    with pytest.raises(DataError, match="sequence"):
        [file.read(number) for number in range(len(file))]
    with pytest.raises(DataError, match=FAULTS[fault][2]):
        file.check()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_reading_a_file_that_was_cut_names_it_instead_of_killing_the_process(tmp_path: Path, suffix: str) -> None:
    file, path = write_file(tmp_path / "x", [40, 50]), tmp_path / f"x.{suffix}"
    os.truncate(path, 20)
    with pytest.raises(DataError, match=f"token file {path} was cut since it was opened: it ends at byte "):
        file.read(1)
