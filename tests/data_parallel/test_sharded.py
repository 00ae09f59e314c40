"""Weights that are gathered and freed, driven by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.comm.groups import ProcessGroups
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.store import Sharing, is_allocated
from megapipe.data_parallel.stores import Stores
from megapipe.sharding.buffers import layout_buffers
from tests.data_parallel.toy import Toy, draw, groups_of, toy_specs
from tests.harness import RankPool


def sharded_stage(groups: ProcessGroups) -> tuple[StageBuffers, Toy]:
    layouts = layout_buffers(toy_specs(), 0, 1, groups.shards.size, 60)
    buffers, module = StageBuffers(layouts, "cpu", torch.float64, torch.float64, sharing=Sharing.of(groups, 3)), Toy()
    buffers.materialize(module, draw)
    return buffers, module


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
