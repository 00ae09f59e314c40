from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.indexed_file import DTYPES, IndexedFile, token_dtype
from megapipe.errors import DataError
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
