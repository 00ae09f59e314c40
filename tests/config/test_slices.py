"""Rules of --pipe-sp-splits, and the cut of a sequence into slices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.config import Config
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import model_spec
from megapipe.plan.layer_costs import flops_of_length, sequence_slices
from megapipe.plan.resolve import resolve
from megapipe.schedule.action import Op
from tests.tiny import make_config

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 32,
    "make_vocab_size_divisible_by": 4,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 1,
    "lr": 1e-3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "device": "cpu",
    "pipeline_model_parallel_size": 2,
    "pipe_sp_splits": 4,
}


def config(**changes: Any) -> Config:
    return make_config(**BASE | changes)


@given(
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 300), st.sampled_from(["uniform_comp", "average"]), st.data()
)
def test_slices_are_a_partition_of_the_sequence_in_multiples(
    count: int, unit: int, extra: int, strategy: str, data: st.DataObject
) -> None:
    seq = unit * (count + extra)
    model = model_spec(resolve(config(pipe_sp_splits=1), 2).config.model, PrecisionConfig())
    slices = sequence_slices(model, RecomputeConfig(), seq, count, strategy, unit)
    assert [each.start for each in slices] == [0, *(each.stop for each in slices[:-1])]
    assert slices[-1].stop == seq and all(each.length > 0 and each.length % unit == 0 for each in slices)
    if strategy == "average":
        assert max(each.length for each in slices) - min(each.length for each in slices) <= unit
    else:
        assert all(a.length >= b.length - unit for a, b in pairwise(slices))


def test_slices_of_equal_cost_have_equal_shares_of_forward_and_backward_together() -> None:
    plan = resolve(config(seq_length=65536, pipe_sp_splits=8, num_layers=8), 2)
    shares = plan.slice_shares
    lengths = [each.length for each in plan.slices]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 4 * lengths[-1]
    forward, backward = shares[0, Op.F], shares[0, Op.B]
    assert forward[0] > 0.125 > backward[0]  # attention has a larger part in the backward
    assert sum(forward) == sum(backward) == pytest.approx(1)
    totals = []
    for each in plan.slices:
        costs = [flops_of_length(plan.model.layers, plan.model, plan.config.recompute, op) for op in (Op.F, Op.B)]
        totals.append(sum(cost(each.stop) - cost(each.start) for cost in costs))
    assert max(totals) < 1.001 * min(totals)


def test_windows_make_slices_nearly_equal_in_length() -> None:
    plan = resolve(config(seq_length=4096, window_size=16), 2)
    assert [each.length for each in plan.slices] == pytest.approx([1024] * 4, rel=0.02)


def test_the_units_of_stages_run_slices_too() -> None:
    sharded = {"data_parallel_sharding_strategy": "optim_grads_params", "data_parallel_sharding_units": 2}
    plan = resolve(config(use_distributed_optimizer=True, **sharded), 4)
    schedule = plan.schedule(plan.batch.num_microbatches)
    assert (schedule.num_stages, schedule.num_slices) == (4, 4)
