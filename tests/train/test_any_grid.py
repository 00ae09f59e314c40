"""Checkpoints across fifteen layouts of up to eight ranks.

A checkpoint of any layout loads bit-identically on any other, and training continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import KEEP_ALL, open_folder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Attempt, Extras, SaveReport
from megapipe.checkpoint.shard import TensorBox, tensor_box
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.extras.inspect.checkpoint import compare
from megapipe.plan.resolve import resolve
from megapipe.topology import GROUP_NAMES, Topology
from megapipe.train.loading import load
from megapipe.train.saving import boxes_to_save
from megapipe.train.state import Schedules, TrainingState
from tests.harness import RankPool
from tests.train.runs import expected, runtime_of, save, tiny
from tests.train.test_resume import train

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
ZERO = {"use_distributed_optimizer": True, "ddp_bucket_size": 700}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params", "data_parallel_sharding_units": 2}
Layout = tuple[int, dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp4_zero": (4, ZERO),
    "tp2": (2, {TP: 2}),
    "tp2_sequence_dp2_zero": (4, {TP: 2, "sequence_parallel": True} | ZERO),
    "pp2": (2, {PP: 2}),
    "pp4_cut_by_hand": (4, {PP: 4, "pipeline_model_parallel_layout": "Et|ttt|t|tttL"}),
    "pp2_chunks2_dp2_zero": (4, {PP: 2, "num_virtual_stages_per_pipeline_rank": 2} | ZERO),
    "tp2_pp2_dp2_zero": (8, {TP: 2, PP: 2} | ZERO),
    "zb_v_pp2_dp2_zero": (4, {PP: 2, "pipeline_schedule": "zb-v"} | ZERO),
    "dualpipe_pp4_zero": (4, {PP: 4, "pipeline_schedule": "dualpipe"} | ZERO),
    "tp4_dp2_zero_more_padding": (8, {TP: 4, "make_vocab_size_divisible_by": 32} | ZERO),
    "pp2_dp2_zero3": (4, {PP: 2} | ZERO3),
    "cp2_dp2_zero": (4, {"context_parallel_size": 2} | ZERO),
    "tp2_dp4_instances2_zero3": (
        8,
        {TP: 2, "sequence_parallel": True, "num_distributed_optimizer_instances": 2, "global_batch_size": 8} | ZERO3,
    ),
}
MODEL: dict[str, Any] = {
    "num_layers": 8,
    "num_query_groups": 2,
    "activation": "swiglu",
    "micro_batch_size": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
Pools = Callable[[int], RankPool]


# --- all pairs, without processes


def simulated(world: int, changes: dict[str, Any]) -> list[TrainingRuntime]:
    """Build the runtime of every rank in one process: they hold tensors and cannot communicate."""
    plan = resolve(tiny(**MODEL, **changes), world)
    return [TrainingRuntime(plan, groups_of(plan.topology, rank), torch.device("cpu")) for rank in range(world)]


def groups_of(topology: Topology, rank: int) -> ProcessGroups:
    made: dict[str, Group | None] = {}
    for name in GROUP_NAMES:
        siblings = topology.groups(name)
        mine = next((ranks for ranks in siblings if rank in ranks), None)
        made[name] = None if mine is None else Group(name, mine, mine.index(rank), siblings=siblings)
    return ProcessGroups(**made)  # type: ignore[arg-type]


@cache
def whole(key: str, name: str, shape: tuple[int, ...]) -> Tensor:
    return expected(key, name, shape)


def values_of(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
    """Return what a part of a tensor of a checkpoint holds."""
    return whole(*name.split("/", 1), shape)[slices].reshape(-1)


def boxes_of(runtime: TrainingRuntime) -> list[TensorBox]:
    """Return what a rank loads: its optimizer's state, and biases of routers."""
    found = (tensor_box(held.key, held.piece, held.values) for held in runtime.optimizer.state())
    return [*(box for box in found if box is not None), *(box for _, box in runtime.held_states("master"))]


def assert_all_load(runtimes: dict[str, list[TrainingRuntime]], writer: str, root: Path) -> None:
    """Save known values on one layout, and assert that every layout loads them."""
    attempt = Attempt(Disk(), root, 1, Extras({}, ""), KEEP_ALL, 1 << 22)
    temporary = attempt.begin()
    assert isinstance(temporary, Path)
    written = []
    for rank, runtime in enumerate(runtimes[writer]):
        for held in runtime.optimizer.state():
            name = f"{held.key}/{held.piece.spec.name}"
            held.values.copy_(values_of(name, held.piece.spec.shape, held.piece.box.slices))
        for _, box in runtime.held_states("master"):
            box.values.copy_(values_of(box.name, box.shape, box.box.slices))
        written.append(attempt.write(temporary, list(boxes_to_save(runtime)), rank))
    report = attempt.finish(temporary, written)
    assert isinstance(report, SaveReport), report
    folder = open_folder(report.path)
    for reader, ranks in runtimes.items():
        for runtime in ranks:
            boxes = boxes_of(runtime)
            for box in boxes:
                box.values.fill_(math.nan)
            load_tensors(folder, boxes, Group.alone("world"))
            for box in boxes:
                there = values_of(box.name, box.shape, box.box.slices)
                assert torch.equal(box.values, there), (writer, reader, box.name, box.box)


@pytest.fixture(scope="module")
def all_runtimes() -> dict[str, list[TrainingRuntime]]:
    return {name: simulated(*layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(
    tmp_path: Path, all_runtimes: dict[str, list[TrainingRuntime]], writer: str
) -> None:
    assert_all_load(all_runtimes, writer, tmp_path)


# --- pairs with processes: from one layout to another and back


def begun(rank: int, world: int, changes: dict[str, Any], root: str) -> list[float]:
    """Train two steps, save, and return the losses of the next three steps."""
    runtime, state = runtime_of(rank, world, **MODEL, **changes), TrainingState()
    schedules = Schedules.of(runtime.plan.config)
    train(runtime, state, schedules, 2)
    save(runtime, state, schedules, Path(root))
    return train(runtime, state, schedules, 5)


def taken_over(rank: int, world: int, changes: dict[str, Any], there: str, root: str) -> list[float]:
    """Load a checkpoint, save it under another path, and return the losses of the next three steps."""
    runtime = runtime_of(rank, world, **MODEL, **changes)
    resumed = load(runtime, Path(there))
    assert resumed.schedules is not None and resumed.state.step == 2
    save(runtime, resumed.state, resumed.schedules, Path(root))
    return train(runtime, resumed.state, resumed.schedules, 5)


def assert_the_way_back_changes_nothing(pools: Pools, root: Path, first: Layout, second: Layout) -> None:
    """Take a run of one layout to another and back: bits stay, and both continue alike."""
    here, there, back = (str(root / name) for name in ("here", "there", "back"))
    (world, changes), (other_world, other_changes) = first, second
    losses = pools(world).run(begun, changes, here)[0]
    other_losses = pools(other_world).run(taken_over, other_changes, here, there)[0]
    again = pools(world).run(taken_over, changes, there, back)[0]
    assert again == losses
    assert other_losses == pytest.approx(losses, rel=1e-6, abs=0)
    assert len(set(losses)) == 3
    folders = [open_folder(Path(saved) / "step_00000002") for saved in (here, there, back)]
    for other in folders[1:]:
        found = list(compare(folders[0], other))
        assert len(found) > 60 and [one.name for one in found if not one.is_equal] == []


NAMES = list(LAYOUTS)
PAIRS = [
    (name, NAMES[(index + 5) % len(NAMES)]) for index, name in enumerate(NAMES)
]  # each layout appears once on each side
QUICK = {"dp2", "tp2", "cp2_dp2_zero", "zb_v_pp2_dp2_zero"}
CASES = [pytest.param(*pair, id="-".join(pair), marks=() if pair[0] in QUICK else pytest.mark.slow) for pair in PAIRS]


@pytest.mark.parametrize(("first", "second"), CASES)
def test_resharding_there_and_back_changes_no_bit_and_training_continues(
    rank_pools: Pools, tmp_path: Path, first: str, second: str
) -> None:
    assert_the_way_back_changes_nothing(rank_pools, tmp_path, LAYOUTS[first], LAYOUTS[second])
