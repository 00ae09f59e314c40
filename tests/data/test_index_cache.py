from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from megapipe.data import index_cache as module
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.index_cache import IndexCache, file_stamp, source_stamp
from megapipe.errors import ConfigError
from tests.data.fixtures import write_file

ARRAYS = {"numbers": np.arange(1000, dtype=np.uint32)}


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_second_use_maps_what_the_first_stored(tmp_path):
    cache, built = IndexCache(tmp_path, True), []

    def build():
        built.append(1)
        return ARRAYS

    first, second = (cache.arrays("kind", {"seed": 1}, build)["numbers"] for _ in range(2))
    assert len(built) == 1
    assert isinstance(second, np.memmap)
    np.testing.assert_array_equal(first, second)
    cache.arrays("kind", {"seed": 2}, build)
    assert len(built) == 2
    assert len(entries(tmp_path)) == 2


def build_and_sum(folder: str, gate, results) -> None:
    def build():
        with open(Path(folder) / ".builders", "a") as file:
            file.write("x")
        time.sleep(0.05)  # long enough for the other processes to arrive during the build
        return ARRAYS

    gate.wait()
    cached = IndexCache(Path(folder), True).arrays("kind", {"seed": 1}, build)
    results.put(int(cached["numbers"].sum()))


def test_processes_that_start_together_all_succeed_and_one_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=build_and_sum, args=(str(tmp_path), gate, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    sums = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert sums == [499500] * 4
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / ".builders").read_text() == "x"
    assert len(entries(tmp_path)) == 1


def test_a_race_without_locks_still_ends_in_one_whole_entry(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    cache = IndexCache(tmp_path, True)

    def build():  # another process stores the same entry during the build
        return cache.arrays("kind", {"seed": 1}, lambda: ARRAYS) if not entries(tmp_path) else ARRAYS

    np.testing.assert_array_equal(cache.arrays("kind", {"seed": 1}, build)["numbers"], ARRAYS["numbers"])
    assert len(entries(tmp_path)) == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.is_dir()]


def test_unwritable_requested_folder_is_an_error(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"--data-cache-path .*taken cannot be written"):
        IndexCache.at(str(tmp_path / "taken"), "x").arrays("kind", {}, lambda: ARRAYS)


def test_unwritable_default_folder_keeps_the_index_in_memory(tmp_path):
    (tmp_path / "cache").write_text("a file")
    cache = IndexCache.at(None, str(tmp_path / "x"))
    assert cache.folder == tmp_path / "cache"
    assert cache.arrays("kind", {}, lambda: ARRAYS) is ARRAYS


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut": lambda entry: os.truncate(entry / "numbers.npy", 200),
    "flipped bit": lambda entry: flip(entry / "numbers.npy", -1),
    "gone": lambda entry: (entry / "numbers.npy").unlink(),
    "empty array": lambda entry: os.truncate(entry / "numbers.npy", 0),
    "empty description": lambda entry: os.truncate(entry / "description.json", 0),
    "nested description": lambda entry: (entry / "description.json").write_text("[" * 100_000),
    "another description": lambda entry: flip(entry / "description.json", 40),
    "folder for a file": lambda entry: ((entry / "numbers.npy").unlink(), (entry / "numbers.npy").mkdir()),
    "file for a folder": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_built_again_and_never_used(damage, tmp_path, caplog):
    cache = IndexCache(tmp_path, True)
    cache.arrays("kind", {}, lambda: ARRAYS)
    damage(tmp_path / entries(tmp_path)[0])
    for _ in range(2):
        np.testing.assert_array_equal(cache.arrays("kind", {}, lambda: ARRAYS)["numbers"], ARRAYS["numbers"])
    assert caplog.text.count("is a damaged index") == 1
    assert len(entries(tmp_path)) == 1


def test_a_start_reads_no_array_that_has_not_changed_since_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    read = []
    checksum = module._checksum
    monkeypatch.setattr(module, "_checksum", lambda path: read.append(path.name) or checksum(path))

    def start() -> list[str]:
        read.clear()
        found = IndexCache(tmp_path, True).arrays("kind", {}, lambda: ARRAYS)
        np.testing.assert_array_equal(found["numbers"], ARRAYS["numbers"])
        return list(read)

    assert start() == ["numbers.npy"]  # written
    assert start() == []
    os.utime(tmp_path / entries(tmp_path)[0] / "numbers.npy")  # as after a copy
    assert start() == ["numbers.npy"]
    assert start() == []


def test_a_file_that_has_just_changed_is_read_again_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", 10**18)
    cache = IndexCache(tmp_path, True)
    cache.arrays("kind", {}, lambda: ARRAYS)
    path = tmp_path / entries(tmp_path)[0] / "description.json"
    assert json.loads(path.read_text())["stamps"] == {}


def test_changed_data_meets_no_old_index(tmp_path):
    def samples(lengths):
        file = write_file(tmp_path / "x", lengths)
        dataset = GPTDataset(
            file, (0, len(file)), num_samples=5, seq_length=4, seed=1, cache=IndexCache(tmp_path / "c", True)
        )
        return [dataset[i].tolist() for i in range(len(dataset))]

    first = samples([9, 9, 9])
    assert samples([3, 9, 15]) != first  # the same number of tokens, and the same sizes of both files
    assert len(entries(tmp_path / "c")) == 2


@pytest.mark.parametrize("name", ["x.idx", "x.jsonl"])
def test_a_source_that_is_overwritten_with_its_time_restored_has_another_stamp(tmp_path, name):
    write_file(tmp_path / "x", [9, 9, 9])
    (tmp_path / "x.jsonl").write_text("[" * 90)
    path = tmp_path / name

    def stamp():
        return source_stamp(str(tmp_path / "x")) if name == "x.idx" else file_stamp(str(path))

    first, times = stamp(), os.stat(path)
    flip(path, 50)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamp() != first
    flip(path, 50)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamp() == first
