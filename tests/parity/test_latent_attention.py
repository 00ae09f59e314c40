"""Latent attention on every grid equals one process in fp64: losses, gradients, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import given, note, settings

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.parity.configuration import configuration
from tests.parity.grids import LATENTS
from tests.parity.options import Grid, world_of
from tests.parity.test_random_grids import DRAW, grids


def with_latents(grid: Grid) -> Grid:
    """Return a drawn grid with the values of its options that fit latent attention."""
    return grid | {
        "kv_heads": "all",
        "qk_layernorm_scope": "head",
        "qk_layernorm_after_rope": False,
        "attention_output_gate": False,
        "qk_l2_norm": False,
        "positions": grid["positions"] if grid["positions"] in ("rope, yarn", "rope, linear") else "rope",
        "layers": grid["layers"] if grid["layers"] in ("windows skipped", "widths", "missing parts") else "alike",
        "biases": "none" if grid["biases"] == "qkv" else grid["biases"],
    }


def drawn_differences(rank: int, world_size: int, grid: Grid) -> list[str]:
    config, sizes = configuration(grid), LATENTS | {"qk_layernorm": grid["qk_layernorm"], "kv_channels": None}
    sizes |= {"q_lora_rank": None if grid["tied"] else 10, "v_head_dim": 9 if grid["embedding_scale"] == 1.0 else 6}
    sizes |= {"yarn_mscale_all_dim": 0.9}
    sizes["position_embedding_type"] = config.model.position_embedding_type
    plan = resolve(dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes)), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, grid["decoupled_lr"]), Rates(0.01, 0.2, None)])


@settings(DRAW, max_examples=4)
@given(grid=grids())
def test_drawn_grid_with_latent_attention_equals_one_process(rank_pools: Callable[[int], RankPool], grid: Grid) -> None:
    grid = with_latents(grid)
    note(str(grid))
    assert rank_pools(world_of(grid)).run(drawn_differences, grid)[0] == []
