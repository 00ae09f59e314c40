"""Training with messages in fp8: every schedule computes nearly what exact messages give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.assembly.microbatches import Keys
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.errors import ConfigError
from megapipe.model.microbatch import Microbatch
from megapipe.train.step import train_step
from tests.assembly.test_planned_memory import make_plan
from tests.harness import RankPool

PP2 = {"pipeline_model_parallel_size": 2, "hidden_dropout": 0.0, "global_batch_size": 8}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "breadth-first": {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "breadth-first"},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zb-v": {"pipeline_schedule": "zb-v"},
    "v-half": {"pipeline_schedule": "v-half"},
    "dualpipe": {"pipeline_schedule": "dualpipe"},
    "dualpipe-v": {"pipeline_schedule": "dualpipe-v"},
}


def gradients(rank: int, world_size: int, dtype: str, changes: dict[str, Any]) -> list[torch.Tensor]:
    """Return a rank's gradients of one step, exact and with messages in fp8."""
    found = []
    for message_dtype in (None, "fp8"):
        plan = make_plan(world_size, dtype, **PP2 | changes | {"pipeline_message_dtype": message_dtype})
        runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
        generator, keys = torch.Generator().manual_seed(1), Keys(1, 2, 0, 1)
        count = plan.batch.num_microbatches
        tokens = [torch.randint(29, (2, 8), generator=generator) for _ in range(count)]
        microbatches = [Microbatch(each, labels=each.clone(), dropout_key=keys.of(k)) for k, each in enumerate(tokens)]
        train_step(runtime).gradients(microbatches).sum()
        stages = runtime.buffers.values()
        found.append(torch.cat([buffer.gradients.flatten() for stage in stages for buffer in stage.buffers]))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_with_messages_in_fp8_are_nearly_exact(
    schedule: str, dtype: str, rank_pools: Callable[[int], RankPool]
) -> None:
    for exact, rounded in rank_pools(2).run(gradients, dtype, SCHEDULES[schedule]):
        error = (rounded - exact).norm() / exact.norm()
        assert 0 < error < 0.1  # each element of a message is off by at most 1/16, about 0.03 in the mean


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"pipeline_model_parallel_size": 1}, "of at least 2"), ({"dtype": "fp64"}, "fp64 is for verification")],
    ids=["pp1", "fp64"],
)
def test_messages_in_fp8_are_refused_where_they_cannot_work(changes: dict[str, Any], words: str) -> None:
    dtype = str(changes.pop("dtype", "fp32"))
    with pytest.raises(ConfigError, match=words):
        make_plan(2, dtype, **PP2 | {"pipeline_message_dtype": "fp8"} | changes)
