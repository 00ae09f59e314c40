"""A step's bytes on a GPU, as torch's allocator counts them, against the plan and the dry run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups
from megapipe.extras.dry_run.rank import count_rank, count_step, random_reader, run_steps
from megapipe.plan.memory import rank_memory
from megapipe.trace.meta import LiveBytes
from tests.extras.dry_run.grids import FULL, LLAMA, make_plan, selective

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CLOSE = 0.10
OFFLOAD = {"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}
# large enough that cuBLAS's workspace and the allocator's rounding are small in comparison
SIZE = {"hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 32000, "micro_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2_bf16": {"dtype": "bf16"},
    "llama_bf16": LLAMA | {"ffn_hidden_size": 3584, "num_query_groups": 4, "dtype": "bf16"},
    "llama_fp32": LLAMA | {"ffn_hidden_size": 3584, "num_query_groups": 4},
    "full_recompute": FULL | {"dtype": "bf16"},
    "full_recompute_but_attention": FULL | {"recompute_keep_attention": True, "dtype": "bf16"},
    "offload": OFFLOAD | {"dtype": "bf16"},
    "offload_checkpoints": OFFLOAD | FULL | {"recompute_keep_attention": True, "dtype": "bf16"},
    "selective_recompute": LLAMA
    | selective("layernorm", "activation")
    | {"ffn_hidden_size": 3584, "num_query_groups": 4, "dtype": "bf16"},
}


def peak_of_a_step(changes: dict[str, Any]) -> tuple[int, int, int]:
    """Return (peak bytes on the GPU, planned bytes, bytes of host buffers)."""
    plan = make_plan(1, changes | {"device": "cuda"}, SIZE)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runtime = TrainingRuntime(plan, ProcessGroups.alone(), torch.device("cuda", 0))
    read, count = random_reader(plan), plan.batch.full // plan.batch.samples_per_microbatch
    run_steps(runtime, read, num_microbatches=count)
    taken = torch.cuda.max_memory_allocated() - before
    return taken, rank_memory(plan, 0).total, 0 if runtime.offload is None else runtime.offload.pool.num_bytes


def test_offloading_lowers_the_peak_as_planned() -> None:
    (without, planned_without, _), (taken, planned, host) = (
        peak_of_a_step({"dtype": "bf16"}),
        peak_of_a_step(OFFLOAD | {"dtype": "bf16"}),
    )
    assert without - taken == pytest.approx(planned_without - planned, rel=CLOSE)
    assert host == rank_memory(make_plan(1, OFFLOAD | {"dtype": "bf16", "device": "cuda"}, SIZE), 0).host["activations"]


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_uses_the_planned_and_counted_bytes(name: str) -> None:
    plan = make_plan(1, CASES[name] | {"device": "cuda"}, SIZE)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with LiveBytes() as live:
        seen, _ = count_step(plan, ProcessGroups.alone(), torch.device("cuda", 0), live, random_reader(plan))
    taken = torch.cuda.max_memory_allocated() - before
    assert seen.peak == pytest.approx(taken, rel=CLOSE)
    assert count_rank(plan, 0, random_reader(plan), "cuda", in_full=True).peak == pytest.approx(taken, rel=CLOSE)
    assert rank_memory(plan, 0).total == pytest.approx(taken, rel=CLOSE)
