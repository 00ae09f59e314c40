from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import ConfigError, DataError
from megapipe.extras.preprocess import merge as module
from megapipe.extras.preprocess.merge import merge, prefixes_in
from tests.data.fixtures import FOLDER, write_file
from tests.token_files import IndexedWriter

TINY = str(FOLDER / "tiny_uint16")


def test_an_interrupted_merge_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write_file(tmp_path / "x", [3])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupt(*rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_index", interrupt)
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
