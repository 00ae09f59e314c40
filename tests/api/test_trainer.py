"""A Trainer makes the run of `megapipe pretrain` and calls its callbacks, on every rank, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapipe.api import trainer as trainer_module
from megapipe.api.config import Config
from megapipe.api.trainer import Callback, Trainer
from megapipe.errors import ConfigError, TrainingError
from tests.api.ranks import as_rank
from tests.harness import RankPool
from tests.train.jobs import TINY, job

GRIDS = {"alone": (1, {}), "pp2_dp2": (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"})}


class Recorder(Callback):
    """Records every call, and does what a test asks for."""

    def __init__(self, stop_at: int = 0, fail_at: int = 0, rank: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at, self.fail_at, self.acting_rank = stop_at, fail_at, rank

    def on_start(self, trainer: Trainer, step: int) -> None:
        self.calls.append(("start", step))

    def on_step_end(self, trainer: Trainer, summary: Any) -> None:
        self.calls.append(("step", summary.step, summary.loss, summary.consumed_samples))
        if trainer.rank == self.acting_rank and summary.step == self.stop_at:
            trainer.stop()
        if trainer.rank == self.acting_rank and summary.step == self.fail_at:
            raise ValueError("the plot has no axis")

    def on_evaluation(self, trainer: Trainer, metrics: Any) -> None:
        self.calls.append(("evaluation", metrics.split, metrics.step, metrics.loss))

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        self.calls.append(("save", folder.name))

    def on_end(self, trainer: Trainer, result: Any) -> None:
        self.calls.append(("end", result))


def tiny(**options: Any) -> Config:
    return Config.from_flags(TINY).replace(train_iters=4, **options)


def run(rank: int, world_size: int, config: Config, *recorder: int) -> tuple[Any, list[tuple[Any, ...]]]:
    as_rank(rank, world_size, trainer_module)
    trainer_module.end_with_launcher = lambda environment: None
    trainer_module.guarded = lambda body, *_, **__: body()  # errors reach the test
    callback = Recorder(*recorder)
    return Trainer(config, [callback]).run(), callback.calls


@pytest.mark.parametrize("grid", GRIDS)
def test_callbacks_follow_the_run_on_every_rank(
    rank_pools: Callable[[int], RankPool], tmp_path: Path, grid: str
) -> None:
    world_size, options = GRIDS[grid]
    config = tiny(
        save=tmp_path / "run", save_interval=2, eval_iters=1, eval_interval=3, metrics_file=tmp_path / "m", **options
    )
    results = rank_pools(world_size).run(run, config)
    for result, calls in results:
        assert calls == results[0][1]
        names = [(call[0], *call[1:3]) if call[0] == "evaluation" else call[:2] for call in calls]
        assert names[:-1] == [
            ("start", 0),
            ("step", 1),
            ("step", 2),
            ("save", "step_00000002"),
            ("step", 3),
            ("evaluation", "validation", 3),
            ("step", 4),
            ("save", "step_00000004"),
            ("evaluation", "validation", 4),
            ("evaluation", "test", 4),
        ]
        assert calls[-1] == ("end", result)
        assert (result.step, result.is_complete) == (4, True) and result.reason == "all 4 steps done"
        assert result.loss == calls[6][2] and calls[6][3] == 32
        assert (result.validation_loss, result.test_loss) == (calls[8][3], calls[9][3])
    written = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["loss"] for line in written if line["kind"] == "step"] == [
        call[2] for call in results[0][1] if call[0] == "step"
    ]


def test_a_trainer_makes_the_run_of_the_command_line(tmp_path: Path) -> None:
    code, said = job(f"--train-iters 4 --metrics-file {tmp_path / 'command'}")
    assert code == 0, said
    result = Trainer(tiny(metrics_file=tmp_path / "python")).run()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("command", "python")
    ]
    assert losses[0] == losses[1] and result.loss == losses[0][-1]


def test_one_rank_stops_all_and_the_last_step_is_saved(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    world_size, options = GRIDS["pp2_dp2"]
    for result, calls in rank_pools(world_size).run(run, tiny(save=tmp_path, **options), 2, 0, 3):
        assert (result.step, result.is_complete, result.reason) == (2, False, "a callback asked to stop")
        assert [call[:2] for call in calls[-2:]] == [("save", "step_00000002"), ("end", result)]


def test_a_run_that_stops_before_its_first_step_has_no_loss() -> None:
    class Early(Callback):
        def on_start(self, trainer: Trainer, step: int) -> None:
            trainer.stop()

    result = Trainer(tiny(), [Early()]).run()
    assert (result.step, result.loss, result.is_complete) == (0, None, False)


def test_an_exception_in_a_callback_ends_training() -> None:
    with pytest.raises(TrainingError, match=r"Recorder.on_step_end .*ValueError: the plot has no"):
        run(0, 1, tiny(), 0, 2, 0)  # on several ranks: tests/test_examples.py


def test_everything_that_is_missing_is_reported_when_a_trainer_is_made() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(Config(num_layers=2, train_iters=5, train_samples=40))
    text = str(caught.value)
    assert (
        "--seq-length is missing" in text
        and "--train-iters and --train-samples both" in text
        and len(text.splitlines()) > 2
    )
    with pytest.raises(ConfigError, match=r"needs a megapipe\.Config, got dict"):
        Trainer({"num_layers": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a callback is of type int; derive it from"):
        Trainer(tiny(), [3])  # type: ignore[list-item]
