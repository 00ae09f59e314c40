"""Fingerprints differ between training data, and are equal for the same data in another place or for a longer run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.config.files import DataConfig
from megapipe.data.build_datasets import DatasetRequest, build_datasets
from megapipe.data.fingerprint import Fingerprint, differences, fingerprint, has_another_order, sampled_checksum
from tests.token_files import IndexedWriter
from tests.train.jobs import TINY, job

LENGTHS = [20, 40, 31, 7, 100, 12, 55, 64, 90, 81]


def write(prefix: Path, salt: int = 0, lengths: list[int] = LENGTHS) -> str:
    with IndexedWriter(prefix, "u2") as writer:
        for number, length in enumerate(lengths):
            writer.add_document((np.arange(length) * 7 + number + salt) % 31)
    return str(prefix)


def found(*path: str, num_samples: int = 20, seq_length: int = 8, **flags: Any) -> Fingerprint:
    """Return the fingerprint of the training part of a blend; of generated tokens without a path."""
    data = DataConfig(**({"data_path": path} if path else {"mock_data": True}) | {"split": "8,2,0"} | flags)
    built = build_datasets(DatasetRequest(data, seq_length, 1, (num_samples, 4, 0), 32))
    assert built.train is not None
    result = fingerprint(built.train)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("tokens")
    return write(root / "a"), write(root / "b", salt=3)


def test_the_same_data_elsewhere_or_for_longer_are_the_same(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = files
    for suffix in ("bin", "idx"):
        shutil.copy(f"{a}.{suffix}", tmp_path / f"moved.{suffix}")
        os.utime(tmp_path / f"moved.{suffix}", (1, 1))
    moved, saved = str(tmp_path / "moved"), found(a)
    for own in (
        found(moved),
        found(a, split="80,20"),
        found(a, split="0.8,0.1,0.1"),
        found(a, data_cache_path=str(tmp_path / "cache")),
        found(a, num_samples=40),
    ):
        assert differences(saved, own) == [] and not has_another_order(saved, own)
    many_epochs = found(a, num_samples=400)
    assert differences(saved, many_epochs) == [] and has_another_order(saved, many_epochs)
    blend = found("3", a, "1", b)
    assert differences(blend, found("0.75", moved, "0.25", b, num_samples=24)) == []
    assert differences(found(), found(num_samples=1000)) == []


def test_other_data_are_found_with_both_sides(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = files
    saved = found(a)
    (line,) = differences(saved, found(b))
    assert line.startswith(f"{a} (sequences 0 to 7; 1,000 and ") and f" in the checkpoint, {b} (sequences 0" in line
    assert differences(saved, found(write(tmp_path / "cut", lengths=LENGTHS[:-1]), split="1"))
    assert differences(saved, found(a, split="9,1"))
    assert differences(saved, found(a, seq_length=16)) == ["--seq-length: 8 in the checkpoint, 16 here"]
    assert differences(saved, found()) == [f"{a} in the checkpoint, generated tokens (--mock-data) here"]
    assert differences(found(), saved) == [f"generated tokens (--mock-data) in the checkpoint, {a} here"]
    blend = found("3", a, "1", b)
    assert len(differences(blend, found("3", a, "2", b))) == 2
    assert len(differences(blend, found("3", b, "1", a))) == 2
    assert differences(blend, saved) == [f"2 files in the checkpoint, 1 here: {a}, {b}; {a}"]


def test_large_files_are_sampled_from_the_first_to_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = np.random.default_rng(0).bytes(10_000)
    path.write_bytes(content)
    whole, sampled = sampled_checksum(path, 100, 100), sampled_checksum(path, 4, 100)
    for position, in_a_block in ((0, True), (9_999, True), (3_350, True), (1_000, False)):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert sampled_checksum(path, 100, 100) != whole
        assert (sampled_checksum(path, 4, 100) != sampled) == in_a_block
    path.write_bytes(b"")
    assert sampled_checksum(path, 4, 100) == 0


def test_a_run_resumes_with_its_data_or_on_purpose_with_others(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = files
    assert "--mock-data" in TINY
    run = f"--train-iters 3 --lr-decay-style constant --split 8,2,0 --save {tmp_path / 'run'}"
    real = TINY.replace("--mock-data ", "")
    assert job(f"{run} --data-path {a} --exit-interval 1", real)[0] == 0
    load = f"{run} --load {tmp_path / 'run'}"
    code, said = job(f"{load} --data-path {b} --exit-interval 2", real)
    assert code == 1 and f"  data:\n    {a} (sequences" in said and "or give --allow-changed-data if" in said
    code, said = job(f"{load} --exit-interval 2", TINY)
    assert code == 1 and f"{a} in the checkpoint" in said
    code, said = job(f"{load} --data-path {b} --exit-interval 2 --allow-changed-data", real)
    assert code == 0 and "  data (--allow-changed-data):\n    " in said
    code, said = job(f"{load} --data-path {b}", real)
    assert code == 0 and "training data are not" not in said
    # its end is reached: the same command again, with the data moved, finds it saved
    for suffix in ("bin", "idx"):
        shutil.copy(f"{b}.{suffix}", tmp_path / f"moved.{suffix}")
    code, said = job(f"{load} --data-path {tmp_path / 'moved'}", real)
    assert code == 0 and "was already saved" in said, said
