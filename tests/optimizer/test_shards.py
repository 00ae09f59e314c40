from __future__ import annotations

import pytest
import torch

from megapipe.optimizer.shards import Shard
from megapipe.sharding.spec import Fused, ParamSpec
from tests.data_parallel.toy import shard_of, stage_buffers

SPECS = (
    ParamSpec("bias", (6,), owner=0, weight_decay=False, slicing=Fused(0)),
    ParamSpec("first.weight", (6, 7), owner=0, slicing=Fused(0)),
    ParamSpec("replicated.weight", (5, 5), owner=0),
    ParamSpec("second.weight", (6, 3), owner=0, slicing=Fused(0)),
    ParamSpec("embedding.weight", (8, 3), owner=0, slicing=Fused(0), decoupled_lr=True, true_rows=6),
)


def shards_of(tp_rank: int, replica: int, num_shards: int, dtype: torch.dtype = torch.float64) -> tuple[Shard, ...]:
    sharing = shard_of(replica, num_shards, (tp_rank, 2))
    buffers = stage_buffers(SPECS, sharing, 1000, param_dtype=dtype, grad_dtype=torch.float64)
    return tuple(
        Shard(0, buffer, bucket, ("exp_avg",)) for buffer in buffers.buffers for bucket in buffer.layout.buckets
    )


def meaning(shard: Shard) -> list[str]:
    """Return the parameter of each element of the shard: '' for padding, with a leading '-' for replicas of another
    tp_rank.
    """
    found = [""] * (shard.stop - shard.start)
    for part, piece in shard.pieces():
        name = piece.spec.name if piece.owned else f"-{piece.spec.name}"
        found[part] = [name] * piece.box.num_elements
    return found


@pytest.mark.parametrize("num_shards", [1, 2, 3], ids=lambda n: f"shards{n}")
@pytest.mark.parametrize("tp_rank", [0, 1], ids=["tp0", "tp1"])
def test_counted_ranges_hold_the_owned_elements_and_no_replica(tp_rank: int, num_shards: int) -> None:
    exact, merged = 0, 0
    for replica in range(num_shards):
        (shard,) = shards_of(tp_rank, replica, num_shards)
        names = meaning(shard)
        for low, high in shard.merged_ranges:
            assert not any(name.startswith("-") for name in names[low:high])
            merged += sum(name != "" for name in names[low:high])
        for low, high in shard.exact_ranges:
            assert all(name and not name.startswith("-") for name in names[low:high])
            exact += high - low
    assert merged == 3 + 21 + 9 + 12 + (25 if tp_rank == 0 else 0)
    padded_vocabulary = 2 * 3 if tp_rank == 1 else 0
    assert exact == merged - padded_vocabulary


def test_owned_neighbours_are_one_range() -> None:
    (shard,) = shards_of(0, 0, 1)
    assert len(shard.merged_ranges) == 1
    assert len(shards_of(1, 0, 1)[0].merged_ranges) == 2  # the replica separates them


@pytest.mark.parametrize("num_shards", [1, 2, 3], ids=lambda n: f"shards{n}")
def test_runs_cover_every_element_with_its_own_treatment(num_shards: int) -> None:
    specs = {spec.name: spec for spec in SPECS}
    covered = 0
    for replica in range(num_shards):
        (shard,) = shards_of(0, replica, num_shards)
        names = meaning(shard)
        assert len(shard.runs) <= 3
        for run in shard.runs:
            kinds = {
                (specs[name].weight_decay, specs[name].decoupled_lr) for name in names[run.start : run.stop] if name
            }
            assert kinds == {(run.weight_decay, run.decoupled_lr)}
            covered += sum(name != "" for name in names[run.start : run.stop])
    assert covered == 3 + 21 + 25 + 9 + 12


def test_equal_dtypes_share_master_and_parameter() -> None:
    same, low = shards_of(0, 0, 1)[0], shards_of(0, 0, 1, torch.float32)[0]
    assert same.master.data_ptr() == same.parameter.data_ptr()
    assert not same.has_own_master
    assert low.has_own_master
    assert low.master.dtype == low.moments["exp_avg"].dtype == torch.float64
