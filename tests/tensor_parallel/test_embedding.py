"""The vocabulary-parallel embedding against nn.functional.embedding in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from megapipe.comm.groups import Group
from megapipe.errors import ConfigError, DataError
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue
from tests.harness import RankPool
from tests.tensor_parallel.ranks import Storages, close, part, tp_group

S, B, H, PADDED, TRUE = 8, 3, 6, 32, 29


def run_embedding(rank: int, world_size: int, sequence_parallel: bool) -> None:
    group = tp_group(rank, world_size) if world_size > 1 else Group.alone("tp")
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    tokens = torch.randint(TRUE, (B, S), generator=generator)
    tokens[0, :3] = tokens[1, 0]  # repeated ids add up
    grad_output = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    whole = table.clone().requires_grad_()
    expected = functional.embedding(tokens.t(), whole)
    expected.backward(grad_output)

    def of_rank(tensor: torch.Tensor) -> torch.Tensor:
        return part(tensor, 0, group) if sequence_parallel else tensor.detach()

    for slots in (False, True):
        for split in (False, True):
            queue = WeightQueue()
            embedding = VocabParallelEmbedding(PADDED, H, group, sequence_parallel, true_vocab_size=TRUE, queue=queue)
            embedding.weight = nn.Parameter(part(table, 0, group))
            ready: list[GradientSlot] = []
            if slots:
                embedding.slots["weight"] = GradientSlot(torch.zeros_like(embedding.weight), on_ready=ready.append)
            y = embedding(tokens)
            close(y, of_rank(expected))
            if split:
                queue.defer(0)
            y.backward(of_rank(grad_output))
            if split:
                queue.immediate()
                assert embedding.weight.grad is None
                assert not slots or not embedding.slots["weight"].main_grad.any()
                queue.run(0)
            gradient = embedding.slots["weight"].main_grad if slots else embedding.weight.grad
            close(gradient, part(whole.grad, 0, group))
            assert len(ready) == slots


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence_parallel"])
def test_rows_and_gradients_equal_one_process(ranks: RankPool, sequence_parallel: bool) -> None:
    ranks.run(run_embedding, sequence_parallel)


def test_a_group_of_one_is_a_plain_embedding() -> None:
    run_embedding(0, 1, True)


def test_backward_into_a_slot_makes_no_dense_gradient() -> None:
    embedding = VocabParallelEmbedding(4096, 8, Group.alone("tp"), False)
    embedding.weight = nn.Parameter(torch.randn(4096, 8))
    embedding.slots["weight"] = GradientSlot(torch.zeros(4096, 8))
    y = embedding(torch.arange(12).view(2, 6))
    storages = Storages()
    storages.known.update(
        t.untyped_storage().data_ptr() for t in (embedding.weight, embedding.slots["weight"].main_grad)
    )
    with storages:
        y.backward(torch.ones_like(y))
    assert storages.largest <= 12 * 8
    assert embedding.slots["weight"].main_grad.sum() == 12 * 8


@pytest.mark.parametrize("token", [-1, 30], ids=["negative", "padding_row"])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    embedding = VocabParallelEmbedding(32, 4, Group.alone("tp"), False, true_vocab_size=30)
    with pytest.raises(DataError, match=f"token id {token} is outside the vocabulary of 30"):
        embedding(torch.tensor([[token]]))


def test_a_vocabulary_that_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 rows cannot be split over 3"):
        VocabParallelEmbedding(32, 4, Group("tp", (0, 1, 2), 0, None, None), False)
