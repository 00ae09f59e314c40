"""Recomputation changes memory but no bits: loss and gradients with dropout, with whole and split backwards.

Replays run the same kernels on the same shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.config.parallel import RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.model.recompute import KeptAttention, RecomputedSegment, layer_groups
from megapipe.plan.activations import group_sizes
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.trace.meta import LiveBytes
from tests.model.grids import GPT2, LLAMA, UNLIKE, make_microbatch, make_stage, model_config, reference

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
OPTIONS = {
    "gpt2": GPT2 | DROPOUT,
    "gated": LLAMA | DROPOUT | {"attention_output_gate": True},
    "llama": LLAMA | DROPOUT | {"qk_layernorm": True},
    "llama_fused": LLAMA | {"hidden_dropout": 0.1},
}
OPTIONS["unlike"] = UNLIKE | DROPOUT
OPTIONS["unlike_fused"] = UNLIKE | {
    "hidden_dropout": 0.2,
    "layer_pattern": tuple(word.partition(" attn_logit")[0] for word in UNLIKE["layer_pattern"]),
}
OPTIONS["gpt2_window"] = GPT2 | {"hidden_dropout": 0.2, "window_size": 4}
METHODS = ("uniform", "block")
RECOMPUTES = {
    "core_attn": RecomputeConfig("selective", recompute_modules=("core_attn",)),
    "layernorm": RecomputeConfig("selective", recompute_modules=("layernorm",)),
    "mlp": RecomputeConfig("selective", recompute_modules=("mlp",)),
    "activation": RecomputeConfig("selective", recompute_modules=("activation",)),
    "all": RecomputeConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp", "activation")),
    "uniform1": RecomputeConfig("full", "uniform", 1),
    "uniform2": RecomputeConfig("full", "uniform", 2),
    "block1": RecomputeConfig("full", "block", 1),
    "uniform2_attention_kept": RecomputeConfig("full", "uniform", 2, recompute_keep_attention=True),
    "block1_attention_kept": RecomputeConfig("full", "block", 1, recompute_keep_attention=True),
}
FUSED = ("llama_fused", "gpt2_window", "unlike_fused")
CASES = [(name, recompute) for recompute in RECOMPUTES for name in (FUSED if "attention" in recompute else OPTIONS)]


def run(
    name: str, recompute: RecomputeConfig, split: bool = False, num_layers: int = 3, is_ahead: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    config = model_config(**OPTIONS[name], num_layers=num_layers)
    weights = {key: tensor.float() for key, tensor in reference(config).named_parameters()}
    queue = WeightQueue() if split else None
    stage = make_stage(config, weights, recompute=recompute, queue=queue)
    replays = stage.replays = [] if is_ahead else None
    loss = stage(make_microbatch(config, dropout_key=DropoutKey(5, 6, 7))).loss_sum
    for replay in replays or ():
        replay()
    if queue is None:
        loss.backward()
    else:
        queue.defer("microbatch")
        loss.backward()
        queue.immediate()
        assert all(parameter.grad is None for key, parameter in stage.named_parameters() if "linear" in key)
        queue.run("microbatch")
    return loss.detach(), {key: parameter.grad for key, parameter in stage.named_parameters()}


def assert_same_bits(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    differing = [name for name, grad in expected[1].items() if not torch.equal(actual[1][name], grad)]
    assert not differing


@pytest.mark.parametrize("split", [False, True], ids=["B", "I-W"])
@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_recompute_gives_the_same_bits(name: str, recompute: str, split: bool) -> None:
    assert_same_bits(run(name, RECOMPUTES[recompute], split), run(name, RecomputeConfig()))


@pytest.mark.parametrize("split", [False, True], ids=["B", "I-W"])
@pytest.mark.parametrize(("name", "recompute"), [case for case in CASES if RECOMPUTES[case[1]].recompute_method])
def test_a_replay_ahead_of_the_backward_gives_the_same_bits(name: str, recompute: str, split: bool) -> None:
    assert_same_bits(run(name, RECOMPUTES[recompute], split, is_ahead=True), run(name, RecomputeConfig()))


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("split", [False, True], ids=["B", "I-W"])
@pytest.mark.parametrize(("recompute", "num_forwards"), [("mlp", 2), ("uniform1", 2), ("core_attn", 1)])
def test_each_segment_is_recomputed_once(
    monkeypatch: pytest.MonkeyPatch, recompute: str, num_forwards: int, split: bool, is_ahead: bool
) -> None:
    import megapipe.model.mlp as mlp

    calls: list[Any] = []
    original = mlp.activation
    monkeypatch.setattr(mlp, "activation", lambda name, _: lambda x: (calls.append(name), original(name)(x))[1])
    run("gpt2", RECOMPUTES[recompute], split, is_ahead=is_ahead)
    assert len(calls) == 3 * num_forwards


class CountedKernels(TorchDispatchMode):
    """A recorder of attention kernels that ran, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._schema.name:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recompute", "num_forwards"), [("uniform2", 6), ("uniform2_attention_kept", 3), ("block1_attention_kept", 3)]
)
def test_a_recompute_that_keeps_attention_does_not_run_its_kernel(recompute: str, num_forwards: int) -> None:
    with CountedKernels() as counted:
        run("llama_fused", RECOMPUTES[recompute])
    assert sum("backward" in name for name in counted.names) == 3
    assert sum("backward" not in name for name in counted.names) == num_forwards


def test_what_attention_returned_is_freed_with_the_graph() -> None:
    config = model_config(**LLAMA)
    stage = make_stage(
        config, dict(reference(config).named_parameters()), recompute=RECOMPUTES["uniform2_attention_kept"]
    )
    parameters = sum(parameter.untyped_storage().nbytes() for parameter in stage.parameters())
    with LiveBytes() as live:
        stage(make_microbatch(config)).loss_sum.backward()
    assert live.peak > 2 * parameters
    assert live.now < 2.1 * parameters  # parameters, their gradients, tables


def test_a_librarys_kernel_is_kept_by_the_name_that_the_dispatcher_knows() -> None:
    calls: list[int] = []

    @torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
    def forward(q: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return q.exp(), q.sum(-1)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output, statistics = forward(q)
            ctx.save_for_backward(output, statistics)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            return grad * ctx.saved_tensors[0], None, None

    kept = KeptAttention()
    segment = RecomputedSegment(lambda x: kept(Attention.apply, x * 2, x, x).sum(), kept)
    x = torch.randn(3, requires_grad=True)
    segment(x).backward()
    assert len(calls) == 1
    assert torch.allclose(x.grad, 2 * (2 * x.detach()).exp())


def test_attention_without_a_kernel_that_torch_sees_is_refused() -> None:
    kept = KeptAttention()
    with pytest.raises(ConfigError, match="--recompute-keep-attention"):
        kept.record(lambda *qkv: kept(lambda q, k, v: q + k + v, *qkv), tuple(torch.zeros(3, 2)))


def test_in_a_split_backward_the_recompute_happens_at_the_input_gradient() -> None:
    calls: list[str] = []

    def double(x: Tensor) -> Tensor:
        calls.append("run")
        return x * 2

    segment, x = RecomputedSegment(double), torch.ones(2, requires_grad=True)
    y = segment(x)
    recompute = segment.input_recompute(x.detach())
    y.sum().backward()
    assert calls == ["run", "run"]
    assert torch.equal(recompute.function(), torch.full((2,), 2.0))
    assert calls == ["run", "run"]
    assert segment._output is None
    assert segment._graph is None


def test_a_segment_of_inputs_without_gradient_still_trains_its_parameters() -> None:
    linear = torch.nn.Linear(3, 2)
    RecomputedSegment(linear)(torch.ones(1, 3)).sum().backward()
    assert torch.equal(linear.weight.grad, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("method", "size", "expected"),
    [
        ("uniform", 2, [((4, 5), True), ((6, 7), True), ((8,), True)]),
        ("uniform", 9, [((4, 5, 6, 7, 8), True)]),
        ("block", 2, [((4,), True), ((5,), True), ((6,), False), ((7,), False), ((8,), False)]),
        ("block", 9, [((layer,), True) for layer in range(4, 9)]),
    ],
    ids=["uniform2", "uniform-more-than-layers", "block2", "block-more-than-layers"],
)
def test_full_recompute_groups_layers_as_megatron_does(method: str, size: int, expected: list[Any]) -> None:
    assert layer_groups(RecomputeConfig("full", method, size), range(4, 9)) == expected


@pytest.mark.parametrize(
    "config", [RecomputeConfig("full", None, 1), RecomputeConfig("full", "block", None)], ids=["method", "layers"]
)
def test_full_recompute_without_its_numbers_is_refused(config: RecomputeConfig) -> None:
    with pytest.raises(ConfigError, match="recompute-method"):
        layer_groups(config, range(2))


@pytest.mark.parametrize(
    "config", [RecomputeConfig(), *(RecomputeConfig("full", m, n) for m in METHODS for n in (1, 2, 5))]
)
def test_the_planner_groups_layers_as_the_stage_does(config: RecomputeConfig) -> None:
    assert group_sizes(config, 5) == tuple(len(layers) for layers, _ in layer_groups(config, range(3, 8)))
