"""The training loop: when a run evaluates, saves and exits, and what stops it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.assembly.microbatches import to_microbatch
from megapipe.data.loader import Loader
from megapipe.extras.verify.oracle import random_batches
from megapipe.model.block import Block
from megapipe.train.nonfinite import OutputWatch
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.train.jobs import job, job_on_rank, lines_of, steps_of
from tests.train.runs import runtime_of

Pools = Callable[[int], RankPool]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(re.sub(r"\D", "", path.parent.name)) for path in folder.glob("*/manifest.json"))


def test_evaluations_come_where_asked_each_on_samples_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []
    microbatch = Loader.microbatch

    def recorded(self: Loader, consumed: int, k: int, *rest: int) -> Any:
        read.append((self.name, consumed + k * rest[1] * rest[2]))
        return microbatch(self, consumed, k, *rest)

    monkeypatch.setattr(Loader, "microbatch", recorded)
    code, said = job(f"--train-iters 5 --eval-interval 2 --eval-iters 1 --metrics-file {tmp_path}/m.jsonl")
    assert code == 0, said
    order = [(line["kind"], line["step"], line.get("split")) for line in lines_of(tmp_path / "m.jsonl")]
    evaluations = [("evaluation", 2, "validation"), ("evaluation", 4, "validation"), ("evaluation", 5, "validation")]
    assert [line for line in order if line[0] == "evaluation"] == [*evaluations, ("evaluation", 5, "test")]
    assert order.index(evaluations[0]) == 2  # right after the second step's line
    for split, number in (("train", 40), ("validation", 24), ("test", 8)):
        assert sorted({first for name, first in read if name == split}) == list(range(0, number, 2))


def test_a_run_that_only_evaluates_takes_no_step_and_saves_nothing(tmp_path: Path) -> None:
    code, said = job(f"--skip-train --train-iters 5 --eval-iters 2 --save {tmp_path}/c")
    assert code == 0, said
    assert [line["split"] for line in lines_of(tmp_path / "c" / "metrics.jsonl")] == ["validation", "test"]
    assert checkpoints(tmp_path / "c") == []
    assert "ended after step 0: evaluation only" in said


@pytest.mark.parametrize(
    ("flags", "step", "reason"),
    [
        ("--exit-interval 2", 2, "--exit-interval 2"),
        ("--exit-duration-in-mins 1e-9", 1, "--exit-duration-in-mins 1e-09 is over"),
    ],
    ids=["interval", "duration"],
)
def test_a_run_that_stops_early_has_saved_and_resumes_from_there(
    tmp_path: Path, flags: str, step: int, reason: str
) -> None:
    common = f"--train-iters 4 --eval-iters 1 --save {tmp_path}/c --load {tmp_path}/c"
    code, said = job(f"{common} {flags}")
    assert code == 0, said
    assert f"ended after step {step}: {reason}" in said
    assert checkpoints(tmp_path / "c") == [step]
    assert not [line for line in lines_of(tmp_path / "c" / "metrics.jsonl") if line["kind"] == "evaluation"]
    code, said = job(common)
    assert code == 0, said
    steps = steps_of(tmp_path / "c" / "metrics.jsonl")  # the run appends to the same file
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["consumed_samples"] for line in steps] == [8, 16, 24, 32]
    assert checkpoints(tmp_path / "c") == [step, 4]


def plant(rank: int, where: int, layer: int, call: int, in_backward: bool) -> None:
    """Make the output of a layer (or its gradient) NaN the call-th time that rank `where` computes it."""
    if rank != where:
        return
    forward = Block.forward
    calls = 0

    def broken(self: Block, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        output = forward(self, *arguments)
        if self.layer == layer:
            calls += 1
            if calls == call and in_backward:
                output.register_hook(lambda gradient: gradient * torch.nan)
            elif calls == call:
                output = output * torch.nan
        return output

    Block.forward = broken  # type: ignore[method-assign]


def test_nan_in_a_forward_names_rank_stage_microbatch_and_samples() -> None:
    flags = "--train-iters 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    with RankPool(4) as pool:  # pp 2 x dp 2; rank 3 is dp_rank 1 of pp_rank 1: stages 1 and 3
        results = pool.run(job_on_rank, f"{flags} --global-batch-size 16", plant, 3, 1, 4 + 3, False)
    for _, kind, text in results:
        assert kind == "TrainingError"
        assert text is not None
        assert text.startswith(
            "step 2: loss nan, gradient norm nan; first seen in the forward of stage 1 (layers 1 to 1) on rank 3, "
        )
        # step 2 begins after 16 samples; microbatch 2 of dp rank 1 holds samples 16 + (2 x 2 + 1) x 2 and the next one
        assert "microbatch 2, samples 26, 27" in text


def test_nan_in_a_backward_names_rank_and_parameters() -> None:
    with RankPool(2) as pool:
        results = pool.run(job_on_rank, "--train-iters 4 --pipeline-model-parallel-size 2", plant, 1, 3, 1, True)
    for _, kind, text in results:
        assert kind == "TrainingError"
        assert text is not None
        assert "it arose in a backward" in text
        assert re.search(r"gradient of decoder\.layers\..* on rank \d; repeated", text), text
        assert not text.startswith("step 1: loss nan")


def test_overflows_of_fp16_are_skipped_counted_and_logged(tmp_path: Path) -> None:
    code, said = job(
        f"--train-iters 6 --fp16 --initial-loss-scale 1e9 --hysteresis 1 --metrics-file {tmp_path}/m.jsonl"
    )
    assert code == 0, said
    steps = steps_of(tmp_path / "m.jsonl")
    skipped = [line["skipped_steps"] for line in steps]
    assert skipped[0] == 1  # the first scale is far too large
    assert 1 < skipped[-1] <= 6
    for before, after in itertools.pairwise(steps):
        was_skipped = before["grad_norm"] is None  # JSON has no infinity
        assert after["loss_scale"] == before["loss_scale"] / (2 if was_skipped else 1)
    assert f"skipped {skipped[-1]}" in said.splitlines()[-2]


def test_an_overflow_at_the_smallest_scale_stops_the_run() -> None:
    code, said = job("--train-iters 6 --fp16 --initial-loss-scale 1e9 --min-loss-scale 5e8 --hysteresis 1")
    assert code == 1
    assert re.search(
        r"training stopped: step 2: loss 3\.\d+, gradient norm (inf|nan), loss scale 5e\+08; all forwards were finite",
        said,
    ), said


def test_training_continues_after_a_nan_without_the_check(tmp_path: Path) -> None:
    code, said = job(f"--train-iters 3 --lr 1e30 --no-check-for-nan-in-loss-and-grad --metrics-file {tmp_path}/m.jsonl")
    assert code == 0, said
    last = steps_of(tmp_path / "m.jsonl")[-1]
    assert (last["step"], last["loss"]) == (3, None)
    assert last["skipped_steps"] >= 1


def test_an_evaluation_leaves_nothing_for_the_search_after_a_nan() -> None:
    runtime = runtime_of(0, 1)
    watch, step = OutputWatch(runtime), TrainStep(runtime)
    batch = [
        to_microbatch(part, runtime.device, None) for part in random_batches(runtime.plan.config, 1, [4], seed=1)[0]
    ]
    step.evaluate(batch)
    assert not watch.take()
    step.gradients(batch[:4])
    assert set(watch.take()) == {(microbatch, 0) for microbatch in range(4)}
