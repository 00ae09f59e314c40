from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from megapipe.data_parallel.buffers import StageBuffers
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import GradientSlot
from tests.data_parallel.toy import Toy, draw, stage_buffers, tokens_of, toy_specs


class Shared(nn.Module):
    """Two submodules that share one Parameter; the first `by_hand` of them accumulate its gradient themselves."""

    def __init__(self, by_hand: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        for module in (self.first, self.second)[:by_hand]:
            module.slots = {}


SHARED_SPECS = (ParamSpec("first.weight", (3, 3), owner=0),)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_parameters_are_aligned_views_with_the_drawn_values(dtype: torch.dtype) -> None:
    buffers, module = stage_buffers(toy_specs(), param_dtype=dtype), Toy()
    buffers.materialize(module, draw)
    for spec in toy_specs():
        parameter = module.get_parameter(spec.name)
        assert parameter.data_ptr() % 64 == 0
        assert parameter.requires_grad
        assert torch.equal(parameter, draw(spec).to(dtype))
    assert len(buffers.buffers[0].layout.buckets) > 2
    for buffer in buffers.buffers:
        buffer.parameters.zero_()
    assert all(not parameter.any() for parameter in module.parameters())


def test_autograd_gradients_add_up_in_the_main_gradients_and_are_dropped() -> None:
    buffers, module = stage_buffers(toy_specs(), param_dtype=torch.float32), Toy()
    buffers.materialize(module, draw)
    heard = []
    buffers.listener = heard.append
    expected = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in module.named_parameters()}
    for microbatch in range(3):
        loss = module(tokens_of(0, microbatch))
        for (name, _), gradient in zip(
            module.named_parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            expected[name] += gradient
        module(tokens_of(0, microbatch)).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is None
        assert torch.equal(buffers.main_grad(name), expected[name])
        assert heard.count(name) == 3
    for buffer in buffers.buffers:
        buffer.kept_gradients[0].zero_()
    assert not any(buffers.main_grad(name).any() for name in buffers.names)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, slot):
        ctx.slot = slot
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.slot.add(torch.ones(3, 3))
        ctx.slot.ready()
        return grad, None, None


def test_a_gradient_added_by_hand_is_counted_once() -> None:
    buffers, module = stage_buffers(SHARED_SPECS), Shared(by_hand=2)
    buffers.materialize(module, draw, GradientSlot)
    heard = []
    buffers.listener = heard.append
    slot = module.first.slots["weight"]
    assert slot is module.second.slots["weight"]
    x = ByHand.apply(torch.ones(3, requires_grad=True), module.first.weight, slot)
    ByHand.apply(x, module.second.weight, slot).sum().backward()
    assert heard == ["first.weight"]  # both uses are done; the hook of a backward that returned None reports nothing
    assert torch.equal(buffers.main_grad("first.weight"), torch.full((3, 3), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("by_hand", "unpredictable"), [(0, False), (1, True), (2, False)], ids=["autograd", "one by hand", "both by hand"]
)
def test_parameter_shared_by_two_modules_stays_one(by_hand: int, unpredictable: bool) -> None:
    buffers, module = stage_buffers(SHARED_SPECS), Shared(by_hand)
    buffers.materialize(module, draw, GradientSlot)
    assert module.first.weight is module.second.weight
    assert module.first.weight.data_ptr() == buffers.parameter("first.weight").data_ptr()
    assert ("first.weight" in buffers.unpredictable) == unpredictable


def test_module_that_is_not_the_layout_is_refused() -> None:
    specs = toy_specs()
    with pytest.raises(ValueError, match=r"only in the module: \['embedding.weight'\]"):
        stage_buffers(specs[1:]).materialize(Toy())
    wrong = (ParamSpec("embedding.weight", (12, 7), owner=0), *specs[1:])
    with pytest.raises(ValueError, match=r"embedding.weight: .*\(11, 7\), .*\(12, 7\)"):
        stage_buffers(wrong).materialize(Toy())


def test_inference_buffers_hold_no_gradients() -> None:
    buffers, module = stage_buffers(toy_specs(), grad_dtype=None), Toy()
    buffers.materialize(module, draw)
    with pytest.raises(RuntimeError, match="have no gradients"):
        buffers.buffers[0].kept_gradients[0].zero_()


def test_unused_buffers_are_freed() -> None:
    buffers, module = stage_buffers(toy_specs()), Toy()
    buffers.materialize(module, draw, GradientSlot)
    module(tokens_of(0, 0)).backward()
    there = weakref.ref(buffers)
    del buffers, module
    gc.collect()
    assert there() is None


class Head(nn.Module):
    """A stage that uses `first.weight` of another stage and its own `second.weight`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
        self.first.slots = {}


def test_a_borrowed_parameter_is_the_lenders_own_with_its_slot() -> None:
    lender, module = stage_buffers(SHARED_SPECS), Shared(by_hand=1)
    lender.materialize(module, draw, GradientSlot)
    borrower, head = stage_buffers((ParamSpec("second.weight", (3, 3), owner=1),)), Head()
    borrower.materialize(head, draw, GradientSlot, lender)
    assert head.first.weight is module.first.weight
    assert head.first.slots["weight"] is module.first.slots["weight"]
    assert borrower.names == ("second.weight",)
    head.first(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(lender.main_grad("first.weight"), torch.full((3, 3), 2.0, dtype=torch.float64))


def test_what_neither_the_buffers_nor_the_lender_hold_is_named() -> None:
    lender, module = stage_buffers(SHARED_SPECS), Shared(by_hand=0)
    lender.materialize(module, draw)
    with pytest.raises(ValueError, match=r"only in the module: \['second.weight'\]"):
        stage_buffers(()).materialize(Head(), draw, None, lender)


def test_versions_compute_apart_and_add_their_gradients_up() -> None:
    layouts = tuple(buffer.layout for buffer in stage_buffers(toy_specs()).buffers)
    buffers, module = StageBuffers(layouts, "cpu", torch.float64, torch.float64, num_versions=2), Toy()
    buffers.materialize(module, draw)
    assert len(
        {buffer.untyped_storage().data_ptr() for flat in buffers.buffers for buffer in flat.versions}
    ) == 2 * len(buffers.buffers)
    loss_of_old = module(tokens_of(0, 0))
    expected = torch.autograd.grad(module(tokens_of(0, 0)), list(module.parameters()))
    buffers.newest = 1
    buffers.fill(lambda spec: draw(spec) * 2)
    buffers.install(1)
    assert torch.equal(module.up.weight, buffers.parameter("up.weight")) and module.up.weight.data_ptr() % 64 == 0
    assert torch.equal(buffers.parameter("up.weight"), 2 * buffers.parameter("up.weight", version=0))
    loss_of_new = module(tokens_of(0, 0))
    assert loss_of_new != loss_of_old
    loss_of_old.backward()  # its weights still exist, although the module now holds others
    for (name, _), gradient in zip(module.named_parameters(), expected, strict=True):
        assert torch.equal(buffers.main_grad(name), gradient)
    loss_of_new.backward()
    assert not torch.equal(buffers.main_grad("up.weight"), expected[3])


def test_a_frozen_parameter_has_neither_gradient_nor_memory_for_one() -> None:
    specs = [replace(spec, trainable=spec.name not in ("embedding.weight", "up.bias")) for spec in toy_specs()]
    buffers, module = stage_buffers(specs), Toy()
    buffers.materialize(module, draw)
    module(tokens_of(0, 0)).backward()
    assert set(buffers.trained_names) == {"norm.weight", "norm.bias", "up.weight", "down.weight"}
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == (name in buffers.trained_names) and parameter.grad is None
        assert name not in buffers.trained_names or buffers.main_grad(name).any()
    (frozen,) = (buffer for buffer in buffers.buffers if not buffer.layout.trainable)
    with pytest.raises(RuntimeError, match="frozen"):
        _ = frozen.gradients
