"""The optimizer in one process: against torch's own, precision, overflow, norms, state."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from megapipe.comm.groups import ProcessGroups
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.data_parallel.stores import Stores
from megapipe.optimizer.gradients import sum_of_squares
from megapipe.optimizer.optimizer import Optimizer, StepReport
from megapipe.optimizer.schedule import Rates
from megapipe.sharding.spec import Fused, ParamSpec
from megapipe.sharding.state_dtypes import state_dtypes
from tests.data_parallel.toy import Toy, draw, stage_buffers, tokens_of, toy_specs

ADAM = OptimizerConfig(lr=0.01, clip_grad=0.5, adam_beta2=0.99, adam_eps=1e-3)
SGD = OptimizerConfig(lr=0.01, clip_grad=0.5, optimizer="sgd", sgd_momentum=0.8)
PLAIN_SGD = OptimizerConfig(lr=0.01, clip_grad=0.0, optimizer="sgd", sgd_momentum=0.0)
CONFIGS = pytest.mark.parametrize(
    "config", [ADAM, SGD, PLAIN_SGD], ids=["adamw", "sgd with momentum", "sgd, unclipped"]
)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Training of Toy on one rank."""

    def __init__(
        self,
        config: OptimizerConfig,
        precision: PrecisionConfig = PrecisionConfig(dtype="fp64"),  # noqa: B008
    ) -> None:
        dtype = DTYPES[precision.dtype]
        self.module = Toy()
        gradient = DTYPES[state_dtypes(config, precision).gradient]
        self.buffers = stage_buffers(toy_specs(), param_dtype=dtype, grad_dtype=gradient)
        self.buffers.materialize(self.module, draw)
        self.stores = Stores({0: self.buffers}, ProcessGroups.alone())
        self.optimizer = Optimizer(self.stores, ProcessGroups.alone(), config, precision)

    def step(self, step: int, num_microbatches: int = 4, scale: float = 1.0, lr: float = 0.01) -> StepReport:
        self.stores.begin_step(num_microbatches)
        for microbatch in range(num_microbatches):
            (self.module(tokens_of(step, microbatch)) * (scale * self.optimizer.loss_scale)).backward()
        self.stores.finish_gradients()
        return self.optimizer.step(1 / num_microbatches, Rates(lr, 0.1, 0.3 * lr))

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}


def plain_training(config: OptimizerConfig, steps: int, num_microbatches: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train with a plain torch loop in fp64 and return weights and gradient norms."""
    module = Toy().to_empty(device="cpu").double()
    with torch.no_grad():
        for spec in toy_specs():
            module.get_parameter(spec.name).copy_(draw(spec))
    groups = [
        {
            "params": [module.get_parameter(spec.name)],
            "lr": 0.003 if spec.decoupled_lr else 0.01,
            "weight_decay": 0.1 if spec.weight_decay else 0.0,
        }
        for spec in toy_specs()
    ]
    if config.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps
        )
    else:
        optimizer = torch.optim.SGD(groups, momentum=config.sgd_momentum)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(num_microbatches):
            (module(tokens_of(step, microbatch)) / num_microbatches).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), config.clip_grad or math.inf).item())
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}, norms


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].double() - values.double()).abs().max() <= tolerance * values.abs().max(), name


@CONFIGS
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)], ids=["fp64", "fp32"])
def test_weights_and_norms_equal_torchs_own_optimizer(config: OptimizerConfig, dtype: str, tolerance: float) -> None:
    trainer = Trainer(config, PrecisionConfig(dtype=dtype))
    reports = [trainer.step(step) for step in range(4)]
    weights, norms = plain_training(config, 4, 4)
    assert_close(trainer.weights(), weights, tolerance)
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=tolerance)
    assert any(report.clip_coefficient < 1 for report in reports) == (config.clip_grad > 0)
    assert not any(shard.has_own_master for shard in trainer.optimizer.shards)


def test_clip_coefficient_is_megatrons() -> None:
    report = Trainer(ADAM).step(0)
    assert report.grad_norm > 0.5
    assert report.clip_coefficient == 0.5 / (report.grad_norm + 1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_parameters_are_the_rounded_fp32_masters(dtype: str) -> None:
    trainer = Trainer(ADAM, PrecisionConfig(dtype=dtype, initial_loss_scale=4.0))
    drawn = trainer.weights()
    for step in range(3):
        assert not trainer.step(step, lr=1e-5).skipped
    masters = master_weights(trainer)
    weights = trainer.weights()
    assert all(shard.has_own_master for shard in trainer.optimizer.shards)
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(weights[name].flatten(), master.to(DTYPES[dtype]))
    changed_below_rounding = 0
    for name, master in masters.items():
        changed_below_rounding += int(
            ((weights[name] == drawn[name]).flatten() & (master != drawn[name].float().flatten())).sum()
        )
    assert changed_below_rounding > 0  # masters keep updates too small for the parameter's precision


def master_weights(trainer: Trainer) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for state in trainer.optimizer.state():
        if state.key == "master":
            found.setdefault(state.piece.spec.name, []).append(state.values)
    return {name: torch.cat(parts) for name, parts in found.items()}


def test_overflow_skips_the_step_and_backs_off() -> None:
    trainer = Trainer(ADAM, PrecisionConfig(dtype="fp16", initial_loss_scale=16.0, hysteresis=2, loss_scale_window=2))
    before = trainer.weights()
    scales = []
    for step in range(2):
        report = trainer.step(step, scale=1e6)
        scales.append((report.loss_scale, trainer.optimizer.loss_scale))
        assert report.skipped
        assert not math.isfinite(report.grad_norm)
        assert trainer.optimizer.nonfinite_gradients()
    assert scales == [(16.0, 16.0), (16.0, 8.0)]
    assert all(torch.equal(values, before[name]) for name, values in trainer.weights().items())
    assert trainer.optimizer.plain_state()["num_steps"] == 0
    assert not trainer.step(2).skipped
    assert not trainer.step(3).skipped
    assert trainer.optimizer.loss_scale == 16.0
    assert trainer.optimizer.plain_state()["num_steps"] == 2


def test_nan_gradient_updates_nothing_and_is_named() -> None:
    trainer = Trainer(ADAM)
    before = trainer.weights()
    trainer.buffers.main_grad("up.bias")[3] = math.nan
    report = trainer.optimizer.step(1.0, Rates(0.01, 0.1))
    assert math.isnan(report.grad_norm)
    assert report.skipped
    assert trainer.optimizer.nonfinite_gradients() == ["up.bias"]
    assert all(torch.equal(values, before[name]) for name, values in trainer.weights().items())


def test_zeros_and_norms_leave_padding_out() -> None:
    spec = ParamSpec("embedding.weight", (8, 5), owner="embedding", slicing=Fused(0), true_rows=6)
    buffers = stage_buffers((spec, ParamSpec("bias", (3,), owner=0, weight_decay=False)))
    buffers.fill(lambda spec: torch.full(spec.shape, 2.0))
    alone = ProcessGroups.alone()
    optimizer = Optimizer(Stores({0: buffers}, alone), alone, OptimizerConfig(lr=0.0001), PrecisionConfig(dtype="fp64"))
    assert optimizer.parameters_norm() == pytest.approx(math.sqrt(33 * 4.0))
    buffers.main_grad("bias").copy_(torch.tensor([3.0, 0.0, 4.0]))
    report = optimizer.step(1.0, Rates(0.0, 0.0), count_zero_gradients=True)
    assert report.grad_norm == pytest.approx(5.0)
    assert report.num_zeros == 31


@CONFIGS
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_state_on_the_host_trains_the_same_to_the_bit(config: OptimizerConfig, dtype: str) -> None:
    here = Trainer(config, PrecisionConfig(dtype=dtype))
    there = Trainer(dataclasses.replace(config, optimizer_cpu_offload=True), PrecisionConfig(dtype=dtype))
    assert all(shard.has_own_master for shard in there.optimizer.shards)
    for number in range(4):
        mine, theirs = here.step(number), there.step(number)
        assert mine == theirs
    assert all(torch.equal(there.weights()[name], value) for name, value in here.weights().items())
    kept = {(held.key, held.piece.spec.name, held.piece.start): held.values for held in here.optimizer.state()}
    for held in there.optimizer.state():
        assert torch.equal(held.values, kept[held.key, held.piece.spec.name, held.piece.start])
    own = {
        value.untyped_storage().data_ptr()
        for buffer in there.buffers.buffers
        for value in (buffer.parameters, buffer.gradients)
    }
    assert own.isdisjoint({held.values.untyped_storage().data_ptr() for held in there.optimizer.state()})


def test_weights_loaded_without_state_become_masters() -> None:
    trainer = Trainer(ADAM, PrecisionConfig(dtype="bf16"))
    trainer.buffers.fill(lambda spec: torch.ones(spec.shape))
    trainer.optimizer.parameters_to_masters()
    trainer.optimizer.masters_to_parameters()
    assert all((values == 1).all() for values in trainer.weights().values())


def test_sum_of_squares_of_many_elements_does_not_drift() -> None:
    values = torch.randn(3_000_017, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum().item()
    assert sum_of_squares([values], values.device).item() == pytest.approx(exact, rel=3e-7)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_pass_for_compilation_updates_as_torchs_fused_kernel_and_writes_the_weights(dtype: str) -> None:
    """Four steps, two of them clipped; the function is not compiled. Gradients keep their raw sums."""
    plain, found = Trainer(ADAM, PrecisionConfig(dtype=dtype)), Trainer(ADAM, PrecisionConfig(dtype=dtype))
    found.optimizer = Optimizer(
        found.stores,
        ProcessGroups.alone(),
        ADAM,
        PrecisionConfig(dtype=dtype),
        compiler=lambda function: function,
    )
    for step in range(4):
        reports = plain.step(step), found.step(step)
        assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5 if dtype == "fp32" else 1e-2)
    assert found.optimizer.plain_state() == plain.optimizer.plain_state()
    assert_close(found.weights(), plain.weights(), 1e-5 if dtype == "fp32" else 1e-2)
    assert not found.optimizer.stale_parameters()
    assert [piece.key for piece in found.optimizer.state()] == [piece.key for piece in plain.optimizer.state()]
