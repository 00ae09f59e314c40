"""Stages that run in parts compute what whole stages compute, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.errors import ScheduleError
from megapipe.extras.verify.compare import gradient_pieces
from megapipe.extras.verify.oracle import drawn_slices, random_batches, share_of
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.parts import expand
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.parity.grids import MODEL, SHARED, SIGMOID, ZERO
from tests.tiny import make_config

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DELAY = OVERLAP | {"delay_wgrad_compute": True}


def one_step(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """Run a step; return loss, norm, all gradients as bytes, and the names of the actions."""
    plan, tracer = resolve(make_config(**MODEL | options), world_size), Tracer()
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(
        plan, groups, torch.device("cpu"), drawn_slices(1, torch.float64), None if plan.parts is None else tracer
    )
    (batch,) = random_batches(plan.config, plan.topology.dp, [plan.batch.num_microbatches], seed=3)
    result = TrainStep(runtime).run(share_of(runtime, batch, 0), Rates(0.0, 0.0, None))
    gradients = {
        (piece.piece.spec.name, str(piece.piece)): piece.values.numpy().tobytes() for piece in gradient_pieces(runtime)
    }
    actions = [event.name for event in tracer.of_kind("action")]
    return result.loss, result.update.grad_norm, gradients, actions


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 1": (2, {"ep": 2} | SHARED),
    "dropout, norms around": (
        2,
        {"ep": 2, "hidden_dropout": 0.2, "norm_position": "around", "moe_layer_freq": "2"} | SHARED,
    ),
    "tp 2, ep 2, etp 2": (4, {"tp": 2, "ep": 2} | SIGMOID | SHARED),
    "interleaved": (4, {"ep": 2, "pp": 2, "chunks": 2, "recompute_granularity": "selective"} | ZERO),
    "dualpipe": (4, {"ep": 2, "pp": 2, "pipeline_schedule": "dualpipe"} | SHARED),
    "dualpipe-v": (4, {"ep": 2, "pp": 2, "chunks": 2, "pipeline_schedule": "dualpipe-v"}),
}


@pytest.mark.parametrize("how", [OVERLAP, DELAY], ids=["whole backwards", "delayed weight gradients"])
@pytest.mark.parametrize("name", CASES)
def test_stages_in_parts_compute_the_bits_of_whole_stages(
    name: str, how: dict[str, Any], rank_pools: Callable[[int], RankPool]
) -> None:
    world_size, options = CASES[name]
    pool = rank_pools(world_size)
    for whole, parts in zip(pool.run(one_step, options), pool.run(one_step, options | how), strict=True):
        assert parts[:2] == whole[:2]
        assert [key for key in whole[2] if whole[2][key] != parts[2][key]] == []
        assert any(name.endswith("D") for name in parts[3])


def engine_with_another_row(rank: int, world_size: int) -> Any:
    """Build an engine where rank 1 has no pairs."""
    plan = resolve(make_config(**MODEL | DELAY | {"ep": 2}), world_size)
    if rank:
        serial = replace(plan.config.parallel, overlap_moe_expert_parallel_comm=False)
        other = replace(plan, config=replace(plan.config, parallel=serial)).schedule(plan.batch.num_microbatches)
        assert plan.parts is not None
        rows = lower(expand(other.compute_only(), plan.parts), 4)
        object.__setattr__(plan, "part_schedule", lambda count: rows)
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(1, torch.float64))
    with pytest.raises(ScheduleError, match="would issue different all-to-alls"):
        runtime.engine(plan.batch.num_microbatches)


def test_ranks_that_would_issue_all_to_alls_in_other_orders_are_refused(rank_pools: Callable[[int], RankPool]) -> None:
    rank_pools(2).run(engine_with_another_row)


PP2 = {"ep": 2, "pp": 2}


def test_1f1b_in_pairs_has_a_warm_up_long_enough() -> None:
    """Each pair of 1F1B's own rows would wait for that of the next rank."""
    plan = resolve(make_config(**MODEL | PP2 | OVERLAP | {"global_batch_size": 32}), 4)
    plain = resolve(make_config(**MODEL | PP2 | {"global_batch_size": 32}), 4)
    assert [peak_live_chunks(made.schedule(8)) for made in (plan, plain)] == [(4, 2), (2, 1)]
