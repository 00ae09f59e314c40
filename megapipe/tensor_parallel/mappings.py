"""Collectives over the tp group along dim 0 (the sequence), and the conjugate operators f and g built from them.

    operator                     forward         backward        in the paper
    copy_to_tensor_parallel      identity        all-reduce      f      Shoeybi et al. 2019, arXiv:1909.08053
    reduce_from_tensor_parallel  all-reduce      identity        g
    gather_sequence              all-gather      reduce-scatter  g      Korthikanti et al. 2022, arXiv:2205.05198
    reduce_scatter_sequence      reduce-scatter  all-gather      g-bar

The linears fuse these operators with their GEMMs; the operators here are for modules that use other layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_gather, all_reduce, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError


def empty_gathered(x: Tensor, group: Group) -> Tensor:
    """Allocate the result of an all-gather along dim 0: [n, ...] -> [n * tp, ...]."""
    return x.new_empty((x.shape[0] * group.size, *x.shape[1:]))


def gathered(x: Tensor, group: Group) -> Tensor:
    """All-gather along dim 0, outside autograd: [n, ...] -> [n * tp, ...]."""
    output = empty_gathered(x, group)
    all_gather(output, x.contiguous(), group)
    return output


def reduce_scattered(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter along dim 0, outside autograd: [n, ...] -> [n / tp, ...]. Overwrites x."""
    output = x.new_empty((slice_length(x, group), *x.shape[1:]))
    reduce_scatter(output, x, group)
    return output


def reduced(x: Tensor, group: Group) -> Tensor:
    """All-reduce into a new tensor, outside autograd."""
    output = _contiguous_copy(x)
    all_reduce(output, group)
    return output


def own_slice(x: Tensor, group: Group) -> Tensor:
    """Return this rank's slice of dim 0, a view: [n, ...] -> [n / tp, ...]."""
    length = slice_length(x, group)
    return x.narrow(0, group.rank * length, length)


def slice_length(x: Tensor, group: Group) -> int:
    """Return the length of one rank's slice of the sequence. Raises ConfigError if tp does not divide it."""
    if x.shape[0] % group.size:
        raise ConfigError(
            f"a sequence of {x.shape[0]} cannot be split over {group.size} tensor-parallel ranks: sequence parallelism "
            "needs a sequence length divisible by --tensor-model-parallel-size; "
            f"pad it to {-(-x.shape[0] // group.size) * group.size}"
        )
    return x.shape[0] // group.size


def _contiguous_copy(x: Tensor) -> Tensor:
    """Copy x, since the collectives overwrite their input and need it contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """f: identity; the backward is an all-reduce over tp.
    x: [s, b, h], the same on all tp ranks, on its way into sharded weights."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """g: all-reduce over tp; the backward is the identity.
    x: [s, b, h], partial sums from sharded weights."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """g: all-gather along the sequence; the backward is a reduce-scatter.
    x: [s / tp, b, h] -> [s, b, h], on its way into sharded weights."""
    return x if group.size == 1 else _Gather.apply(x, group)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """g-bar: reduce-scatter along the sequence; the backward is an all-gather.
    x: [s, b, h], partial sums -> [s / tp, b, h]. Raises ConfigError if tp does not divide s."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduced(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return reduced(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scattered(_contiguous_copy(grad), ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scattered(_contiguous_copy(x), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(grad, ctx.group), None
