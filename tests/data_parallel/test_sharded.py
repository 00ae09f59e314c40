"""Weights that are gathered and freed, and gradients that are reduced part by part, driven by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.comm.groups import ProcessGroups
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.store import Sharing, is_allocated
from megapipe.data_parallel.stores import Stores
from megapipe.sharding.buffers import layout_buffers
from tests.data_parallel.toy import Toy, draw, groups_of, stage_buffers, tokens_of, toy_specs
from tests.harness import RankPool

NUM_MICROBATCHES = 4


def sharded_stage(
    groups: ProcessGroups, dtype: torch.dtype = torch.float64, gradient_dtype: torch.dtype = torch.float64
) -> tuple[StageBuffers, Toy]:
    layouts = layout_buffers(toy_specs(), 0, 1, groups.shards.size, 60)
    buffers, module = StageBuffers(layouts, "cpu", dtype, gradient_dtype, sharing=Sharing.of(groups, 3)), Toy()
    buffers.materialize(module, draw)
    return buffers, module


def whole_gradients(microbatches: range) -> dict[str, Tensor]:
    buffers, module = stage_buffers(toy_specs()), Toy()
    buffers.materialize(module, draw)
    for microbatch in microbatches:
        module(tokens_of(1, microbatch)).backward()
    return {name: buffers.main_grad(name).flatten().clone() for name in buffers.names}


def held(buffers: StageBuffers) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Return (start, stop, values) of this rank's part of each reduced gradient."""
    found: dict[str, list[tuple[int, int, Tensor]]] = {}
    for buffer in buffers.buffers:
        for bucket in buffer.layout.buckets:
            start, stop = buffer.shard_range(bucket)
            for slot in bucket.slots:
                low, high = max(start, slot.start), min(stop, slot.stop)
                if low < high:
                    values = buffer.own_gradients(bucket)[low - start : high - start].clone()
                    found.setdefault(slot.spec.name, []).append((low - slot.start, high - slot.start, values))
    return found


def train(rank: int, world: int, gradient_dtype: torch.dtype = torch.float64) -> dict:
    """Run microbatches forward and backward with the weights freed in between, and reduce every two of them in bf16.

    Return this rank's reduced gradients.
    """
    groups = groups_of(rank, dp=world)
    buffers, module = sharded_stage(groups, gradient_dtype=gradient_dtype)
    stores = Stores({0: buffers}, groups, reduce_in_bf16=True)
    for step in range(2):  # the second step shows that the first one left no state behind
        stores.begin_step(NUM_MICROBATCHES)
        for number in range(NUM_MICROBATCHES):
            stores.unshard(0)
            stores.use(0)
            loss = module(tokens_of(step, number * world + rank))
            stores.reshard(0)  # what the backward saved is freed, and gathered again
            stores.unshard(0)
            stores.use(0)
            stores.accumulate(0)
            loss.backward()
            stores.reshard(0)
            if number == NUM_MICROBATCHES - 1:
                stores.reduce(0)
            elif number % 2:
                stores.reduce_part(0)
        stores.finish_gradients()
    return held(buffers)


def test_reductions_in_bf16_round_what_they_send(two_ranks: RankPool) -> None:
    expected, is_rounded = whole_gradients(range(2 * NUM_MICROBATCHES)), False
    for found in two_ranks.run(train):
        for name, start, stop, values in ((name, *part) for name, parts in found.items() for part in parts):
            difference = (values - expected[name][start:stop]).abs().max()
            assert difference <= 2e-2 * expected[name].abs().max(), name
            is_rounded |= bool(difference > 1e-6 * expected[name].abs().max())
    assert is_rounded


def test_gradients_in_bf16_exist_until_their_reduction_has_read_them(two_ranks: RankPool) -> None:
    """Nothing is copied for a reduction in bf16 where main gradients are bf16 themselves."""
    expected = whole_gradients(range(2 * NUM_MICROBATCHES))
    for found in two_ranks.run(train, torch.bfloat16):
        for name, start, stop, values in ((name, *part) for name, parts in found.items() for part in parts):
            assert (values - expected[name][start:stop]).abs().max() <= 5e-2 * expected[name].abs().max(), name


def gather(rank: int, world: int) -> tuple[bool, list[str]]:
    """Compare gathered weights with those drawn, and return the errors of wrong orders."""
    groups = groups_of(rank, dp=world)
    buffers, module = sharded_stage(groups)
    weights, errors = Stores({0: buffers}, groups), []
    for wrong in (lambda: weights.use(0), lambda: weights.reshard(0)):
        try:
            wrong()
        except RuntimeError as error:
            errors.append(str(error))
    with weights.whole([0]):
        try:
            weights.unshard(0)
        except RuntimeError as error:
            errors.append(str(error))
        equal = all(torch.equal(parameter, draw_of(name)) for name, parameter in module.named_parameters())
    return equal and not is_allocated(buffers.buffers[0].parameters), errors


def draw_of(name: str) -> Tensor:
    return draw(next(spec for spec in toy_specs() if spec.name == name))


def test_shards_of_initial_weights_are_gathered_to_what_was_drawn(two_ranks: RankPool) -> None:
    for equal, errors in two_ranks.run(gather):
        assert equal
        assert errors == [
            "stage 0 computes, but its weights are not gathered: its row lacks an UNSHARD",
            "the weights of stage 0 are freed, but they are not gathered",
            "the weights of stage 0 are gathered already",
        ]
