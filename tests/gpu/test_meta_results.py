"""Results without values are those of torch: their shapes, dtypes and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.gpu.meta_results import meta_result

aten = torch.ops.aten
DTYPES = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool
POINTWISE: dict[Any, int] = {  # the number of operands
    aten.add.Tensor: 2,
    aten.sub.Tensor: 2,
    aten.mul.Tensor: 2,
    aten.div.Tensor: 2,
    aten.floor_divide.default: 2,
    aten.lt.Tensor: 2,
    aten.bitwise_and.Tensor: 2,
    aten.neg.default: 1,
    aten.exp.default: 1,
    aten.silu.default: 1,
    aten.bitwise_not.default: 1,
    aten.where.self: 3,
}


@st.composite
def operands(draw: st.DrawFn, number: int) -> list[Any]:
    """Draw tensors that broadcast, whole, transposed, sliced or repeated, and perhaps a number at the end."""
    shape, made = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), list[Any]()
    for index in range(number):
        if index and draw(st.integers(0, 4)) == 0:
            made.append(draw(st.sampled_from([2, 0.5])))
            continue
        own = [draw(st.sampled_from([size, 1])) if index else size for size in shape]
        own = own[draw(st.integers(0, len(own) - 1)) if index else 0 :]
        order = draw(st.permutations(range(len(own))))
        whole = torch.empty([own[dim] + draw(st.integers(0, 1)) for dim in order], dtype=draw(st.sampled_from(DTYPES)))
        tensor = whole[tuple(slice(own[dim]) for dim in order)].permute([order.index(dim) for dim in range(len(own))])
        is_repeated = draw(st.booleans()) and draw(st.booleans())
        made.append(tensor[..., :1].expand(own).to("meta") if is_repeated else _on_meta(tensor))
    return made


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def same(result: Tensor, expected: Tensor) -> None:
    assert result.is_meta and (result.shape, result.dtype) == (expected.shape, expected.dtype)
    sized = [dim for dim, size in enumerate(expected.shape) if size > 1]  # strides of others mean nothing
    if expected.numel():
        assert [result.stride(dim) for dim in sized] == [expected.stride(dim) for dim in sized]


@pytest.mark.parametrize("func", POINTWISE, ids=str)
@given(data=st.data())
def test_pointwise_results_are_torchs(func: Any, data: st.DataObject) -> None:
    args = data.draw(operands(POINTWISE[func]))
    result = meta_result(func, args, {})
    if result is not None:
        same(result, func(*args))


@pytest.mark.parametrize("func", POINTWISE, ids=str)
def test_contiguous_operands_need_no_run_of_torch(func: Any) -> None:
    dtype = torch.float32 if func in (aten.silu.default, aten.exp.default) else torch.int64
    args = [torch.empty(3, 2, dtype=dtype, device="meta") for _ in range(POINTWISE[func])]
    if func is aten.where.self:
        args[0] = args[0].bool()
    result = meta_result(func, args, {})
    assert result is not None
    same(result, func(*args))


X, Y = (torch.empty(size, device="meta") for size in ((4, 3), (3, 2)))
MADE: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, (X, Y), {}),
    (aten.addmm.default, (torch.empty(2, device="meta"), X, Y), {}),
    (aten.addmm.default, (torch.empty(4, 2, device="meta"), X, Y), {"beta": 2, "alpha": 0.5}),
    (aten.mv.default, (X, X[0]), {}),
    (aten.all.default, (X > 0,), {}),
    (aten.cat.default, ([X, X[:1], X],), {}),
    (aten.cat.default, ([X, X], -1), {}),
    (aten.cat.default, ([torch.empty(4, 2, 3, 1, 6, device="meta")[..., :2]] * 3, 3), {}),
    (aten.cat.default, ([torch.empty(4, 5, 2, 1, 6, device="meta").permute(1, 0, 2, 3, 4)] * 3, 3), {}),
    (aten.cat.default, ([torch.empty(4, 1, 3, 5, 6, device="meta")[..., :1]] * 2, 1), {}),
    (aten.cat.default, ([torch.empty(4, 3, 2, 6, device="meta")[..., :1]] * 2, 1), {}),
    (aten.stack.default, ([X, X],), {}),
    (aten.stack.default, ([X, X], -1), {}),
    (aten.stack.default, ([X, X], 1), {}),
    (aten.arange.default, (5,), {"device": "meta"}),
    (aten.arange.start, (2, 5.5), {"device": "meta"}),
    (aten.arange.start_step, (0, 7, 2), {"dtype": torch.float32, "device": "meta"}),
    (aten.amax.default, (X,), {}),
    (aten.empty_like.default, (X,), {"dtype": torch.int64}),
    (aten.empty_like.default, (X,), {"pin_memory": False}),
    (aten.amax.default, (X, [-1], True), {}),
    (aten.mean.dim, (X, [0]), {}),
    (aten.mean.dim, (X, [-1], True), {"dtype": torch.float64}),
    (aten.linalg_vector_norm.default, (X,), {}),
    (aten.linalg_vector_norm.default, (X.bfloat16(), 2, [-1], True), {"dtype": torch.float32}),
    (aten.sum.dim_IntList, (X, [0, 1]), {}),
    (aten.sum.dim_IntList, (X, [1], True), {}),
    (aten.gather.default, (X, 1, X[:, :2].long()), {}),
    (aten.gather.default, (X, 1, X[:, :2].long()), {"sparse_grad": True}),
    (aten.index.Tensor, (X, [X[:, :2].long()]), {}),
    (aten.scatter_add.default, (X, 1, X[:, :2].long(), X), {}),
    (aten.cumsum.default, (X.int(), 1), {"dtype": torch.int32}),
    (aten.cumsum.default, (X.int(), 0), {}),
    (aten._softmax_backward_data.default, (X, X, -1, torch.float32), {}),
    (aten._softmax_backward_data.default, (X[:, :1].expand(4, 3), X, -1, torch.float32), {}),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.sub.Tensor, (X, X), {"alpha": 2}),
    (aten.div.Tensor_mode, (X.int(), 2), {"rounding_mode": "floor"}),
    (aten.clone.default, (X.t(),), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), MADE, ids=lambda value: str(value) if callable(value) else "")
def test_other_results_are_torchs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    result = meta_result(func, args, kwargs)
    assert result is not None
    same(result, func(*args, **kwargs))


def test_what_is_in_place_is_its_operand() -> None:
    out = torch.empty_like(X)
    assert meta_result(aten.mul_.Tensor, (X, X), {}) is X
    assert meta_result(aten.masked_fill_.Scalar, (X, X > 0, 0), {}) is X
    assert meta_result(aten.addmm_.default, (X, X, torch.empty(3, 3, device="meta")), {}) is X
    assert meta_result(aten.scatter_add_.default, (X, 1, X[:, :1].long(), X), {}) is X
    assert meta_result(aten.mul.out, (X, X), {"out": out}) is out
    assert meta_result(aten.mm.out, (X, Y), {"out": out}) is out


def test_tensors_with_values_are_computed() -> None:
    values = torch.ones(2, 2)
    for func, args in (
        (aten.mul.Tensor, (values, 2)),
        (aten.mm.default, (values, values)),
        (aten.all.default, (values,)),
    ):
        assert meta_result(func, args, {}) is None
    assert meta_result(aten.arange.default, (3,), {"device": "cpu"}) is None
    assert meta_result(aten.clone.default, (X.t(),), {"memory_format": torch.contiguous_format}) is None
    assert meta_result(aten.index.Tensor, (X, [X[:, 0] > 0]), {}) is None
    assert meta_result(aten.sort.default, (X,), {}) is None
    assert meta_result(aten.sum.dim_IntList, (X.long(), [0]), {}) is None
