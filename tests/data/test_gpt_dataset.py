from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.blend import BlendedDataset
from megapipe.data.build_datasets import build_datasets
from megapipe.data.gpt_dataset import GPTDataset, build_sample_index, plan_epochs
from megapipe.errors import DataError
from tests.data.fixtures import FOLDER, RUNS, expected, request_of, write_file


@pytest.mark.parametrize("run", RUNS)
def test_every_sample_equals_megatrons(run, tmp_path):
    built = build_datasets(request_of(run, tmp_path))
    for part, known in zip(("train", "valid", "test"), expected(run)["datasets"], strict=True):
        dataset = getattr(built, part)
        if known is None:
            assert dataset is None
            continue
        samples = np.stack([dataset[i] for i in range(len(dataset))])
        assert samples.dtype == np.int64
        np.testing.assert_array_equal(samples, np.load(FOLDER / f"expect_{run}_{part}.npy"))
        assert hashlib.sha256(samples.tobytes()).hexdigest() == known["sha256_all"]
        assert len(dataset) == known["len"]
        assert dataset[0].tolist() == known["first_sample"]


@pytest.mark.parametrize("run", RUNS)
def test_every_index_equals_megatrons(run, tmp_path):
    built = build_datasets(request_of(run, tmp_path))
    num_compared = 0
    for part, known in zip(("train", "valid", "test"), expected(run)["datasets"], strict=True):
        if known is None:
            continue
        dataset = getattr(built, part)
        if isinstance(dataset, BlendedDataset):
            assert dataset.dataset_index.tolist() == known["dataset_index"]
            assert dataset.sample_index.tolist() == known["dataset_sample_index"]
            assert [str(dataset.dataset_index.dtype), str(dataset.sample_index.dtype)] == known["dtypes"]
            assert list(dataset.weights) == known["weights"]
        for member, mid in zip(getattr(dataset, "members", (dataset,)), known["mid"], strict=True):
            assert member.num_requested == mid["num_samples"]
            assert member.sequences == tuple(mid["indices"])
            assert member.index.documents.tolist() == mid["document_index"]
            starts = [member.index.locate(k) for k in range(len(member) + 1)]
            assert [list(start) for start in starts] == mid["sample_index"]
            assert member.index.shuffle.tolist() == mid["shuffle_index"]
            num_compared += 1
    assert num_compared == {"single_1epoch": 3, "single_2p5epoch": 1, "blend_weights": 6}[run]


def test_sample_outside_is_an_index_error(tmp_path):
    dataset = GPTDataset(write_file(tmp_path / "x", [40]), (0, 1), num_samples=3, seq_length=8, seed=1)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 4 samples"):
            dataset[index]


def test_range_without_tokens_is_named(tmp_path):
    file = write_file(tmp_path / "x", [5, 0, 0])
    with pytest.raises(DataError, match=r"sequences 1\.\.3 of 3 hold no token"):
        GPTDataset(file, (1, 3), num_samples=3, seq_length=8, seed=1)


def test_an_epoch_shorter_than_a_sample_has_no_samples(tmp_path):
    file = write_file(tmp_path / "x", [8])
    assert len(GPTDataset(file, (0, 1), num_samples=None, seq_length=8, seed=1)) == 0
    assert len(GPTDataset(file, (0, 1), num_samples=2, seq_length=8, seed=1)) == 2


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0)


@settings(max_examples=60)
@given(lengths=LENGTHS, num_samples=st.integers(0, 40), seq_length=st.integers(1, 9))
def test_boundaries_equal_a_walk_over_the_concatenated_documents(lengths, num_samples, seq_length):
    index = build_sample_index(np.array(lengths, np.int32), 0, num_samples, seq_length, seed=7)
    owners = [(place, offset) for place, document in enumerate(index.documents) for offset in range(lengths[document])]
    assert [index.locate(k) for k in range(len(index) + 1)] == [owners[k * seq_length] for k in range(len(index) + 1)]


@settings(max_examples=60)
@given(lengths=LENGTHS, num_samples=st.integers(0, 40), seq_length=st.integers(1, 9), seed=st.integers(0, 3))
def test_every_sample_and_every_document_occurs(lengths, num_samples, seq_length, seed):
    index = build_sample_index(np.array(lengths, np.int32), 100, num_samples, seq_length, seed)
    plan = plan_epochs(sum(lengths), num_samples, seq_length)
    assert len(index) >= num_samples
    assert sorted(index.shuffle.tolist()) == list(range(plan.num_samples))
    assert sorted(index.documents.tolist()) == sorted([*range(100, 100 + len(lengths))] * plan.num_epochs)
    assert plan.num_epochs == 1 or (plan.num_epochs - 1) * sum(lengths) < num_samples * seq_length + 1


@pytest.mark.parametrize(
    ("num_samples", "num_epochs", "separate_last"),
    [(9, 1, False), (10, 2, True), (15, 2, True), (16, 2, False), (17, 2, False), (19, 2, False), (20, 3, True)],
)
def test_last_epoch_is_apart_when_less_than_four_fifths_are_needed(num_samples, num_epochs, separate_last):
    plan = plan_epochs(100, num_samples, 10)
    assert (plan.num_epochs, plan.separate_last) == (num_epochs, separate_last)


def test_a_separate_last_epoch_puts_samples_of_full_epochs_first():
    index = build_sample_index(np.full(10, 10, np.int32), 0, 10, 10, seed=1)
    assert sorted(index.shuffle[:9].tolist()) == list(range(9))
    assert sorted(index.documents[:10].tolist()) == list(range(10))


def test_no_token_at_all_is_an_error():
    with pytest.raises(DataError, match="holds no token"):
        plan_epochs(0, 5, 10)
