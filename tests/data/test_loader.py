from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.dataset import SyntheticDataset
from megapipe.data.loader import Loader
from megapipe.errors import DataError

DATASET = SyntheticDataset(400, seq_length=4, vocab_size=16, seed=3)


class Recorded:
    """Data set that records which thread read which sample, and fails at one sample."""

    def __init__(self, length: int, broken: int = -1) -> None:
        self.length, self.broken, self.read = length, broken, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        self.read.append((index, threading.current_thread().name))
        if index == self.broken:
            raise DataError(f"sample {index} is broken")
        return np.full(5, index, dtype=np.int64)


def step_samples(loader, consumed, num_microbatches, dp_size, micro):
    """Return the sample ids of a step's global batch over all dp ranks."""
    return [
        sample
        for k in range(num_microbatches)
        for d in range(dp_size)
        for sample in loader.microbatch(consumed, k, d, dp_size, micro).sample_ids
    ]


@settings(max_examples=30)
@given(
    grid=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]),
    micro=st.integers(1, 3),
    consumed=st.integers(0, 300),
)
def test_global_batch_does_not_depend_on_dp(grid, micro, consumed):
    dp_size, num_microbatches = grid
    assert step_samples(Loader(DATASET), consumed, num_microbatches, dp_size, micro) == list(
        range(consumed, consumed + 12 * micro)
    )


def test_microbatch_k_of_dp_rank_d_takes_its_rows():
    got = Loader(DATASET).microbatch(100, 3, 1, 4, 2)
    assert got.sample_ids == (126, 127)
    np.testing.assert_array_equal(got.tokens, np.stack([DATASET[126], DATASET[127]])[:, :-1])
    np.testing.assert_array_equal(got.labels, np.stack([DATASET[126], DATASET[127]])[:, 1:])


def test_resuming_is_arithmetic():
    straight = [sample for step in range(4) for sample in step_samples(Loader(DATASET), 24 * step, 4, 2, 3)]
    resumed = [sample for step in (2, 3) for sample in step_samples(Loader(DATASET), 24 * step, 8, 1, 3)]
    assert straight[48:] == resumed


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_reading_ahead_gives_the_same_batches(num_workers):
    loader = Loader(DATASET, num_workers=num_workers)
    for step in range(6):
        for k in range(3):
            for _ in range(2):  # two stages on one rank request the same microbatch
                got = loader.microbatch(step * 12, k, 1, 2, 2)
                first = step * 12 + (k * 2 + 1) * 2
                assert got.sample_ids == (first, first + 1)
                np.testing.assert_array_equal(got.tokens[0], DATASET[first][:-1])
    loader.close()


def test_threads_read_batches_of_the_next_step_ahead():
    dataset = Recorded(64)
    loader = Loader(dataset, num_workers=2)
    for step in range(8):
        for k in range(2):
            loader.microbatch(step * 8, k, 0, 2, 2)
    loader.close()
    assert {name.rpartition("_")[0] for _, name in dataset.read} == {"train-loader"}
    # this rank's samples, each read once
    assert sorted(index for index, _ in dataset.read) == [i for i in range(64) if i % 4 < 2]


def test_next_batch_is_read_before_it_is_requested():
    dataset = Recorded(64)
    loader = Loader(dataset, num_workers=1)
    loader.microbatch(0, 0, 0, 1, 2)
    for future in list(loader._ready.values()):
        future.result(timeout=10)
    assert [index for index, _ in dataset.read] == [0, 1, 2, 3, 4, 5]
    loader.close()


def test_error_in_a_thread_is_raised_where_its_batch_is_asked_for():
    loader = Loader(Recorded(64, broken=6), num_workers=1)
    assert loader.microbatch(0, 0, 0, 1, 2).sample_ids == (0, 1)
    assert loader.microbatch(0, 1, 0, 1, 2).sample_ids == (2, 3)
    assert loader.microbatch(0, 2, 0, 1, 2).sample_ids == (4, 5)
    with pytest.raises(DataError, match="sample 6 is broken"):
        loader.microbatch(0, 3, 0, 1, 2)
    assert loader.microbatch(0, 4, 0, 1, 2).sample_ids == (8, 9)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_past_the_last_sample_is_an_error_and_no_wrap_around(num_workers):
    loader = Loader(Recorded(10), num_workers=num_workers, name="valid")
    assert loader.microbatch(8, 0, 0, 1, 2).sample_ids == (8, 9)
    with pytest.raises(DataError, match=r"valid data .*10 samples, .*microbatch 1 of dp rank 0 .*10\.\.12"):
        loader.microbatch(8, 1, 0, 1, 2)
    loader.close()


HANGING = """
import sys, threading
sys.path.insert(0, {repository!r})
from megapipe.data.loader import Loader

class Hanging:
    def __len__(self): return 64
    def __getitem__(self, index):
        if index >= 2:
            started.set()
            threading.Event().wait()
        return __import__("numpy").zeros(9, dtype="int64")

started = threading.Event()
loader = Loader(Hanging(), num_workers=2)
loader.microbatch(0, 0, 0, 1, 2)
started.wait()
loader.close()
print("closed")
"""


def test_a_read_that_hangs_does_not_keep_the_process():
    repository = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", HANGING.format(repository=repository)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "closed\n"
