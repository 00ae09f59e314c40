"""A Pipeline of plain modules computes the loss and the gradients of one process, under every synchronous schedule."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megapipe.api import pipeline as pipeline_module
from megapipe.api.pipeline import Pipeline
from megapipe.schedule.families import SCHEDULES
from tests.api.ranks import as_rank, error_of
from tests.harness import RankPool

COUNT, ROWS, CLASSES, BLOCKS = 8, 2, 5, 8  # microbatches, their rows, classes, modules of a model
SYNCHRONOUS = [family for family in SCHEDULES.values() if family.is_synchronous]
CASES = [  # schedule, chunks
    (family.name, chunks) for family in SYNCHRONOUS for chunks in sorted({family.num_chunks(1), family.num_chunks(2)})
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
    """Return a tuple with a tensor that only depends on a weight, integers and an unused tensor. Changes its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias, self.unused = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.mul_(0.5).tanh(), self.bias * 2, torch.arange(len(x)), x.detach()


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
    cases = [(name, chunks) for name, chunks in CASES if p > 1 or not SCHEDULES[name].is_mirrored(2)]
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
                # running averages are those of the rank's own microbatches: each of two directions sees half of them
                if "running" in name or "tracked" in name:
                    if replica == 0 and not SCHEDULES[case[0]].is_mirrored(2):
                        assert torch.allclose(value, expected[name], rtol=1e-10), (case, name)
                else:
                    assert (value - expected[name]).abs().max() <= 1e-10 * expected[name].abs().max(), (case, name)


def errors(rank: int, world_size: int) -> dict[str, str]:
    """Return the message of each plausible mistake."""
    as_rank(rank, world_size, pipeline_module)

    def linears(*widths: int) -> list[nn.Module]:
        return [nn.Linear(*pair) for pair in itertools.pairwise(widths)]

    def made(*stages: nn.Module, loss: Any = cross_entropy, **settings: Any) -> Pipeline:
        return Pipeline(stages, loss=loss, **({"microbatches": 2, "device": "cpu"} | settings))

    def step(stages: list[nn.Module], x: Any, y: Any, **settings: Any) -> Callable[[], Any]:
        return lambda: made(*stages, **settings).step(x, y)

    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    tied = linears(3, 3, 3)
    tied[1].weight = tied[0].weight

    def changed() -> None:
        pipeline = made(*linears(3, 5, 4))
        pipeline.step(x, y)
        pipeline.step(x[:2], y[:2])

    mistakes = {
        "number of stages": lambda: made(*linears(3, 4, 4, 4)),
        "no stages": lambda: made(),
        "chunks": lambda: made(*linears(3, 4, 4), schedule="gpipe", chunks=2),
        "schedule": lambda: made(*linears(3, 4, 4), schedule="zb-1"),
        "asynchronous": lambda: made(*linears(3, 4, 4), schedule="pipedream"),
        "replicas": lambda: made(*linears(3, 4, 4), data_parallel=3),
        "shared": lambda: made(*tied),
        "not a module": lambda: made(lambda: 3, lambda: 3),
        "batch": step(linears(3, 5, 4), x[:3], y[:3]),
        "no inputs": step(linears(3, 5, 4), None, None),
        "inputs": step(linears(3, 5, 4), torch.randn(4, 7), y),
        "between stages": step([*linears(3, 5), *linears(6, 4)], x, y),
        "loss": step(linears(3, 5, 4), x, y, loss=lambda output, target: output),
        "outputs": step([nn.Identity(), Named()], x, y),
        "changed shapes": changed,
    }
    return {name: error_of(call) for name, call in mistakes.items()}


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


MESSAGES = {
    "number of stages": "3 stages do not divide over 2 pipeline rank(s) x 1 chunk(s); give a multiple of 2",
    "no stages": "0 stages do not divide over 2 pipeline rank(s)",
    "chunks": "schedule gpipe holds one chunk per rank, but 2 were given",
    "schedule": "unknown pipeline schedule 'zb-1'; did you mean zb-h1?",
    "asynchronous": "schedule pipedream updates weights within a step",
    "replicas": "data_parallel=3 does not divide the 2 rank(s); use one of 1, 2",
    "shared": "stages 0 and 1 share the parameter weight (weight), but different ranks hold them",
    "not a module": "is of type int; give an nn.Module, or a function without arguments that returns one",
    "batch": "float32[3, 3]: a batch of 3 does not divide into 2 microbatches",
    "no inputs": "inputs is None on a rank that needs it; give tensors [batch, ...]",
    "inputs": "stage 0 for its inputs: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x7 and 3x5)",
    "between stages": "stage 1 for float32[2, 5] from stage 0: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "loss": "loss returned a tensor float32[2, 4]; it must return a scalar: average it",
    "outputs": "stage 1 for float32[2, 3] from stage 0: TypeError: cross_entropy_loss",
    "changed shapes": "a microbatch has the inputs float32[1, 3], those of the first step were float32[2, 3]",
}
ON_THE_OTHER_END = {  # what the last rank says where it does not see the same mistake
    "batch": "targets int64[3]: a batch of 3",
    "no inputs": "targets is None",
    "changed shapes": "a microbatch has the targets int64[1], those of the first step were int64[2]",
}


def test_mistakes_are_reported_in_one_line_on_every_rank(rank_pools: Callable[[int], RankPool]) -> None:
    for rank, found in enumerate(rank_pools(2).run(errors)):
        for name, message in MESSAGES.items():
            expected = ON_THE_OTHER_END.get(name, message) if rank else message
            assert expected in found[name], (rank, name)
            assert len(found[name].splitlines()) == 1 and found[name].startswith("ConfigError"), (rank, name)


def evaluate_and_clip(rank: int, world_size: int) -> tuple[float, float, float, list[Tensor]]:
    torch.set_default_dtype(torch.float64)
    as_rank(rank, world_size, pipeline_module)
    x, y = batch("conv", 0)
    stages = [module.train() for module in conv_net()]
    pipeline = Pipeline(stages, loss=cross_entropy, microbatches=COUNT, schedule="zb-h1", device="cpu")
    generator = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in pipeline.model.buffers()]
    pipeline.model.eval()
    evaluated = pipeline.evaluate(x, y).item()
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(*pair) for pair in zip(buffers, pipeline.model.buffers(), strict=True))
    pipeline.step(x, y)
    norm = pipeline.clip_grad_norm(0.01).item()
    return evaluated, norm, pipeline.clip_grad_norm(1.0).item(), [p.grad for p in pipeline.model.parameters()]


def test_evaluation_and_the_gradient_norm_are_those_of_one_process(rank_pools: Callable[[int], RankPool]) -> None:
    (alone,), two = rank_pools(1).run(evaluate_and_clip), rank_pools(2).run(evaluate_and_clip)
    for evaluated, norm, clipped, _ in two:
        assert (evaluated, norm, clipped) == pytest.approx(alone[:3], rel=1e-10)
    assert alone[2] == pytest.approx(0.01, rel=1e-3) and alone[1] > 0.1
    for gradient, expected in zip([*two[0][3], *two[1][3]], alone[3], strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-9)


def accumulate(rank: int, world_size: int) -> list[float]:
    """Return how far the gradients of two steps are from twice those of one, for each grid of two ranks."""
    as_rank(rank, world_size, pipeline_module)
    differences = []
    for settings in ({"schedule": "dualpipe"}, {"schedule": "zb-v"}, {"data_parallel": 2}):
        pipeline = Pipeline(mlp(), loss=cross_entropy, microbatches=COUNT, device="cpu", **settings)
        x, y = batch("mlp", pipeline.replica)
        pipeline.step(x.clone(), y)
        first = [None if p.grad is None else p.grad.clone() for p in pipeline.model.parameters()]
        pipeline.step(x.clone(), y)
        pairs = zip(first, pipeline.model.parameters(), strict=True)
        differences += [float((p.grad - 2 * one).abs().max()) for one, p in pairs if one is not None]
    return differences


def test_the_gradients_of_several_steps_add_up(rank_pools: Callable[[int], RankPool]) -> None:
    for differences in rank_pools(2).run(accumulate):
        assert len(differences) > 20 and max(differences) < 1e-6


def test_a_batch_is_not_changed_by_the_trial_of_the_first_step() -> None:
    seen = []

    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x[0, 0].item())
            return super().forward(x.add_(1.0))

    Pipeline([InPlace(3, 4)], loss=cross_entropy, microbatches=2, device="cpu").step(
        torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    )
    assert seen == [0.0, 0.0, 0.0]


def with_other_arguments(rank: int, world_size: int, name: str, value: Any) -> str:
    """Make a pipeline whose last rank has another argument; return its error."""
    as_rank(rank, world_size, pipeline_module)
    settings: dict[str, Any] = {"microbatches": 4, "device": "cpu"} | ({name: value} if rank else {})
    return error_of(lambda: Pipeline([nn.Linear(3, 3) for _ in range(4)], loss=cross_entropy, **settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("microbatches", 8),
        ("schedule", "gpipe"),
        ("chunks", 2),
        ("data_parallel", 2),
        ("device", "auto"),
        ("backend", "gloo"),
        ("timeout_seconds", 60.0),
    ],
)
def test_an_argument_of_one_rank_alone_is_named(name: str, value: Any, rank_pools: Callable[[int], RankPool]) -> None:
    found = rank_pools(2).run(with_other_arguments, name, value)
    assert all(text.startswith("DisagreementError") and f"\n  {name} of Pipeline: " in text for text in found), found
