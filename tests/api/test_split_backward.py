"""The two halves of a module's backward add up to the whole one, and compute nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megapipe.api.split_backward import SplitStageRunner
from megapipe.pipeline.stage import StageRunner
from tests.api.test_pipeline import Join, Split, Twice

WIDTH, ROWS = 6, 4


class Scale(torch.autograd.Function):
    """x * w, whose backward computes both gradients whenever it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(self.linear(x), self.weight)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Attention(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 12, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[None])[0]


class Recurrent(nn.Module):
    """One cell that is used three times, and one weight that reaches the output directly."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.start = nn.GRUCell(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(len(x), WIDTH)
        for _ in range(3):
            state = self.cell(x, state)
        return state + self.start


class Chain(nn.Sequential):
    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3))


CASES: dict[str, Callable[[], nn.Module]] = {
    "linears": linears,
    "shared_and_in_place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(WIDTH)),
    "tuples": lambda: Chain(nn.Linear(WIDTH, WIDTH), Split(WIDTH), Join(), Split(WIDTH)),
    "a_weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "an_autograd_function": ByHand,
    "activation_checkpoints": Checkpointed,
    "attention": Attention,
    "recurrent": Recurrent,
    "no_weights": nn.Tanh,
    "frozen": lambda: linears().requires_grad_(False),
}


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(runner: StageRunner, has_input: bool, is_last: bool, is_split: bool) -> tuple[list[Any], list[int]]:
    """Return the gradients of inputs and weights, and the floating-point operations of each call of the backward."""
    torch.manual_seed(5)
    payload = torch.randn(ROWS, WIDTH)
    module: Any = runner.module
    runner.module = lambda *arguments: module(arguments[0] * 1.0)  # the input, or on the first stage the microbatch
    inputs = (torch.randn(ROWS, WIDTH),) if has_input else ()
    loss = (
        (lambda output, _: ((output[0] if isinstance(output, tuple) else output).square().sum(), None))
        if is_last
        else None
    )
    outputs = runner.forward(0, inputs, payload, loss)
    sent: Any = (None,) if is_last else tuple(torch.randn(t.shape) for t in outputs if t.is_floating_point())
    counted = []

    def run(call: Callable[..., Any], *arguments: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = call(*arguments)
        counted.append(counter.get_total_flops())
        return result

    back = run(runner.backward_input if is_split else runner.backward, 0, sent)
    waiting = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if is_split:
        run(runner.backward_weight, 0)
    runner.module = module
    return [*back, *(p.grad for p in module.parameters()), waiting], counted


@pytest.mark.parametrize("is_last", [False, True], ids=["inner", "last"])
@pytest.mark.parametrize("has_input", [True, False], ids=["with_input", "first"])
@pytest.mark.parametrize("name", CASES)
def test_both_halves_add_up_to_the_whole(name: str, has_input: bool, is_last: bool) -> None:
    found = []
    for is_split in (False, True):
        torch.manual_seed(4)
        module = CASES[name]()
        runner = SplitStageRunner(module) if is_split else StageRunner(module)
        found.append(gradients(runner, has_input, is_last, is_split))
    (*whole, _), (whole_flops,) = found[0]
    (*halves, waiting), (input_flops, weight_flops) = found[1]
    for one, other in zip(halves, whole, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    if name != "activation_checkpoints":
        assert input_flops + weight_flops == whole_flops
    if name in ("linears", "attention", "a_weight_norm") or not has_input:
        assert len(waiting) == sum(p.requires_grad for p in CASES[name]().parameters())
        assert input_flops == 0 if not has_input else name == "frozen" or weight_flops > 0.3 * whole_flops
    if name == "an_autograd_function" and has_input:
        assert waiting == ["linear.weight", "linear.bias"]
    if name == "recurrent" and has_input:
        assert waiting == []
