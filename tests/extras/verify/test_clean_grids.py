"""Grids equal one process, in fp64 and in their own dtypes, with features that the ledger does not combine.

tests/test_ledger.py compares its combinations in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.verify.grids import compared
from tests.harness import RankPool
from tests.tiny import LLAMA, tiny_config

GPT2 = {"hidden_dropout": 0.1, "attention_dropout": 0.2, "seq_length": 16}
NARROW = {
    "dtype": "bf16",
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ring of three": (3, "native", LLAMA | {"context_parallel_size": 3, "window_size": 5, "seq_length": 24}),
    "muon": (
        4,
        "fp64",
        LLAMA
        | {"tp": 4, "sp": True, "num_query_groups": 2, "optimizer": "muon", "muon_tp_mode": "distributed"}
        | {"attention_output_gate": True, "muon_nesterov": True, "muon_scale_mode": "unit_rms_norm"},
    ),
    "many norms after branches": (1, "fp64", LLAMA | {"norm_position": "after", "num_layers": 24}),
    "bf16, norms around branches": (1, "native", LLAMA | {"norm_position": "around", "num_layers": 6, "dtype": "bf16"}),
    "bf16": (
        4,
        "native",
        LLAMA | {"tp": 2, "dtype": "bf16", "zero": True, "qk_layernorm": True, "grad_reduce_in_bf16": True},
    ),
    "bf16 with narrow state": (2, "native", NARROW | {"pp": 2, "zero": True, "exp_avg_sq_dtype": "bf16"}),
    "narrow state in fp64": (2, "fp64", NARROW | {"tp": 2}),
    "fp16": (2, "native", {"pp": 2, "dtype": "fp16", "hidden_dropout": 0.1}),
    "fp32": (
        4,
        "native",
        GPT2 | {"tp": 2, "sp": True, "pp": 2, "position_embedding_type": "none", "qk_layernorm": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grid_equals_one_process(case: str, rank_pools: Callable[[int], RankPool]) -> None:
    world, mode, options = CASES[case]
    steps, report = rank_pools(world).run(compared, tiny_config(**options), mode)[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report
    if mode == "fp64":
        worst = max(
            rank.gradients.worst.ratio for step in steps for rank in step.ranks if rank.gradients.worst is not None
        )
        assert worst < 1e-11, "the tolerance has a margin"
