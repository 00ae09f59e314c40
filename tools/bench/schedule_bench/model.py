"""Small transformer stages for real computation, the same for every contender; weight gradients are queued where a
schedule splits."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from plain_loop import Block
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from schedule_bench.cases import RealCase


def _linear(inputs: int, outputs: int, queue: WeightQueue) -> ColumnParallelLinear:
    return ColumnParallelLinear(inputs, outputs, bias=True, tp=Group.alone("tp"), sequence_parallel=False, queue=queue)


class TransformerStage(nn.Module):
    """Stage `stage` of `num_stages`: its share of the blocks, on the first the embedding, on the last the head.

    Tokens [b, s] -> hidden states [b, s, h] -> logits [b, s, vocab]. Initial values depend on the layer alone.
    """

    def __init__(self, case: RealCase, stage: int, num_stages: int, queue: WeightQueue) -> None:
        super().__init__()
        if case.layers % num_stages:
            raise ValueError(f"{case.layers} layers cannot be split evenly over {num_stages} stages")
        share = case.layers // num_stages
        self.embedding = nn.Embedding(case.vocab, case.hidden) if stage == 0 else None
        linear = partial(_linear, queue=queue)
        self.blocks = nn.Sequential(*(Block(case.hidden, case.heads, linear) for _ in range(share)))
        self.head = _linear(case.hidden, case.vocab, queue) if stage == num_stages - 1 else None
        for number, block in enumerate(self.blocks):
            _draw(block, 1 + stage * share + number)
        if self.embedding is not None:
            _draw(self.embedding, 0)
        if self.head is not None:
            _draw(self.head, 1 + case.layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.blocks(x)
        return x if self.head is None else self.head(x)


def _draw(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False)):
            values = torch.randn(old.shape, generator=generator) * 0.02
            setattr(
                part,
                name,
                nn.Parameter(values + 1.0 if isinstance(part, nn.LayerNorm) and name == "weight" else values),
            )


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def draw_batch(case: RealCase) -> tuple[Tensor, Tensor]:
    """Return (tokens, labels) of one step, [microbatches x micro_batch, s] each."""
    rows = torch.randint(
        case.vocab, (case.microbatches * case.micro_batch, case.seq + 1), generator=torch.Generator().manual_seed(0)
    )
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
