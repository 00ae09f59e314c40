"""Outputs of a run: metrics.jsonl, TensorBoard, Weights & Biases, traces, norms, timers."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.comm.trace import Tracer
from megapipe.config.load import load_config
from megapipe.environment import read_environment
from megapipe.gpu.device_clock import EventClock, Timers, action_seconds
from megapipe.plan.resolve import resolve
from megapipe.train.journal import Journal
from megapipe.train.metrics import Console, EvaluationMetrics, JsonLines
from megapipe.train.run import Job, pretrain
from tests.pipeline.fake_device import FakeDevice
from tests.train.jobs import TINY, job, lines_of, steps_of


def test_metrics_hold_the_step_in_numbers(tmp_path: Path) -> None:
    code, said = job(f"--train-iters 3 --eval-iters 1 --lr-decay-style constant --metrics-file {tmp_path}/m.jsonl")
    assert code == 0, said
    *steps, validation, test = lines_of(tmp_path / "m.jsonl")
    for index, line in enumerate(steps, start=1):
        expected = {
            "step": index,
            "train_iters": 3,
            "consumed_samples": 8 * index,
            "consumed_tokens": 64 * index,
            "global_batch_size": 8,
        }
        assert expected.items() <= line.items()
        assert (line["lr"], line["weight_decay"], line["loss_scale"], line["skipped_steps"]) == (1e-2, 0.01, 1.0, 0)
        assert abs(line["loss"] - math.log(32)) < 0.3
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
        assert line["bubble"] is None
        assert line["bubble_note"] == "n/a: no pipeline"
        assert line["memory_bytes"] > 1e7
        assert line["phases"] == {}
    assert [(line["split"], line["step"], line["num_tokens"]) for line in (validation, test)] == [
        ("validation", 3, 64),
        ("test", 3, 64),
    ]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code, said = job(
        f"--train-iters 3 --eval-iters 1 --tensorboard-dir {tmp_path}/board --metrics-file {tmp_path}/m.jsonl"
    )
    assert code == 0, said
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    steps = steps_of(tmp_path / "m.jsonl")
    for tag, key in (
        ("train/loss", "loss"),
        ("train/grad_norm", "grad_norm"),
        ("speed/tokens_per_second", "tokens_per_second"),
    ):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in steps]
    assert [event.step for event in events.Scalars("validation/loss")] == [3]


class FakeWandb(types.SimpleNamespace):
    """A fake wandb that fails a given number of times and records its input."""

    def __init__(self, failing_inits: int = 0, failing_logs: bool = False, failing_finish: bool = False) -> None:
        super().__init__(Settings=dict, modes=[], logged=[])
        self.failing_inits, self.failing_logs, self.failing_finish = failing_inits, failing_logs, failing_finish

    def init(self, **arguments: Any) -> Any:
        self.modes.append(arguments["mode"])
        if len(self.modes) <= self.failing_inits:
            raise ConnectionError("no server")
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        if self.failing_logs:
            raise ConnectionError("lost the server")
        self.logged.append((step, scalars["train/loss"]))

    def finish(self) -> None:
        if self.failing_finish:
            raise ConnectionError("no farewell")


@pytest.mark.parametrize(
    ("fake", "modes", "num_logged", "said"),
    [
        (FakeWandb(), [None], 2, ""),
        (FakeWandb(failing_inits=1), [None, "offline"], 2, "continuing offline"),
        (FakeWandb(failing_inits=2), [None, "offline"], 0, "training continues without it"),
        (
            FakeWandb(failing_logs=True),
            [None],
            0,
            "WeightsAndBiases stopped: ConnectionError: lost the server; training continues",
        ),
        (FakeWandb(failing_finish=True), [None], 2, "wandb did not finish: ConnectionError: no farewell"),
    ],
    ids=["reachable", "offline", "not at all", "lost on the way", "lost at the end"],
)
def test_wandb_never_stops_training(
    monkeypatch: pytest.MonkeyPatch, fake: FakeWandb, modes: list[Any], num_logged: int, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    code, text = job("--train-iters 2 --wandb-project p")
    assert code == 0, text
    assert "ended after step 2: all 2 steps done" in text
    assert said in text
    assert fake.modes == modes
    assert [step for step, _ in fake.logged] == list(range(1, num_logged + 1))


def test_wandb_that_is_not_installed_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, said = job("--train-iters 2 --wandb-project p")
    assert code == 2
    assert "pip install 'megapipe[wandb]'" in said
    assert "step 1/2" not in said


def test_a_writer_that_fails_is_left_out_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(JsonLines):
        def write(self, metrics: Any) -> None:
            raise OSError(28, "No space left on device")

    journal = Journal(None)
    journal.writers = [Full(tmp_path / "full.jsonl"), Console(), JsonLines(tmp_path / "m.jsonl")]
    for step in (1, 2):
        journal.write(EvaluationMetrics("validation", step, math.nan, 64, 0.1))
    journal.close()
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path / "m.jsonl")] == [(1, None), (2, None)]
    printed = capsys.readouterr()
    assert printed.err.count("No space left on device; training continues without it") == 1
    assert printed.out.count("validation loss after step") == 2


def test_metrics_that_cannot_be_written_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = job(f"--train-iters 2 --metrics-file {tmp_path}/file/m.jsonl")
    assert code == 2
    assert "metrics cannot be written to" in said


@pytest.mark.parametrize(
    ("flags", "said", "is_there"),
    [
        ("--profile-step-start 1 --profile-step-end 3", "trace of steps 1 to 2", True),
        ("--profile-step-start 2 --profile-step-end 9", "trace of steps 2 to 2", True),
        (
            "--profile-step-start 8 --profile-step-end 9",
            "nothing was traced: the run did not reach step 8",
            False,
        ),
        ("--profile-step-start 1 --profile-step-end 3 --profile-ranks 1", "", False),
    ],
    ids=["whole span", "run ends inside", "never reached", "another rank"],
)
def test_profile_writes_a_trace_of_its_steps(tmp_path: Path, flags: str, said: str, is_there: bool) -> None:
    code, text = job(f"--train-iters 3 --save {tmp_path} --profile {flags}")
    assert code == 0, text
    assert said in text
    path = tmp_path / "trace_rank_00000.json"
    assert path.exists() == is_there
    if is_there:
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert "aten::mm" in names


def test_norm_and_zeros_are_those_of_the_model(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []

    def look(runtime: Any, data: Any, journal: Any) -> None:
        (buffers,) = runtime.buffers.values()
        squares = sum(buffers.parameter(name).double().square().sum().item() for name in buffers.names)
        zeros = sum(int((buffers.main_grad(name) == 0).sum()) for name in buffers.names)
        seen.append((math.sqrt(squares), zeros))

    flags = (
        f"--train-iters 2 --log-params-norm --log-num-zeros-in-grad --metrics-file {tmp_path}/m.jsonl --activation relu"
    )
    loaded = load_config([*TINY.split(), *flags.split()])
    plan = resolve(loaded.config, 1)
    pretrain(Job(plan, read_environment({}), loaded.text(plan.config), look))
    last = steps_of(tmp_path / "m.jsonl")[-1]
    assert last["params_norm"] == pytest.approx(seen[0][0], rel=1e-6)
    assert last["num_zeros"] == seen[0][1]


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (0, set()),
        (1, {"forward-backward", "gradient-reduce", "optimizer"}),
        (2, {"forward-backward", "gradient-reduce", "optimizer", "forward", "backward", "start-reduce"}),
    ],
    ids=["step", "phases", "actions"],
)
def test_each_timing_level_logs_its_phases(tmp_path: Path, level: int, names: set[str]) -> None:
    code, said = job(f"--train-iters 4 --log-interval 2 --timing-log-level {level} --metrics-file {tmp_path}/m.jsonl")
    assert code == 0, said
    for line in steps_of(tmp_path / "m.jsonl"):
        phases = line["phases"]
        assert set(phases) == names
        # per step, like step_seconds
        assert sum(
            seconds for name, seconds in phases.items() if name in ("forward-backward", "gradient-reduce", "optimizer")
        ) < (line["step_seconds"] + 1e-9)
        if level == 2:
            assert phases["forward"] + phases["backward"] + phases["start-reduce"] <= phases["forward-backward"]


def test_waits_are_not_part_of_the_action_they_happen_in() -> None:
    tracer = Tracer()
    second = 1_000_000_000
    for name, kind, start, end in (
        ("1F0", "action", 0, 5), ("1F0", "wait", 1, 3), ("1RECV_B0", "action", 5, 6), ("1B0", "action", 6, 10),
        ("1B0", "wait", 6, 9),
    ):  # fmt: skip
        tracer.event(name, kind, start * second, end * second)
    assert action_seconds(tracer) == {"forward": 3.0, "wait": 5.0, "post-receive": 1.0, "backward": 1.0}


def test_on_a_gpu_phases_have_the_times_of_its_stream_and_do_not_block_the_host() -> None:
    device = FakeDevice()
    timers = Timers(1, torch.device("cpu"), clock=EventClock(torch.device("cpu"), device, device.now))
    launched = device.host_ns
    for _ in range(3):
        with timers.phase("forward-backward"):
            device.launch(30_000_000)
        with timers.phase("optimizer"):
            device.launch(2_000_000)
    assert device.host_ns - launched < 1_000_000
    assert timers.take(3) == {
        "forward-backward": pytest.approx(0.03, rel=1e-2),
        "optimizer": pytest.approx(0.002, rel=1e-2),
    }
    assert timers.take(3) == {}
