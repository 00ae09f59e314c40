"""The order of --dataloader-type cyclic. Expected indices are those of Megatron-Core 0.19.2's own sampler, recorded by
tests/fixtures/megatron_samplers/make_with_megatron.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.assembly.datasets import permutation
from megapipe.data.cyclic_order import CyclicOrder
from megapipe.data.dataset import SkippedSamples, SyntheticDataset
from megapipe.data.loader import Loader
from megapipe.errors import DataError
from tests.harness import RankPool
from tests.train.jobs import job, job_on_rank, steps_of

RECORDED = Path(__file__).parent.parent / "fixtures" / "megatron_samplers" / "cyclic.json"


def loader_of(samples: int, sharding: bool = True, num_workers: int = 0) -> Loader:
    dataset = SyntheticDataset(samples, seq_length=4, vocab_size=16, seed=3)
    return Loader(dataset, num_workers=num_workers, order=CyclicOrder(sharding, permutation))


@pytest.mark.parametrize("num_workers", [0, 2], ids=["as asked", "read ahead"])
def test_every_rank_reads_the_samples_of_megatron(num_workers: int) -> None:
    cases = json.loads(RECORDED.read_text())
    assert len(cases) == 9
    for samples, dp, micro, sharding, consumed, ranks in cases:
        for rank, microbatches in enumerate(ranks):
            loader = loader_of(samples, sharding, num_workers)
            found = [loader.microbatch(consumed, k, rank, dp, micro).sample_ids for k in range(len(microbatches))]
            loader.close()
            assert found == [tuple(each) for each in microbatches], (samples, dp, micro, sharding, consumed, rank)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 11), st.booleans(), st.integers(0, 3))
def test_an_epoch_is_a_permutation_and_each_step_a_function_of_consumed_samples(
    dp: int, micro: int, microbatches: int, rest: int, sharding: bool, epoch: int
) -> None:
    whole = microbatches * dp * micro
    samples = whole + rest % (dp * micro)
    order = CyclicOrder(sharding, permutation)
    found = [order.index(epoch * whole + at, samples, dp, micro) for at in range(whole)]
    assert len(set(found)) == whole and min(found) >= 0 and max(found) < samples
    loader = loader_of(samples, sharding)
    for k in range(microbatches):
        consumed = epoch * whole + k * dp * micro
        read = [loader.microbatch(consumed, 0, rank, dp, micro).sample_ids for rank in range(dp)]
        assert [sample for ids in read for sample in ids] == found[k * dp * micro : (k + 1) * dp * micro]


def test_skipped_samples_are_passed_over_in_the_order() -> None:
    loader, order = loader_of(20), CyclicOrder(True, permutation)
    loader.skip(SkippedSamples.of([(4, 12)]), 100)
    assert loader.microbatch(4, 0, 1, 2, 2).sample_ids == tuple(order.index(at, 20, 2, 2) for at in (14, 15))


def test_a_start_within_a_microbatch_and_too_few_samples_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 dp ranks x .* 4 samples .*26 of 30"):
        loader_of(30).microbatch(26, 0, 0, 2, 4)
    with pytest.raises(DataError, match=r"2 dp ranks x --micro-batch-size 4 .* 7"):
        loader_of(7).microbatch(0, 0, 0, 2, 4)


def test_a_run_resumed_in_an_epoch_reads_on_and_says_what_its_order_depends_on(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    flags = "--dataloader-type cyclic --train-iters 4 --eval-iters 1 --eval-interval 2 --save {0} --load {0}"
    for name, parts in (("straight", [""]), ("parts", ["--exit-interval 1 --train-iters 4", ""])):
        for part in parts:
            for _, *error in rank_pools(2).run(job_on_rank, f"{flags.format(tmp_path / name)} {part}"):
                assert error == ["", None], error
    straight, parts = (steps_of(tmp_path / name / "metrics.jsonl") for name in ("straight", "parts"))
    assert [line["loss"] for line in parts] == [line["loss"] for line in straight]
    # the same data in another order: of one rank, and of the shuffled index
    losses = {tuple(line["loss"] for line in straight)}
    for name, own in (("one", flags), ("single", flags.replace("cyclic", "single"))):
        code, said = job(own.format(tmp_path / name))
        assert code == 0, said
        told = "--dataloader-type cyclic: the order of samples depends on the number of dp ranks and --micro-batch-size"
        assert (told in said) == (name == "one")
        losses.add(tuple(line["loss"] for line in steps_of(tmp_path / name / "metrics.jsonl")))
    assert len(losses) == 3
