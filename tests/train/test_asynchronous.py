"""Training with asynchronous schedules: pipelines that drain only where something needs it.

Covers the cases in which they equal the synchronous ones, the loop, resuming, overflows, and messages to the user.
tests/parity/test_asynchronous.py compares streams with their emulation in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.train.stream import StreamStep
from tests.harness import RankPool
from tests.train.jobs import job_on_rank, lines_of, steps_of
from tests.train.runs import tiny
from tests.train.test_resume import straight
from tests.train.test_saving import contents

Pools = Callable[[int], RankPool]
COMMON = {"hidden_dropout": 0.1, "weight_decay": 0.1}
PP2 = COMMON | {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 2}
UNTIED = {"untie_embeddings_and_output_weights": True, "clip_grad": 0.0}
BIASES = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
STREAM = "--pipeline-model-parallel-size 2 --train-iters 6 --eval-iters 1"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pipedream-2bw", {"dtype": "fp32", "optimizer": "sgd"}),
        ("pipedream-2bw", {"dtype": "fp16", "initial_loss_scale": 2.0**24, "hysteresis": 1}),
        ("pipedream-2bw", {"dtype": "bf16", "use_distributed_optimizer": True}),
        ("paci", {"dtype": "bf16"} | UNTIED),
    ],
    ids=["2bw fp32", "2bw fp16 with overflows", "2bw bf16", "paci bf16"],
)
def test_steps_between_drains_are_those_of_1f1b_to_the_bit(
    name: str, changes: dict[str, Any], rank_pools: Pools
) -> None:
    found, plain = (
        rank_pools(2).run(straight, PP2 | changes | {"pipeline_schedule": which}, 3) for which in (name, "1f1b")
    )
    for (losses, tensors, state), (plain_losses, plain_tensors, plain_state) in zip(found, plain, strict=True):
        assert (losses, state) == (plain_losses, plain_state)
        assert tensors.keys() == plain_tensors.keys()
        assert all(torch.equal(values, plain_tensors[name]) for name, values in tensors.items())


def recorded(
    rank: int, world_size: int, flags: str
) -> tuple[tuple[str, str, str | None], list[tuple[int, int | None]]]:
    """Run a job; return its output and error, and the steps that it advanced by, each with the one after it."""
    advance, calls = StreamStep.advance, []

    def seen(self: StreamStep, batch: Any, following: Any) -> Any:
        calls.append((batch.step, None if following is None else following.step))
        return advance(self, batch, following)

    StreamStep.advance = seen  # type: ignore[method-assign]
    try:
        return job_on_rank(rank, world_size, flags), calls
    finally:
        StreamStep.advance = advance  # type: ignore[method-assign]


def test_a_pipeline_drains_for_evaluations_saves_and_the_end_alone(rank_pools: Pools, tmp_path: Path) -> None:
    flags = f"{STREAM} --eval-interval 2 --save-interval 5 --save {tmp_path}/c --pipeline-schedule pipedream-2bw"
    for (said, kind, text), calls in rank_pools(2).run(recorded, flags):
        assert not kind, (said, text)
        assert calls == [(1, 2), (2, None), (3, 4), (4, None), (5, None), (6, None)]
    lines = lines_of(tmp_path / "c" / "metrics.jsonl")
    order = [(line["kind"], line["step"]) for line in lines if line["kind"] in ("step", "evaluation")]
    assert order == [
        *[("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("step", 4), ("evaluation", 4)],
        *[("step", 5), ("step", 6), ("evaluation", 6), ("evaluation", 6)],
    ]
    steps = steps_of(tmp_path / "c" / "metrics.jsonl")
    assert all(line["step_seconds"] > 1e-4 and 0.0 <= line["bubble"] < 1.0 for line in steps)


@pytest.mark.parametrize("name", ["pipedream-2bw", "pipedream", "paci"])
def test_each_step_reports_the_loads_of_its_own_experts(name: str, rank_pools: Pools, tmp_path: Path) -> None:
    """Also the last two, which end together. At this learning rate all versions of the weights route alike."""
    flags = f"{STREAM} --train-iters 3 --lr 1e-12 --num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.1"
    flags += " --moe-per-layer-logging --untie-embeddings-and-output-weights"
    for schedule in ("1f1b", name):
        save = f"--save {tmp_path / schedule}"
        for said, kind, text in rank_pools(2).run(job_on_rank, f"{flags} --pipeline-schedule {schedule} {save}"):
            assert not kind, (said, text)
    plain, found = (steps_of(tmp_path / schedule / "metrics.jsonl") for schedule in ("1f1b", name))
    loads = [line["expert_load"] for line in found]
    assert loads == [line["expert_load"] for line in plain] and loads[0] != loads[1] != loads[2]
    losses = [[line["router_losses"]["aux_loss"] for line in lines] for lines in (found, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_growing_batch_drains(rank_pools: Pools) -> None:
    flags = f"{STREAM} --rampup-batch-size 4 4 8 --pipeline-schedule pipedream-2bw"
    for (said, kind, text), calls in rank_pools(2).run(recorded, flags):
        assert not kind, (said, text)
        assert calls == [(1, 2), (2, None), (3, 4), (4, 5), (5, 6), (6, None)]


@pytest.mark.parametrize("name", ["pipedream-2bw", "pipedream", "paci"])
def test_a_resumed_run_equals_one_that_drained_there(name: str, rank_pools: Pools, tmp_path: Path) -> None:
    own = f" --untie-embeddings-and-output-weights --num-experts 4 --disable-bias-linear {BIASES}"
    own += " --clip-grad 0.1 --clip-grad-delay 1" if name == "paci" else ""
    if name == "pipedream-2bw":
        own = " --delay-error-feedback 1"
    flags = f"{STREAM} --save-interval 3 --bf16 --pipeline-schedule {name}{own} --eval-interval 100"
    for folder, more in (("at_once", ""), ("in_two", "--exit-interval 3"), ("in_two", "--load {}")):
        save = tmp_path / folder
        for said, kind, text in rank_pools(2).run(job_on_rank, f"{flags} --save {save} {more.format(save)}"):
            assert not kind, (said, text)
    both = [steps_of(tmp_path / folder / "metrics.jsonl") for folder in ("at_once", "in_two")]
    assert [line["loss"] for line in both[0]] == [line["loss"] for line in both[1]]
    found, wanted = (contents(tmp_path / folder, 6) for folder in ("in_two", "at_once"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], values) for key, values in wanted.items())


def test_error_feedback_begins_and_ends_with_a_resumed_run(rank_pools: Pools, tmp_path: Path) -> None:
    flags = f"{STREAM} --pipeline-schedule pipedream-2bw --lr-decay-style constant --eval-interval 100"
    common = f"{flags} --train-iters 8 --load {tmp_path}/a --allow-changed-optimizer"
    runs = {
        "a": f"{flags} --train-iters 3",
        "without": common,
        "begins": f"{common} --delay-error-feedback 1",
        "ends": f"{common} --load {tmp_path}/begins --train-iters 12",
    }
    losses = {}
    for folder, more in runs.items():
        for said, kind, text in rank_pools(2).run(job_on_rank, f"{more} --save {tmp_path / folder}"):
            assert not kind, (said, text)
        losses[folder] = [line["loss"] for line in steps_of(tmp_path / folder / "metrics.jsonl")]
    # the first update after it was loaded knows no last change: the third step is the first that it reaches
    assert losses["begins"][:3] == losses["without"][:3]
    assert losses["begins"][3] != losses["without"][3]
    assert len(losses["ends"]) == 4


def test_a_run_that_drains_at_other_steps_says_so_when_it_resumes(rank_pools: Pools, tmp_path: Path) -> None:
    flags = f"{STREAM} --save {tmp_path} --pipeline-schedule pipedream-2bw --eval-interval 100"
    rank_pools(2).run(job_on_rank, f"{flags} --save-interval 3 --exit-interval 3")
    (said, kind, text), _ = rank_pools(2).run(job_on_rank, f"{flags} --save-interval 2 --load {tmp_path}")
    assert not kind, text
    assert "--save-interval: 3 in the checkpoint, 2 here" in said
    assert "--exit-interval: 3 in the checkpoint" in said
    assert "--log-interval" not in said


def test_the_plan_says_that_it_is_not_synchronous() -> None:
    changes = PP2 | {"pipeline_model_parallel_size": 4, "global_batch_size": 8, "eval_interval": 5, "eval_iters": 1}
    text = plan_text(resolve(tiny(**changes, **UNTIED, pipeline_schedule="pipedream"), 4))
    assert "NOT synchronous" in text and "4 to 1 versions of the weights" in text
    assert "every 5 steps (--eval-interval)" in text
    assert "NOT" not in plan_text(resolve(tiny(**changes, pipeline_schedule="1f1b"), 4))
