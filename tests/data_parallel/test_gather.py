from __future__ import annotations

import pytest
import torch
from torch import nn

from megapipe.comm.groups import ProcessGroups
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.sharding.spec import ParamSpec
from tests.data_parallel.toy import groups_of, stage_buffers
from tests.harness import RankPool


def specs_of(stage: int) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(f"{stage}.{index}", (3 + stage, 7), owner=stage) for index in range(5))


def pending_stages(stores: Stores, order: list[int]) -> tuple[int, ...]:
    return tuple(stage for stage in order if any(store.gathering for store in stores.stages[stage].buffers))


def test_a_parameter_that_no_part_waits_for_is_refused() -> None:
    module = nn.ModuleDict({str(index): nn.Linear(7, 3, bias=False) for index in range(2)})
    gathering = Stores({0: stage_buffers(specs_of(0))}, ProcessGroups.alone())
    with pytest.raises(ValueError, match=r"stage 0: .*1\.weight"):
        gathering.wait_inside(0, module, [module["0"]])


def test_order_must_name_the_stages() -> None:
    with pytest.raises(ValueError, match=r"names stages \[0, 2\], this rank holds \[0\]"):
        Stores({0: stage_buffers(specs_of(0))}, ProcessGroups.alone(), [0, 2])


def wait_of_a_borrower(rank: int, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Wait for a part of stage 1 that uses a parameter of stage 0.

    Return the stages in flight before and after it ran.
    """
    groups = groups_of(rank, dp=world)
    specs = {0: (ParamSpec("shared", (5, 7), owner=0),), 1: (ParamSpec("own", (5, 7), owner=1),)}
    stages = {stage: stage_buffers(held, Sharing.of(groups, 1)) for stage, held in specs.items()}
    module = nn.Module()
    module.head, module.rest = nn.Identity(), nn.Identity()
    module.head.register_parameter("weight", nn.Parameter(stages[0].parameter("shared")))
    module.rest.register_parameter("weight", nn.Parameter(stages[1].parameter("own")))
    names = {"head.weight": "shared", "rest.weight": "own"}
    module.named_parameters = lambda: ((names[name], p) for name, p in nn.Module.named_parameters(module))
    gathering = Stores(stages, groups, [1, 0])
    gathering.wait_inside(1, module, [module.head, module.rest])
    gathering.start_gather()
    before = pending_stages(gathering, [1, 0])
    module.head(torch.ones(1))
    after = pending_stages(gathering, [1, 0])
    gathering.finish_weights()
    return before, after


def test_a_stage_that_borrows_a_parameter_waits_for_its_holder(two_ranks: RankPool) -> None:
    for before, after in two_ranks.run(wait_of_a_borrower):
        assert (before, after) == ((1, 0), (1,))
