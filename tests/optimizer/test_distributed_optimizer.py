"""The sharded and the replicated optimizer on several ranks.

They match plain training in one process, and norms count every element once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.optimizer.optimizer import Optimizer
from megapipe.optimizer.schedule import Rates
from megapipe.sharding.boxes import Box
from megapipe.sharding.buffers import BufferKind
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups
from tests.data_parallel.toy import Toy, draw, groups_of, stage_buffers, tokens_of, toy_specs
from tests.harness import RankPool
from tests.optimizer.test_optimizer import ADAM, SGD, assert_close, plain_training

STEPS = 3


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(3) as three, RankPool(4) as four:
        yield {2: two, 3: three, 4: four}


State = dict[tuple[str, str, Box], Tensor]


def train(
    rank: int,
    world: int,
    config: OptimizerConfig,
    sharded: bool,
    overlap: bool,
    dtype: str = "fp64",
    steps: range = range(STEPS),
    saved: list[tuple[State, dict]] | None = None,
) -> tuple[dict[str, Tensor], list[float], State, dict]:
    """Train with 12 microbatches per step over dp ranks; return weights, norms, and the state this rank would save."""
    groups = groups_of(rank, dp=world)
    param_dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}[dtype]
    buffers, module = (
        stage_buffers(
            toy_specs(),
            Sharing.of(groups, int(sharded)),
            param_dtype=param_dtype,
            grad_dtype=torch.promote_types(param_dtype, torch.float32),
        ),
        Toy(),
    )
    buffers.materialize(module, draw)
    stores = Stores({0: buffers}, groups, overlap_gather=overlap, overlap_reduce=overlap)
    optimizer = Optimizer(stores, groups, config, PrecisionConfig(dtype=dtype))
    if saved is not None:
        buffers.fill(lambda spec: torch.zeros(spec.shape))
        load(optimizer, saved)
    norms, num_microbatches = [], 12 // world
    for step in steps:
        stores.begin_step(num_microbatches)
        stores.wait(0)
        for microbatch in range(num_microbatches):
            module(tokens_of(step, microbatch * world + rank)).backward()
        stores.reduce(0)
        stores.finish_gradients()
        norms.append(optimizer.step(1 / 12, Rates(0.01, 0.1, 0.003)).grad_norm)
    stores.finish_weights()
    state = {
        (piece.key, piece.piece.spec.name, piece.piece.box): piece.values
        for piece in optimizer.state()
        if piece.primary
    }
    return (
        {name: parameter.detach() for name, parameter in module.named_parameters()},
        norms,
        state,
        optimizer.plain_state(),
    )


def load(optimizer: Optimizer, saved: list[tuple[State, dict]]) -> None:
    """Fill the optimizer's boxes from a state saved with any other sharding."""
    whole: dict[tuple[str, str], Tensor] = {}
    for state, _ in saved:
        for (key, name, box), values in state.items():
            shape = next(spec.shape for spec in toy_specs() if spec.name == name)
            tensor = whole.setdefault((key, name), torch.full(shape, math.nan, dtype=values.dtype))
            tensor[box.slices] = values.view(box.shape)
    for piece in optimizer.state():
        piece.values.copy_(whole[piece.key, piece.piece.spec.name][piece.piece.box.slices].flatten())
    optimizer.load_plain_state(saved[0][1])
    optimizer.masters_to_parameters()


@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "zero1"])
@pytest.mark.parametrize("dp", [2, 3], ids=["dp2", "dp3"])
@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adamw", "sgd"])
def test_weights_equal_a_plain_single_process(
    pools: dict[int, RankPool], config: OptimizerConfig, dp: int, sharded: bool, overlap: bool
) -> None:
    expected, norms = plain_training(config, STEPS, 12)
    for weights, found_norms, _, _ in pools[dp].run(train, config, sharded, overlap):
        assert_close(weights, expected, 1e-10)
        assert found_norms == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "zero1"])
def test_bf16_replicas_hold_the_same_parameters_to_the_bit(pools: dict[int, RankPool], sharded: bool) -> None:
    (first, _, _, _), (second, _, _, _) = pools[2].run(train, ADAM, sharded, True, "bf16")
    for name, values in first.items():
        assert values.dtype == torch.bfloat16
        assert torch.equal(values, second[name]), name


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "zero1"])
def test_state_saved_by_two_replicas_is_loaded_by_three(pools: dict[int, RankPool], sharded: bool) -> None:
    straight = pools[2].run(train, ADAM, sharded, True, "fp64", range(4))[0][0]
    saved = [(state, plain) for _, _, state, plain in pools[2].run(train, ADAM, sharded, True, "fp64", range(2))]
    assert sum(values.numel() for state, _ in saved for values in state.values()) == 3 * sum(
        values.numel() for values in straight.values()
    )
    for weights, _, _, _ in pools[3].run(train, ADAM, not sharded, True, "fp64", range(2, 4), saved):
        assert_close(weights, straight, 1e-10)


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


def test_rank_whose_shards_are_all_padding_takes_part(pools: dict[int, RankPool]) -> None:
    (first, state), (second, other_state) = pools[2].run(train_one_vector)
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
    pools: dict[int, RankPool], axes: dict[str, int], num_shards: int
) -> None:
    values = {spec.name: global_values(spec)[: spec.true_rows] for spec in GRID_SPECS}
    norm = math.sqrt(sum(tensor.square().sum().item() for tensor in values.values()))
    zeros = sum(int((tensor == 0).sum()) for tensor in values.values())
    results = pools[4].run(measure, axes, num_shards)
    for grad_norm, params_norm, num_zeros, _ in results:
        assert grad_norm == pytest.approx(norm, rel=1e-12)
        assert params_norm == pytest.approx(norm, rel=1e-12)
        assert num_zeros == zeros
    for spec in GRID_SPECS:
        assert sum(saved.get(spec.name, 0) for _, _, _, saved in results) == spec.num_elements, spec.name
