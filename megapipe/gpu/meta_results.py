"""Results of some of torch's functions for tensors without values: `meta_result`, and `MetaResults`, a mode of it.

On the meta device torch finds the results of pointwise functions, joins and products in Python. That takes half a
millisecond each, a hundred times as long as an empty tensor, and the first one imports dynamo, which takes two seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
LIKE_OPERANDS = {  # besides pointwise functions, if all are contiguous
    aten.cumsum.default,
    aten.floor_divide.default,
}
OPTIONS = {"alpha", "approximate", "dtype", "rounding_mode"}  # which leave shapes and strides as they are
IN_PLACE = {  # besides pointwise functions
    aten.addmm_.default,
    aten.index_add_.default,
    aten.masked_fill_.Scalar,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_add_.default,
}


def meta_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the result of a function if all of its tensors are on the meta device; None where it has to be run."""
    make = _maker(func)
    return None if make is None else make(args, kwargs)


Maker = Callable[[Sequence[Any], Mapping[str, Any]], Tensor | None]


@cache
def _maker(func: Any) -> Maker | None:
    """Return what makes the results of a function from its arguments; None for a function that is run."""
    if func in OTHERS:
        other = OTHERS[func]
        return lambda args, kwargs: other(*args, **kwargs)
    if func in IN_PLACE:
        return lambda args, kwargs: args[0] if args[0].is_meta else None
    if torch.Tag.pointwise not in func.tags and func not in LIKE_OPERANDS:
        return None
    is_mutable, is_contiguous = func._schema.is_mutable, func in LIKE_OPERANDS

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        operands = [each for each in args if isinstance(each, Tensor)]
        if not operands or not all(each.is_meta for each in operands):
            return None
        if is_mutable:  # in place, or out=
            return kwargs.get("out", operands[0])
        if kwargs.keys() - OPTIONS:
            return None
        if is_contiguous and not all(each.is_contiguous() for each in operands):
            return None
        return _like_operands(operands, kwargs.get("dtype") or _result_dtype(func, *map(_kind, args), **kwargs))

    return make


def _like_operands(operands: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor | None:
    """Return the result of a pointwise function; None where its dtype or its strides take torch to know."""
    if dtype is None:
        return None
    first, *others = operands
    shape: Sequence[int] = first.shape
    if any(each.shape != shape for each in others):
        shape = np.broadcast_shapes(*(each.shape for each in operands))  # torch's own imports sympy
    if first.shape == shape and first.is_contiguous():
        return first.new_empty(shape, dtype=dtype)
    order = _order_in_memory(operands, shape)
    if order is None:
        return None
    result = first.new_empty([shape[dim] for dim in order], dtype=dtype)
    places = [order.index(dim) for dim in range(len(shape))]
    return result if order == sorted(order) else result.permute(places)


class MetaResults(TorchDispatchMode):
    """A dispatch mode of functions of meta tensors that counts nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports dynamo, and lets it leave out each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = meta_result(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is None else result


def _order_in_memory(operands: Sequence[Tensor], shape: Sequence[int]) -> list[int] | None:
    """Return the dims of a pointwise result from the largest stride to the least; None if it takes torch to know."""
    first = operands[0]
    if first.shape == shape and all(stride for size, stride in zip(shape, first.stride(), strict=True) if size > 1):
        return sorted(range(len(shape)), key=first.stride, reverse=True)  # the first operand decides
    return list(range(len(shape))) if all(map(_is_in_order, operands)) else None


def _is_in_order(tensor: Tensor) -> bool:
    """Return True if the dims stand in memory as they do in the shape, dims of one or of repeated elements aside."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride]
    return strides == sorted(strides, reverse=True)


def _kind(argument: Any) -> Any:
    """Return what the dtype of a result depends on: of a tensor its dtype and its number of dims."""
    return (argument.dtype, argument.dim()) if isinstance(argument, Tensor) else argument


@lru_cache(maxsize=None, typed=True)
def _result_dtype(func: Any, *kinds: Any, **options: Any) -> torch.dtype | None:
    """Return the dtype of a function's result, which it returns for one element on the CPU; None if it cannot."""
    values = (torch.ones([1] * kind[1], dtype=kind[0]) if isinstance(kind, tuple) else kind for kind in kinds)
    try:
        result = func(*values, **options)
    except (NotImplementedError, RuntimeError):  # a CPU lacks it for this dtype, and the function is run
        return None
    return result.dtype if isinstance(result, Tensor) else None


def _product(x: Tensor, y: Tensor) -> Tensor | None:
    return x.new_empty(x.shape[0], y.shape[1]) if x.is_meta else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first, *others = tensors
    if not all(each.is_meta and each.dtype == first.dtype for each in tensors):
        return None
    if not all(_is_in_order(each) or (each.shape[-1] > 1 and each.stride(-1) == 1) for each in tensors):
        return None  # images have their channels last
    if any(each.dim() != first.dim() for each in others):  # an empty tensor may have other dims
        return None
    shape = list(first.shape)
    shape[dim] += sum(each.shape[dim] for each in others)
    return first.new_empty(shape)


def _empty_like(
    x: Tensor, *, dtype: torch.dtype | None = None, pin_memory: bool = False, **options: Any
) -> Tensor | None:
    return x.new_empty(x.shape, dtype=dtype) if x.is_meta and x.is_contiguous() and not options else None


def _reduced(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return the result of a reduction of floating values."""
    if not x.is_meta or not x.is_floating_point():
        return None
    reduced = {dim % x.dim() for dim in dims or range(x.dim())}
    shape = [1 if dim in reduced else size for dim, size in enumerate(x.shape) if keepdim or dim not in reduced]
    return x.new_empty(shape, dtype=dtype)


def _arange(*limits: float, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor | None:
    if device is None or torch.device(device).type != "meta":
        return None
    if dtype is None:
        dtype = torch.int64 if all(isinstance(each, int) for each in limits) else torch.get_default_dtype()
    start, end, step = (0, *limits, 1) if len(limits) == 1 else (*limits, 1)[:3]
    return torch.empty(math.ceil((end - start) / step), dtype=dtype, device=device)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of a tensor that one tensor of numbers names."""
    rows = indices[0]
    if not x.is_meta or not x.is_contiguous() or len(indices) > 1 or rows is None or rows.dtype != torch.int64:
        return None
    return x.new_empty((*rows.shape, *x.shape[1:]))


OTHERS: dict[Any, Callable[..., Tensor | None]] = {
    aten.mm.default: _product,
    aten.addmm.default: lambda bias, x, y, **factors: _product(x, y),
    aten.mm.out: lambda x, y, out: out if out.is_meta else None,
    aten.mv.default: lambda x, y: x.new_empty(x.shape[0]) if x.is_meta else None,
    aten.all.default: lambda x: x.new_empty((), dtype=torch.bool) if x.is_meta and x.dtype != torch.uint8 else None,
    aten.amax.default: _reduced,
    aten.linalg_vector_norm.default: lambda x, order=2, *dims, **options: _reduced(x, *dims, **options),
    aten.mean.dim: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.cat.default: _cat,
    aten.empty_like.default: _empty_like,
    aten.gather.default: lambda x, dim, index, **options: x.new_empty(index.shape) if x.is_meta else None,
    aten.index.Tensor: _index,
    aten.scatter_add.default: lambda x, dim, index, added: _empty_like(x),
    aten._softmax_backward_data.default: lambda grad, output, dim, dtype: _empty_like(output, dtype=dtype),
    aten.stack.default: lambda tensors, dim=0: _cat([each.unsqueeze(dim) for each in tensors], dim),
}
