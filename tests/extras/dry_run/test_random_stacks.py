"""Planned bytes against counted ones for random stacks of layers, whose peak is in the layers, not in the head."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from megapipe.extras.dry_run.rank import STATE, count_rank, random_reader
from megapipe.plan.memory import rank_memory
from tests.extras.dry_run.grids import FULL, LLAMA, OFFLOAD, PP2, SP2, TP2, make_plan, selective
from tests.extras.dry_run.test_planned import CLOSE, ranks_at_ends

RUNS = (
    "norm_position=after",
    "norm_position=around",
    "attention=none norm_position=around",
    "mlp=none",
    "mlp=none qk_layernorm=true qk_layernorm_scope=projection",
    "ffn_hidden_size=768",
    "ffn_hidden_size=64",
    "num_query_groups=1",
    "window_size=32",
    "position_embedding_type=none qk_layernorm=true",
    "activation=squared_relu",
    "activation=geglu_tanh attn_logit_softcapping=5",
)
RECOMPUTES: tuple[dict[str, Any], ...] = (
    {},
    selective("layernorm", "mlp"),
    selective("core_attn", "layernorm", "activation"),
    FULL,
    FULL | {"recompute_num_layers": 4},
    FULL | {"recompute_num_layers": 2, "recompute_method": "block"},
)
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "tp2": (2, TP2),
    "sp2": (2, SP2),
    "pp2": (2, PP2),
    "zb_h1": (2, PP2 | {"pipeline_schedule": "zb-h1"}),
    "zb_v": (2, PP2 | {"pipeline_schedule": "zb-v"}),
    "offload": (1, OFFLOAD),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("grid", GRIDS)
def test_a_random_stack_takes_the_bytes_in_the_plan(grid: str, seed: int) -> None:
    random, (world_size, changes) = Random(f"{grid} {seed}"), GRIDS[grid]
    runs = [f"{random.randint(1, 2)} {random.choice(RUNS)}" for _ in range(random.randint(1, 3))]
    drawn = {
        "vocab_size": 64,
        "layer_pattern": (*runs, *["1"][: random.randint(0, 1)], "..."),
        "normalization": "RMSNorm",
        "dtype": random.choice(("fp32", "bf16")),
        "device": random.choice(("cuda", "cpu")),
    }
    options = changes | random.choice(RECOMPUTES) | drawn
    plan = make_plan(world_size, options, random.choice(({}, LLAMA)))
    for rank in ranks_at_ends(plan.topology.pp, world_size):
        counted = count_rank(plan, rank, random_reader(plan), drawn["device"])
        memory = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert {item: counted.items[item] for item in STATE} == {item: memory.items.get(item, 0) for item in STATE}
        assert counted.peak == pytest.approx(memory.total, rel=CLOSE), (options, counted, dict(memory.items))
