"""Checkpoints of mixtures of experts: any (ep, etp, tp, pp, dp) loads what any other saved, bit by bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import KEEP_ALL, open_folder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Attempt, Extras, SaveReport
from megapipe.checkpoint.shard import tensor_box
from megapipe.comm.groups import Group
from megapipe.extras.inspect.checkpoint import compare
from megapipe.train.saving import boxes_to_save
from tests.train.test_any_grid import PP, TP, ZERO, Pools, begun, simulated, taken_over, whole

EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
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
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2_zero": (2, {EP: 2} | ZERO),
    "ep2_of_dp8_two_instances": (8, {EP: 2, "num_distributed_optimizer_instances": 2} | ZERO),
    "ep4_of_tp2_dp2": (4, {TP: 2, EP: 4, ETP: 1}),
    "ep2_etp2_pp2_zero": (8, {TP: 2, EP: 2, PP: 2} | ZERO),
    "etp4_of_tp2_dp2": (4, {TP: 2, ETP: 4} | ZERO),
}


def test_every_expert_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    runtimes = {name: simulated(world, EXPERTS | changes) for name, (world, changes) in LAYOUTS.items()}
    for writer, held_by in runtimes.items():
        attempt = Attempt(Disk(), tmp_path / writer, 1, Extras({}, ""), KEEP_ALL, 1 << 22)
        temporary = attempt.begin()
        assert isinstance(temporary, Path)
        written = []
        for rank, runtime in enumerate(held_by):
            for held in runtime.optimizer.state():
                values = whole(held.key, held.piece.spec.name, held.piece.spec.shape)[held.piece.box.slices]
                held.values.copy_(values.reshape(-1))
            for _, box in runtime.held_states("master"):
                box.values.copy_(whole(*box.name.split("/", 1), box.shape))
            written.append(attempt.write(temporary, list(boxes_to_save(runtime)), rank))
        report = attempt.finish(temporary, written)
        assert isinstance(report, SaveReport), report
        folder = open_folder(report.path)
        for reader, ranks in runtimes.items():
            for runtime in ranks:
                found = (tensor_box(held.key, held.piece, held.values) for held in runtime.optimizer.state())
                boxes = [box for box in found if box is not None]
                boxes += [box for _, box in runtime.held_states("master")]
                for box in boxes:
                    box.values.fill_(math.nan)
                load_tensors(folder, boxes, Group.alone("world"))
                for box in boxes:
                    there = whole(*box.name.split("/", 1), box.shape)[box.box.slices].reshape(-1)
                    assert torch.equal(box.values, there), (writer, reader, box.name, box.box)


@pytest.mark.parametrize(("first", "second"), [("ep2_zero", "ep4_of_tp2_dp2"), ("etp4_of_tp2_dp2", "one")])
def test_experts_move_to_another_layout_and_back_without_a_changed_bit(
    rank_pools: Pools, tmp_path: Path, first: str, second: str
) -> None:
    here, there, back = (str(tmp_path / name) for name in ("here", "there", "back"))
    (world, changes), (other_world, other_changes) = LAYOUTS[first], LAYOUTS[second]
    losses = rank_pools(world).run(begun, EXPERTS | changes, here)[0]
    other_losses = rank_pools(other_world).run(taken_over, EXPERTS | other_changes, here, there)[0]
    again = rank_pools(world).run(taken_over, EXPERTS | changes, there, back)[0]
    assert again == losses
    assert other_losses == pytest.approx(losses, rel=1e-6, abs=0)
    folders = [open_folder(Path(root) / "step_00000002") for root in (here, there, back)]
    for other in folders[1:]:
        found = list(compare(folders[0], other))
        assert len(found) > 60 and [one.name for one in found if not one.is_equal] == []
