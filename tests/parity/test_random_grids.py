"""Random grids compute the same losses, gradients and weights as one plain process: fp64, two or three steps, 1e-10 a
tensor.

The grids come from a fixed list that covers every possible pair of option values, and from hypothesis. A failing test
prints its grid; to run it again, add it to CORNERS in test_megatron_like_corners.py. A long run of drawn grids:
pytest tests/parity --all --ledger-part all -k long_run, or -k shard-07 for a part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from megapipe.checkpoint.changes import LATENT_OPTIONS
from megapipe.config.model import ModelConfig
from tests.harness import RankPool
from tests.parity.comparison import assert_equals_reference
from tests.parity.configuration import configuration
from tests.parity.options import (
    LONG_RUN_WORLDS,
    OPTIONS,
    WORLDS,
    Grid,
    covering_grids,
    pairs_of,
    possible_pairs,
    possible_values,
    topologies,
    world_of,
)

Pools = Callable[[int], RankPool]

NUM_COVERING = 105
NUM_CUBES = 20  # grids of tp 2 x pp 2 x dp 2 among them
NUM_SHARDS, SHARD_SIZE = 40, 4  # hypothesis draws some of them twice

# shrinking grids of eight processes takes minutes; the grid that failed is shown as it was drawn
DRAW = settings(
    phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck), derandomize=True, deadline=None
)


@functools.cache
def covering() -> list[Grid]:
    return covering_grids(WORLDS, NUM_CUBES)


@st.composite
def grids(draw: st.DrawFn, worlds: tuple[int, ...] = WORLDS) -> Grid:
    """Draw any valid grid of one of the worlds, option by option; a third of them with tp, pp and dp above 1."""
    axes = topologies(worlds)
    grid: Grid = dict(draw(st.sampled_from(axes + 4 * [sizes for sizes in axes if min(sizes.values()) > 1])))
    for name in OPTIONS:
        if name not in grid:
            grid[name] = draw(st.sampled_from(possible_values(name, grid, worlds)))
    return grid


@pytest.mark.parametrize("number", range(NUM_COVERING), ids="{:02}".format)
def test_grid_equals_reference(rank_pools: Pools, number: int) -> None:
    grid = covering()[number]
    ramps_up = grid["microbatches"] == "1, 2, 3"
    assert_equals_reference(rank_pools(world_of(grid)), grid, steps=3 if ramps_up else 2)


def test_every_pair_of_option_values_occurs_in_the_grids() -> None:
    assert len(covering()) == NUM_COVERING
    missing = possible_pairs(WORLDS).difference(pair for grid in covering() for pair in pairs_of(grid))
    assert not missing


def test_grids_are_many_and_parallel() -> None:
    assert len(covering()) >= 60
    assert len({str(grid) for grid in covering()}) == len(covering())
    assert all(world_of(grid) > 1 for grid in covering())
    assert sum(grid["tp"] > 1 and grid["pp"] > 1 and grid["dp"] > 1 for grid in covering()) >= 20
    assert any(
        int(grid["microbatches"]) < grid["pp"] * grid["chunks"]
        for grid in covering()
        if isinstance(grid["microbatches"], int)
    )


# sizes and constants, the same in all grids
SIZES = {"hidden_size", "ffn_hidden_size", "kv_channels", "seq_length", "max_position_embeddings", "padded_vocab_size"}
CONSTANTS = {"norm_epsilon", "init_method_std", "distributed_timeout_minutes"}
ROPE_CONSTANTS = {field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith(("rope_", "yarn_"))}
# equivalent to a drawn option, rounds to bf16, or has no effect on numbers
ELSEWHERE = {
    "num_layers_per_virtual_pipeline_stage",
    "grad_reduce_in_bf16",
    "allow_tp_across_nodes",
    "allow_mixed_hosts",
    "distributed_backend",
    "hang_timeout_seconds",
    "pipeline_rank_speeds",
    "pipeline_rank_memory",
    "pipeline_layer_times",
    "recompute_memory_budget",  # tests/parity/test_megatron_like_corners.py
    "nope_query_scale",  # this and the next four: tests/parity/grids.tsv
    "nope_query_scale_length",
    "softmax_type",
    "glu_linear_offset",
    "activation_func_clamp_value",
    # this and the next four: tests/parity/test_sharded_weights.py
    "data_parallel_sharding_strategy",
    "data_parallel_sharding_granularity",
    "data_parallel_sharding_prefetch",
    "data_parallel_sharding_units",
    "num_distributed_optimizer_instances",
    "pipe_sp_splits",  # this and the next three: tests/parity/grids.tsv
    "pipe_sp_strategy",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "attention_kind",  # chunks: tests/parity/grids.tsv; another: tests/test_extend.py
    "attention_options",  # tests/test_mixer.py
}
# grids of their own: tests/parity/test_context_parallel.py and grids.tsv
CONTEXT_PARALLEL = {"context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"}


def test_every_field_of_the_model_and_its_layout_takes_several_values() -> None:
    """Require for each field of the configuration an option here, or a reason above."""
    configs = [configuration(grid) for grid in covering()]
    for section in ("model", "parallel", "recompute"):
        values = [vars(getattr(config, section)) for config in configs]
        constant = {name for name in values[0] if len({each[name] for each in values}) == 1}
        # experts have grids of their own: tests/parity/grids.tsv
        constant = {name for name in constant if not name.startswith(("num_experts", "moe_", "expert_"))}
        # likewise latent attention
        constant -= {"multi_latent_attention", *LATENT_OPTIONS}
        # and multi-token prediction
        constant = {name for name in constant if not name.startswith("mtp_")}
        assert constant <= SIZES | CONSTANTS | ROPE_CONSTANTS | ELSEWHERE | CONTEXT_PARALLEL


@pytest.fixture(scope="module")
def long_run(request: pytest.FixtureRequest) -> Iterator[list[Grid]]:
    """The grids of the long run, with a summary at its end."""
    done: list[Grid] = []
    start = time.monotonic()
    failed_before = request.session.testsfailed
    yield done
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        cubes = sum(grid["tp"] > 1 and grid["pp"] > 1 and grid["dp"] > 1 for grid in done)
        print(
            f"\nlong run: {len(done)} grids equal the reference ({len({str(grid) for grid in done})} different, "
            f"{cubes} with tp, pp and dp "
            f"above 1), {request.session.testsfailed - failed_before} tests failed, {time.monotonic() - start:.0f} s"
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(NUM_SHARDS), ids="shard-{:02}".format)
def test_long_run_of_drawn_grids_equals_reference(rank_pools: Pools, long_run: list[Grid], shard: int) -> None:
    @seed(shard)
    @settings(DRAW, max_examples=SHARD_SIZE)
    @given(grid=grids(LONG_RUN_WORLDS))
    def check(grid: Grid) -> None:
        note(str(grid))
        assert_equals_reference(rank_pools(world_of(grid)), grid)
        long_run.append(grid)

    check()
