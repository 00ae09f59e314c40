"""The reported loss under a loss mask is the mean over tokens; what is differentiated depends on a flag."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.extras.verify.oracle import Oracle, drawn_slices, random_batches, share_of, whole_weights
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.tiny import tiny_config

MICROBATCHES, DP, LR = 3, 2, 0.5


def step_and_formula(rank: int, world_size: int, masked: bool, per_token: bool) -> tuple[list[float], list[float]]:
    """Return (reported loss, tokens, evaluated loss, gradient norm) of a step, and Megatron's formulas for them."""
    config = tiny_config(
        pipeline_model_parallel_size=2, global_batch_size=12, micro_batch_size=2, eod_mask_loss=masked,
        calculate_per_token_loss=per_token, clip_grad=0.0,
    )  # fmt: skip
    plan = resolve(config, world_size)
    slices = drawn_slices(7, torch.float32)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 60), torch.device("cpu"), slices)
    (batch,) = random_batches(plan.config, DP, [MICROBATCHES], seed=1)

    model = Oracle(plan.config, whole_weights(runtime.plan.specs, slices)).model
    sums, counts = [], []
    for part in batch:
        mask = torch.ones(part.tokens.shape) if part.loss_mask is None else torch.from_numpy(part.loss_mask)
        total, count = model(torch.from_numpy(part.tokens), torch.from_numpy(part.labels), mask)
        sums.append(total)
        counts.append(count)
    reported = sum(sums) / sum(counts)
    means = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(batch)
    (reported if per_token else means).backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm().item()
    assert masked == (abs(reported.item() - means.item()) > 1e-4), "the two means must differ for the test to tell"

    step = TrainStep(runtime)
    evaluated = step.evaluate(share_of(runtime, batch, 0)).loss
    result = step.run(share_of(runtime, batch, 0), Rates(LR, 0.0))
    found = [result.loss, result.num_tokens, evaluated, result.update.grad_norm]
    return found, [reported.item(), sum(counts).item(), reported.item(), norm]


@pytest.mark.parametrize("per_token", [False, True], ids=["", "per token"])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
def test_reported_loss_is_over_the_tokens_of_the_global_batch(
    rank_pools: Callable[[int], RankPool], masked: bool, per_token: bool
) -> None:
    """The grid is dp 2 x pp 2 with 3 microbatches, which have different numbers of counted tokens."""
    for found, expected in rank_pools(4).run(step_and_formula, masked, per_token):
        assert found == pytest.approx(expected, rel=2e-6)
