"""f, g and their sequence-parallel pair: forwards and backwards against the definition on whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.tensor_parallel import mappings
from tests.harness import RankPool
from tests.tensor_parallel.ranks import close, tp_group

S, B, H = 8, 3, 4


def together(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


# name -> (lengths of dim 0 and 2 of a rank's x, rank's output from all ranks' x, rank's input gradient from all output
# gradients)
Pieces = Callable[[list[Tensor], int], Tensor]
TABLE: dict[str, tuple[Callable[[int], tuple[int, int]], Pieces, Pieces]] = {
    "copy_to_tensor_parallel": (lambda tp: (S, H), lambda x, r: x[r], lambda g, r: together(g)),
    "reduce_from_tensor_parallel": (lambda tp: (S, H), lambda x, r: together(x), lambda g, r: g[r]),
    "gather_sequence": (lambda tp: (S // tp, H), lambda x, r: torch.cat(x), lambda g, r: together(g).chunk(len(g))[r]),
    "reduce_scatter_sequence": (
        lambda tp: (S, H),
        lambda x, r: together(x).chunk(len(x))[r],
        lambda g, r: torch.cat(g),
    ),
}


def run_mapping(rank: int, world_size: int, name: str) -> None:
    group = tp_group(rank, world_size)
    shape, forward, backward = TABLE[name]
    generator = torch.Generator().manual_seed(1)
    rows, columns = shape(world_size)
    inputs = [torch.randn(rows, B, columns, generator=generator, dtype=torch.float64) for _ in range(world_size)]
    x = inputs[rank].clone().requires_grad_()
    y = getattr(mappings, name)(x, group)
    close(y, forward(inputs, rank))
    gradients = [torch.randn(*y.shape, generator=generator, dtype=torch.float64) for _ in range(world_size)]
    y.backward(gradients[rank])
    close(x.grad, backward(gradients, rank))
    assert torch.equal(x, inputs[rank]), "the input was changed in place"


@pytest.mark.parametrize("name", TABLE)
def test_forward_and_backward_are_the_definition(ranks: RankPool, name: str) -> None:
    ranks.run(run_mapping, name)


@pytest.mark.parametrize("name", TABLE)
def test_a_group_of_one_is_the_identity(name: str) -> None:
    x = torch.randn(3, 2, 5)
    assert getattr(mappings, name)(x, Group.alone("tp")) is x


def test_a_sequence_that_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence of 7 cannot be split over 2"):
        mappings.reduce_scatter_sequence(torch.randn(7, 1, 2), Group("tp", (0, 1), 0, None, None))
