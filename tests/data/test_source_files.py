"""Token files that change during a run are found, by size and time and by sampled blocks; touched ones are accepted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.data import fingerprint
from megapipe.data.build_datasets import build_datasets
from megapipe.data.dataset import SyntheticDataset
from megapipe.data.fingerprint import COMPARED_BLOCKS, SourceFiles, files_in_use
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.index_cache import IndexCache
from megapipe.errors import DataError
from tests.data.fixtures import FOLDER, request_of, write_file


def other_bytes(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes(255 - byte for byte in content))


def replaced(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes()[::-1])
    os.replace(path.with_suffix(".new"), path)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "overwritten": (other_bytes, "180 bytes, checksum"),
    "cut": (lambda path: os.truncate(path, 90), "90 bytes, checksum"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"1"), "181 bytes, checksum"),
    "replaced": (replaced, "180 bytes, checksum"),
    "vanished": (Path.unlink, r"which cannot be read \(No such file or directory\)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_named_with_what_it_was_and_is(tmp_path: Path, change: str) -> None:
    write_file(tmp_path / "x", [40, 50])
    path = tmp_path / "x.bin"
    files = SourceFiles([path, tmp_path / "x.idx", path])
    assert files.look() == files.compare() == ()
    act, now = CHANGES[change]
    act(path)
    for check in (files.look, files.compare):
        rule = rf"token file {path} has changed since the run began: 180 bytes, checksum \w{{8}} then, {now}"
        with pytest.raises(DataError, match=rule):
            check()


def test_a_file_that_is_touched_or_replaced_by_its_copy_is_accepted_with_one_remark(tmp_path: Path) -> None:
    write_file(tmp_path / "x", [40, 50])
    path, copy = tmp_path / "x.bin", tmp_path / "copy"
    files = SourceFiles([path])
    os.utime(path, (1, 1))
    (remark,) = files.look()
    assert f"token file {path} was written to or touched during the run" in remark
    assert files.look() == files.compare() == ()
    copy.write_bytes(path.read_bytes())
    os.replace(copy, path)
    (remark,) = files.look()
    assert "was replaced during the run" in remark and files.look() == ()


def test_a_change_that_keeps_size_and_time_is_found_in_the_sampled_blocks(tmp_path: Path) -> None:
    path, (count, block_bytes) = tmp_path / "x.bin", COMPARED_BLOCKS
    path.write_bytes(bytes(2 * count * block_bytes))
    files, before = SourceFiles([path]), os.stat(path)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for check in (files.look, files.compare):  # the time of a change of the inode cannot be set
        with pytest.raises(DataError, match="has changed since the run began"):
            check()


def test_an_index_that_is_changed_in_place_is_named_and_one_that_is_removed_is_not(tmp_path: Path) -> None:
    file = write_file(tmp_path / "x", [40, 50, 60])
    cache = IndexCache(tmp_path / "cache", True)
    dataset = GPTDataset(file, (0, 3), num_samples=8, seq_length=4, seed=1, cache=cache)
    before, found = [sample.tolist() for sample in map(dataset.__getitem__, range(8))], files_in_use((dataset,))
    arrays = {path.stem: path for path in found if path.suffix == ".npy"}
    assert sorted(arrays) == ["documents", "offsets", "places", "shuffle"]
    files = SourceFiles(found)
    assert files.look() == files.compare() == ()
    arrays["places"].unlink()
    assert files.look() == files.compare() == ()
    assert [sample.tolist() for sample in map(dataset.__getitem__, range(8))] == before
    size = os.path.getsize(arrays["shuffle"])
    with open(arrays["shuffle"], "r+b") as stored:
        stored.write(bytes(size))
    for check in (files.look, files.compare):
        with pytest.raises(DataError, match=f"index {arrays['shuffle']} has changed since the run began"):
            check()


def test_files_of_a_large_blend_are_looked_at_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MOST_LOOKS", 2)
    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        path.write_bytes(b"1234")
    files = SourceFiles(paths)
    paths[4].write_bytes(b"12")
    assert files.look() == files.look() == ()
    with pytest.raises(DataError, match=f"token file {paths[4]} has changed"):
        files.look()


def test_the_files_of_a_run_are_those_of_all_its_data_sets_once(tmp_path: Path) -> None:
    datasets = build_datasets(request_of("blend_weights", tmp_path))
    used = files_in_use((datasets.train, datasets.valid, datasets.test, None, SyntheticDataset(1, 4, 8, 1)))
    names = sorted(path.name for path in SourceFiles(used).paths)
    names = [name for name in names if not name.endswith(".npy")]
    assert len(names) == len(set(names)) == 6
    assert {path.parent for path in used if path.suffix != ".npy"} == {FOLDER}
    assert files_in_use((None, SyntheticDataset(1, 4, 8, 1))) == ()
