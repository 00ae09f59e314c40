"""Units of offloaded activations: which copy waits for what, and what happens out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megapipe.pipeline.offload import Offload
from megapipe.schedule.action import Action, parse_action
from megapipe.schedule.lifetimes import StageGroups, plan_moves
from tests.pipeline.late_copies import LateCopies

GROUPS = 4
STAGES = {0: StageGroups(GROUPS, GROUPS, has_head=False)}
Log = list[tuple[str, str, str]]


class Rank:
    """A row with one stage of four groups, each tanh(w x), and with copies that run as late as possible."""

    def __init__(self, row: str, min_elements: int = 1, early: bool = False) -> None:
        self.actions = [parse_action(word) for word in row.split()]
        self.copies = LateCopies(early)
        self.offload = Offload(self.copies, min_elements)
        self.moves = plan_moves(self.actions, STAGES)
        self.weights = [torch.full((3,), 0.5 + group, requires_grad=True) for group in range(GROUPS)]

    @property
    def log(self) -> Log:
        return self.copies.cuda.log

    @contextmanager
    def acting(self, word: str) -> Iterator[Action]:
        action = parse_action(word)
        with self.offload.computing(action):
            yield action

    def begin(self) -> None:
        self.offload.begin(self.moves)

    def forward(self, word: str, x: Tensor) -> Tensor:
        with self.acting(word):
            for group, weight in enumerate(self.weights):
                x = self.offload.run(0, group, self.layer(weight), x, [weight])
        return x

    @staticmethod
    def layer(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(x * weight)

    def backward(self, word: str, output: Tensor) -> None:
        with self.acting(word):
            output.sum().backward()


def plain(x: Tensor) -> list[Tensor]:
    rank = Rank("0F0 0B0")
    for weight in rank.weights:
        x = torch.tanh(x * weight)
    x.sum().backward()
    return [weight.grad for weight in rank.weights if weight.grad is not None]


def test_copies_and_computation_wait_for_each_other() -> None:
    rank, x = Rank("0F0 0F1 0B0 0B1"), torch.randn(2, 3)
    rank.begin()
    outputs = [rank.forward(f"0F{number}", x) for number in range(2)]
    left: Log = [("out", "waits for", "compute"), ("compute", "waits for", "out"), ("out", "copies", "")]
    # two groups: a copy is waited for when the group after the next begins
    assert rank.log[:6] == [left[0], left[0], *left[1:], left[0], left[1]]
    rank.backward("0B0", outputs[0])
    rank.log.clear()
    rank.backward("0B1", outputs[1])
    came: Log = [("compute", "waits for", "in"), ("in", "copies", "")]
    # loading of the first unit begins in the previous action; each later load begins before the current one is waited
    # for
    assert rank.log == (GROUPS - 1) * [("in", "waits for", "compute"), *came] + came
    for weight, expected in zip(rank.weights, plain(x), strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, 2 * expected)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_host_buffer_is_reused_only_after_it_was_read(early: bool) -> None:
    rank, x = Rank("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", early=early), torch.randn(2, 3)
    rank.begin()
    outputs = {}
    for action in rank.actions:
        if action.op.value == "F":
            outputs[action.microbatch] = rank.forward(str(action), x + action.microbatch)
        else:
            rank.backward(str(action), outputs.pop(action.microbatch))
    expected = [sum(each) for each in zip(*(plain(x + number) for number in range(4)), strict=True)]
    for weight, gradient in zip(rank.weights, expected, strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, gradient)


def test_shared_storages_move_once_and_small_tensors_and_parameters_stay() -> None:
    weight, stays = torch.ones(5, requires_grad=True), torch.ones(4, 5)
    for min_elements, num_bytes in ((1, (20 + 5) * 4), (6, 20 * 4), (21, 0)):
        rank = Rank("0F0 0F1 0B0 0B1", min_elements)
        rank.begin()

        def several(x: Tensor) -> Tensor:
            x = x * 2
            return (
                x * weight + x.view(20).sin().view(4, 5) + x * stays + x[0].exp()
            )  # these keep x three times, once as a view, and one output

        with rank.acting("0F0"):
            rank.offload.run(0, 0, several, torch.randn(4, 5, requires_grad=True), [weight, stays])
            carried = next(iter(rank.offload._units.values()))
            assert sum(part.num_bytes for part in carried._parts.values()) == num_bytes


def test_nothing_is_offloaded_without_gradients_or_outside_a_row() -> None:
    rank, x = Rank("0F0 0F1 0B0 0B1"), torch.randn(2, 3)
    rank.begin()
    output = rank.offload.run(0, 0, rank.layer(rank.weights[0]), x, [])
    output.sum().backward()
    with rank.acting("0F0"), torch.no_grad():
        rank.offload.run(0, 0, rank.layer(rank.weights[0]), x, [])
    assert rank.log == []


def test_another_order_than_the_planned_one_raises() -> None:
    rank, x = Rank("0F0 0F1 0B0 0B1"), torch.randn(2, 3)
    rank.begin()
    rank.forward("0F0", x)
    with pytest.raises(RuntimeError, match=r"expects .* next, but .*op=<Op.B: 'B'>"), rank.acting("0B0"):
        pass


def test_a_backward_outside_its_row_raises() -> None:
    rank, x = Rank("0F0 0F1 0B0 0B1"), torch.randn(2, 3)
    rank.begin()
    output = rank.forward("0F0", x)
    with pytest.raises(RuntimeError, match="outside the row"):
        output.sum().backward()


def test_an_aborted_row_leaves_no_copy_in_flight() -> None:
    rank, x = Rank("0F0 0F1 0B0 0B1"), torch.randn(2, 3)
    rank.begin()
    rank.forward("0F0", x)
    num_copies = rank.log.count(("out", "copies", ""))
    rank.offload.clear()
    assert rank.log.count(("out", "copies", "")) == GROUPS > num_copies
    rank.begin()
    rank.forward("0F0", x)
