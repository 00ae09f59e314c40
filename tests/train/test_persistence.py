"""A run's state goes to disk and comes back to the bit: on the same grid, on another, with every flag that leaves something out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapipe.comm.groups import Group
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.train.persistence import load, prepare_save, save
from megapipe.train.schedules import Schedules
from megapipe.train.state import TrainingState
from tests.harness import RankPool
from tests.train.runs import differences, machines_of, scramble

ALL = ("master", "exp_avg", "exp_avg_sq")
STATE = TrainingState(step=7, consumed_samples=56, consumed_tokens=448, skipped_steps=1)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two, RankPool(4) as four:
        yield {1: one, 2: two, 4: four}


def save_scrambled(rank: int, world_size: int, root: str, changes: dict[str, Any]) -> None:
    machines = machines_of(rank, world_size, **changes)
    scramble(machines)
    machines.optimizer.load_plain_state(machines.optimizer.plain_state() | {"num_steps": 6})
    config = machines.plan.config
    report = save(machines, STATE, Schedules.of(config), Path(root), to_yaml(config))
    assert report.num_bytes == sum(
        path.stat().st_size for path in report.path.rglob("*") if path.is_file() and path.name != "manifest.json"
    )


def load_and_compare(rank: int, world_size: int, root: str, changes: dict[str, Any], keys: tuple[str, ...]) -> tuple[list[str], Any, int]:
    machines = machines_of(rank, world_size, **changes)
    scramble(machines, salt=1)  # what is loaded must replace everything
    resumed = load(machines, Path(root))
    has_runs = machines.optimizer.plain_state()["num_steps"]
    return differences(machines, keys), resumed.state, has_runs


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "one_rank_bf16": (1, {"dtype": "bf16"}),
    "dp2_zero_bf16": (2, {"use_distributed_optimizer": True, "dtype": "bf16", "ddp_bucket_size": 700}),
    "dp2_plain": (2, {}),
    "tp2_swiglu_gqa_sequence_parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "activation": "swiglu", "num_query_groups": 2, "position_embedding_type": "rope"},
    ),
    "tp2_pp2_bf16": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "dtype": "bf16"}),
    "pp2_chunks2_dp2_zero_bf16": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "use_distributed_optimizer": True,
            "dtype": "bf16",
            "ddp_bucket_size": 500,
        },
    ),
    "tp4_shared_kv_heads_untied": (
        4,
        {"tensor_model_parallel_size": 4, "num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world", "changes"), GRIDS.values(), ids=GRIDS.keys())
def test_the_same_grid_loads_every_bit(pools: dict[int, RankPool], tmp_path: Path, world: int, changes: dict[str, Any]) -> None:
    pools[world].run(save_scrambled, str(tmp_path), changes)
    for found, state, num_steps in pools[world].run(load_and_compare, str(tmp_path), changes, ALL):
        assert (found, state, num_steps) == ([], STATE, 6)
