"""The engine runs any valid schedule, frees memory as early as possible, and reports errors clearly."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.groups import Group
from megapipe.comm.trace import Tracer
from megapipe.errors import CommunicationError
from megapipe.gpu.streams import StageStreams
from megapipe.pipeline.engine import Around, Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.resolve import resolve
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower, without_pairs
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.validate import validate
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from tests.harness import RankFailure, RankPool
from tests.pipeline.stages import Plain, gradients, loss_of, message, payloads, pp_group
from tests.tiny import tiny_config

WIDTH = 6


def mean(output: Any, payload: Any) -> tuple[Tensor, Tensor]:
    loss = loss_of(output, payload)
    return loss, loss.detach()


def plain_step(count: int) -> Step:
    return Step(payloads(count), lambda boundary: message(boundary, False), mean)


class Linears(nn.Module):
    """Two hand-written linears with biases and a plain parameter between them; their weight gradients go to a queue."""

    def __init__(self, stage: int, queue: WeightQueue) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        tp = Group.alone("tp")
        self.linears = nn.ModuleList(
            ColumnParallelLinear(WIDTH, WIDTH, tp=tp, sequence_parallel=False, bias=True, queue=queue) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.empty(WIDTH))
        for module in self.modules():
            for name, old in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.randn(old.shape, generator=generator, dtype=torch.float64)))

    def forward(self, *inputs: Any) -> Tensor:
        first, second = self.linears
        return second(torch.tanh(first(inputs[0]) * self.scale))


def split(schedule: Schedule, delay: int) -> Schedule:
    """Split every B into I and a W that runs `delay` backwards later, or at the end of the row."""
    rows = []
    for row in schedule.rows:
        cut: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            if action.op is not Op.B:
                cut.append(action)
                continue
            cut.append(action._replace(op=Op.I))
            waiting.append(action._replace(op=Op.W))
            if len(waiting) > delay:
                cut.append(waiting.pop(0))
        rows.append((*cut, *waiting))
    return Schedule("split", schedule.placement, schedule.num_microbatches, tuple(rows))


def run_lowered(
    rank: int, world_size: int, lowered: Schedule, streams: StageStreams | None = None, tracer: Tracer | None = None
) -> tuple[tuple[list[Tensor], list[tuple[int, int]]], dict[int, list[Tensor]]]:
    queues = {stage: WeightQueue() for stage in lowered.placement.stages_of(rank)}
    modules = {stage: Linears(stage, queue) for stage, queue in queues.items()}
    runners = {stage: StageRunner(module, queues[stage]) for stage, module in modules.items()}
    group = pp_group(rank, world_size)
    reduced: list[tuple[int, int]] = []
    engine = Engine(
        lowered,
        rank,
        runners,
        Channels.build(lowered.placement, group, max_in_flight=4),
        {
            Op.REDUCE_GRAD: lambda action: reduced.append((action.stage, len(queues[action.stage].waiting))),
            Op.OVERLAP: lambda action: streams and streams.begin_pair(),
        },
        [] if streams is None else [Around.computing(lambda action: streams.computing(action.stage))],
        tracer,
        streams=streams,
    )
    count = lowered.num_microbatches
    inputs = [
        torch.randn(3, 1, WIDTH, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(count)
    ]
    spec = (MessageSpec((3, 1, WIDTH), torch.float64),)
    reports = engine.run(
        Step(inputs, lambda boundary: spec, lambda output, payload: (output.square().sum(), output.detach().sum()))
    )
    assert all(runner.num_live == 0 for runner in runners.values())
    return (reports, reduced), {stage: gradients(module) for stage, module in modules.items()}


class Watched(nn.Module):
    """A linear whose output nothing saves.

    It records, at each forward, how many of its outputs are still alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.outputs: list[StorageWeakRef] = []
        self.num_alive: list[int] = []

    def forward(self, *inputs: Any) -> Tensor:
        self.num_alive.append(sum(not output.expired() for output in self.outputs))
        x = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0]["x"].new_ones(5, 4)
        output = self.linear(x)
        self.outputs.append(StorageWeakRef(output.untyped_storage()))
        return output


def watch_outputs(rank: int, world_size: int, count: int, in_flight: int) -> tuple[list[int], int, int]:
    """Return this rank's counts: (outputs alive at each forward, maximum of live microbatches, outputs alive at the
    end).
    """
    schedule = build_lowered("gpipe", world_size, 1, count)
    module = Watched()
    runner = StageRunner(module)
    live = []
    runner.observe = lambda microbatch, output: live.append(runner.num_live + 1)
    group = pp_group(rank, world_size)
    engine = Engine(schedule, rank, {rank: runner}, Channels.build(schedule.placement, group, max_in_flight=in_flight))
    spec = (MessageSpec((5, 4), torch.float64),)
    engine.run(Step(payloads(count), lambda boundary: spec, lambda output, payload: (output.sum(), 0)))
    return module.num_alive, max(live), sum(not output.expired() for output in module.outputs)


def test_sent_outputs_are_freed_before_their_graphs(rank_pools: Callable[[int], RankPool]) -> None:
    for num_alive, num_live, after in rank_pools(2).run(watch_outputs, 8, 2):
        assert num_live == 8
        assert max(num_alive) <= 2  # those being sent
        assert after == 0


def peak(rank: int, world_size: int, name: str, chunks: int, count: int) -> int:
    """Return the maximum of live microbatches on this rank, over all its stages."""
    schedule = build_lowered(name, world_size, chunks, count)
    runners = {stage: StageRunner(Plain(stage, tuples=False)) for stage in schedule.placement.stages_of(rank)}
    most = 0

    def observe(microbatch: int, output: Any) -> None:
        nonlocal most
        most = max(most, 1 + sum(runner.num_live for runner in runners.values()))

    for runner in runners.values():
        runner.observe = observe
    channels = Channels.build(schedule.placement, pp_group(rank, world_size), max_in_flight=4)
    Engine(schedule, rank, runners, channels).run(plain_step(count))
    return most


@pytest.mark.parametrize(
    ("name", "chunks", "count", "expected"),
    [
        ("gpipe", 1, 6, [6, 6, 6, 6]),
        ("1f1b", 1, 6, [4, 3, 2, 1]),
        ("1f1b", 1, 2, [2, 2, 2, 1]),
        ("interleaved", 2, 8, [11, 9, 7, 5]),
    ],
    ids=["gpipe", "1f1b", "1f1b with few microbatches", "interleaved"],
)
def test_live_microbatches_equal_the_schedules_peak(
    rank_pools: Callable[[int], RankPool], name: str, chunks: int, count: int, expected: list[int]
) -> None:
    assert rank_pools(4).run(peak, name, chunks, count) == expected
    assert list(peak_live_chunks(build_schedule(name, 4, chunks, count))) == expected


class Broken(Plain):
    """A stage that raises in the forward of its second microbatch."""

    def forward(self, *inputs: Any) -> Any:
        if torch.equal(inputs[-1]["x"], payloads(2)[1]["x"]):
            raise ArithmeticError("this stage is broken")
        return super().forward(*inputs)


def break_last_stage(rank: int, world_size: int, catch: bool) -> tuple[str, str, int, list[str]]:
    schedule = build_lowered("1f1b", world_size, 1, 3)
    runner = StageRunner((Broken if rank == world_size - 1 else Plain)(rank, tuples=False))
    channels = Channels.build(schedule.placement, pp_group(rank, world_size, timeout_seconds=1.0), max_in_flight=2)
    try:
        Engine(schedule, rank, {rank: runner}, channels).run(plain_step(3))
    except (ArithmeticError, CommunicationError) as error:
        if not catch:
            raise
        return type(error).__name__, str(error), runner.num_live, []
    raise AssertionError("nothing was raised")


def test_exception_of_a_stage_propagates_with_traceback(rank_pools: Callable[[int], RankPool]) -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)rank 1 of 2 raised ArithmeticError: this stage is broken.*in forward\n"
    ) as failure:
        rank_pools(2).run(break_last_stage, False)
    assert failure.value.rank == 1


def test_peers_of_a_broken_stage_fail_within_the_timeout_and_no_graph_is_left(
    rank_pools: Callable[[int], RankPool],
) -> None:
    waiting, broken = rank_pools(2).run(break_last_stage, True)
    assert broken[:3] == ("ArithmeticError", "this stage is broken", 0)
    assert waiting[0] == "CommunicationError"
    assert "receiving gradient from stage 1 to 0" in waiting[1]
    assert waiting[2] == 0


def one_rank(count: int = 2, tracer: Tracer | None = None, runner: StageRunner | None = None) -> Engine:
    return Engine(
        build_lowered("1f1b", 1, 1, count), 0, {0: runner or StageRunner(Plain(0, tuples=False))}, {}, tracer=tracer
    )


def test_wrong_number_of_microbatches_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 microbatches, 3"):
        one_rank(2).run(plain_step(3))


def test_stages_of_another_rank_are_an_error() -> None:
    schedule = build_lowered("1f1b", 2, 1, 2)
    with pytest.raises(ValueError, match=r"pp_rank 1 .*\[0\], .*\(1,\)"):
        Engine(schedule, 1, {0: StageRunner(Plain(0, tuples=False))}, {})


def test_schedule_without_messages_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no messages"):
        Engine(build_schedule("1f1b", 2, 1, 2), 0, {0: StageRunner(Plain(0, tuples=False))}, {})


def test_a_split_backward_needs_a_queue() -> None:
    schedule = lower(split(build_schedule("1f1b", 1, 1, 1), 0))
    with pytest.raises(ValueError, match="the stage needs `weight_gradients`"):
        Engine(schedule, 0, {0: StageRunner(Plain(0, tuples=False))}, {}).run(plain_step(1))


def test_the_trace_has_every_action_in_order_within_the_row() -> None:
    tracer = Tracer()
    engine = one_rank(2, tracer)
    engine.run(plain_step(2))
    assert [event.name for event in tracer.of_kind("action")] == [str(action) for action in engine.row]
    (row,) = tracer.of_kind("row")
    assert all(row.start_ns <= event.start_ns <= event.end_ns <= row.end_ns for event in tracer.events)


def test_what_surrounds_actions_is_nested_in_order_adds_no_frame_and_is_cleared_after_an_error() -> None:
    log: list[str] = []

    def around(name: str) -> Around:
        @contextmanager
        def context(action: Action) -> Iterator[None]:
            log.append(f"{name} {action}")
            yield
            log.append(f"{name} ends")

        return Around.computing(context, lambda: log.append(f"{name} begins"), lambda: log.append(f"{name} is cleared"))

    def stage(payload: int) -> Tensor:
        frames = [frame.name for frame in traceback.extract_stack()]
        last = max(number for number, name in enumerate(frames) if name == "run")  # the engine's
        log.append(" ".join(frames[last:]))
        if payload:
            raise ArithmeticError("this stage is broken")
        return torch.ones((), requires_grad=True)

    engine = Engine(
        build_lowered("1f1b", 1, 1, 1), 0, {0: StageRunner(stage)}, {}, around=[around("outer"), around("inner")]
    )
    engine.run(Step([0], lambda boundary: (), lambda output, payload: (output, None)))
    begun = ["outer begins", "inner begins", "outer 0F0", "inner 0F0", "run act forward stage"]
    assert log == [*begun, "inner ends", "outer ends", "outer 0B0", "inner 0B0", "inner ends", "outer ends"]
    log.clear()
    with pytest.raises(ArithmeticError):
        engine.run(Step([1], lambda boundary: (), lambda output, payload: (output, None)))
    assert log == [*begun, "outer is cleared", "inner is cleared"]


class Half(nn.Module):
    """A stage that uses only the second of its two inputs."""

    def forward(self, unused: Tensor, used: Tensor, payload: Any) -> Tensor:
        return used * 3.0


def test_an_input_that_a_stage_does_not_use_has_gradient_zero() -> None:
    runner = StageRunner(Half())
    (output,) = runner.forward(0, (torch.ones(2), torch.ones(2)), None, None)
    unused, used = runner.backward(0, (torch.ones_like(output),))
    assert (unused.tolist(), used.tolist()) == ([0, 0], [3, 3])


def test_without_gradients_nothing_is_kept() -> None:
    runner = StageRunner(Half())
    with torch.no_grad():
        runner.forward(0, (torch.ones(2), torch.ones(2)), None, None)
    assert runner.num_live == 0


class Scaled(nn.Module):
    """A module whose single parameter is exchanged between weight versions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *inputs: Any) -> Tensor:
        return (inputs[0] if len(inputs) > 1 else inputs[-1]) * self.factor


def test_a_schedule_with_updates_needs_a_handler_of_them() -> None:
    with pytest.raises(ValueError, match=r"pipedream.*UPDATE.*handlers"):
        Engine(build_lowered("pipedream", 1, 1, 2), 0, {0: StageRunner(Scaled())}, {})


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("receive_depth", [0, 1, 4])
def test_without_streams_the_first_half_of_a_pair_is_sent_before_the_second_half(name: str, receive_depth: int) -> None:
    chunks = 2 if name == "dualpipe-v" else 1
    paired = build_lowered(name, 4, chunks, 10, receive_depth=receive_depth)
    rows = tuple(map(without_pairs, paired.rows))
    validate(replace(paired, rows=rows))
    for before, after in zip(paired.rows, rows, strict=True):
        assert Counter(after) == Counter(action for action in before if action.op is not Op.OVERLAP)
        assert [a for a in after if a.op in COMPUTE_OPS] == [a for a in before if a.op in COMPUTE_OPS]
        made = [slot for slot, action in enumerate(after) if action._replace(op=Op.SEND_F) in after]
        assert all(after[slot + 1].op is Op.SEND_F for slot in made if after[slot].op is Op.F)
    plain = build_lowered("1f1b", 2, 1, 4)
    assert without_pairs(plain.rows[0]) is plain.rows[0]


@pytest.mark.parametrize(("device", "given", "ahead"), [("cpu", None, 4), ("auto", None, 1), ("cpu", 2, 2)])
def test_receives_are_posted_four_computations_ahead_on_cpus(device: str, given: int | None, ahead: int) -> None:
    plan = resolve(tiny_config(pipeline_model_parallel_size=2, pipeline_receive_depth=given, device=device), 2)
    count = plan.batch.full // plan.batch.samples_per_microbatch
    assert plan.config.parallel.pipeline_receive_depth == ahead
    assert plan.schedule(count).rows == lower(build_schedule("1f1b", 2, 1, count), ahead).rows


class Doubled(nn.Module):
    def forward(self, payload: Tensor) -> Tensor:
        return payload * 2


def test_a_loss_with_a_shape_is_refused() -> None:
    runner = StageRunner(Doubled())
    with pytest.raises(ValueError, match=r"scalar .*\[3\]"):
        runner.forward(0, (), torch.ones(3, requires_grad=True), lambda output, payload: (output, None))


def test_a_gradient_of_another_shape_is_refused() -> None:
    runner = StageRunner(Doubled())
    runner.forward(0, (), torch.ones(3, requires_grad=True), None)
    with pytest.raises(RuntimeError, match="shape"):
        runner.backward(0, (torch.ones(2),))
