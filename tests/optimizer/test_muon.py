"""Muon: its update against torch.optim.Muon, zero gradients, states, memory and traffic.

verify-grid's tests compare grids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import Group, ProcessGroups, build_process_groups
from megapipe.config.training import NEWTON_SCHULZ
from megapipe.extras.reference.train import MuonOptions, newton_schulz
from megapipe.optimizer import muon
from megapipe.optimizer.muon import orthogonalized
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import rank_memory
from megapipe.plan.muon import muon_work
from tests.assembly.plans import make_plan
from tests.harness import RankPool

MUON: dict[str, Any] = {"optimizer": "muon", "muon_tp_mode": "duplicated"}
TP2 = {"tensor_model_parallel_size": 2}
ZERO = {"use_distributed_optimizer": True}
SHAPES = [(8, 8), (5, 12), (12, 5), (1, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", NEWTON_SCHULZ)
def test_orthogonalizing_equals_the_reference(shape: tuple[int, int], coefficients: str) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = MuonOptions(0.9, False, coefficients, 5, "spectral", 1.0, True)
    found = orthogonalized(matrix, NEWTON_SCHULZ[coefficients], 5)
    torch.testing.assert_close(found, newton_schulz(matrix, options), rtol=0, atol=1e-12)
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.6 and singular.max() < 1.3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_training_equals_torch(shape: tuple[int, int], nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon multiplies in bf16; with that cast patched out it is the same in fp64."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    monkeypatch.setattr(torch, "bfloat16", torch.float64)  # from torch 2.15 on the cast is Tensor.to
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, momentum = weight.clone(), torch.zeros_like(weight)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.3, momentum=0.8, nesterov=nesterov, ns_steps=4, adjust_lr_fn="original"
    )
    for step in range(3):
        gradient = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        theirs.grad = gradient.clone()
        optimizer.step()
        momentum.lerp_(gradient, 0.2)
        start = gradient.lerp(momentum, 0.8) if nesterov else momentum
        scale = math.sqrt(max(1.0, shape[0] / shape[1]))
        ours.mul_(1 - 0.1 * 0.3).sub_(0.1 * scale * orthogonalized(start, NEWTON_SCHULZ["simple"], 4))
        torch.testing.assert_close(theirs.detach(), ours, rtol=0, atol=1e-10)


def test_zeros_stay_zero_and_scales_do_not_matter() -> None:
    assert torch.equal(orthogonalized(torch.zeros(3, 4), NEWTON_SCHULZ["quintic"], 5), torch.zeros(3, 4))
    matrix = torch.randn(3, 4, dtype=torch.float64)
    wide, small = (orthogonalized(matrix * factor, NEWTON_SCHULZ["simple"], 5) for factor in (1e4, 1e-4))
    torch.testing.assert_close(wide, small, rtol=0, atol=1e-10)


def test_a_matrix_has_one_moment_and_everything_else_two() -> None:
    plan = make_plan(1, "fp32", **MUON)
    optimizer = TrainingRuntime(plan, ProcessGroups.alone(), torch.device("cpu")).optimizer
    states: dict[str, set[str]] = {}
    for piece in optimizer.state():
        states.setdefault(piece.piece.spec.name, set()).add(piece.key)
    by_name = {spec.name: spec for spec in plan.specs}
    assert {by_name[name].matrix is not None for name in states} == {False, True}
    for name, keys in states.items():
        expected = {"momentum"} if by_name[name].matrix else {"exp_avg", "exp_avg_sq"}
        assert keys == {"master", *expected}, name
    held = sum(tensor.nbytes for tensor in optimizer.held()["optimizer"])
    assert held == rank_memory(plan, 0).items["optimizer"]


def sent_and_held(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Return the elements that an update's exchange sends over each group, and the operations of the matrices owned."""
    plan = make_plan(world_size, "fp64", **changes)
    groups = build_process_groups(plan.topology, rank, "gloo", 30)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"))
    flops: list[int] = []
    original = muon.orthogonalized

    def counted_product(matrix: Tensor, coefficients: Any, steps: int) -> Tensor:
        small, large = sorted(matrix.shape)
        flops.append(steps * (4 * small * small * large + 2 * small**3))
        return original(matrix, coefficients, steps)

    sends: Counter[str] = Counter()
    exchange = muon._exchange

    def counted_exchange(sent: Any, received: Any, group: Group, like: Tensor) -> None:
        away = (one.numel() for peer, parts in enumerate(sent) if peer != group.rank for one in parts)
        sends[group.name] += sum(away)
        exchange(sent, received, group, like)

    with (
        mock.patch.object(muon, "orthogonalized", counted_product),
        mock.patch.object(muon, "_exchange", counted_exchange),
    ):
        runtime.optimizer.step(1.0, Rates(1e-2, 0.0))
        runtime.stores.finish_weights()
    return dict(sends), sum(flops)


@pytest.mark.parametrize(
    "changes",
    [
        TP2 | {"sequence_parallel": True} | ZERO,
        TP2,
        ZERO | {"pipeline_model_parallel_size": 2, "pipeline_schedule": "dualpipe"},
        {"data_parallel_sharding_strategy": "optim_grads_params", "num_distributed_optimizer_instances": 2},
        ZERO | {"num_experts": 4, "expert_model_parallel_size": 2, "add_bias_linear": False},
    ],
    ids=["tp2 zero", "tp2 replicated", "dualpipe", "instances", "experts"],
)
def test_an_update_does_and_sends_what_is_planned(
    changes: dict[str, Any], rank_pools: Callable[[int], RankPool]
) -> None:
    plan = make_plan(4, "fp64", **changes | MUON)
    ranks = rank_pools(4).run(sent_and_held, changes | MUON)
    work = [muon_work(plan, plan.topology.coordinates(rank).pp_rank) for rank in range(4)]
    for group in ("replicas", "shards", "tp", "expert_replicas", "etp"):
        found = sum(sends.get(group, 0) for sends, _ in ranks)
        assert found == pytest.approx(sum(one.sent.get(group, 0) for one in work)), group
    assert max(flops for _, flops in ranks) == max(one.flops for one in work)
