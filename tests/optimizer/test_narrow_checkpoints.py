"""Checkpoints of narrow optimizer state: fp32 in the file, loaded to the bit on any grid and with any dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.folder import open_folder
from megapipe.extras.inspect.checkpoint import compare
from tests.harness import RankPool
from tests.train.test_any_grid import LAYOUTS, begun, taken_over
from tests.train.test_expert_layouts import EP, EXPERTS
from tests.train.test_expert_layouts import LAYOUTS as OF_EXPERTS

BF16 = {"dtype": "bf16"}
NARROW = BF16 | {"use_precision_aware_optimizer": True}
NARROW |= dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")
GRIDS = LAYOUTS | OF_EXPERTS | {"ep2": (2, {EP: 2})}
# (layout and state of the run, layout and state to which it is taken over and from which it comes back)
CASES = {
    "narrow": ("pp2", NARROW, "tp2", NARROW),
    "to_fp32_state_and_back": ("dp2", NARROW, "tp2", BF16),
    "to_shards_with_one_moment_in_fp32": ("tp2", NARROW, "dp4_zero", NARROW | {"exp_avg_sq_dtype": "fp32"}),
    "experts": ("ep2", NARROW | EXPERTS, "ep4_of_tp2_dp2", NARROW | EXPERTS),
    "experts_sharded": ("ep2_zero", NARROW | EXPERTS, "one", NARROW | EXPERTS),
}


@pytest.mark.parametrize("case", CASES)
def test_state_is_taken_to_another_grid_and_back_without_a_changed_bit(
    rank_pools: Callable[[int], RankPool], tmp_path: Path, case: str
) -> None:
    first, state, second, other_state = CASES[case]
    here, there, back = (str(tmp_path / name) for name in ("here", "there", "back"))
    (world, layout), (other_world, other_layout) = GRIDS[first], GRIDS[second]
    changes: dict[str, Any] = layout | state
    losses = rank_pools(world).run(begun, changes, here)[0]
    other_changes, allowed = other_layout | other_state, {"allow_changed_optimizer": True}
    other_losses = rank_pools(other_world).run(taken_over, other_changes | allowed, here, there)[0]
    assert rank_pools(world).run(taken_over, changes | allowed, there, back)[0] == losses
    assert other_losses == pytest.approx(losses, rel=0.02)
    folders = [open_folder(Path(root) / "step_00000002") for root in (here, there, back)]
    assert {saved.dtype for saved in folders[0].manifest.tensors.values()} == {"F32"}
    for other in folders[1:]:
        found = list(compare(folders[0], other))
        assert len(found) > 60 and [one.name for one in found if not one.is_equal] == []
