"""Checkpoints across layouts of up to eight ranks, dense and of mixtures with a predicting module.

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
from tests.tables import options, rows
from tests.train.runs import expected, runtime_of, save, tiny
from tests.train.test_resume import train

ZERO = {"use_distributed_optimizer": True, "ddp_bucket_size": 700}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params", "data_parallel_sharding_units": 2}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_layer_freq": "2",
    "moe_shared_expert_intermediate_size": 8,
    "add_bias_linear": False,
    "sequence_parallel": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
}
Layout = tuple[int, dict[str, Any]]
TABLE, SETS = rows(Path(__file__).with_name("layouts.tsv")), {"ZERO": ZERO, "ZERO3": ZERO3}
KINDS: dict[str, dict[str, Layout]] = {
    kind: {name: (int(ranks), common | options(words, SETS)) for row, ranks, words, name in TABLE if row == kind}
    for kind, common in (("dense", {}), ("experts", EXPERTS))
}
LAYOUTS = KINDS["dense"] | KINDS["experts"]
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
def runtimes_of() -> Callable[[str], dict[str, list[TrainingRuntime]]]:
    """Return a function that builds all layouts of a kind once."""
    return cache(lambda kind: {name: simulated(*layout) for name, layout in KINDS[kind].items()})


@pytest.mark.parametrize(("kind", "writer"), [(kind, name) for kind in KINDS for name in KINDS[kind]])
def test_every_layout_loads_what_every_other_saved(
    tmp_path: Path, runtimes_of: Callable[[str], dict[str, list[TrainingRuntime]]], kind: str, writer: str
) -> None:
    assert_all_load(runtimes_of(kind), writer, tmp_path)


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


NAMES = list(KINDS["dense"])
# each layout appears once on each side
PAIRS = [(name, NAMES[(index + 5) % len(NAMES)]) for index, name in enumerate(NAMES)]
PAIRS += [("ep2_zero", "ep4_of_tp2_dp2"), ("etp4_of_tp2_dp2", "one_of_experts")]
MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated"}
BF16 = {"dtype": "bf16", "allow_changed_optimizer": True}
NARROW = BF16 | {"use_precision_aware_optimizer": True}
NARROW |= dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")
# (layout and options here, layout and options there, tolerance of the losses there)
TRIPS = {
    "sgd, shards to tp2": ("dp4_zero", {"optimizer": "sgd"}, "tp2", {"optimizer": "sgd"}, 1e-6),
    "muon, sharded weights to dp4": ("pp2_dp2_zero3", MUON, "dp4_zero", MUON, 1e-4),
    "muon, tp2 to dp4": ("tp2", MUON, "dp4_zero", MUON, 1e-4),
    "muon, tp2 with shards to pp2": ("tp2_sequence_dp2_zero", MUON, "pp2", MUON, 1e-4),
    "narrow": ("pp2", NARROW, "tp2", NARROW, 0.02),
    "narrow, to fp32 state": ("dp2", NARROW, "tp2", BF16, 0.02),
    "narrow, to shards with one moment in fp32": (
        "tp2",
        NARROW,
        "dp4_zero",
        NARROW | {"exp_avg_sq_dtype": "fp32"},
        0.02,
    ),
    "narrow, experts": ("ep2", NARROW, "ep4_of_tp2_dp2", NARROW, 0.02),
    "narrow, experts sharded": ("ep2_zero", NARROW, "one_of_experts", NARROW, 0.02),
}
CASES = {f"{one}-{two}": (one, {}, two, {}, 1e-6) for one, two in PAIRS} | TRIPS


@pytest.mark.parametrize("case", CASES)
def test_resharding_there_and_back_changes_no_bit_and_training_continues(
    rank_pools: Pools, tmp_path: Path, case: str
) -> None:
    """Take a run of one layout to another and back: bits stay, fp32 in the file, and both continue alike."""
    first, changes, second, other_changes, limit = CASES[case]
    here, there, back = (str(tmp_path / name) for name in ("here", "there", "back"))
    (world, layout), (other_world, other_layout) = LAYOUTS[first], LAYOUTS[second]
    losses = rank_pools(world).run(begun, layout | changes, here)[0]
    other_losses = rank_pools(other_world).run(taken_over, other_layout | other_changes, here, there)[0]
    again = rank_pools(world).run(taken_over, layout | changes, there, back)[0]
    assert again == losses
    assert other_losses == pytest.approx(losses, rel=limit, abs=0)
    assert len(set(losses)) == 3
    folders = [open_folder(Path(saved) / "step_00000002") for saved in (here, there, back)]
    assert {saved.dtype for saved in folders[0].manifest.tensors.values()} == {"F32"}
    for other in folders[1:]:
        found = list(compare(folders[0], other))
        assert len(found) > 60 and [one.name for one in found if not one.is_equal] == []
