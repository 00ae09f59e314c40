"""Frozen parameters keep their bits, take no training state, and may be others after a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.train.loading import load
from megapipe.train.state import Schedules, TrainingState
from tests.harness import RankPool
from tests.train.runs import runtime_of, save, state_of
from tests.train.test_resume import train

GRID = {"use_distributed_optimizer": True, "dtype": "bf16", "clip_grad": 0.0}
FIRST, SECOND = "decoder.layers.0.", "decoder.layers.1."


def trained(rank: int, world_size: int, root: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state before and after two steps in which the first layer is frozen, and save the latter."""
    runtime, state = runtime_of(rank, world_size, freeze=(f"{FIRST}*",), **GRID), TrainingState()
    schedules, before = Schedules.of(runtime.plan.config), state_of(runtime)
    train(runtime, state, schedules, 2)
    save(runtime, state, schedules, Path(root))
    return before, state_of(runtime)


def resumed(rank: int, world_size: int, root: str, freeze: tuple[str, ...], allows: bool) -> Any:
    """Return the remarks and the state of a run that has loaded the checkpoint, or the error."""
    runtime = runtime_of(rank, world_size, freeze=freeze, **GRID)
    flags = replace(runtime.plan.config.checkpoint, allow_changed_optimizer=allows)
    try:
        remarks = load(runtime, Path(root), flags).remarks
    except CheckpointError as error:
        return str(error)
    return remarks, state_of(runtime)


def keys_of(state: dict[str, Tensor], name: str) -> set[str]:
    """Return the kinds of tensors that a state has of parameters whose names begin so."""
    return {key.split("/")[0] for key in state if key.split("/")[1].startswith(name)}


def test_frozen_parameters_keep_their_bits_and_have_no_state(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for before, after in rank_pools(2).run(trained, str(tmp_path)):
        assert keys_of(after, FIRST) == {"parameter"} and keys_of(after, SECOND) > {"master", "parameter"}
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert changed and not any(FIRST in key for key in changed)


def test_other_parameters_are_frozen_from_a_checkpoint_on(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    ranks = rank_pools(2)
    saved = [after for _, after in ranks.run(trained, str(tmp_path))]
    (refusal, _) = ranks.run(resumed, str(tmp_path), (f"{SECOND}*",), False)
    assert "--freeze" in refusal and "--allow-changed-optimizer" in refusal
    for before, (remarks, now) in zip(saved, ranks.run(resumed, str(tmp_path), (f"{SECOND}*",), True), strict=True):
        assert "--freeze" in "".join(remarks)
        assert keys_of(now, SECOND) == {"parameter"} and keys_of(now, FIRST) > {"master", "parameter"}
        for key, values in now.items():
            kind, name = key.split("/")
            if key in before:
                assert torch.equal(values, before[key]), key
            else:  # trained from here on
                assert name.startswith(FIRST) and (kind == "master" or not values.any()), key


def test_a_stage_without_trained_parameters_has_no_state(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    grid = {"pipeline_model_parallel_size": 2, "freeze": ("embedding.*", "decoder.layers.[01].*")}
    held = rank_pools(2).run(sizes_of_state, grid)
    assert held[0] == 0 < held[1]


def sizes_of_state(rank: int, world_size: int, changes: dict[str, Any]) -> int:
    """Return the elements of main gradients, masters and moments of a rank that has trained a step."""
    runtime = runtime_of(rank, world_size, **changes)
    train(runtime, TrainingState(), Schedules.of(runtime.plan.config), 1)
    stores = [store for buffers in runtime.buffers.values() for store in buffers.trained]
    gradients = [store.kept_gradients[0] for store in stores]
    return sum(each.numel() for each in [*gradients, *runtime.optimizer.held()["optimizer"]])
