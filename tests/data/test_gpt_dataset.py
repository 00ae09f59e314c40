from __future__ import annotations

import hashlib

import numpy as np
import pytest

from megapipe.data.blend import BlendedDataset
from megapipe.data.build_datasets import build_datasets
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.errors import DataError
from tests.data.fixtures import FOLDER, RUNS, expected, request_of, write_file


@pytest.mark.parametrize("run", RUNS)
def test_every_sample_equals_megatrons(run, tmp_path):
    built = build_datasets(request_of(run, tmp_path))
    for part, told in zip(("train", "valid", "test"), expected(run)["datasets"], strict=True):
        dataset = getattr(built, part)
        if told is None:
            assert dataset is None
            continue
        samples = np.stack([dataset[i] for i in range(len(dataset))])
        assert samples.dtype == np.int64
        np.testing.assert_array_equal(samples, np.load(FOLDER / f"expect_{run}_{part}.npy"))
        assert hashlib.sha256(samples.tobytes()).hexdigest() == told["sha256_all"]
        assert len(dataset) == told["len"]
        assert dataset[0].tolist() == told["first_sample"]


@pytest.mark.parametrize("run", RUNS)
def test_every_index_equals_megatrons(run, tmp_path):
    built = build_datasets(request_of(run, tmp_path))
    num_compared = 0
    for part, told in zip(("train", "valid", "test"), expected(run)["datasets"], strict=True):
        if told is None:
            continue
        dataset = getattr(built, part)
        if isinstance(dataset, BlendedDataset):
            assert dataset.dataset_index.tolist() == told["dataset_index"]
            assert dataset.sample_index.tolist() == told["dataset_sample_index"]
            assert [str(dataset.dataset_index.dtype), str(dataset.sample_index.dtype)] == told["dtypes"]
            assert list(dataset.weights) == told["weights"]
        for member, mid in zip(getattr(dataset, "members", (dataset,)), told["mid"], strict=True):
            assert member.num_asked == mid["num_samples"]
            assert member.sequences == tuple(mid["indices"])
            assert member.index.documents.tolist() == mid["document_index"]
            assert member.index.boundaries().tolist() == mid["sample_index"]
            assert member.index.shuffle.tolist() == mid["shuffle_index"]
            num_compared += 1
    assert num_compared == {"single_1epoch": 3, "single_2p5epoch": 1, "blend_weights": 6}[run]


def test_sample_outside_is_an_index_error(tmp_path):
    dataset = GPTDataset(write_file(tmp_path / "x", [40]), (0, 1), num_samples=3, seq_length=8, seed=1)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {index} of a data set of 4 samples"):
            dataset[index]


def test_range_without_tokens_is_named(tmp_path):
    file = write_file(tmp_path / "x", [5, 0, 0])
    with pytest.raises(DataError, match=r"sequences 1\.\.3 of 3 hold no token"):
        GPTDataset(file, (1, 3), num_samples=3, seq_length=8, seed=1)


def test_one_epoch_shorter_than_a_sample_has_none(tmp_path):
    file = write_file(tmp_path / "x", [8])
    assert len(GPTDataset(file, (0, 1), num_samples=None, seq_length=8, seed=1)) == 0
    assert len(GPTDataset(file, (0, 1), num_samples=2, seq_length=8, seed=1)) == 2
