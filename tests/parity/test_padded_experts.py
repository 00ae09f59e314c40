"""Mixtures of experts on padded conversations: what stands in for no token changes nothing, on every grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups
from megapipe.data.batch import CHAT_ROWS, PADDING, Batch, DocumentRules
from megapipe.extras.verify.oracle import Oracle, drawn_slices, share_of, whole_weights
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.train.step import ExpertReport, TrainStep
from tests.parity.grids import BIAS, CHATS, DROPS, EVERY_LOSS, FULL, MODEL, PADS, PREDICTS, SHARED, again
from tests.tiny import make_config

RATES = Rates(0.01, 0.0, None)
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid, groups, bias, shared": BIAS | SHARED,
    "drops by weight": DROPS,
    "drops by position": DROPS | {"moe_token_drop_policy": "position"},
    "rows padded to the capacity": PADS,
    "recomputed experts": again("moe", "layernorm"),
    "full recompute": FULL,
    "predictions": PREDICTS,
}


def chats(lengths: Sequence[Sequence[int]], seq: int, seed: int = 0) -> Batch:
    """Return a microbatch with conversations of these lengths in each sequence, whose tokens depend on their places in
    the whole list alone.
    """
    samples = np.zeros((len(lengths), CHAT_ROWS, seq + 1), dtype=np.int64)
    samples[:, 2] = PADDING
    number = 0
    for sample, held in zip(samples, lengths, strict=True):
        filled = 0
        for place, length in enumerate(held):
            random, number = np.random.default_rng([seed, number]), number + 1
            rows = random.integers(1, 24, length), random.random(length) < 0.6, np.full(length, place)
            sample[:, filled : filled + length] = np.stack(rows)
            sample[1, filled], sample[1, filled + length - 1] = 0, 1
            filled += length
    return Batch.of(samples, tuple(range(len(lengths))), DocumentRules())


Outcome = tuple[float, dict[str, torch.Tensor], ExpertReport]


def trained(options: dict[str, Any], batches: Sequence[Sequence[Batch]]) -> Outcome:
    """Train one rank; return the last loss, weights and biases, and the last report of experts."""
    micro, seq = batches[0][0].tokens.shape
    shape = {"micro_batch_size": micro, "global_batch_size": micro * len(batches[0]), "seq_length": seq}
    plan = resolve(make_config(**MODEL | CHATS | shape | options), 1)
    slices = drawn_slices(1, torch.float64)
    runtime = TrainingRuntime(plan, ProcessGroups.alone(), torch.device("cpu"), slices)
    step = TrainStep(runtime)
    results = [step.run(share_of(runtime, batch, number), RATES) for number, batch in enumerate(batches)]
    report = step.expert_loads.report(results[-1].routed, len(batches[0]))
    assert report is not None
    runtime.stores.finish_weights()
    weights = {name: buffers.parameter(name).clone() for buffers in runtime.buffers.values() for name in buffers.names}
    return results[-1].loss, weights | {box.name: box.values.clone() for _, box in runtime.held_states()}, report


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for name, values in expected[1].items():
        assert (found[1][name] - values).abs().max() <= 1e-10 * values.abs().max().clamp(min=1e-3), name
    for one, other in zip(found[2].load, expected[2].load, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert found[2].dropped == pytest.approx(expected[2].dropped, rel=1e-12)
    for key, losses in expected[2].losses.items():
        assert found[2].losses[key] == pytest.approx(losses, rel=1e-10)


LENGTHS = [[[5], [3]], [[9], [2]], [[4], [7]], [[6], [8]]]  # of conversations in each sequence of each microbatch


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_more_padding_changes_nothing(options: dict[str, Any]) -> None:
    short, long = (
        trained(options | EVERY_LOSS, [[chats(lengths, seq, step) for lengths in LENGTHS] for step in range(2)])
        for seq in (10, 17)
    )
    assert_same(long, short)
    assert sum(long[2].load[0]) == pytest.approx(len(long[2].load[0]))


@pytest.mark.parametrize("name", [name for name in KINDS if "capacity" not in name and "drops" not in name])
def test_packed_conversations_train_as_padded_ones(name: str) -> None:
    """With the same ones in every microbatch: losses by sequence depend on the grouping, as do capacities."""
    losses = {"moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"), "moe_aux_loss_coeff": (0.02, 0.1)}
    grouped = [LENGTHS, [[[number for (number,) in lengths]] for lengths in LENGTHS]]
    padded, packed = (
        trained(KINDS[name] | losses, [[chats(each, 16, step) for each in lengths] for step in range(2)])
        for lengths in grouped
    )
    assert_same(packed, padded)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_padded_conversations_train_as_alone(options: dict[str, Any]) -> None:
    """The reference model in fp64 gets each conversation in a sequence of its own length, without padding."""
    lengths = [5, 3, 9, 2, 4, 7]
    options = options | EVERY_LOSS
    batch = [chats([[length]], 12, number) for number, length in enumerate(lengths)]
    alone = [chats([[length]], length, number) for number, length in enumerate(lengths)]
    assert all(each.padding is not None and not each.padding.any() for each in alone)
    shape = {"micro_batch_size": 1, "global_batch_size": len(lengths), "seq_length": 12}
    plan = resolve(make_config(**MODEL | CHATS | shape | options), 1)
    oracle = Oracle(plan.config, whole_weights(plan.specs, drawn_slices(1, torch.float64)))
    oracle._choices = None  # it takes sequences of one length
    for module in oracle.model.experts():  # a capacity is that of the conversation, not of a rank's positions
        module.config = replace(module.config, moe_capacity_slices=())
    expected = oracle.step(alone, 0, RATES)
    loss, weights, _ = trained(options, [batch])
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    for name, values in expected.weights.items():
        found = weights.get(name, weights.get(f"weights/{name}"))
        assert found is not None and (found - values).abs().max() <= 1e-10 * values.abs().max(), name
