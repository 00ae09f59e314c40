"""Biases that balance experts: what counts, what a skipped step leaves, and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.extras.verify.oracle import drawn_slices, random_batches, share_of
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.trace.parameters import model_states
from megapipe.train.step import ExpertReport, TrainStep
from tests.harness import RankPool
from tests.parity.grids import BIAS, FULL, MODEL, ZERO
from tests.tiny import make_config

RATES = Rates(0.01, 0.0, None)


def built(options: dict[str, Any], rank: int = 0, world_size: int = 1) -> TrainingRuntime:
    plan = resolve(make_config(**MODEL | BIAS | options), world_size)
    groups = ProcessGroups.alone() if world_size == 1 else build_process_groups(plan.topology, rank, "gloo", 60)
    dtype = torch.float64 if plan.config.precision.dtype == "fp64" else torch.float32
    return TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(1, dtype))


def batches_of(runtime: TrainingRuntime, count: int) -> list[Any]:
    plan = runtime.plan
    return random_batches(plan.config, plan.topology.dp, [8 // plan.topology.dp] * count, seed=3)


def biases(runtime: TrainingRuntime) -> torch.Tensor:
    return torch.stack([box.values.clone() for _, box in runtime.held_states()])


def test_states_have_the_names_and_shapes_of_their_specification() -> None:
    runtime = built({"moe_layer_freq": "2"})
    held = {box.name: box.shape for _, box in runtime.held_states()}
    assert held == {f"weights/{spec.name}": spec.shape for spec in model_states(runtime.plan.config.model)}
    assert list(held) == [f"weights/decoder.layers.{layer}.mlp.router.expert_bias" for layer in (0, 2)]


def test_a_bias_moves_by_the_rate_towards_the_mean_load_of_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = built({})
    trainer = TrainStep(runtime)
    (batch,) = batches_of(runtime, 1)
    taken: list[Any] = []
    for router in runtime.stages[0].routers().values():
        take = router.take
        monkeypatch.setattr(router, "take", lambda take=take: taken.append(found := take()) or found)
    trainer.run(share_of(runtime, batch, 0), RATES)
    loads = [load for load, _, _ in taken]
    assert len(loads) == 4
    for bias, load in zip(biases(runtime), loads, strict=True):
        assert load.sum() == 16 * 8 * 4  # samples x tokens x topk, each counted once
        mean = load.sum() / load.numel()
        expected = [0.05 if count < mean else -0.05 if count > mean else 0.0 for count in load.tolist()]
        assert torch.allclose(bias, torch.tensor(expected))
        assert set(expected) >= {0.05, -0.05}


def test_evaluation_and_replays_do_not_count() -> None:
    found = []
    for options, evaluates in (({}, False), ({}, True), (FULL, True)):
        runtime = built(options)
        trainer = TrainStep(runtime)
        for step, batch in enumerate(batches_of(runtime, 2)):
            if evaluates:
                before = biases(runtime)
                evaluation = share_of(runtime, batch, step)
                evaluation._keys = None  # as `read_microbatches` does for evaluation
                trainer.evaluate(evaluation)
                assert torch.equal(before, biases(runtime))
            trainer.run(share_of(runtime, batch, step), RATES)
        found.append(biases(runtime))
    assert found[0].abs().max() > 0
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_skipped_step_leaves_the_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = built({})
    trainer = TrainStep(runtime)
    (batch,) = batches_of(runtime, 1)
    finish = runtime.stores.finish_gradients

    def overflow() -> None:
        finish()
        runtime.buffers[0].buffers[0].gradients[0] = torch.inf

    with monkeypatch.context() as patch:
        patch.setattr(runtime.stores, "finish_gradients", overflow)
        assert trainer.run(share_of(runtime, batch, 0), RATES).update.skipped
    assert biases(runtime).abs().max() == 0
    assert not trainer.run(share_of(runtime, batch, 0), RATES).update.skipped
    assert biases(runtime).abs().max() == pytest.approx(0.05)


def after_two_steps(rank: int, world_size: int, options: dict[str, Any]) -> list[list[float]]:
    runtime = built(options, rank, world_size)
    trainer = TrainStep(runtime)
    for step, batch in enumerate(batches_of(runtime, 2)):
        trainer.run(share_of(runtime, batch, step), RATES)
    assert biases(runtime).abs().max() > 0
    return biases(runtime).tolist()


@pytest.mark.parametrize("options", [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 1} | ZERO], ids=["ep4", "tp2-ep2-zero"])
def test_every_rank_has_the_biases_of_one_rank(options: dict[str, Any], rank_pools: Callable[[int], RankPool]) -> None:
    ((*expected,),) = rank_pools(1).run(after_two_steps, {})
    assert all(found == expected for found in rank_pools(4).run(after_two_steps, options))


def reported(rank: int, world_size: int, options: dict[str, Any]) -> ExpertReport | None:
    runtime = built(options, rank, world_size)
    trainer = TrainStep(runtime)
    (batch,) = batches_of(runtime, 1)
    return trainer.expert_loads.report(trainer.run(share_of(runtime, batch, 0), RATES).routed, 8)


EVERY = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2),
    "moe_layer_freq": "[1,1,0,1]",
}


def test_the_report_is_the_same_on_every_rank_of_every_grid(rank_pools: Callable[[int], RankPool]) -> None:
    """One process with 4 microbatches fewer a rank: loads add up over dp, ep, tp and pipeline ranks."""
    (expected,) = rank_pools(1).run(reported, EVERY)
    assert expected is not None and expected.layers == (0, 1, 3)
    assert list(expected.losses) == ["z_loss", "aux_loss", "seq_aux_loss"]
    for loads, imbalance in zip(expected.load, expected.imbalance, strict=True):
        assert len(loads) == 8 and sum(loads) == pytest.approx(8.0) and imbalance == max(loads) > 1.0
    # near balance a loss is its coefficient, and never far below
    assert all(0.09 < loss < 0.4 for loss in expected.losses["aux_loss"])
    for options in ({"ep": 2, "pp": 2}, {"tp": 2, "ep": 4, "etp": 1}):
        for found in rank_pools(4).run(reported, EVERY | options):
            assert found is not None and found.layers == expected.layers and found.dropped == [0.0] * 3
            assert torch.allclose(torch.tensor(found.load), torch.tensor(expected.load))
            for name, losses in expected.losses.items():
                assert found.losses[name] == pytest.approx(losses, rel=1e-10)


def test_dropped_rows_are_those_beyond_the_capacity() -> None:
    report = reported(0, 1, {"moe_expert_capacity_factor": 0.5})
    assert report is not None
    # every expert takes at most half of the mean, so at least half of the rows are dropped
    assert all(0.5 <= share < 0.75 for share in report.dropped)
