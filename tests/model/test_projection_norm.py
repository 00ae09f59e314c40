"""The norm over all heads of q or k on two and four tp ranks equals one process, also where ranks share a head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.config.config import resolve_model
from megapipe.model.norm import ProjectionNorm
from megapipe.sharding.spec import HeadChannels, ParamSpec
from tests.harness import RankPool
from tests.model.grids import BATCH, SEQ, local_slice, model_config

HEAD_DIM = 6
Results = tuple[Tensor, Tensor, Tensor]  # outputs, input gradients, weight gradients of some heads


def whole_tensors(heads: int) -> Results:
    """Return an input, an output gradient [s, b, heads * head_dim] and a weight of so many heads."""
    generator = torch.Generator().manual_seed(heads)
    size = heads * HEAD_DIM
    shapes = (SEQ, BATCH, size), (SEQ, BATCH, size), (size,)
    x, grad, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, grad, weight


def run(x: Tensor, grad: Tensor, weight: Tensor, heads: int, tp: Group, zero_centered: bool) -> Results:
    """Run the norm over the channels [s, b, n] of one rank, as heads [s, b, groups 1, heads, head_dim]."""
    options = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": zero_centered, "kv_channels": HEAD_DIM}
    norm = ProjectionNorm(resolve_model(model_config(**options), 1), heads, tp)
    assert norm.weight.shape == weight.shape
    norm.weight = torch.nn.Parameter(weight.clone())
    x = x.clone().requires_grad_()
    output = norm(x.unflatten(-1, (1, -1, HEAD_DIM)))
    output.flatten(2).backward(grad)
    assert x.grad is not None and norm.weight.grad is not None
    return output.detach().flatten(2), x.grad, norm.weight.grad


def one_rank(rank: int, world_size: int, heads: int, zero_centered: bool) -> Results:
    """Return this rank's share, its partial gradients of a shared head summed over the ranks that share it.

    A shared head's output gradient is a part on each rank, as from the rank's own query heads.
    """
    spec = ParamSpec("weight", (heads * HEAD_DIM,), 0, HeadChannels(heads, HEAD_DIM))
    (interval,) = spec.intervals(rank, world_size)
    x, grad, weight = (
        local_slice(spec, t.movedim(-1, 0), rank, world_size).movedim(0, -1) for t in whole_tensors(heads)
    )
    part = 1.0 + interval.replicas.index(rank)
    grad = grad * part / sum(range(1, len(interval.replicas) + 1))
    tp = Group("tp", tuple(range(world_size)), rank, dist.group.WORLD)
    output, *gradients = run(x, grad, weight, heads, tp, zero_centered)
    for gradient in gradients:
        parts = [torch.empty_like(gradient) for _ in range(world_size)]
        dist.all_gather(parts, gradient.contiguous())
        gradient.copy_(sum(parts[replica] for replica in interval.replicas))
    return output, gradients[0], gradients[1]


@pytest.mark.parametrize("zero_centered", [False, True], ids=["ones", "zero-centred"])
@pytest.mark.parametrize(("tp", "heads"), [(2, 1), (2, 4), (4, 1), (4, 2), (4, 8)])
def test_tp_ranks_equal_one_process(
    rank_pools: Callable[[int], RankPool], tp: int, heads: int, zero_centered: bool
) -> None:
    expected = run(*whole_tensors(heads), heads, Group.alone("tp"), zero_centered)
    spec = ParamSpec("weight", (heads * HEAD_DIM,), 0, HeadChannels(heads, HEAD_DIM))
    for rank, found in enumerate(rank_pools(tp).run(one_rank, heads, zero_centered)):
        for mine, whole in zip(found, expected, strict=True):
            share = local_slice(spec, whole.movedim(-1, 0), rank, tp).movedim(0, -1)
            assert (mine - share).abs().max() <= 1e-12 * whole.abs().max()


@pytest.mark.parametrize("zero_centered", [False, True], ids=["ones", "zero-centred"])
def test_one_process_equals_the_formula(zero_centered: bool) -> None:
    x, grad, weight = whole_tensors(4)
    found = run(x, grad, weight, 4, Group.alone("tp"), zero_centered)
    x.requires_grad_()
    weight.requires_grad_()
    scale = weight + 1 if zero_centered else weight
    output = x / (x.square().mean(-1, keepdim=True) + model_config().norm_epsilon).sqrt() * scale
    output.backward(grad)
    for mine, whole in zip(found, (output, x.grad, weight.grad), strict=True):
        assert whole is not None
        assert (mine - whole).abs().max() <= 1e-12 * whole.abs().max()
