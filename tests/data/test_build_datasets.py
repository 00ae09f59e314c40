from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.files import DataConfig
from megapipe.data.blend import BlendedDataset
from megapipe.data.build_datasets import DatasetRequest, build_datasets, parse_split, sequence_range
from megapipe.data.dataset import SyntheticDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import ConfigError, DataError
from tests.data.fixtures import FOLDER, changed, write_file

A, B, C = (str(FOLDER / f"corpus{name}") for name in "ABC")


@pytest.fixture
def request_a(tmp_path) -> DatasetRequest:
    data = DataConfig(data_path=(A,), split="80,10,10", data_cache_path=str(tmp_path))
    return DatasetRequest(data, 16, 1234, (20, 4, 2))


def test_parts_without_share_or_samples_are_none(request_a):
    built = build_datasets(changed(request_a, split="90,10,0", num_samples=(20, 0, 5)))
    assert isinstance(built.train, GPTDataset)
    assert built.valid is None
    assert built.test is None


def test_prefixes_without_weights_give_one_epoch_each(request_a):
    built = build_datasets(changed(request_a, data_path=[A, B, C], split="100,0,0", num_samples=(10_000, 0, 0)))
    assert isinstance(built.train, BlendedDataset)
    lengths = [len(member) for member in built.train.members]
    assert len(built.train) == sum(lengths)
    assert [int((built.train.dataset_index == d).sum()) for d in range(3)] == lengths
    assert [member.index.documents.tolist() for member in built.train.members] == [
        GPTDataset(
            member.file, (0, len(member.file)), num_samples=None, seq_length=16, seed=1234
        ).index.documents.tolist()
        for member in built.train.members
    ]
    few = build_datasets(changed(request_a, data_path=[A, B, C], split="100,0,0", num_samples=(30, 0, 0)))
    assert few.train is not None
    assert len(few.train) == 30


def test_files_without_a_sample_of_a_split_are_left_out_of_it(request_a, tmp_path):
    short, empty = (
        write_file(tmp_path / name, lengths).prefix for name, lengths in (("short", [5] * 10), ("empty", [9]))
    )
    built = build_datasets(changed(request_a, data_path=[short, A, empty], split="90,10,0"))
    assert isinstance(built.valid, BlendedDataset)
    assert [member.file.prefix for member in built.valid.members] == [A]
    assert len(built.valid) == 4
    with pytest.raises(DataError, match=r"valid .*17 tokens"):
        build_datasets(changed(request_a, data_path=[short, empty], split="90,10,0", num_samples=(0, 4, 0)))


def test_one_weighted_prefix_is_still_a_blend_with_surplus(request_a):
    built = build_datasets(changed(request_a, data_path=["2.0", A], split="100,0,0", num_samples=(201, 0, 0)))
    assert isinstance(built.train, BlendedDataset)
    assert built.train.members[0].num_requested == 203
    assert len(built.train) == 201


def test_shares_are_rounded_up_and_the_blend_is_their_sum(request_a):
    built = build_datasets(
        changed(request_a, data_path=["1", A, "1", B, "1", C], split="100,0,0", num_samples=(100, 0, 0))
    )
    assert isinstance(built.train, BlendedDataset)
    assert len(built.train) == 102
    assert [member.num_requested for member in built.train.members] == [35, 35, 35]


def test_each_part_can_have_separate_files(request_a):
    own = changed(
        request_a, data_path=None, split=None, train_data_path=["0.5", A, "0.5", B], valid_data_path=["1.0", C]
    )
    built = build_datasets(own)
    assert isinstance(built.train, BlendedDataset)
    assert isinstance(built.valid, GPTDataset)  # a single file is not a blend, with or without a weight
    assert built.valid.sequences == (0, 10)
    assert built.valid.num_requested == 4
    assert built.test is None


def test_default_split_is_969_30_1(request_a):
    built = build_datasets(changed(request_a, split=None, num_samples=(20, 4, 0)))
    assert isinstance(built.train, GPTDataset)
    assert isinstance(built.valid, GPTDataset)
    assert (built.train.sequences, built.valid.sequences) == ((0, 39), (39, 40))


def test_mock_data_needs_no_file(request_a):
    built = build_datasets(DatasetRequest(DataConfig(mock_data=True), 16, 1234, (20, 4, 0), vocab_size=64))
    assert isinstance(built.train, SyntheticDataset)
    assert isinstance(built.valid, SyntheticDataset)
    assert (len(built.train), len(built.valid), built.test) == (20, 4, None)
    assert built.train[0].tolist() != built.valid[0].tolist()


WRONG = {
    "nothing": ({"data_path": None, "split": None}, ConfigError, "exactly one of .* 0 of them are given"),
    "two": ({"mock_data": True}, ConfigError, "exactly one of .* 2 of them are given"),
    "mock-without-vocabulary": (
        {"data_path": None, "mock_data": True},
        ConfigError,
        "--mock-data needs the vocabulary size",
    ),
    "empty-part": (
        {"split": "1000,1,0"},
        DataError,
        "corpusA has 40 sequences, and the valid part of --split 1000,1,0 holds none",
    ),
    "missing-file": ({"data_path": ["0.5", A, "0.5", "nowhere/x"]}, DataError, "no token file nowhere/x.idx"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_requests_are_refused(change, error, message, request_a):
    with pytest.raises(error, match=message):
        build_datasets(changed(request_a, **change))


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("90,10,0", ((0.0, 0.9), (0.9, 1.0), None)),
        ("80,10,10", ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))),
        ("100", ((0.0, 1.0), None, None)),
        ("80/10/10", ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))),
        ("0, 1", (None, (0.0, 1.0), None)),
    ],
)
def test_split_gives_the_ranges_of_megatron(text, ranges):
    for got, want in zip(parse_split(text), ranges, strict=True):
        assert got == pytest.approx(want) if want is not None else got is None


@settings(max_examples=50)
@given(parts=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), num_sequences=st.integers(0, 10**9))
def test_split_covers_every_sequence_once(parts, num_sequences):
    ranges = [
        sequence_range(part, num_sequences) for part in parse_split(",".join(map(str, parts))) if part is not None
    ]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_sequences
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("text", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1,1", "inf,1,1"])
def test_bad_split_is_refused(text):
    with pytest.raises(ConfigError, match=f"--split {re.escape(text)}: expected"):
        parse_split(text)


def test_only_the_process_that_builds_an_index_reads_the_whole_idx(request_a, monkeypatch):
    checked = []
    monkeypatch.setattr(IndexedFile, "check", lambda file: checked.append(file.prefix))
    first = build_datasets(request_a)
    assert set(checked) == {A}
    checked.clear()
    second = build_datasets(request_a)
    assert checked == []
    assert [second.train[i].tolist() for i in range(20)] == [first.train[i].tolist() for i in range(20)]


def test_a_damaged_index_is_found_when_the_run_starts(tmp_path):
    write_file(tmp_path / "x", [9] * 40)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[34 + 4 * 40 + 8] ^= 1  # the offset of sequence 1
    (tmp_path / "x.idx").write_bytes(index)
    data = DataConfig(data_path=(str(tmp_path / "x"),), split="100,0,0", data_cache_path=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"do not fill x\.bin"):
            build_datasets(DatasetRequest(data, 16, 1, (5, 0, 0)))
