"""The order in which `StageStreams` makes streams wait for each other, on fake streams that log it."""

from __future__ import annotations

import pytest
import torch

from megapipe.gpu.streams import StageStreams
from megapipe.schedule.families import build_lowered
from tests.pipeline.current_stream import CurrentStream
from tests.pipeline.test_engine import run_lowered

Log = list[tuple[str, ...]]


class FakeStream:
    """A stream that logs its name and what is launched on it."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append((self.name, "waits for", other.name))


class FakeCuda(CurrentStream[FakeStream]):
    """The stream functions of torch.cuda."""

    def __init__(self) -> None:
        self.log: Log = []
        super().__init__(FakeStream("main", self.log))
        self._num_streams = 0

    def Stream(self, device: torch.device) -> FakeStream:
        self._num_streams += 1
        return FakeStream(f"stage {self._num_streams - 1}", self.log)

    def launch(self, what: str) -> None:
        self.log.append((self._current.name, "runs", what))


FORK: Log = [("stage 0", "waits for", "main"), ("stage 1", "waits for", "main")]
JOIN: Log = [("main", "waits for", "stage 0"), ("main", "waits for", "stage 1")]


def fakes() -> tuple[FakeCuda, StageStreams]:
    cuda = FakeCuda()
    return cuda, StageStreams((0, 1), torch.device("cpu"), cuda)


def test_outside_a_pair_computations_keep_their_order() -> None:
    cuda, streams = fakes()
    for stage, what in ((0, "F"), (1, "B")):
        with streams.computing(stage):
            cuda.launch(what)
    assert cuda.log == [*FORK, ("stage 0", "runs", "F"), *JOIN, *FORK, ("stage 1", "runs", "B"), *JOIN]


def test_the_halves_of_a_pair_do_not_wait_for_each_other() -> None:
    cuda, streams = fakes()
    streams.begin_pair()
    for stage, what in ((1, "F"), (0, "B")):
        with streams.computing(stage):
            cuda.launch(what)
    cuda.launch("SEND")
    pair: Log = [("stage 1", "runs", "F"), ("stage 0", "runs", "B")]
    assert cuda.log == [*FORK, *pair, *JOIN, ("main", "runs", "SEND")]


def test_after_a_half_that_failed_the_next_step_begins_outside_a_pair() -> None:
    cuda, streams = fakes()
    streams.begin_pair()
    with pytest.raises(ArithmeticError), streams.computing(0):
        raise ArithmeticError
    cuda.log.clear()
    with streams.computing(0):
        cuda.launch("F")
    assert cuda.log == [*FORK, ("stage 0", "runs", "F"), *JOIN]


class FakeTensor:
    def __init__(self) -> None:
        self.used_on: list[str] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.used_on.append(stream.name)


def test_tensor_of_another_stream_is_recorded_on_the_using_stream() -> None:
    _, streams = fakes()
    tensor = FakeTensor()
    with streams.computing(1):
        streams.use((None, tensor))  # type: ignore[arg-type]
    assert tensor.used_on == ["stage 1"]


def test_the_engine_runs_both_halves_of_each_pair_on_the_streams_of_their_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dualpipe-v on one rank, which holds both stages: there are no messages."""
    cuda, streams = fakes()
    used: list[str] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append(stream.name))
    schedule = build_lowered("dualpipe-v", 1, 2, 4)
    (_, with_streams), (_, without) = run_lowered(0, 1, schedule, streams), run_lowered(0, 1, schedule)
    for stage, gradients in without.items():
        assert all(torch.equal(a, b) for a, b in zip(with_streams[stage], gradients, strict=True))
    num_pairs = sum(action.op.value == "OVERLAP" for action in schedule.rows[0])
    num_computations = sum(action.op.value in "FBIW" for action in schedule.rows[0])
    assert num_pairs > 2
    assert cuda.log == [*FORK, *JOIN] * (num_computations - num_pairs)
    assert {"stage 0", "stage 1"} == set(used)
