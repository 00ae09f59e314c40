"""The optimizer on several ranks: shards that are all padding, and norms that count every element once.

That its weights are those of one process is shown by tests/parity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megapipe.config.model import PrecisionConfig
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.optimizer.optimizer import Optimizer
from megapipe.optimizer.schedule import Rates
from megapipe.sharding.buffers import BufferKind
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups
from tests.data_parallel.toy import draw, groups_of, stage_buffers
from tests.harness import RankPool
from tests.optimizer.test_optimizer import ADAM, SGD


def train_one_vector(rank: int, world: int) -> tuple[Tensor, dict]:
    """Train three elements in a buffer of two shards of 32, so that the second rank holds padding only."""
    groups = groups_of(rank, dp=world)
    stages = {0: stage_buffers((ParamSpec("bias", (3,), owner=0, weight_decay=False),), Sharing.of(groups, 1))}
    stages[0].main_grad("bias").copy_(torch.tensor([1.0, 2.0, 2.0]))
    stores = Stores(stages, groups)
    optimizer = Optimizer(stores, groups, SGD, PrecisionConfig(dtype="fp64"))
    assert optimizer.step(1.0, Rates(0.1, 0.0)).grad_norm == 3.0
    stores.finish_weights()
    return stages[0].parameter("bias").clone(), optimizer.plain_state()


def test_rank_whose_shards_are_all_padding_takes_part(rank_pools: Callable[[int], RankPool]) -> None:
    (first, state), (second, other_state) = rank_pools(2).run(train_one_vector)
    assert torch.equal(first, second)
    assert first == pytest.approx(torch.tensor([-1.0, -2.0, -2.0]) * 0.1 * 0.5 / 3, rel=1e-6)
    assert state == other_state
    assert state["num_steps"] == 1


HEADS, QUERY_GROUPS, HEAD_DIM, HIDDEN = 4, 1, 3, 4
GRID_SPECS = (
    ParamSpec("embedding.weight", (10, HIDDEN), owner="embedding", slicing=Fused(0), tied=True, true_rows=9),
    ParamSpec("norm.weight", (HIDDEN,), owner=0, weight_decay=False, partial_gradient=True),
    ParamSpec(
        "qkv.weight",
        ((HEADS + 2 * QUERY_GROUPS) * HEAD_DIM, HIDDEN),
        owner=0,
        slicing=QueryGroups(HEADS, QUERY_GROUPS, HEAD_DIM),
    ),
    ParamSpec("proj.weight", (HIDDEN, HEADS * HEAD_DIM), owner=0, slicing=Fused(1)),
    ParamSpec("head_norm.weight", (HIDDEN,), owner="head", weight_decay=False),
)
STAGES = {0: GRID_SPECS[:4], 1: (GRID_SPECS[0], GRID_SPECS[4])}


def global_values(spec: ParamSpec) -> Tensor:
    """Draw a whole tensor with some exact zeros; its vocabulary padding is zero."""
    values = draw(spec)
    values[torch.rand(spec.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = 0.0
    if spec.true_rows is not None:
        values[spec.true_rows :] = 0.0
    return values


def local_values(spec: ParamSpec, whole: Tensor, tp_rank: int, tp: int) -> Tensor:
    dim = spec.slicing.dim or 0
    return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)


def measure(
    rank: int, world: int, axes: dict[str, int], num_shards: int
) -> tuple[float, float, int | None, dict[str, int]]:
    """Set parameters and complete gradients; return norms, the number of zeros and of saved elements."""
    groups = groups_of(rank, **axes)
    tp, tp_rank = groups.tp.size, groups.tp.rank
    mine = [groups.pp.rank] if groups.pp.size == 2 else [0, 1]
    # on one pipeline rank the first and the last stage share the embedding
    held = STAGES if groups.pp.size == 2 else {0: STAGES[0], 1: STAGES[1][1:]}
    kind: BufferKind = "tied" if groups.pp.size == 2 else "shared"
    sharing = Sharing.of(groups, int(num_shards > 1))
    stages = {stage: stage_buffers(held[stage], sharing, 20, tied_kind=kind) for stage in mine}
    for stage, buffers in stages.items():
        buffers.fill(lambda spec: local_values(spec, global_values(spec), tp_rank, tp))
        for spec in held[stage]:
            buffers.main_grad(spec.name).copy_(buffers.parameter(spec.name))
    optimizer = Optimizer(Stores(stages, groups), groups, ADAM, PrecisionConfig(dtype="fp64"))
    saved: dict[str, int] = {}
    for piece in optimizer.state():
        if piece.key == "master" and piece.primary:
            saved[piece.piece.spec.name] = saved.get(piece.piece.spec.name, 0) + piece.values.numel()
    params_norm = optimizer.parameters_norm()
    report = optimizer.step(1.0, Rates(0.0, 0.0), count_zero_gradients=True)
    return report.grad_norm, params_norm, report.num_zeros, saved


@pytest.mark.parametrize(
    ("axes", "num_shards"),
    [
        ({"tp": 2, "pp": 2, "kv_replicas": 2}, 1),
        ({"tp": 2, "dp": 2, "kv_replicas": 2}, 2),
        ({"tp": 2, "dp": 2, "kv_replicas": 2}, 1),
        ({"pp": 2, "dp": 2}, 2),
    ],
    ids=["tp2 pp2", "tp2 dp2 zero1", "tp2 dp2", "pp2 dp2 zero1"],
)
def test_every_element_counts_once_on_every_grid(
    rank_pools: Callable[[int], RankPool], axes: dict[str, int], num_shards: int
) -> None:
    values = {spec.name: global_values(spec)[: spec.true_rows] for spec in GRID_SPECS}
    norm = math.sqrt(sum(tensor.square().sum().item() for tensor in values.values()))
    zeros = sum(int((tensor == 0).sum()) for tensor in values.values())
    results = rank_pools(4).run(measure, axes, num_shards)
    for grad_norm, params_norm, num_zeros, _ in results:
        assert grad_norm == pytest.approx(norm, rel=1e-12)
        assert params_norm == pytest.approx(norm, rel=1e-12)
        assert num_zeros == zeros
    for spec in GRID_SPECS:
        assert sum(saved.get(spec.name, 0) for _, _, _, saved in results) == spec.num_elements, spec.name
