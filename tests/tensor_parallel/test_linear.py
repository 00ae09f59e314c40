"""Column- and row-parallel linears against nn.functional.linear in one process, in fp64: same outputs, same
gradients, in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megapipe.tensor_parallel.gemms as gemms_module
import megapipe.tensor_parallel.linear as linear_module
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.sharding.spec import ParamSpec, QueryGroups
from megapipe.tensor_parallel.gemms import Gemms
from megapipe.tensor_parallel.gradients import GradientSlot, InputRecompute, WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.parameter import declarations
from tests.harness import RankPool
from tests.tensor_parallel.ranks import Storages, close, part, tp_group

S, B, IN, OUT = 8, 3, 12, 16
KINDS = ("column", "row")


class Case:
    """One linear, whole and sharded: weights, and per microbatch an input, an output gradient and expected results."""

    def __init__(
        self, kind: str, group: Group, sequence_parallel: bool, bias: bool, chunks: CommChunks = WHOLE
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.kind, self.group, self.sequence_parallel = kind, group, sequence_parallel
        self.weight, self.bias = draw(OUT, IN), draw(OUT) if bias else None
        self.before = [draw(S, B, IN) for _ in range(2)]
        self.grad_outputs = [draw(S, B, OUT) for _ in range(2)]
        cut = {"column": 0, "row": 1}[kind]
        self.queue = WeightQueue()
        layer = (ColumnParallelLinear if kind == "column" else RowParallelLinear)(
            IN, OUT, bias=bias, tp=group, sequence_parallel=sequence_parallel, queue=self.queue, chunks=chunks
        )
        assert layer.weight.is_meta
        assert tuple(layer.weight.shape) == tuple(part(self.weight, cut, group).shape)
        layer.weight = nn.Parameter(part(self.weight, cut, group))
        if self.bias is not None:
            layer.bias = nn.Parameter(part(self.bias, 0, group) if kind == "column" else self.bias.clone())
        self.layer, self.cut = layer, cut

    def input_part(self, x: Tensor) -> Tensor:
        if self.kind == "row":
            return part(x, 2, self.group)
        return part(x, 0, self.group) if self.sequence_parallel else x.detach().clone()

    def output_part(self, y: Tensor) -> Tensor:
        if self.kind == "column":
            return part(y, 2, self.group)
        return part(y, 0, self.group) if self.sequence_parallel else y.detach().clone()

    def whole(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
        """Return this rank's expected (outputs, input gradients) per microbatch and summed (weight, bias) gradients."""
        weight = self.weight.clone().requires_grad_()
        outputs, input_gradients = [], []
        for before, grad_output in zip(self.before, self.grad_outputs, strict=True):
            before = before.clone().requires_grad_()
            y = functional.linear(torch.tanh(before), weight, self.bias)
            y.backward(grad_output)
            outputs.append(self.output_part(y))
            input_gradients.append(self.input_part(before.grad))
        bias_gradient = None
        if self.bias is not None:
            bias_gradient = sum((self.output_part(g) for g in self.grad_outputs), torch.zeros(())).sum((0, 1))
        return outputs, input_gradients, part(weight.grad, self.cut, self.group), bias_gradient


def run_case(
    group: Group, kind: str, sequence_parallel: bool, chunks: CommChunks, mode: tuple[bool, bool, bool, bool]
) -> None:
    bias, slots, split, recompute = mode
    case = Case(kind, group, sequence_parallel, bias, chunks)
    layer = case.layer
    ready: list[GradientSlot] = []
    if slots:
        layer.slots = {
            name: GradientSlot(torch.zeros_like(p), on_ready=ready.append) for name, p in layer.named_parameters()
        }
    outputs, input_gradients, weight_gradient, bias_gradient = case.whole()
    for microbatch in range(2):
        before = case.input_part(case.before[microbatch]).requires_grad_()
        input_recompute = InputRecompute(torch.tanh, (before,)) if recompute else None
        y = layer(torch.tanh(before), recompute=input_recompute)
        close(y, outputs[microbatch])
        if split:
            case.queue.defer(microbatch)
        y.backward(case.output_part(case.grad_outputs[microbatch]))
        case.queue.immediate()
        close(before.grad, input_gradients[microbatch])
    if split:
        for name, parameter in layer.named_parameters():
            assert parameter.grad is None, "a weight gradient was computed at I"
            assert not slots or not layer.slots[name].main_grad.any()
        assert not ready
        for microbatch in range(2):
            case.queue.run(microbatch)
    assert not case.queue.waiting
    for name, expected in (("weight", weight_gradient), ("bias", bias_gradient)):
        if expected is None:
            continue
        if slots:
            assert getattr(layer, name).grad is None
            close(layer.slots[name].main_grad, expected)
            assert ready.count(layer.slots[name]) == 2
        else:
            close(getattr(layer, name).grad, expected)


# bias, slots, split, recompute: every pair of them occurs
MODES = [
    (True, False, False, False),
    (True, True, True, True),
    (True, True, False, False),
    (False, True, False, True),
    (True, False, True, True),
    (False, False, True, False),
    (True, False, False, True),
    (False, True, True, False),
]


def run_all_modes(rank: int, world_size: int, kind: str, sequence_parallel: bool, chunks: CommChunks = WHOLE) -> None:
    for mode in MODES:
        run_case(tp_group(rank, world_size), kind, sequence_parallel, chunks, mode)


@pytest.mark.parametrize("chunks", [WHOLE, CommChunks(3, 3)], ids=["whole", "chunks"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence_parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_all_gradients_equal_one_process_in_every_mode(
    ranks: RankPool, kind: str, sequence_parallel: bool, chunks: CommChunks
) -> None:
    ranks.run(run_all_modes, kind, sequence_parallel, chunks)


def run_low_precision(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    for sequence_parallel, chunks in ((False, WHOLE), (True, WHOLE), (True, CommChunks(2, 2))):
        case = Case(kind, tp_group(rank, world_size), sequence_parallel, True, chunks)
        layer = case.layer.to(dtype)
        layer.slots = {name: GradientSlot(torch.zeros(p.shape)) for name, p in layer.named_parameters()}
        outputs, input_gradients, weight_gradient, bias_gradient = case.whole()
        for before, grad_output, output, input_gradient in zip(
            case.before, case.grad_outputs, outputs, input_gradients, strict=True
        ):
            before = case.input_part(before).requires_grad_()
            y = layer(torch.tanh(before).to(dtype))
            y.backward(case.output_part(grad_output).to(dtype))
            assert y.dtype == dtype
            for actual, expected in ((y, output), (before.grad, input_gradient)):
                torch.testing.assert_close(
                    actual.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps * float(expected.abs().max())
                )
        for name, expected in (("weight", weight_gradient), ("bias", bias_gradient)):
            main_grad = layer.slots[name].main_grad
            assert main_grad.dtype == torch.float32
            torch.testing.assert_close(
                main_grad.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps * float(expected.abs().max())
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_differs_by_its_rounding_alone(ranks: RankPool, kind: str, dtype: torch.dtype) -> None:
    ranks.run(run_low_precision, kind, dtype)


def run_saved(rank: int, world_size: int, kind: str, recompute: bool) -> list[tuple[int, ...]]:
    case = Case(kind, tp_group(rank, world_size), True, True)
    saved: list[tuple[int, ...]] = []
    before = case.input_part(case.before[0]).requires_grad_()
    x = torch.tanh(before)

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved.append(tuple(tensor.shape))
            assert tensor.data_ptr() == (before if recompute else x).data_ptr()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.layer(x, recompute=InputRecompute(torch.tanh, (before,)) if recompute else None)
    return saved


@pytest.mark.parametrize("recompute", [False, True], ids=["input", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_scattered_input_or_what_recomputes_it_is_saved(ranks: RankPool, kind: str, recompute: bool) -> None:
    tp = ranks.world_size
    kept = (S // tp, B, IN) if kind == "column" else (S, B, IN // tp)
    assert ranks.run(run_saved, kind, recompute) == [[kept]] * tp


def run_waiting_bytes(rank: int, world_size: int, kind: str) -> None:
    case = Case(kind, tp_group(rank, world_size), True, True)
    x = case.input_part(case.before[0]).requires_grad_()
    y = case.layer(torch.tanh(x))
    grad_output = case.output_part(case.grad_outputs[0])
    case.queue.defer(0)
    y.backward(grad_output)
    (waiting,) = case.queue.waiting[0]
    (kept,) = waiting.inputs
    assert kept.numel() == x.numel()
    assert not kept.requires_grad, "a gradient that waits for W holds the graph"
    assert waiting.grad_output.work is None
    assert waiting.grad_output.tensor.data_ptr() == grad_output.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_queued_gradient_keeps_slices_and_no_graph(ranks: RankPool, kind: str) -> None:
    ranks.run(run_waiting_bytes, kind)


def run_order(rank: int, world_size: int, sequence_parallel: bool) -> list[str]:
    case = Case("column", tp_group(rank, world_size), sequence_parallel, False)
    case.layer.slots = {"weight": GradientSlot(torch.zeros_like(case.layer.weight))}
    y = case.layer(case.input_part(case.before[0]).requires_grad_())
    events: list[str] = []

    def spied(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            events.append(f"launch {name}" if options.get("async_op") else f"blocking {name}")
            work = function(*args, **options)

            class Spy:
                def wait(self) -> None:
                    events.append(f"wait {name}")
                    work.wait()

            return Spy()

        return launch

    places = [(linear_module, "all_reduce"), (linear_module, "reduce_scatter"), (gemms_module, "all_gather")]
    originals = [getattr(*place) for place in places]
    original_add, original_mm = GradientSlot.add_outer, Gemms.input_gradient
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, spied(name, original))
        GradientSlot.add_outer = lambda *args: (events.append("wgrad"), original_add(*args))[1]
        Gemms.input_gradient = lambda *args, **options: (events.append("dgrad"), original_mm(*args, **options))[1]
        y.backward(case.output_part(case.grad_outputs[0]))
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)
        GradientSlot.add_outer, Gemms.input_gradient = original_add, original_mm
    return events


def test_column_backward_communicates_under_its_gemms(ranks: RankPool) -> None:
    expected = [
        "launch all_gather",
        "dgrad",
        "launch reduce_scatter",
        "wait all_gather",
        "wgrad",
        "wait reduce_scatter",
    ]
    assert ranks.run(run_order, True) == [expected] * ranks.world_size
    assert (
        ranks.run(run_order, False) == [["dgrad", "launch all_reduce", "wgrad", "wait all_reduce"]] * ranks.world_size
    )


@pytest.mark.parametrize("split", [False, True], ids=["B", "I+W"])
def test_each_gemm_runs_once(split: bool) -> None:
    queue = WeightQueue()
    layer = ColumnParallelLinear(IN, OUT, bias=False, tp=Group.alone("tp"), sequence_parallel=False, queue=queue)
    layer.weight = nn.Parameter(torch.randn(OUT, IN))
    layer.slots = {"weight": GradientSlot(torch.zeros(OUT, IN))}
    y = layer(torch.randn(S, B, IN, requires_grad=True))
    if split:
        queue.defer("0")
    with Storages() as at_backward:
        y.backward(torch.ones_like(y))
    queue.immediate()
    gemms = [name for name in at_backward.names if "mm" in name]
    if not split:
        assert gemms == ["mm.default", "addmm_.default"]
        return
    assert gemms == ["mm.default"]
    with Storages() as at_weight:
        queue.run("0")
    assert [name for name in at_weight.names if "mm" in name] == ["addmm_.default"]


def applied(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, slots: Any = None) -> Tensor:
    """Apply a linear of a group of one over the given tensors."""
    (out_features, in_features), alone = weight.shape, Group.alone("tp")
    make = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind]
    layer = make(in_features, out_features, bias=bias is not None, tp=alone, sequence_parallel=False)
    for name, tensor in (("weight", weight), ("bias", bias)):
        delattr(layer, name)  # a module refuses to replace a Parameter by a plain tensor
        setattr(layer, name, tensor)
    layer.slots = slots or {}
    return layer(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wanted", [(0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)], ids=["weight", "input", "bias", "input+bias"]
)
def test_only_tensors_that_require_a_gradient_get_one(kind: str, wanted: tuple[int, int, int]) -> None:
    drawn = [torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2, 4), (5, 4), (5,))]
    ours = [t.clone().requires_grad_(bool(flag)) for t, flag in zip(drawn, wanted, strict=True)]
    plain = [t.clone().requires_grad_(bool(flag)) for t, flag in zip(drawn, wanted, strict=True)]
    applied(kind, *ours).square().sum().backward()
    functional.linear(*plain).square().sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            close(mine.grad, theirs.grad)


def test_a_linear_used_twice_adds_both_gradients() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    ready: list[GradientSlot] = []
    slot = GradientSlot(torch.zeros_like(weight), uses=2, on_ready=ready.append)
    ours, plain = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    inner = applied("row", x, ours, slots={"weight": slot})
    applied("row", inner, ours, slots={"weight": slot}).square().sum().backward()
    functional.linear(functional.linear(x, plain), plain).square().sum().backward()
    close(slot.main_grad, plain.grad)
    assert ready == [slot]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_low_precision_gradients_accumulate_in_fp32(dtype: torch.dtype) -> None:
    weight, bias = torch.zeros(4, 8, dtype=dtype, requires_grad=True), torch.zeros(4, dtype=dtype, requires_grad=True)
    slots = {"weight": GradientSlot(torch.full((4, 8), 4096.0)), "bias": GradientSlot(torch.full((4,), 4096.0))}
    for _ in range(3):
        y = applied("column", torch.ones(1, 1, 8, dtype=dtype), weight, bias, slots)
        assert y.dtype == dtype
        y.backward(torch.ones_like(y))
    for slot in slots.values():
        # in bf16 or fp16 4096 + 1 == 4096
        assert torch.equal(slot.main_grad, torch.full_like(slot.main_grad, 4099.0))


def test_a_bias_gradient_is_summed_in_fp32() -> None:
    weight, bias = torch.zeros(3, 1, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    slot = GradientSlot(torch.zeros(3))
    y = applied("column", torch.ones(4097, 1, 1, dtype=torch.bfloat16), weight, bias, {"bias": slot})
    y.backward(torch.ones_like(y))
    assert torch.equal(slot.main_grad, torch.full((3,), 4097.0))  # bf16 has no 4097


def test_each_rank_has_the_rows_that_the_declaration_of_the_weight_gives_it() -> None:
    tp = Group("tp", (0, 1, 2), 1, None, None)
    weight = ParamSpec("", (10, 8), 0, QueryGroups(heads=3, groups=1, head_dim=2))  # shared k and v
    layer = ColumnParallelLinear(8, 10, bias=True, tp=tp, sequence_parallel=False, weight=weight)
    assert tuple(layer.weight.shape) == (6, 8)
    assert tuple(layer.bias.shape) == (6,)
    assert [(spec.name, spec.shape, spec.slicing) for spec in declarations(layer, "qkv.")] == [
        ("qkv.weight", (10, 8), weight.slicing),
        ("qkv.bias", (10,), weight.slicing),
    ]


@pytest.mark.parametrize("make", [ColumnParallelLinear, RowParallelLinear], ids=KINDS)
def test_features_that_tp_does_not_divide_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="3 does not divide the 16"):
        make(16, 16, bias=False, tp=Group("tp", (0, 1, 2), 0, None, None), sequence_parallel=False)
