"""Saving and loading the state of a run.

It is bit-identical on the same grid, on another one, and with every flag that leaves parts out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.manifest import read_manifest
from megapipe.checkpoint.shard import padding_of
from megapipe.errors import CheckpointError
from megapipe.train.loading import load
from megapipe.train.saving import prepare_save
from megapipe.train.state import Schedules, TrainingState
from tests.harness import RankPool
from tests.tables import options, rows
from tests.train.runs import differences, runtime_of, save, scramble, state_of

Pools = Callable[[int], RankPool]
# of a run that began there, so that the position fits batches of any size
STATE = TrainingState(step=7, consumed_samples=56, consumed_tokens=448, skipped_steps=1, since=(7, 56))


def save_scrambled(rank: int, world_size: int, root: str, changes: dict[str, Any]) -> None:
    runtime = runtime_of(rank, world_size, **changes)
    scramble(runtime)
    runtime.optimizer.load_plain_state(runtime.optimizer.plain_state() | {"num_steps": 6})
    config = runtime.plan.config
    report = save(runtime, STATE, Schedules.of(config), Path(root))
    assert report.num_bytes == sum(
        path.stat().st_size for path in report.path.rglob("*") if path.is_file() and path.name != "manifest.json"
    )


def load_and_compare(
    rank: int, world_size: int, root: str, changes: dict[str, Any], keys: tuple[str, ...]
) -> tuple[list[str], Any, int]:
    runtime = runtime_of(rank, world_size, **changes)
    scramble(runtime, salt=1)  # loading must overwrite all of it
    resumed = load(runtime, Path(root))
    has_runs = runtime.optimizer.plain_state()["num_steps"]
    return differences(runtime, keys), resumed.state, has_runs


def saved_keys(root: Path) -> set[str]:
    (path,) = root.glob("step_*")
    return {name.split("/")[0] for name in read_manifest(path).tensors}


@pytest.mark.parametrize(
    ("dtype", "with_optimizer", "keys"),
    [
        ("fp32", True, {"master", "exp_avg", "exp_avg_sq"}),
        ("bf16", True, {"master", "exp_avg", "exp_avg_sq"}),
        ("fp32", False, {"master"}),
        ("bf16", False, {"weights"}),
    ],
    ids=["fp32", "bf16", "fp32_no_optimizer", "bf16_no_optimizer"],
)
@pytest.mark.parametrize("flag", ["no_load_optim", "finetune"])
def test_a_checkpoint_without_optimizer_state_loads_the_weights(
    rank_pools: Pools, tmp_path: Path, dtype: str, with_optimizer: bool, keys: set[str], flag: str
) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), {"dtype": dtype, "no_save_optim": not with_optimizer})
    assert saved_keys(tmp_path) == keys
    changes = {"dtype": dtype, "pipeline_model_parallel_size": 2, flag: True}
    compared = () if keys == {"weights"} else ("master",)  # parameters are always compared
    for found, state, num_steps in rank_pools(2).run(load_and_compare, str(tmp_path), changes, compared):
        assert (found, state, num_steps) == ([], TrainingState() if flag == "finetune" else STATE, 0)


def test_masters_of_bf16_weights_are_the_weights(rank_pools: Pools, tmp_path: Path) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), {"dtype": "bf16", "no_save_optim": True})
    assert all(rank_pools(2).run(masters_equal_parameters, str(tmp_path)))


def masters_equal_parameters(rank: int, world_size: int, root: str) -> bool:
    runtime = runtime_of(rank, world_size, dtype="bf16", no_load_optim=True, use_distributed_optimizer=True)
    load(runtime, Path(root))
    before = state_of(runtime)
    runtime.optimizer.masters_to_parameters()
    after = state_of(runtime)
    masters = [values for name, values in after.items() if name.startswith("master/")]
    assert masters
    return all(torch.equal(before[name], after[name]) for name in after) and all(
        torch.equal(v, v.bfloat16().float()) for v in masters
    )


def refusal(rank: int, world_size: int, root: str, changes: dict[str, Any]) -> str:
    runtime = runtime_of(rank, world_size, **changes)
    try:
        return f"no refusal: {load(runtime, Path(root))}"
    except CheckpointError as error:
        return str(error)


REFUSALS = rows(Path(__file__).with_name("unfit_checkpoints.tsv"))


@pytest.mark.parametrize(("writer", "reader", "message"), [pytest.param(*row[1:], id=row[0]) for row in REFUSALS])
def test_a_checkpoint_that_does_not_fit_the_run_is_refused_on_all_ranks(
    rank_pools: Pools, tmp_path: Path, writer: str, reader: str, message: str
) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), options(writer, {}))
    changes = options(f"pipeline_model_parallel_size=2 {reader}", {})
    for said in rank_pools(2).run(refusal, str(tmp_path), changes):
        assert re.search(message, said, re.DOTALL), said


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({}, {"seed": 5, "no_load_rng": True}),
        ({"no_save_rng": True}, {"no_load_rng": True}),
        ({}, {"seed": 5, "finetune": True, "lr": 0.5}),
        ({}, {"lr": 0.5, "override_opt_param_scheduler": True}),
        ({}, {"lr": 0.5, "use_checkpoint_opt_param_scheduler": True}),
        ({}, {"ckpt_step": 7}),
        ({}, {"dtype": "fp64"}),
    ],
    ids=["other_seed", "no_random_state", "finetune", "override_schedules", "checkpoint_schedules", "step", "widened"],
)
def test_flags_allow_to_resume_despite_a_difference(
    rank_pools: Pools, tmp_path: Path, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), writer)
    for said in rank_pools(2).run(refusal, str(tmp_path), {"pipeline_model_parallel_size": 2} | reader):
        assert said.startswith("no refusal"), said


def resumed_lr(rank: int, world_size: int, root: str, changes: dict[str, Any]) -> float:
    schedules = load(runtime_of(rank, world_size, **changes), Path(root)).schedules
    assert schedules is not None
    return schedules.rates(0).lr


def test_two_flags_choose_the_schedules_of_the_run_or_of_the_checkpoint(rank_pools: Pools, tmp_path: Path) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), {"lr": 0.25})
    assert rank_pools(1).run(resumed_lr, str(tmp_path), {"lr": 0.5, "override_opt_param_scheduler": True}) == [0.5]
    assert rank_pools(1).run(resumed_lr, str(tmp_path), {"lr": 0.5, "use_checkpoint_opt_param_scheduler": True}) == [
        0.25
    ]
    assert rank_pools(1).run(resumed_lr, str(tmp_path), {"lr": 0.5, "finetune": True}) == [0.5]


def test_an_empty_root_is_a_fresh_start_unless_that_is_an_error(rank_pools: Pools, tmp_path: Path) -> None:
    for said in rank_pools(2).run(refusal, str(tmp_path), {}):
        assert (
            said.startswith("no refusal: Resumed(state=TrainingState(step=0")
            and "holds no checkpoint: starting from step 0" in said
        )
    for said in rank_pools(2).run(refusal, str(tmp_path), {"exit_on_missing_checkpoint": True}):
        assert re.search(r"--load .* holds no checkpoint \(--exit-on-missing-checkpoint\)", said)


def test_a_folder_to_load_from_that_does_not_exist_is_refused_unless_the_run_saves_there(
    rank_pools: Pools, tmp_path: Path
) -> None:
    missing = str(tmp_path / "gpt2")
    for said in rank_pools(2).run(refusal, missing, {"save": str(tmp_path)}):
        assert f"--load {missing} does not exist" in said
    for said in rank_pools(2).run(refusal, missing, {"save": missing + "/"}):
        assert "gpt2 holds no checkpoint: starting from step 0" in said


def test_damage_found_by_one_rank_fails_all_ranks(rank_pools: Pools, tmp_path: Path) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), {})
    (path,) = tmp_path.glob("step_*")
    saved = read_manifest(path).tensors["master/decoder.layers.3.mlp.linear_fc2.weight"].boxes[0]
    shard = path / saved.file
    content = bytearray(shard.read_bytes())
    content[saved.start] ^= 1
    shard.write_bytes(content)
    messages = set(rank_pools(2).run(refusal, str(tmp_path), {"pipeline_model_parallel_size": 2}))
    (message,) = messages
    where = "rank_00000.safetensors, tensor master/decoder.layers.3.mlp.linear_fc2.weight@0,0 is damaged"
    assert re.search(f"holds no complete checkpoint:\\n  passed over: rank 1: .*{where}", message)


def prepare(rank: int, world_size: int, root: str, step: int) -> str:
    world = runtime_of(rank, world_size).groups.world
    try:
        return str(prepare_save(Path(root), TrainingState(step=step), world))
    except CheckpointError as error:
        return str(error)


def test_the_root_is_prepared_once_for_all(rank_pools: Pools, tmp_path: Path) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), {})
    (tmp_path / ".step_00000008.tmp-0123abcd").mkdir()
    for said in rank_pools(2).run(prepare, str(tmp_path), 7):
        assert ".step_00000008.tmp-0123abcd" in said
    for said in rank_pools(2).run(prepare, str(tmp_path), 6):
        assert "already holds step_00000007, later than step 6" in said


def padding_and_scale(rank: int, world_size: int, root: str, changes: dict[str, Any]) -> tuple[float, int, float]:
    """Load and return the largest moment in the vocabulary padding, the number of such moments, and the loss scale."""
    runtime = runtime_of(rank, world_size, **changes)
    scramble(runtime, salt=1)
    load(runtime, Path(root))
    padding = [padding_of(held.piece, held.values) for held in runtime.optimizer.state() if held.key != "master"]
    values = torch.cat(padding)
    return values.abs().max().item(), values.numel(), runtime.optimizer.loss_scale


def test_moments_of_the_padding_are_zero_and_a_loss_scale_stays_with_its_precision(
    rank_pools: Pools, tmp_path: Path
) -> None:
    rank_pools(1).run(save_scrambled, str(tmp_path), {"dtype": "bf16"})
    changes = {"dtype": "fp16", "initial_loss_scale": 512.0, "make_vocab_size_divisible_by": 32}
    assert rank_pools(1).run(padding_and_scale, str(tmp_path), changes) == [(0.0, 3 * 16 * 2, 512.0)]
