"""Gradients and moments narrower than fp32: against the written-out formula, rollback, resuming, grids."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.optimizer.optimizer import Optimizer
from megapipe.optimizer.schedule import Rates
from megapipe.sharding.state_dtypes import CHUNK, state_dtypes
from tests.data_parallel.toy import Toy, draw, groups_of, stage_buffers, tokens_of, toy_specs
from tests.harness import RankPool
from tests.optimizer.test_optimizer import ADAM, DTYPES, Trainer

RATES = Rates(0.01, 0.1, 0.003)
BITS = {"fp32": 24, "bf16": 8, "fp16": 11}  # of the significand
LEAST = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}  # smallest positive number
BF16 = PrecisionConfig(dtype="bf16")
FP16 = PrecisionConfig(dtype="fp16", initial_loss_scale=64.0)
NARROWEST = dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")


def narrow_adam(**dtypes: Any) -> OptimizerConfig:
    return dataclasses.replace(ADAM, use_precision_aware_optimizer=True, **dtypes)


COMBINATIONS = [
    (precision, *dtypes) for precision in (BF16, FP16) for dtypes in itertools.product(("fp32", "bf16"), repeat=3)
]


def decoded(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return state -> parameter -> values in fp64, decoded from the stored tensors alone."""
    found: dict[str, dict[str, Tensor]] = {}
    for shard in optimizer.shards:
        for state, stored in shard.states.items():
            for part, piece in shard.pieces():
                name = piece.spec.name
                values = stored[part].double()
                found.setdefault(state, {}).setdefault(name, torch.empty(0, dtype=torch.float64))
                found[state][name] = torch.cat([found[state][name], values.detach()])
    return found


def adamw(
    config: OptimizerConfig, step: int, gradient: Tensor, states: dict[str, Tensor], decay: float, lr: float
) -> dict[str, Tensor]:
    """AdamW as in the paper, in fp64."""
    first = config.adam_beta1 * states["exp_avg"] + (1 - config.adam_beta1) * gradient
    second = config.adam_beta2 * states["exp_avg_sq"] + (1 - config.adam_beta2) * gradient.square()
    corrected = first / (1 - config.adam_beta1**step), second / (1 - config.adam_beta2**step)
    master = states["master"] * (1 - lr * decay) - lr * corrected[0] / (corrected[1].sqrt() + config.adam_eps)
    return {"master": master, "exp_avg": first, "exp_avg_sq": second}


def half_unit(values: Tensor, dtype: str) -> Tensor:
    """Return half the distance between neighbouring numbers of a dtype around each value."""
    exponent, least = torch.frexp(values)[1].double(), LEAST[dtype]
    return torch.maximum(torch.exp2(exponent - BITS[dtype]), torch.full_like(values, least)) / 2


@pytest.mark.parametrize(
    ("precision", "gradient", "first", "second"),
    COMBINATIONS,
    ids=["-".join([each[0].dtype, *each[1:]]) for each in COMBINATIONS],
)
def test_each_step_is_the_formula_with_one_rounding_of_each_state(
    precision: PrecisionConfig, gradient: str, first: str, second: str
) -> None:
    dtypes = {"master": "fp32", "exp_avg": first, "exp_avg_sq": second}
    config = narrow_adam(main_grads_dtype=gradient, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    trainer = Trainer(config, precision)
    optimizer, specs = trainer.optimizer, {spec.name: spec for spec in toy_specs()}
    for step in range(1, 4):
        before = decoded(optimizer)
        trainer.stores.begin_step(2)
        for microbatch in range(2):
            (trainer.module(tokens_of(step, microbatch)) * optimizer.loss_scale).backward()
        trainer.stores.finish_gradients()
        gradients = {name: trainer.buffers.main_grad(name).double().flatten() for name in specs}
        assert all(trainer.buffers.main_grad(name).dtype == DTYPES[gradient] for name in specs)
        factor = 0.5 / optimizer.loss_scale
        factor *= optimizer.step(0.5, RATES).clip_coefficient
        after = decoded(optimizer)
        for name, spec in specs.items():
            lr = 0.003 if spec.decoupled_lr else 0.01
            decay = 0.1 if spec.weight_decay else 0.0
            states = {state: before[state][name] for state in ("master", "exp_avg", "exp_avg_sq")}
            scaled = gradients[name] * factor
            expected = adamw(config, step, scaled, states, decay, lr)
            terms = {"master": torch.full_like(scaled, lr), "exp_avg": scaled.abs(), "exp_avg_sq": scaled.square()}
            for state, values in expected.items():
                bound = half_unit(values, dtypes[state]) * 1.01
                bound += 5e-7 * (states[state].abs() + terms[state])  # the formula itself is computed in fp32
                assert ((after[state][name] - values).abs() <= bound).all(), (step, state, name)
            rounded = after["master"][name].float()
            distance = (trainer.buffers.parameter(name).double().flatten() - rounded.double()).abs()
            assert (distance <= half_unit(rounded.double(), precision.dtype)).all() or precision.dtype == "fp16"
    assert not optimizer.stale_parameters()


def test_narrow_state_on_the_host_trains_the_same_to_the_bit() -> None:
    here = Trainer(narrow_adam(**NARROWEST), BF16)
    there = Trainer(narrow_adam(optimizer_cpu_offload=True, **NARROWEST), BF16)
    for number in range(3):
        assert here.step(number) == there.step(number)
    assert all(torch.equal(there.weights()[name], value) for name, value in here.weights().items())
    for state, parameters in decoded(here.optimizer).items():
        for name, values in parameters.items():
            assert torch.equal(decoded(there.optimizer)[state][name], values)


def test_overflow_leaves_narrow_state_as_it_was() -> None:
    trainer = Trainer(narrow_adam(**NARROWEST), FP16)
    trainer.step(0)
    before = decoded(trainer.optimizer)
    assert trainer.step(1, scale=1e6).skipped
    after = decoded(trainer.optimizer)
    assert all(torch.equal(after[state][name], values) for state in before for name, values in before[state].items())


@pytest.mark.parametrize("chunk", [32, 64])
def test_chunks_change_no_bits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for size in (CHUNK, chunk):
        monkeypatch.setattr("megapipe.optimizer.shards.CHUNK", size)
        trainer = Trainer(narrow_adam(**NARROWEST), BF16)
        for number in range(2):
            trainer.step(number)
        weights.append(trainer.weights())
    assert all(torch.equal(weights[1][name], values) for name, values in weights[0].items())


def train(rank: int, world: int, dtypes: dict[str, str], steps: range, bf16_sum: bool = False) -> dict[str, Tensor]:
    """Train with one exactly summable gradient in each step; return the weights."""
    config, groups = narrow_adam(**dtypes), groups_of(rank, dp=world)
    gradient = DTYPES[state_dtypes(config, BF16).gradient]
    buffers = stage_buffers(toy_specs(), Sharing.of(groups, 1), param_dtype=torch.bfloat16, grad_dtype=gradient)
    module = Toy()
    buffers.materialize(module, draw)
    stores = Stores({0: buffers}, groups, reduce_in_bf16=bf16_sum)
    optimizer = Optimizer(stores, groups, config, BF16)
    for step in steps:
        stores.begin_step(1)
        stores.wait(0)
        # multiples of 1/8 below 4: sums of two have at most 6 bits, so that no order or dtype rounds them
        for microbatch in range(2):
            if microbatch % world == rank:
                for place, spec in enumerate(toy_specs()):
                    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + place)
                    drawn = torch.randint(-16, 17, spec.shape, generator=generator) / 8
                    buffers.main_grad(spec.name).add_(drawn)
        stores.finish_gradients()
        optimizer.step(1 / 2, RATES)
    stores.finish_weights()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_two_shards_train_to_the_bits_of_one_process(two_ranks: RankPool) -> None:
    expected = train(0, 1, NARROWEST, range(4))
    for weights in two_ranks.run(train, NARROWEST, range(4)):
        assert all(torch.equal(weights[name], values) for name, values in expected.items())


def test_bf16_gradients_are_reduced_alike_with_and_without_the_flag(two_ranks: RankPool) -> None:
    plain, flagged = (two_ranks.run(train, NARROWEST, range(2), flag)[0] for flag in (False, True))
    assert all(torch.equal(flagged[name], values) for name, values in plain.items())


def test_gradients_accumulate_in_their_dtype() -> None:
    """256 + 1 == 256 in bf16."""
    trainer = Trainer(narrow_adam(main_grads_dtype="bf16"), BF16)
    slot = trainer.buffers.main_grad("up.bias")
    trainer.stores.begin_step(2)
    slot.add_(torch.full(slot.shape, 256.0))
    slot.add_(torch.full(slot.shape, 1.0))
    assert (slot == 256).all()


def test_chunks_cover_each_element_once() -> None:
    shard = Trainer(narrow_adam(**NARROWEST), BF16).optimizer.shards[0]
    elements = [place for chunk in shard.chunks() for place in range(chunk.start, chunk.stop)]
    assert elements == sorted(set(elements))
