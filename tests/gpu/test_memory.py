"""A step's bytes on a card, as torch's allocator counts them, against the plan and against the dry run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapipe.comm.groups import ProcessGroups
from megapipe.dry_run.live_bytes import LiveBytes
from megapipe.dry_run.rank import count_rank, count_step
from megapipe.planner.memory import rank_memory
from tests.dry_run.grids import FULL, LLAMA, make_plan, read_for, selective

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CLOSE = 0.10
# large enough that cuBLAS's workspace and the allocator's rounding are small beside it
SIZE = {"hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 32000, "micro_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2_bf16": {"dtype": "bf16"},
    "llama_bf16": LLAMA | {"ffn_hidden_size": 3584, "num_query_groups": 4, "dtype": "bf16"},
    "llama_fp32": LLAMA | {"ffn_hidden_size": 3584, "num_query_groups": 4},
    "full_recompute": FULL | {"dtype": "bf16"},
    "selective_recompute": LLAMA | selective("layernorm", "activation") | {"ffn_hidden_size": 3584, "num_query_groups": 4, "dtype": "bf16"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_card_takes_what_was_planned_and_counted(name: str) -> None:
    plan = make_plan(1, CASES[name] | {"device": "cuda"}, SIZE)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with LiveBytes() as live:
        seen, _ = count_step(plan, ProcessGroups.alone(), torch.device("cuda", 0), live, read_for(plan))
    taken = torch.cuda.max_memory_allocated() - before
    assert seen.peak == pytest.approx(taken, rel=CLOSE)
    assert count_rank(plan, 0, read_for(plan), "cuda", in_full=True).peak == pytest.approx(taken, rel=CLOSE)
    assert rank_memory(plan, 0).total == pytest.approx(taken, rel=CLOSE)
