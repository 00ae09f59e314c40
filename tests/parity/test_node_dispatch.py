"""A token that goes once to a node gives the losses, norms and weights of plain all-to-alls, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.errors import ConfigError
from megapipe.extras.report.kernels import dispatch_words
from megapipe.extras.verify.compare import weight_pieces
from megapipe.extras.verify.oracle import drawn_slices, random_batches, share_of
from megapipe.extras.verify.shrink import shrink
from megapipe.model import dispatch
from megapipe.model.node_dispatch import NodeRoutes
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.parity.grids import BIAS, MODELS, grids
from tests.tiny import make_config

SMALL = MODELS["node"]
FLEX = {"moe_token_dispatcher_type": "flex"}
STEPS = 2


def trained(rank: int, world_size: int, per_node: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run some steps; return losses, norms and weights, how often the host waited for numbers, and routes made."""
    plan = resolve(make_config(**SMALL | options), world_size, per_node)
    dtype = torch.float64 if plan.config.precision.dtype == "fp64" else torch.float32
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(1, dtype))
    batches = random_batches(plan.config, plan.topology.dp, [plan.batch.num_microbatches] * STEPS, seed=3)
    step, found = TrainStep(runtime), []
    with (
        mock.patch.object(dispatch, "to_host", side_effect=dispatch.to_host) as waits,
        mock.patch.object(NodeRoutes, "of_slots", side_effect=NodeRoutes.of_slots) as routes,
    ):
        for number, batch in enumerate(batches):
            result = step.run(share_of(runtime, batch, number), Rates(0.05, 0.0, None))
            found += [result.loss, result.update.grad_norm]
        runtime.stores.finish_weights()
    weights = {piece.piece.spec.name: piece.values.clone() for piece in weight_pieces(runtime)}
    return {"losses": found, "weights": weights, "waits": waits.call_count, "routes": routes.call_count}


def case(name: str) -> tuple[int, int, dict[str, Any]]:
    """Return the ranks, the ranks of a node, and the options of a grid of grids.tsv."""
    world_size, options = grids("node")[name]
    return world_size, options["per_node"], {key: value for key, value in options.items() if key != "per_node"}


@pytest.mark.parametrize("name", grids("node"))
def test_training_equals_that_with_all_to_alls(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, per_node, options = case(name)
    pool = rank_pools(world_size)
    plain = pool.run(trained, per_node, options)
    for one, other in zip(plain, pool.run(trained, per_node, options | FLEX), strict=True):
        assert other["losses"] == one["losses"]
        assert_equal(one["weights"], other["weights"])
        assert other["waits"] == one["waits"] == other["routes"] > 0 == one["routes"]


@pytest.mark.parametrize("name", ["ep 4, k 8 of 16", "ep 4 of cp 2 dp 2, capacity", "ep 4 pp 2 in parts, dualpipe-v"])
def test_sums_in_the_node_are_equal_in_fp64_up_to_rounding(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, per_node, options = case(name)
    pool = rank_pools(world_size)
    plain = pool.run(trained, per_node, options)
    found = pool.run(trained, per_node, options | FLEX | {"moe_combine_in_node": True})
    for one, other in zip(plain, found, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-10)
        for key, values in one["weights"].items():
            torch.testing.assert_close(other["weights"][key], values, rtol=1e-10, atol=1e-10)
    assert any(
        not torch.equal(values, other["weights"][key])
        for one, other in zip(plain, found, strict=True)
        for key, values in one["weights"].items()
    )


@pytest.mark.parametrize("per_node", [4, 1], ids=["one node", "a rank a node"])
def test_one_level_runs_plain_all_to_alls(per_node: int, rank_pools: Callable[[int], RankPool]) -> None:
    for found in rank_pools(4).run(trained, per_node, {"ep": 4} | FLEX):
        assert found["routes"] == 0 < found["waits"]


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, values in one.items() if not torch.equal(values, other[name])] == []


def verified(rank: int, world_size: int, per_node: int, options: dict[str, Any]) -> list[str]:
    """Return what --verify-grid finds for a configuration."""
    small = shrink(resolve(make_config(**SMALL | options), world_size, per_node), "fp64", world_size, per_node)
    assert small.plan.shape.has_levels
    rates = [Rates(0.01, 0.0)] * 2
    return plan_differences(rank, small.plan, rates)


@pytest.mark.parametrize("options", [{}, {"moe_combine_in_node": True}], ids=["rows", "sums"])
def test_verify_grid_finds_no_difference(options: dict[str, Any], rank_pools: Callable[[int], RankPool]) -> None:
    for lines in rank_pools(4).run(verified, 2, {"ep": 4, "moe_layer_freq": "2"} | BIAS | FLEX | options):
        assert lines == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            "flex with --moe-pad-expert-input-to-capacity: padding belongs to no token",
            id="padded",
        ),
        pytest.param({"ep": 8}, "8: an ep group has 2 ranks on one node of 6 and 6 on another", id="uneven"),
    ],
)
def test_what_cannot_run_is_refused_in_one_message(options: dict[str, Any], message: str) -> None:
    changes = {"num_experts": 8, "global_batch_size": 48} | FLEX | options
    with pytest.raises(ConfigError, match=message):
        resolve(make_config(**SMALL | changes), 24, 6)


def test_the_start_says_how_tokens_travel() -> None:
    def words(**options: Any) -> str:
        (line,) = dispatch_words(resolve(make_config(**SMALL | FLEX | {"ep": 4} | options), 4, per_node), "gloo")
        return line

    per_node = 2
    assert "2 nodes, which copies it for its 2 ranks" in words()
    assert "equal up to rounding" in words(moe_combine_in_node=True)
    per_node = 4
    assert "by all-to-all, since ep 4 lies on one node" in words()
    per_node = 1
    assert "by all-to-all, since ep 4 has one rank on each node" in words()
    assert dispatch_words(resolve(make_config(**SMALL), 1), "gloo") == ()
    deep = words(moe_flex_dispatcher_backend="deepep")
    assert "not --moe-flex-dispatcher-backend deepep: it needs --bf16" in deep
    assert "hybridep: megapipe has no adapter of it" in words(moe_flex_dispatcher_backend="hybridep")
