"""Mixtures of experts: choices, rows and gradients in cases that have been wrong in public systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ExpertGroups, Group, build_process_groups
from megapipe.config.config import convert, resolve_model
from megapipe.config.layers import LayerConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.extras.report.kernels import describe_kernels
from megapipe.extras.verify.compare import gradient_pieces
from megapipe.extras.verify.oracle import drawn_slices, random_batches, share_of
from megapipe.gpu.kernels import choose_kernels
from megapipe.model.context import LayerContext
from megapipe.model.dispatch import Routes
from megapipe.model.router import OUTSIDE, Choice, Router, balanced_choice
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS, RowGroups
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.trace.parameters import model_parameters
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.model.grids import LLAMA, make_microbatch, make_stage, model_config
from tests.parity.grids import MODEL, ZERO
from tests.tiny import make_config

SIGMOID = {"moe_router_score_function": "sigmoid"}


def again(*modules: str, **options: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules} | options


def router(weight: Tensor, **options: Any) -> Router:
    """Build a router with this weight [experts, hidden] on one rank."""
    options = MODEL | {"hidden_size": weight.shape[1], "num_experts": weight.shape[0]} | options
    model = resolve_model(make_config(**options).model, 1)
    made = Router(convert(LayerConfig, model), Group.alone("tp"))
    made.weight = torch.nn.Parameter(weight)
    return made


def test_ties_go_to_the_experts_of_smaller_numbers() -> None:
    weights, chosen = router(torch.zeros(6, 4, dtype=torch.float64))(torch.randn(3, 2, 4, dtype=torch.float64))
    assert chosen.tolist() == [[0, 1]] * 6
    assert weights.tolist() == [[0.5, 0.5]] * 6


def test_a_token_chooses_from_the_best_groups_only() -> None:
    # experts 0 to 5 in groups of two; the single best expert, 5, is in a group of a small sum
    logits = torch.tensor([1.0, 1.0, 0.9, 1.3, -9.0, 2.0], dtype=torch.float64)
    options = SIGMOID | {"moe_router_topk": 2, "moe_router_num_groups": 3, "moe_router_group_topk": 1}
    weight = torch.zeros(6, 4, dtype=torch.float64)
    weight[:, 0] = logits
    _, chosen = router(weight, **options)(torch.eye(1, 4, dtype=torch.float64)[None])
    assert chosen.tolist() == [[3, 2]]


def test_weights_of_sigmoid_scores_are_renormalized_and_scaled() -> None:
    options = SIGMOID | {"moe_router_topk_scaling_factor": 2.5}
    weights, _ = router(torch.randn(6, 4, dtype=torch.float64), **options)(torch.randn(3, 2, 4, dtype=torch.float64))
    assert torch.allclose(weights.sum(1), torch.full((6,), 2.5, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_the_balance_loss_of_equal_shares_is_its_coefficient(kind: str) -> None:
    options = {"moe_router_load_balancing_type": (kind,), "moe_aux_loss_coeff": (0.3,), "moe_z_loss_coeff": None}
    context = LayerContext(None, None, False, DropoutKey(0, 0, 0))
    made = router(torch.zeros(4, 4, dtype=torch.float64), **options)
    made(torch.zeros(8, 2, 4, dtype=torch.float64), context)
    assert made.losses[context.unit] == {kind: pytest.approx(0.3)}


def test_rows_of_every_expert_keep_the_order_of_tokens() -> None:
    counts = torch.tensor([2, 0, 3])
    routes = Routes.of(counts, 5, ExpertGroups())
    assert routes.expert_rows == (2, 0, 3)
    assert routes.order is None


def test_padded_rows_travel_like_counted_ones() -> None:
    groups = ExpertGroups()
    counted, even = Routes.of(torch.full((3,), 4), 12, groups), Routes.even(4, 3, groups, torch.device("cpu"))
    assert (even.sent, even.gathered, even.expert_rows) == (counted.sent, counted.gathered, counted.expert_rows)
    assert even.ends.tolist() == counted.ends.tolist() == [4, 8, 12]


def gradients_of_stage(change_router: bool, asked: RecomputeConfig) -> dict[str, Tensor]:
    """Run a microbatch through a stage; change_router: between the forward and the backward."""
    options = {"num_experts": 8, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = model_config(num_layers=2, **LLAMA | options | {"moe_ffn_hidden_size": 20, "moe_router_topk": 2})
    drawn = torch.Generator().manual_seed(7)
    weights = {
        spec.name: torch.randn(spec.shape, dtype=torch.float64, generator=drawn) * 0.1
        for spec in model_parameters(config, False)
    }
    stage = make_stage(config, weights, recompute=asked)
    output = stage(make_microbatch(config, dropout_key=DropoutKey(1, 2, 3)))
    if change_router:
        for router in stage.routers().values():
            assert router.expert_bias is not None
            router.expert_bias += torch.linspace(-9.0, 9.0, 8)
    output.loss_sum.backward()
    return {name: parameter.grad for name, parameter in stage.named_parameters()}  # type: ignore[misc]


RECOMPUTES = {
    "-".join(modules): RecomputeConfig("selective", recompute_modules=modules)
    for modules in (("moe",), ("moe", "layernorm"), ("moe_act",))
}
RECOMPUTES |= {
    "full": RecomputeConfig("full", "uniform", 1),
    "full, two layers": RecomputeConfig("full", "uniform", 2),
    "full, two layers, attention kept": RecomputeConfig("full", "uniform", 2, recompute_keep_attention=True),
}


@pytest.mark.parametrize("name", RECOMPUTES)
def test_a_recompute_sends_tokens_to_the_experts_of_the_forward(name: str) -> None:
    """An update of the biases between a forward and its recompute changes nothing."""
    found, wanted = gradients_of_stage(True, RECOMPUTES[name]), gradients_of_stage(False, RecomputeConfig())
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("counts", [(5, 0, 9, 2), (0, 0, 16, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_a_grouped_gemm_equals_one_product_after_the_other(
    dtype: str, counts: tuple[int, ...], transpose: bool
) -> None:
    drawn = torch.Generator().manual_seed(1)
    kind: torch.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    rows, weight = sum(counts), torch.randn(4 * 24, 16, generator=drawn).to(kind)
    x = torch.randn(rows, 16 if transpose else 24, generator=drawn).to(kind)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    every = (RowGroups(counts, not transpose, each) for each in (ends, None))
    grouped, looped = (PLAIN_GEMMS.forward_groups(x, weight, groups) for groups in every)
    assert grouped.shape == (rows, 24 if transpose else 16)
    torch.testing.assert_close(grouped, looped)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "fp32"}, "experts    torch's grouped GEMM"),
        ({"dtype": "fp64"}, "experts    one GEMM after the other: torch has no grouped GEMM in fp64"),
        ({"dtype": "bf16"}, "one GEMM after the other: rows of 12 channels in bf16 are no multiple of 16 bytes"),
        ({"moe_grouped_gemm": False}, "experts    one GEMM after the other: not asked for"),
    ],
)
def test_the_start_says_how_experts_are_multiplied(options: dict[str, Any], said: str) -> None:
    config = resolve(make_config(**MODEL | {"moe_grouped_gemm": True} | options), 1).config
    lines = describe_kernels(choose_kernels(config), config, torch.device("cpu"))
    assert any(said in line for line in lines), lines


# --- on several ranks


def one_step(rank: int, world_size: int, options: dict[str, Any], chosen: Sequence[int] | None) -> Any:
    """Run a step, with every token sent to `chosen` if given; return norm, loss and the largest expert gradient."""
    plan = resolve(make_config(**MODEL | options), world_size)
    runtime = TrainingRuntime(
        plan,
        build_process_groups(plan.topology, rank, "gloo", 60),
        torch.device("cpu"),
        drawn_slices(1, torch.float64),
    )
    with pytest.MonkeyPatch.context() as patch:
        if chosen is not None:
            patch.setattr(
                Choice, "_chosen", lambda self, scores: torch.tensor(chosen).expand(scores.shape[0], -1).contiguous()
            )
        (batch,) = random_batches(plan.config, plan.topology.dp, [4 // plan.topology.dp], seed=3)
        result = TrainStep(runtime).run(share_of(runtime, batch, 0), Rates(0.0, 0.0, None))
    held = [piece for piece in gradient_pieces(runtime) if piece.piece.spec.is_expert]
    largest = max((piece.values.abs().max().item() for piece in held), default=0.0)
    return result.update.grad_norm, result.loss, largest


SKEWED: dict[str, tuple[int, dict[str, Any]]] = {
    "ep4-zero": (4, {"ep": 4} | ZERO),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2}),
    "ep2-zero-bubble": (4, {"ep": 2, "pp": 2, "pipeline_schedule": "zb-h1"}),
    "tp2-ep2-etp2-again": (4, {"tp": 2, "ep": 2} | again("moe")),
}


@pytest.mark.parametrize("chosen", [(0, 1), (2,)], ids=["two experts", "one expert"])
@pytest.mark.parametrize("name", SKEWED)
def test_ranks_whose_experts_get_no_token_agree_with_one_rank(
    name: str, chosen: tuple[int, ...], rank_pools: Callable[[int], RankPool]
) -> None:
    """All tokens go to the chosen experts: other ranks have zero gradients, and still take part in every collective."""
    world_size, options = SKEWED[name]
    common = {"global_batch_size": 8, "moe_router_topk": len(chosen), "moe_router_pre_softmax": len(chosen) == 1}
    norm, loss, _ = rank_pools(1).run(one_step, common, chosen)[0]
    found = rank_pools(world_size).run(one_step, options | common, chosen)
    for rank_norm, rank_loss, _ in found:
        assert (rank_norm, rank_loss) == (pytest.approx(norm, rel=1e-12), pytest.approx(loss, rel=1e-12))
    assert any(largest == 0.0 for _, _, largest in found)


def test_megatrons_default_dispatcher_runs_as_all_to_alls(rank_pools: Callable[[int], RankPool]) -> None:
    options = {"ep": 2, "moe_expert_capacity_factor": 1.0, "global_batch_size": 8}
    plain, named = (
        rank_pools(2).run(one_step, options | {"moe_token_dispatcher_type": kind}, None)
        for kind in ("alltoall", "allgather")
    )
    assert plain == named


def grouped_step(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float | None, float | None, int]:
    """Run a step; return norm, loss and the number of grouped GEMMs."""
    multiply = torch.nn.functional.grouped_mm
    with mock.patch.object(torch.nn.functional, "grouped_mm", side_effect=multiply) as spy:
        norm, loss, _ = one_step(rank, world_size, options, None)
    return norm, loss, spy.call_count


@pytest.mark.parametrize(("dtype", "close"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_a_step_with_grouped_gemms_equals_one_without(
    dtype: str, close: float, rank_pools: Callable[[int], RankPool]
) -> None:
    """In a zero-bubble schedule with recompute, so that every kind of product is there."""
    options = {"dtype": dtype, "moe_ffn_hidden_size": 16, "global_batch_size": 8, "ep": 2, "pp": 2}
    options |= {"pipeline_schedule": "zb-h1", **again("moe")}
    plain, grouped = (
        rank_pools(4).run(grouped_step, options | {"moe_grouped_gemm": is_on})[0] for is_on in (False, True)
    )
    assert plain[2] == 0 and grouped[2] > 0
    assert grouped[:2] == pytest.approx(plain[:2], rel=close)


def sinkhorn_of_megatron(logits: Tensor, topk: int) -> list[set[int]]:
    """Return the experts of each token as Megatron-Core 0.19.2 chooses them, one number at a time in fp32.

    Its `sinkhorn` on exp(logits) [t, experts]: factors of tokens 1 / t / (sum + 1e-8), then of experts, until these
    change by at most 1e-4 on average; then the k largest products.
    """
    costs = logits.exp().tolist()
    num_tokens, num_experts = len(costs), len(costs[0])
    of_experts, change = [1.0] * num_experts, 1.0
    while change > 1e-4:
        sums = [sum(f * cost for f, cost in zip(of_experts, row, strict=True)) for row in costs]
        of_tokens = [1 / num_tokens / (total + 1e-8) for total in sums]
        columns = [sum(of_tokens[t] * costs[t][e] for t in range(num_tokens)) for e in range(num_experts)]
        new = [1 / num_experts / (total + 1e-8) for total in columns]
        change = sum(abs(a - b) for a, b in zip(of_experts, new, strict=True)) / num_experts
        of_experts = new
    products = [[of_experts[e] * costs[t][e] * of_tokens[t] for e in range(num_experts)] for t in range(num_tokens)]
    return [set(sorted(range(num_experts), key=lambda e: -row[e])[:topk]) for row in products]


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_sinkhorn_chooses_the_experts_of_megatrons_formula(topk: int) -> None:
    drawn = torch.Generator().manual_seed(topk)
    logits = 2.0 * torch.randn(24, 2, 6, generator=drawn) + torch.linspace(-2.0, 2.0, 6)  # uneven without balancing
    chosen = balanced_choice(logits, topk, None)
    assert [set(row) for row in chosen.tolist()] == sinkhorn_of_megatron(logits.flatten(0, 1), topk)
    plain = F.one_hot(logits.flatten(0, 1).topk(topk).indices, 6).sum((0, 1))
    assert F.one_hot(chosen, 6).sum((0, 1)).max() < plain.max()
    padding = torch.arange(24)[:, None] >= torch.tensor([24, 17])
    real = ~padding.flatten()
    padded = balanced_choice(logits, topk, padding)[real]
    assert [set(row) for row in padded.tolist()] == sinkhorn_of_megatron(logits.flatten(0, 1)[real], topk)


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_weighs_by_plain_scores_and_evaluates_without_balancing(topk: int) -> None:
    options = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_topk": topk}
    drawn = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(*shape, 16, generator=drawn) for shape in ((6,), (8, 2)))
    made = router(weight, moe_aux_loss_coeff=(0.0,), moe_z_loss_coeff=None, **options)
    logits = F.linear(x, weight).flatten(0, 1)
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    trained = replace(OUTSIDE, dropout_key=DropoutKey(1, 2, 3))
    for context, wanted in ((OUTSIDE, logits.topk(topk).indices), (trained, None)):
        weights, chosen = made(x, context)
        if wanted is None:
            wanted = balanced_choice(logits.view(8, 2, 6), topk, None)
        assert torch.equal(chosen.sort(-1).values, wanted.sort(-1).values)
        torch.testing.assert_close(weights, scores.gather(1, chosen))


def test_losses_of_routers_follow_the_scale_of_the_loss(rank_pools: Callable[[int], RankPool]) -> None:
    """In fp16 the gradient of a loss that decides on the routers' is the same for any scale."""
    options = {"dtype": "fp16", "moe_aux_loss_coeff": (50.0,), "global_batch_size": 8}
    norms = [rank_pools(1).run(one_step, options | {"loss_scale": scale}, None)[0][0] for scale in (1.0, 512.0)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
