"""The rules of asynchronous training against pipelines that run action by action, and against synchronous steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.extras.reference.asynchronous import ErrorFeedback, StreamRule, StreamTraining
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import StepResult, build_optimizer, reference_step, set_lr
from tests.extras.reference.tiny import EVERYTHING, batch, build

LR = 0.05
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}
MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "position_embedding_type": "rope",
    "qk_layernorm": True,
}


class Chain(ReferenceGPT):
    """A pipeline of numbers: stage s multiplies its input by its weight; the loss is half the square of the result."""

    def __init__(self, weights: Sequence[float]) -> None:
        nn.Module.__init__(self)
        self.config = build().config
        self.losses_ahead = []
        self.weights = nn.ParameterList(torch.tensor(weight, dtype=torch.float64) for weight in weights)

    def forward(self, x: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        for weight in self.weights:
            x = x * weight
        return 0.5 * x.square().sum(), loss_mask.sum()


@dataclass
class Stage:
    """One stage of the chain in 1F1B: its weight, and what its microbatches in flight keep."""

    rank: int
    weight: float
    history: list[float] = field(default_factory=list)  # the weight after each update, the first one included
    inputs: dict[int, float] = field(default_factory=dict)
    met: dict[int, float] = field(default_factory=dict)  # the weight of the forward
    gradients: list[float] = field(default_factory=list)  # since the last update


def pipeline(family: str, weights: Sequence[float], inputs: Sequence[float], per_step: int, lr: float) -> list[float]:
    """Return the weights after one stream of 1F1B, of which each stage runs its actions in their order.

    Stages only know what they hold themselves and what messages bring: activations with the number of updates of the
    first stage at the forward, and gradients.
    """
    stages = [Stage(rank, weight, [weight]) for rank, weight in enumerate(weights)]
    last, count = len(weights) - 1, len(inputs)
    activations: list[dict[int, tuple[float, int]]] = [{} for _ in range(last + 2)]  # those that stage s takes in
    activations[0] = {k: (x, -1) for k, x in enumerate(inputs)}
    errors: list[dict[int, float]] = [{} for _ in range(last + 1)]  # gradients that stage s takes in
    rows = []
    for rank in range(last + 1):
        warm_up = min(last - rank, count)
        rows.append([("F", k) for k in range(warm_up)])
        for k in range(count):
            rows[-1] += [("F", k + warm_up)] if k + warm_up < count else []
            rows[-1] += [("B", k)]
    while any(rows):
        for stage, row in zip(stages, rows, strict=True):
            while row and row[0][1] in (activations if row[0][0] == "F" else errors)[stage.rank]:
                kind, k = row.pop(0)
                if kind == "F":
                    x, version = activations[stage.rank][k]
                    version = len(stage.history) - 1 if version < 0 else version
                    before_last = max(0, k // per_step - 1)
                    stage.met[k] = {
                        "pipedream": lambda s=stage: s.weight,
                        "vertical sync": lambda s=stage, v=version: s.history[v],
                        "2bw": lambda s=stage, v=before_last: s.history[v],
                        "paci": lambda s=stage: s.weight,
                    }[family]()
                    stage.inputs[k] = x
                    activations[stage.rank + 1][k] = (x * stage.met[k], version)
                    if stage.rank == last:
                        errors[last][k] = x * stage.met[k]  # the derivative of half the square
                else:
                    error = errors[stage.rank][k]
                    if stage.rank:
                        errors[stage.rank - 1][k] = error * (stage.weight if family == "paci" else stage.met[k])
                    stage.gradients.append(error * stage.inputs[k])
                    if family in ("pipedream", "vertical sync") or len(stage.gradients) == per_step:
                        stage.weight -= lr * sum(stage.gradients) / len(stage.gradients)
                        stage.history.append(stage.weight)
                        stage.gradients.clear()
    return [stage.weight for stage in stages]


RULES: dict[str, Callable[[int], StreamRule]] = {
    "pipedream": StreamRule.pipedream,
    "vertical sync": lambda num_stages: StreamRule.pipedream(num_stages, vertical_sync=True),
    "2bw": lambda num_stages: StreamRule.pipedream_2bw(),
    "paci": StreamRule.paci,
}


SHAPES = [(1, 3), (2, 1), (2, 2), (3, 3), (4, 2), (4, 3), (4, 5), (5, 2)]  # stages, microbatches of a step
CASES = [(family, *shape) for family in RULES for shape in SHAPES if family != "2bw" or shape[1] >= shape[0]]


@pytest.mark.parametrize(("family", "num_stages", "per_step"), CASES, ids=str)
def test_a_stream_equals_a_pipeline_that_runs_action_by_action(family: str, num_stages: int, per_step: int) -> None:
    weights = [0.7 + 0.15 * stage for stage in range(num_stages)]
    inputs = [1.0 + 0.3 * math.sin(3.0 * k) for k in range(6 * per_step)]
    model = Chain(weights)
    optimizer = torch.optim.SGD([{"params": [each], "decoupled": False} for each in model.weights], lr=0.0)
    stage_of = {f"weights.{stage}": stage for stage in range(num_stages)}
    training = StreamTraining(model, optimizer, RULES[family](num_stages), stage_of, False, 0.0)
    expected = list(weights)
    for steps, lr in ((4, LR), (2, 2 * LR)):  # two streams
        taken, inputs = inputs[: steps * per_step], inputs[steps * per_step :]
        expected = pipeline(family, expected, taken, per_step, lr)
        for step in range(steps):
            part = taken[step * per_step : (step + 1) * per_step]
            microbatches = [{"x": torch.tensor([x], dtype=torch.float64), "loss_mask": torch.ones(1)} for x in part]
            training.step(microbatches, lr, drains=step == steps - 1)
    found = [parameter.item() for parameter in model.weights]
    assert found == pytest.approx(expected, rel=1e-13, abs=0.0)


def stages_of(model: nn.Module, num_stages: int) -> dict[str, int]:
    """Return the stages of the two layers, which are the first and the last one; those between hold nothing."""
    is_last = ("decoder.layers.1", "decoder.final", "output_layer", "mtp")
    return {name: num_stages - 1 if name.startswith(is_last) else 0 for name, _ in model.named_parameters()}


def held(model: ReferenceGPT) -> dict[str, Tensor]:
    """Return copies of the weights and of the biases of routers."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()} | model.states()


def batches_of(steps: int, per_step: int) -> list[list[dict[str, Any]]]:
    """Return the microbatches of two dp ranks in each step."""
    return [[batch(seed) for seed in range(2 * per_step * step, 2 * per_step * (step + 1))] for step in range(steps)]


@dataclass
class Run:
    """Training of a tiny model with AdamW on two dp ranks; the learning rate changes from step to step.

    rule: None for synchronous steps. drains: the steps after which the pipeline drains.
    """

    rule: StreamRule | None
    drains: Sequence[int] = ()
    num_stages: int = 1
    clip_grad: float = 0.0
    per_token_loss: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the model

    def __post_init__(self) -> None:
        self.model = build(**self.options)
        self.optimizer = build_optimizer(self.model, "adamw", weight_decay=0.1, eps=1e-3)

    def train(self, batches: Sequence[list[dict[str, Any]]]) -> list[StepResult]:
        if self.rule is None:
            step = partial(reference_step, self.model, self.optimizer, data_parallel=2)
            return [
                step(each, self.per_token_loss, self.clip_grad, lr_of(number)) for number, each in enumerate(batches)
            ]
        stages, loss_and_clip = stages_of(self.model, self.num_stages), (self.per_token_loss, self.clip_grad)
        training = StreamTraining(self.model, self.optimizer, self.rule, stages, *loss_and_clip, data_parallel=2)
        return [training.step(each, lr_of(number), drains=number in self.drains) for number, each in enumerate(batches)]


def lr_of(step: int) -> float:
    return 0.02 / (1 + step)


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"options": {"untie_embeddings_and_output_weights": True}},
    "tied": {"per_token_loss": True},
    "experts": {
        "options": MIXTURE | {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_aux_loss_coeff": (0.1,)}
    },
    "prediction": {"options": {"mtp_num_layers": 2}},
}


def assert_equal_to_synchronous(run: Run, per_step: int) -> None:
    batches, plain = batches_of(3, per_step), replace(run, rule=None)
    for found, expected in zip(run.train(batches), plain.train(batches), strict=True):
        assert (found.loss, found.ahead) == (expected.loss, expected.ahead)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-15)
        assert all(torch.equal(gradient, expected.grads[name]) for name, gradient in found.grads.items())
    expected_weights = held(plain.model)
    assert all(torch.equal(tensor, expected_weights[name]) for name, tensor in held(run.model).items())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("family", "clip_grad", "per_step"), [("2bw", 0.1, 3), ("paci", 0.0, 3), ("pipedream", 0.0, 1)], ids=str
)
def test_with_a_drain_after_every_step_nothing_is_late(
    family: str, clip_grad: float, per_step: int, model: str
) -> None:
    run = Run(RULES[family](4), drains=range(3), num_stages=4, clip_grad=clip_grad, **MODELS[model])
    assert_equal_to_synchronous(run, per_step)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("family", "per_step"), [("paci", 3), ("pipedream", 1), ("vertical sync", 1)], ids=str)
def test_one_stage_is_never_late(family: str, per_step: int, model: str) -> None:
    assert_equal_to_synchronous(Run(RULES[family](1), clip_grad=0.1, **MODELS[model]), per_step)


def test_pipedream_on_one_stage_runs_steps_of_one_microbatch() -> None:
    one, several = Run(StreamRule.pipedream(1), clip_grad=0.1), Run(None, clip_grad=0.1)
    (found,) = one.train(batches_of(1, per_step=3))
    parts = [
        reference_step(several.model, several.optimizer, each, False, 0.1, lr_of(0), data_parallel=2)
        for each in batches_of(3, per_step=1)
    ]
    expected = held(several.model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in held(one.model).items())
    assert (found.grad_norm, found.grads.keys()) == (parts[-1].grad_norm, parts[-1].grads.keys())
    tokens = [sum(each["loss_mask"].sum().item() for each in microbatches) for microbatches in batches_of(3, 1)]
    mean = sum(part.loss * count for part, count in zip(parts, tokens, strict=True)) / sum(tokens)
    assert found.loss == pytest.approx(mean, rel=1e-13)


@pytest.mark.parametrize("model", MODELS)
def test_2bw_takes_gradients_at_the_weights_of_the_step_before(model: str) -> None:
    """W_(t + 1) = AdamW(W_t, clipped g_t(W_(t - 1))); another model makes g_t by synchronous steps that change nothing
    but the biases of routers.
    """
    batches = batches_of(7, per_step=2)
    run = Run(StreamRule.pipedream_2bw(), drains=(2, 5), num_stages=3, clip_grad=0.1, **MODELS[model])
    steps = run.train(batches)

    newest, late = Run(None, **MODELS[model]), build(**run.options)
    no_change = build_optimizer(late, "sgd", momentum=0.0)
    versions = [held(newest.model)]
    for number, microbatches in enumerate(batches):
        seen = versions[max(0, len(versions) - 2)]
        late.load_state_dict({name: tensor for name, tensor in seen.items() if name not in late.states()})
        late.load_states({name: seen[name] for name in late.states()})
        result = reference_step(late, no_change, microbatches, run.per_token_loss, 0.0, lr=0.0, data_parallel=2)
        torch.testing.assert_close(vars(steps[number]), vars(result), **EXACT)
        set_lr(newest.optimizer, lr_of(number))
        for name, parameter in newest.model.named_parameters():
            parameter.grad = result.grads[name] * min(1.0, 0.1 / (result.grad_norm + 1e-6))
        newest.optimizer.step()
        changes = {name: 0.1 * (bias - seen[name]).sign() for name, bias in late.states().items()}
        newest.model.load_states({name: bias + changes[name] for name, bias in newest.model.states().items()})
        versions = [*([] if number in run.drains else versions), held(newest.model)]
    for name, tensor in held(run.model).items():
        torch.testing.assert_close(tensor, versions[-1][name], **EXACT)


def test_biases_of_routers_have_the_version_of_their_stage() -> None:
    run = Run(StreamRule.paci(2), num_stages=2, options=MIXTURE)
    seen: list[list[Tensor]] = []
    for mixture in run.model.experts():
        seen.append([])
        mixture.register_forward_pre_hook(lambda module, inputs, kept=seen[-1]: kept.append(module.choice_bias()))
    run.train(batches_of(3, per_step=2))
    for found, versions in zip(seen, [(0, 0, 0, 1, 1, 2), (0, 0, 1, 1, 2, 2)], strict=True):
        of_version = dict(zip(versions, found[::2], strict=True))
        assert len({tuple(bias.tolist()) for bias in of_version.values()}) == 3
        for version, both in zip(versions, zip(found[::2], found[1::2], strict=True), strict=True):
            assert all(torch.equal(bias, of_version[version]) for bias in both)


@pytest.mark.parametrize("family", ["pipedream", "paci", "2bw"])
def test_stages_are_clipped_by_their_own_norm_but_those_of_2bw_together(family: str) -> None:
    """Gradients of the chain with weights a, b and input x are a b^2 x^2 and a^2 b x^2."""
    a, b, x, clip = 2.0, 3.0, 0.5, 1.5
    gradients = [a * b**2 * x**2, a**2 * b * x**2]
    model = Chain([a, b])
    optimizer = torch.optim.SGD([{"params": [each], "decoupled": False} for each in model.weights], lr=0.0)
    stage_of = {"weights.0": 0, "weights.1": 1}
    training = StreamTraining(model, optimizer, RULES[family](2), stage_of, False, clip)
    result = training.step([{"x": torch.tensor([x]), "loss_mask": torch.ones(1)}], LR)
    norms = [math.hypot(*gradients)] * 2 if family == "2bw" else gradients
    expected = [
        weight - LR * gradient * clip / (norm + 1e-6)
        for weight, gradient, norm in zip((a, b), gradients, norms, strict=True)
    ]
    assert [weight.item() for weight in model.weights] == pytest.approx(expected, rel=1e-13, abs=0.0)
    assert result.grad_norm == pytest.approx(math.hypot(*gradients), rel=1e-13)


def test_another_number_of_microbatches_needs_a_drain() -> None:
    run = Run(StreamRule.pipedream_2bw())
    with pytest.raises(ValueError, match="2 microbatches follows one of 1"):
        run.train([*batches_of(1, 1), *batches_of(1, 2)])
    replace(run, drains=(0,)).train([*batches_of(1, 1), *batches_of(1, 2)])


def test_changes_with_error_feedback_are_those_of_gradients_that_come_a_step_early() -> None:
    """After n steps they are u_1 + ... + u_(n - 1), and u_(n - 1) once more, over drains too."""
    run = Run(StreamRule.pipedream_2bw(), drains=(1, 3))
    plain = build_optimizer(run.model, "sgd", momentum=0.0, weight_decay=0.0)
    run.optimizer = ErrorFeedback(plain)
    before = held(run.model)
    results = run.train(batches_of(6, per_step=2))
    for name, weight in held(run.model).items():
        changes = [-lr_of(number) * result.grads[name] for number, result in enumerate(results)]
        expected = before[name] + sum(changes[1:]) + changes[-1]
        torch.testing.assert_close(weight, expected, **EXACT)


def test_error_feedback_counts_weight_decay_and_takes_its_factor() -> None:
    """A weight w without a gradient changes by u = - lr decay w, here with lr decay = 0.1, then 0.2."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    weight.grad = torch.zeros(1, dtype=torch.float64)
    optimizer = ErrorFeedback(torch.optim.AdamW([weight], lr=1.0, weight_decay=0.1), factor=0.5)
    optimizer.step()
    assert weight.item() == pytest.approx(0.9, rel=1e-14)
    optimizer.param_groups[0]["weight_decay"] = 0.2
    optimizer.step()
    assert weight.item() == pytest.approx(0.9 - 0.18 + 0.5 * (-0.18 + 0.1), rel=1e-14)


@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, MIXTURE | SHARED, LATENT], ids=["plain", "everything", "experts", "latent"]
)
def test_a_backward_keeps_weights_and_nothing_made_of_them_alone(options: dict[str, Any]) -> None:
    """Weights that change in place before the backward then change in all of it, as those of PACI do.

    Whatever is kept without reading the batch, is equal for two batches.
    """
    reference = build(**options)
    weights = {parameter.untyped_storage().data_ptr() for parameter in reference.parameters()}
    kept: list[list[Tensor]] = []
    for seed in (1, 2):
        kept.append([])

        def keep(tensor: Tensor, tensors: list[Tensor] = kept[-1]) -> Tensor:
            tensors.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            reference(**batch(seed))
    others = [tensor for tensor in kept[0] if tensor.untyped_storage().data_ptr() not in weights]
    assert len(others) < len(kept[0]), "weights themselves are kept"
    same = [
        tensor.shape
        for tensor in others
        if tensor.requires_grad
        and tensor.numel()
        and any(tensor.shape == x.shape and torch.equal(tensor, x) for x in kept[1])
    ]
    assert not same
