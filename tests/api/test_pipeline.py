"""A Pipeline of plain modules computes the loss and the gradients of one process, under every synchronous schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megapipe.api import pipeline as pipeline_module
from megapipe.api.pipeline import Pipeline
from megapipe.errors import ConfigError
from megapipe.schedule.families import SCHEDULES
from tests.api.ranks import as_rank, error_of
from tests.harness import RankFailure, RankPool

COUNT, ROWS, CLASSES, BLOCKS = 8, 2, 5, 8  # microbatches, their rows, classes, modules of a model
SYNCHRONOUS = [family for family in SCHEDULES.values() if family.is_synchronous]
CASES = [  # schedule, chunks
    (family.name, chunks)
    for family in SYNCHRONOUS
    for chunks in ((family.chunks,) if family.chunks else (1, 2) if family.takes_chunks else (1,))
]


class Twice(nn.Module):
    """A linear that is used twice, a gain, operations in place (also on its input), and no bias in the middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.linear(x.mul_(1.5)).relu_()) * self.gain
        x[:, 0] += self.gain[1]
        return self.last(x) + self.shift


class Split(nn.Module):
    """Return a tuple with a tensor that only depends on a weight, integers and an unused tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.tanh(), self.bias * 2, torch.arange(len(x)), x.detach()


class Join(nn.Module):
    """Take such a tuple; a module without weights."""

    def forward(self, x: Tensor, bias: Tensor, numbers: Tensor, unused: Tensor) -> Tensor:
        return x + bias * numbers[:, None]


def mlp() -> list[nn.Module]:
    torch.manual_seed(1)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    start = [nn.Linear(3, 6), Split(6), Join(), normed, nn.ReLU(inplace=True)]
    return [*start, nn.Linear(6, 6), Twice(6), nn.Linear(6, CLASSES)]


def conv_net() -> list[nn.Module]:
    torch.manual_seed(2)
    middle = [nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Dropout(0.0)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return [nn.Conv2d(2, 4, 3), *middle, pool, nn.LayerNorm(16), nn.Linear(16, CLASSES)]


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "conv": (conv_net, (2, 6, 6)),
}


def batch(model: str, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + replica)
    x = torch.randn(COUNT * ROWS, *MODELS[model][1], generator=generator)
    return x, torch.randint(CLASSES, (COUNT * ROWS,), generator=generator)


def in_one_process(model: str, num_replicas: int) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and, by name, the gradients of the mean loss, and the buffers of replica 0."""
    modules = nn.Sequential(*MODELS[model][0]())
    total, buffers = 0.0, {}
    for replica in range(num_replicas):
        x, y = batch(model, replica)
        for part, labels in zip(x.split(ROWS), y.split(ROWS), strict=True):
            value: Any = part.clone()
            for module in modules:
                value = module(*value) if isinstance(value, tuple) else module(value)
            loss = cross_entropy(value, labels) / (COUNT * num_replicas)
            loss.backward()
            total += loss.item()
        buffers = buffers or {name: buffer.clone() for name, buffer in modules.named_buffers()}
    return total, buffers | {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}


def train(rank: int, world_size: int, model: str, cases: list[tuple[str, int]], dp: int) -> list[Any]:
    """Return (loss, gradients and buffers of this rank by name, loss without gradients) for each case."""
    torch.set_default_dtype(torch.float64)
    as_rank(rank, world_size, pipeline_module)
    results = []
    for schedule, chunks in cases:
        modules = MODELS[model][0]()
        if dp == 2 and rank % 2:  # replica 1 has another start, which replica 0 overwrites
            modules = [copy.deepcopy(module) for module in modules]
            with torch.no_grad():
                for module in modules:
                    for parameter in module.parameters():
                        parameter.add_(1.0)
        settings = {"schedule": schedule, "chunks": chunks, "data_parallel": dp, "device": "cpu"}
        with Pipeline(modules, loss=cross_entropy, microbatches=COUNT, **settings) as pipeline:
            x, y = batch(model, pipeline.replica)
            given = (x if pipeline.holds_first else None, y if pipeline.holds_last else None)
            loss = pipeline.step(*copy.deepcopy(given)).item()
            found = {name: buffer.clone() for name, buffer in pipeline.model.named_buffers()}
            found |= {name: p.grad for name, p in pipeline.model.named_parameters() if p.grad is not None}
            results.append((loss, found, pipeline.replica))
    return results


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dp", [1, 2], ids=lambda dp: f"dp{dp}")
@pytest.mark.parametrize("p", [1, 2, 4], ids=lambda p: f"pp{p}")
def test_every_schedule_computes_what_one_process_does(
    rank_pools: Callable[[int], RankPool], p: int, dp: int, model: str
) -> None:
    cases = [(name, chunks) for name, chunks in CASES if p > 1 or name != "dualpipe"]
    by_rank = rank_pools(p * dp).run(train, model, cases, dp)
    torch.set_default_dtype(torch.float64)
    try:
        expected_loss, expected = in_one_process(model, dp)
    finally:
        torch.set_default_dtype(torch.float32)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        assert {name for _, found, _ in ranks for name in found} == set(expected), case
        for loss, found, replica in ranks:
            assert loss == pytest.approx(expected_loss, rel=1e-12), case
            for name, value in found.items():
                # running averages are those of the rank's own microbatches: a direction of DualPipe sees half of them
                if "running" in name or "tracked" in name:
                    if replica == 0 and case[0] != "dualpipe":
                        assert torch.allclose(value, expected[name], rtol=1e-10), (case, name)
                else:
                    assert (value - expected[name]).abs().max() <= 1e-10 * expected[name].abs().max(), (case, name)
