"""Gradients of keys that travel in the model's dtype are those that travel in fp32, where no rank adds any up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megapipe.model.block_attention import FusedBlocks
from megapipe.model.context import masked_blocks
from megapipe.model.context_parallel import Ring
from megapipe.model.ring_attention import BlockAttention
from megapipe.sharding.sequence import SequencePart, SequenceSlice, Visibility
from megapipe.topology import Topology
from tests.comm.ranks import groups_of
from tests.harness import RankPool

TOKENS, BATCH, GROUPS, PER_GROUP, SIZE = 16, 2, 2, 2, 8  # of a rank


def gradients(rank: int, world_size: int, adds: bool) -> list[Tensor]:
    """Return the gradients of q, k and v of this rank in bf16."""
    part = SequencePart(rank, world_size)
    seen = Visibility.of(SequenceSlice((TOKENS * world_size,)), part=part)
    assert not seen.adds_key_gradients
    torch.manual_seed(rank)
    shapes = [(TOKENS, BATCH, GROUPS, count, SIZE) for count in (PER_GROUP, 1, 1)]
    q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for shape in shapes)
    blocks = masked_blocks(seen, q.device, q.dtype)
    ring = Ring(groups_of(rank, Topology(cp=world_size)).cp)
    attention = BlockAttention(0, blocks, FusedBlocks(SIZE**-0.5, False), ring, adds)
    output = attention(q, k, v, None)
    output.backward(torch.randn(output.shape).bfloat16())
    return [tensor.grad for tensor in (q, k, v) if tensor.grad is not None]


@pytest.mark.parametrize("ranks", [2, 4])
def test_narrow_messages_change_no_bit(ranks: int, rank_pools: Callable[[int], RankPool]) -> None:
    narrow, wide = (rank_pools(ranks).run(gradients, adds) for adds in (False, True))
    for of_narrow, of_wide in zip(narrow, wide, strict=True):
        assert len(of_narrow) == 3 and all(torch.equal(a, b) for a, b in zip(of_narrow, of_wide, strict=True))
        assert all(gradient.abs().sum() > 0 for gradient in of_narrow)
