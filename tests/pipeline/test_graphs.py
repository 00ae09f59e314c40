"""Graphs of single stages, with tapes in place of CUDA graphs; tests/train/test_graphs.py tests whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.comm.channels import MessageSpec
from megapipe.comm.groups import Group
from megapipe.errors import TrainingError
from megapipe.pipeline.engine import Step
from megapipe.pipeline.graphs import CapturedStage, CudaRecorder, RankGraphs, StageGraphs
from megapipe.pipeline.stage import StageRunner
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from tests.pipeline.tape import Pool, TapeRecorder

WIDTH = 4
MESSAGE = (MessageSpec((3, 1, WIDTH), torch.float64),)


class Middle(nn.Module):
    """A linear with a main gradient; its output is multiplied by a value of the microbatch."""

    def __init__(self, queue: WeightQueue) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = ColumnParallelLinear(
            WIDTH, WIDTH, bias=False, tp=Group.alone("tp"), sequence_parallel=False, queue=queue
        )
        self.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.main_grad = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        self.linear.slots["weight"] = GradientSlot(self.main_grad)
        self.calls = 0

    def forward(self, hidden: Tensor, payload: dict[str, Any]) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(hidden)) * payload["factor"]


def middle(splits: bool = False, **more: Any) -> tuple[Middle, StageGraphs]:
    queue = WeightQueue()
    module = Middle(queue)
    return module, StageGraphs(
        1, StageRunner(module, queue), lambda: [module.linear.weight, module.main_grad], splits=splits, **more
    )


def example(**payload: Any) -> tuple[tuple[Tensor, ...], dict[str, Any], None]:
    """Return what a graph is recorded with: inputs, a microbatch and no loss."""
    inputs = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in MESSAGE)
    return inputs, {"factor": torch.ones(1, 1, WIDTH, dtype=torch.float64)} | payload, None


def values(seed: int) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Return a message, a microbatch and a gradient."""
    draw = torch.Generator().manual_seed(seed)
    x, factor, gradient = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((3, 1, WIDTH), (1, 1, WIDTH), (3, 1, WIDTH))
    )
    return x, {"factor": factor}, gradient


def expected(*seeds: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return outputs, input gradients and the sum of the weight gradients, computed without graphs."""
    module, graphs = middle()
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    for seed in seeds:
        x, payload, gradient = values(seed)
        outputs += graphs.runner.forward(seed, (x,), payload, None)
        gradients += graphs.runner.backward(seed, (gradient,))
    return outputs, gradients, module.main_grad


@pytest.mark.parametrize("splits", [False, True], ids=["B", "I and W"])
def test_two_slots_in_any_order_equal_two_microbatches(splits: bool) -> None:
    module, graphs = middle(splits)
    graphs.record(TapeRecorder(), 2, *example())
    calls = module.calls
    assert not module.main_grad.any()
    stage = CapturedStage(graphs, {1: 0, 2: 1, 3: 0})
    outputs = {seed: stage.forward(seed, (values(seed)[0],), values(seed)[1], None)[0].clone() for seed in (1, 2)}
    gradients = {1: stage.backward(1, (values(1)[2],))[0]}
    outputs[3] = stage.forward(3, (values(3)[0],), values(3)[1], None)[0]
    gradients[2] = stage.backward_input(2, (values(2)[2],))[0]
    gradients[3] = stage.backward_input(3, (values(3)[2],))[0]
    stage.backward_weight(2)
    stage.backward_weight(3)
    want_outputs, want_gradients, want = expected(1, 2, 3)
    for seed in (1, 2, 3):
        torch.testing.assert_close(outputs[seed], want_outputs[seed - 1])
        torch.testing.assert_close(
            gradients[seed], want_gradients[seed - 1]
        )  # those of microbatch 1 too, because microbatch 3 has reused its slot
    torch.testing.assert_close(module.main_grad, want)
    assert module.calls == calls


def test_each_slot_has_its_own_memory_pool() -> None:
    recorder = TapeRecorder()
    middle(splits=True)[1].record(recorder, 3, *example())
    assert [len(pool.tapes) for pool in recorder.pools] == [3, 3, 3]


def test_a_forward_waits_for_weights_before_it_is_replayed() -> None:
    seen: list[Tensor] = []
    module, graphs = middle(ready=lambda: seen.append(module.linear.weight.detach().add_(1.0).clone()))
    graphs.record(TapeRecorder(), 1, *example())
    assert not seen
    output = CapturedStage(graphs, {0: 0}).forward(0, (values(1)[0],), values(1)[1], None)[0]
    torch.testing.assert_close(output, torch.tanh(values(1)[0] @ seen[0].t()) * values(1)[1]["factor"])


def test_without_gradients_the_runner_computes() -> None:
    module, graphs = middle()
    graphs.record(TapeRecorder(), 1, *example())
    calls = module.calls
    with torch.no_grad():
        CapturedStage(graphs, {}).forward(7, (values(1)[0],), values(1)[1], None)
    assert module.calls == calls + 1


def test_replay_with_other_shapes_is_an_error() -> None:
    _, graphs = middle()
    graphs.record(TapeRecorder(), 1, *example())
    stage = CapturedStage(graphs, {0: 0})
    with pytest.raises(
        RuntimeError,
        match=r"stage 1.*\[\(3, 1, 4\)\], .*\[\(2, 1, 4\)\] .*--cuda-graph-impl",
    ):
        stage.forward(0, (values(1)[0][:2],), values(1)[1], None)
    with pytest.raises(RuntimeError, match="captured for a microbatch"):
        stage.forward(0, (values(1)[0],), values(1)[1] | {"mask": torch.ones(1)}, None)


def test_moved_parameters_are_an_error_at_row_start() -> None:
    module, graphs = middle()
    graphs.record(TapeRecorder(), 1, *example())
    CapturedStage(graphs, {}).begin_row()
    module.linear.weight = nn.Parameter(module.linear.weight.detach().clone())
    with pytest.raises(RuntimeError, match="stage 1: parameters or gradients have moved"):
        CapturedStage(graphs, {}).begin_row()


def test_code_that_waits_for_the_device_ends_the_run_with_a_message() -> None:
    class Looks(Middle):
        def forward(self, hidden: Tensor, payload: dict[str, Any]) -> Tensor:
            return super().forward(hidden, payload) * float(hidden.detach().sum())

    queue = WeightQueue()
    runner = StageRunner(Looks(queue), queue)
    runner.observe = observe = lambda _, output: None
    with pytest.raises(
        TrainingError,
        match=r"the forward of stage 2 cannot be captured as a CUDA graph: operation not permitted.*omit --cuda",
    ):
        StageGraphs(2, runner, list).record(TapeRecorder(), 1, *example())
    assert runner.observe is observe


def test_graphs_are_recorded_after_warm_up_and_settle() -> None:
    _, graphs = middle()
    order: list[str] = []

    class Ordered(TapeRecorder):
        def record(self, work: Callable[[], Any], pool: Pool) -> tuple[Callable[[], None], Any]:
            order.append("record")
            return super().record(work, pool)

    rank = RankGraphs({1: graphs}, {1: 2}, 2, 2, torch.device("cpu"), Ordered(), settle=lambda: order.append("settle"))
    step = Step([example()[1]], lambda boundary: MESSAGE, lambda output, payload: (output, output))
    for _ in range(3):
        order.append("step")
        rank.after_step(step)
    assert order == ["step", "step", "settle", *["record"] * 4, "step"]
    rank.release()
    assert not graphs.slots
    rank.after_step(step)
    assert graphs.slots


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["main"]

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    class Graph:  # as torch.cuda.graph ends a capture in which an operation failed
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None:
            current[0] = "capture"

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    for name, value in {"stream": on, "current_stream": lambda: current[0], "graph": Graph, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaRecorder().record(lambda: None, None)
    assert current == ["main"]
