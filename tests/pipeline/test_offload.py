"""Offloaded activations: which copy waits for what, what moves, and what happens out of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.offload import Offload
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.action import Action, Op, parse_action
from megapipe.schedule.lower import lower
from megapipe.schedule.offload import offload
from megapipe.schedule.placement import linear
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.sharding import split_stages
from tests.pipeline.late_copies import LateCopies

STAGES = 4
Log = list[tuple[str, str, str]]


def plain(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x * weight)


class Rank:
    """One rank with four stages of one layer each, all offloaded, and with copies that run as late as possible.

    row: that of the four stages as one, of forwards and backwards. layer: of a weight and an input.
    """

    def __init__(
        self,
        row: str,
        min_elements: int = 1,
        early: bool = False,
        layer: Callable[[Tensor, Tensor], Tensor] = plain,
        stays: tuple[Tensor, ...] = (),
    ) -> None:
        actions = tuple(parse_action(word) for word in row.split())
        whole = Schedule("test", linear(1), len(actions) // 2, (actions,))
        self.schedule = offload(lower(split_stages(whole, [STAGES])), range(STAGES))
        self.copies = LateCopies(early)
        self.offload = Offload(self.copies, min_elements)
        self.weights = [torch.full((3,), 0.5 + stage, requires_grad=True) for stage in range(STAGES)]

        def module(stage: int) -> Callable[..., Tensor]:
            weight = self.weights[stage]
            return lambda x, *_: self.offload.run(lambda x: layer(weight, x), x, [weight, *stays])

        self.runners = {stage: StageRunner(module(stage)) for stage in range(STAGES)}
        for runner in self.runners.values():
            runner.releases_inputs = True

    @property
    def log(self) -> Log:
        return self.copies.cuda.log

    def run(self, inputs: list[Tensor], without: Op | None = None) -> None:
        """Run the row. without: leave out all actions of an op."""
        handlers: dict[Op, Any] = {Op.OFFLOAD: self.offload.release, Op.RELOAD: self.offload.load}
        if without is not None:
            handlers[without] = lambda action: None
        around = [self.offload.around(self.schedule.rows[0])]
        engine = Engine(self.schedule, 0, self.runners, {}, handlers, around)
        engine.run(Step(inputs, lambda boundary: (), lambda output, _: (output.sum(), None)))

    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]


def reference(inputs: list[Tensor]) -> list[Tensor]:
    weights = [torch.full((3,), 0.5 + stage, requires_grad=True) for stage in range(STAGES)]
    for x in inputs:
        for weight in weights:
            x = plain(weight, x)
        x.sum().backward()
    return [weight.grad for weight in weights if weight.grad is not None]


def test_copies_and_computation_wait_for_each_other() -> None:
    rank, inputs = Rank("0F0 0F1 0B0 0B1"), [torch.randn(2, 3) for _ in range(2)]
    rank.run(inputs)
    leaves: Log = [("out", "waits for", "compute")]
    freed: Log = [("compute", "waits for", "out"), ("out", "copies", "")]
    # the copy of a forward is waited for after the next one
    assert rank.log[: 2 + 3 * 2] == leaves + (leaves + freed) * 2 + leaves
    # a copy back begins one computation before it is waited for, the last one after all others
    assert rank.log[-2:] == [("compute", "waits for", "in"), ("in", "copies", "")]
    assert rank.log.count(("in", "copies", "")) == rank.log.count(("out", "copies", "")) == 2 * STAGES
    for gradient, expected in zip(rank.gradients(), reference(inputs), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_host_buffer_is_reused_only_after_it_was_read(early: bool) -> None:
    rank = Rank("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", early=early)
    inputs = [torch.randn(2, 3) for _ in range(4)]
    for _ in range(2):
        rank.run(inputs)
    for gradient, expected in zip(rank.gradients(), reference(inputs * 2), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize(("min_elements", "num_bytes"), [(1, (20 + 5) * 4), (6, 20 * 4), (21, 0)])
def test_shared_storages_move_once_and_small_tensors_and_parameters_stay(min_elements: int, num_bytes: int) -> None:
    stays = torch.ones(4, 5)

    def several(weight: Tensor, x: Tensor) -> Tensor:
        wide = torch.cat([weight, weight[:2]])
        # these keep x three times, once as a view, and one output; not what the parameter's operation makes
        return x * stays + x.view(20).sin().view(4, 5) + x.square() + x[0].exp() + wide.sum()

    rank = Rank("0F0 0F1 0B0 0B1", min_elements, layer=several, stays=(stays,))
    sizes = []
    take = rank.offload.pool.take
    rank.offload.pool.take = lambda size: (sizes.append(size), take(size))[1]  # type: ignore[method-assign]
    rank.run([torch.randn(4, 5) for _ in range(2)])
    assert set(sizes[1:STAGES]) == {num_bytes}


def test_nothing_is_offloaded_outside_a_row_or_without_gradients() -> None:
    rank = Rank("0F0 0F1 0B0 0B1")
    output = rank.offload.run(lambda x: plain(rank.weights[0], x), torch.randn(2, 3), [])
    output.sum().backward()
    assert rank.log == []


def test_the_input_of_a_stage_leaves_the_device_too() -> None:
    rank, held, gone = Rank("0F0 0F1 0B0 0B1"), {}, []
    load, expired = rank.offload.load, torch.UntypedStorage._expired

    def observed(microbatch: int, output: Tensor) -> None:
        held[microbatch] = output.untyped_storage()._weak_ref()

    def loaded(action: Action) -> None:
        if action.stage == 2:
            gone.append(expired(held[action.microbatch]))
        load(action)

    rank.runners[1].observe, rank.offload.load = observed, loaded  # type: ignore[method-assign]
    rank.run([torch.randn(2, 3) for _ in range(2)])
    assert gone == [True, True]


def test_a_backward_without_its_copy_back_raises() -> None:
    rank = Rank("0F0 0F1 0B0 0B1")
    with pytest.raises(RuntimeError, match="its activations are in host memory"):
        rank.run([torch.randn(2, 3)] * 2, without=Op.RELOAD)


def test_an_aborted_row_leaves_no_copy_in_flight() -> None:
    rank, x = Rank("0F0 0F1 0B0 0B1"), torch.randn(2, 3)
    rank.runners[3].observe = lambda microbatch, output: 1 / (1 - microbatch)  # fails in the second forward
    with pytest.raises(ZeroDivisionError):
        rank.run([x, x])
    assert rank.log.count(("out", "copies", "")) == 2 * STAGES
    rank.runners[3].observe = None
    rank.run([x, x])
    for gradient, expected in zip(rank.gradients(), reference([x, x]), strict=True):
        assert torch.equal(gradient, expected)
