"""f, g and their sequence-parallel pair: what a tensor goes through when it enters or leaves the tensor-parallel region.

    name                        forward                     backward                    in the paper
    copy_to_tensor_parallel     identity                    all-reduce                  f  (Shoeybi et al. 2019, arXiv:1909.08053)
    reduce_from_tensor_parallel all-reduce                  identity                    g
    gather_sequence             all-gather of the sequence  reduce-scatter              g  (Korthikanti et al. 2022, arXiv:2205.05198)
    reduce_scatter_sequence     reduce-scatter              all-gather                  g-bar
    scatter_sequence            own slice of the sequence   all-gather                  entering the sequence-parallel region
    gather_columns              all-gather of the last dim  own slice                   logits of inference

All take (x, group) with dim 0 the sequence; a group of one is the identity. Linears fuse the first four with their GEMMs and do not come
through here; embeddings, losses and tests do.
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


def gathered(x: Tensor, group: Group) -> Tensor:
    """All ranks' x, one after another along dim 0, outside autograd: [n, ...] -> [n * tp, ...]."""
    output = empty_whole(x, group)
    all_gather(output, x.contiguous(), group)
    return output


def empty_whole(x: Tensor, group: Group) -> Tensor:
    """Room for all ranks' x along dim 0: [n, ...] -> [n * tp, ...]."""
    return x.new_empty((x.shape[0] * group.size, *x.shape[1:]))


def reduce_scattered(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, this rank's slice of dim 0, outside autograd: [n, ...] -> [n / tp, ...]. x is used up."""
    output = x.new_empty((slice_length(x, group), *x.shape[1:]))
    reduce_scatter(output, x, group)
    return output


def reduced(x: Tensor, group: Group) -> Tensor:
    """The sum over the group as a new tensor, outside autograd."""
    output = _copy(x)
    all_reduce(output, group)
    return output


def _copy(x: Tensor) -> Tensor:
    """Contiguous and ours: what the collectives below may overwrite."""
    return x.clone(memory_format=torch.contiguous_format)


def own_slice(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of dim 0 (a view): [n, ...] -> [n / tp, ...]."""
    length = slice_length(x, group)
    return x.narrow(0, group.rank * length, length)


def slice_length(x: Tensor, group: Group) -> int:
    """Rows of a rank's slice of the sequence. Raises ConfigError if tp does not divide it."""
    if x.shape[0] % group.size:
        raise ConfigError(
            f"a sequence of {x.shape[0]} cannot be cut over {group.size} tensor-parallel ranks: sequence parallelism needs a sequence "
            f"length divisible by --tensor-model-parallel-size; pad it to {-(-x.shape[0] // group.size) * group.size}"
        )
    return x.shape[0] // group.size


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
        return reduce_scattered(_copy(grad), ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scattered(_copy(x), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(grad, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return own_slice(x, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(grad, ctx.group), None


class _GatherColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(gathered(x.unsqueeze(0), group).unbind(0), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        width = grad.shape[-1] // ctx.group.size
        return grad.narrow(-1, ctx.group.rank * width, width).contiguous(), None


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """f: identity; backward: all-reduce over tp. x: [s, b, h], the same on all tp ranks, used with sliced weights."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """g: all-reduce over tp; backward: identity. x: [s, b, h], partial sums."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """All-gather the sequence: [s / tp, b, h] -> [s, b, h]. Backward: reduce-scatter (the result is used with sliced weights)."""
    return x if group.size == 1 else _Gather.apply(x, group)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """g-bar: sum x over tp and keep this rank's slice of the sequence: [s, b, h] -> [s / tp, b, h]. Backward: all-gather.

    Raises ConfigError if tp does not divide s.
    """
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of a sequence that is the same on all tp ranks: [s, b, h] -> [s / tp, b, h]. Backward: all-gather.

    Raises ConfigError if tp does not divide s.
    """
    return x if group.size == 1 else _Scatter.apply(x, group)


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """Concatenate the last dim over tp: [..., n / tp] -> [..., n]; backward: this rank's slice (the result is used alike on all ranks)."""
    return x if group.size == 1 else _GatherColumns.apply(x, group)
