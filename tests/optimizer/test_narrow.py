"""Optimizer state narrower than fp32: against the written-out formula, bit patterns, rollback, resuming, grids."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.optimizer.narrow import NarrowState
from megapipe.optimizer.optimizer import Optimizer
from megapipe.optimizer.schedule import Rates
from megapipe.optimizer.shards import Chunk
from megapipe.sharding.state_dtypes import CHUNK, state_dtypes
from tests.data_parallel.toy import Toy, draw, groups_of, stage_buffers, tokens_of, toy_specs
from tests.harness import RankPool
from tests.optimizer.test_optimizer import ADAM, DTYPES, Trainer

RATES = Rates(0.01, 0.1, 0.003)
BITS = {"fp32": 24, "bf16": 8, "fp16": 11, "fp8": 4}  # of the significand
LEAST = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24, "fp8": 2.0**-9}  # smallest positive number
BF16 = PrecisionConfig(dtype="bf16")
FP16 = PrecisionConfig(dtype="fp16", initial_loss_scale=64.0)
NARROWEST = {"main_grads_dtype": "bf16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}


def narrow_adam(**dtypes: Any) -> OptimizerConfig:
    return dataclasses.replace(ADAM, use_precision_aware_optimizer=True, **dtypes)


# every dtype of gradients with every one of masters and moments that a precision allows
COMBINATIONS = [
    (precision, gradient, master, first, second)
    for precision, gradients in ((BF16, ("fp32", "bf16")), (FP16, ("fp32", "bf16", "fp16")))
    for gradient, master in itertools.product(gradients, ("fp32", "fp16"))
    for first, second in itertools.product(("fp32", "bf16", "fp16", "fp8"), repeat=2)
]


def decoded(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return state -> parameter -> values in fp64, decoded from the stored tensors alone."""
    found: dict[str, dict[str, Tensor]] = {}
    for shard in optimizer.shards:
        for state, stored in shard.states.items():
            for part, piece in shard.pieces():
                name = piece.spec.name
                values = stored[part].double()
                if stored.dtype == torch.int16:
                    bits = (shard.parameter[part].detach().view(torch.int16).long() << 16) + stored[part].long()
                    values = torch.from_numpy((bits & 0xFFFFFFFF).numpy().astype(np.uint32).view(np.float32)).double()
                elif shard.scales is not None and state in shard.scales.rows:
                    scales = shard.scales
                    values = values * scales.current[scales.rows[state], scales.columns[shard.stage, name]].double()
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


def half_unit(values: Tensor, dtype: str, largest: float) -> Tensor:
    """Return half the distance between neighbouring numbers of a dtype around each value; scaled ones by `largest`."""
    exponent = torch.frexp(values)[1].double()
    least = LEAST[dtype]
    if dtype in ("fp16", "fp8"):
        top = 15 if dtype == "fp16" else 8
        least *= 2.0 ** (math.frexp(largest)[1] - top)
    return torch.maximum(torch.exp2(exponent - BITS[dtype]), torch.full_like(values, least)) / 2


@pytest.mark.parametrize(
    ("precision", "gradient", "master", "first", "second"),
    COMBINATIONS,
    ids=["-".join([each[0].dtype, *each[1:]]) for each in COMBINATIONS],
)
def test_each_step_is_the_formula_with_one_rounding_of_each_state(
    precision: PrecisionConfig, gradient: str, master: str, first: str, second: str
) -> None:
    dtypes = {"master": master, "exp_avg": first, "exp_avg_sq": second}
    config = narrow_adam(
        main_grads_dtype=gradient, main_params_dtype=master, exp_avg_dtype=first, exp_avg_sq_dtype=second
    )
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
                bound = half_unit(values, dtypes[state], values.abs().max().item()) * 1.01
                bound += 5e-7 * (states[state].abs() + terms[state])  # the formula itself is computed in fp32
                assert ((after[state][name] - values).abs() <= bound).all(), (step, state, name)
            rounded = after["master"][name].float()
            distance = (trainer.buffers.parameter(name).double().flatten() - rounded.double()).abs()
            assert (distance <= half_unit(rounded.double(), precision.dtype, 1.0)).all() or precision.dtype == "fp16"
    assert not optimizer.stale_parameters()


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def remainder_state(size: int) -> tuple[NarrowState, Tensor]:
    parameter = torch.zeros(size, dtype=torch.bfloat16)
    return NarrowState("remainder", torch.zeros(size, dtype=torch.int16), parameter), parameter


def check_remainders(patterns: Tensor) -> None:
    """Write these fp32 bit patterns and read them back."""
    values = patterns.view(torch.float32)
    state, parameter = remainder_state(values.numel())
    state.write(0, values.clone())
    read = state.read(0, values.numel())
    numbers = ~values.isnan()
    assert torch.equal(bits_of(read)[numbers], patterns[numbers])
    assert read[~numbers].isnan().all()
    assert parameter[~numbers].isnan().all()
    # fp32 rounded to bf16: the nearest, of two equally near ones that of larger magnitude
    nearest = values[numbers].bfloat16()
    halfway = (patterns[numbers] & 0xFFFF) == 0x8000
    assert torch.equal(parameter[numbers][~halfway].view(torch.int16), nearest[~halfway].view(torch.int16))
    away = ((patterns[numbers][halfway].long() >> 16) + 1).to(torch.int16)
    assert torch.equal(parameter[numbers][halfway].view(torch.int16), away)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_parameter_and_remainder_are_the_fp32_master_to_the_bit(patterns: list[int]) -> None:
    check_remainders(torch.tensor(patterns, dtype=torch.int32))


def test_remainders_of_every_low_half_beside_special_high_halves() -> None:
    # zeros, subnormals, one, rounding up to the next power of two, largest number, infinity, NaNs; both signs
    for high in (0x0000, 0x0001, 0x007F, 0x3F80, 0x3FFF, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF):
        for sign in (0, 0x8000):
            (base,) = struct.unpack("<i", struct.pack("<I", (high | sign) << 16))
            check_remainders(torch.arange(1 << 16, dtype=torch.int32) + base)


def test_masters_of_remainders_are_those_of_whole_fp32_masters() -> None:
    """With equal gradients and fp32 moments the update is the one without the option."""
    whole, halves = Trainer(ADAM, BF16), Trainer(narrow_adam(), BF16)
    assert all(shard.has_remainders for shard in halves.optimizer.shards)
    for step in range(4):
        for trainer in (whole, halves):
            for place, spec in enumerate(toy_specs()):
                generator = torch.Generator().manual_seed(100 * step + place)
                trainer.buffers.main_grad(spec.name).copy_(torch.randn(spec.shape, generator=generator))
            trainer.optimizer.step(1.0, RATES)
    one, other = decoded(whole.optimizer), decoded(halves.optimizer)
    for state, parameters in one.items():
        for name, values in parameters.items():
            torch.testing.assert_close(other[state][name], values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_scale_of_what_was_stored_is_the_scale_it_was_stored_with(dtype: str) -> None:
    trainer = Trainer(narrow_adam(exp_avg_dtype=dtype), BF16)
    shard = trainer.optimizer.shards[0]
    scales, (chunk, *_) = shard.scales, list(shard.chunks())
    assert scales is not None
    place = scales.rows["exp_avg"], scales.columns[0, chunk.spec.name]
    generator = torch.Generator().manual_seed(0)
    for exponent in (-60, -3, 0, 40):
        # just below a power of two: rounded up to it
        for top in (1.0, 1.5, 2 - 2**-5, 2 - 2**-12, 2 - 2**-13, 2 - 2**-20):
            values = (torch.rand(chunk.stop - chunk.start, generator=generator) - 0.5) * 2.0**exponent
            values[0] = -top * 2.0**exponent
            stored = []
            for _ in range(2):  # the second time what was read the first time
                largest = torch.zeros_like(scales.current)
                shard.add_largest("exp_avg", chunk, values, largest)
                scales.current.copy_(scales.agree(largest, torch.device("cpu")))
                shard.write("exp_avg", chunk, values.clone(), scales.current)
                values = shard.read("exp_avg", chunk)
                stored.append((scales.current[place].item(), shard.states["exp_avg"].float().clone()))
            assert stored[0][0] == stored[1][0]
            assert torch.equal(stored[0][1], stored[1][1])
            most = stored[0][1].abs().max().item()
            assert (2.0**14 <= most <= 2.0**15) if dtype == "fp16" else (2.0**7 <= most <= 2.0**8)


@pytest.mark.parametrize("dtypes", [{}, NARROWEST, {"main_params_dtype": "fp16"}], ids=["remainders", "all", "fp16"])
def test_narrow_state_on_the_host_trains_the_same_to_the_bit(dtypes: dict[str, str]) -> None:
    here = Trainer(narrow_adam(**dtypes), BF16)
    there = Trainer(narrow_adam(optimizer_cpu_offload=True, **dtypes), BF16)
    for number in range(3):
        assert here.step(number) == there.step(number)
    assert all(torch.equal(there.weights()[name], value) for name, value in here.weights().items())
    for state, parameters in decoded(here.optimizer).items():
        for name, values in parameters.items():
            if state != "master" or dtypes.get("main_params_dtype") == "fp16":
                assert torch.equal(decoded(there.optimizer)[state][name], values)


def test_overflow_leaves_narrow_state_as_it_was() -> None:
    trainer = Trainer(narrow_adam(**NARROWEST | {"main_grads_dtype": "fp16"}), FP16)
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


Saved = list[tuple[dict[tuple[str, str, Any], Tensor], dict[str, Any]]]


def load(optimizer: Optimizer, saved: Saved) -> None:
    """Fill the state of any grid from what all ranks of another one saved."""
    whole: dict[tuple[str, str], Tensor] = {}
    shapes = {spec.name: spec.shape for spec in toy_specs()}
    for state, _ in saved:
        for (key, name, box), values in state.items():
            target = whole.setdefault((key, name), torch.full(shapes[name], math.nan))
            target[box.slices] = values.view(box.shape)
    pieces = list(optimizer.state())
    for piece in pieces:
        piece.values.copy_(whole[piece.key, piece.piece.spec.name][piece.piece.box.slices].reshape(-1))
    optimizer.load_plain_state(saved[0][1])
    optimizer.load_state(pieces)


def train(
    rank: int, world: int, dtypes: dict[str, str], steps: range, saved: Saved | None = None, bf16_sum: bool = False
) -> tuple[dict[str, Tensor], dict[tuple[str, str, Any], Tensor], dict[str, Any]]:
    """Train with one exactly summable gradient in each step; return weights, what the rank saves, and plain state."""
    config, groups = narrow_adam(**dtypes), groups_of(rank, dp=world)
    gradient = DTYPES[state_dtypes(config, BF16).gradient]
    buffers = stage_buffers(toy_specs(), Sharing.of(groups, 1), param_dtype=torch.bfloat16, grad_dtype=gradient)
    module = Toy()
    buffers.materialize(module, draw)
    stores = Stores({0: buffers}, groups, reduce_in_bf16=bf16_sum)
    optimizer = Optimizer(stores, groups, config, BF16)
    if saved is not None:
        buffers.fill(lambda spec: torch.zeros(spec.shape))
        load(optimizer, saved)
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
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    state = {(p.key, p.piece.spec.name, p.piece.box): p.values.clone() for p in optimizer.state() if p.primary}
    return weights, state, optimizer.plain_state()


GRIDS = pytest.mark.parametrize(
    "dtypes",
    [{}, NARROWEST, {"main_params_dtype": "fp16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}],
    ids=["remainders", "narrowest", "fp16 masters"],
)


@GRIDS
def test_two_shards_train_to_the_bits_of_one_process(dtypes: dict[str, str], two_ranks: RankPool) -> None:
    expected = train(0, 1, dtypes, range(4))[0]
    for weights, _, _ in two_ranks.run(train, dtypes, range(4)):
        assert all(torch.equal(weights[name], values) for name, values in expected.items())


@GRIDS
def test_state_saved_by_two_ranks_continues_on_one_to_the_bit(dtypes: dict[str, str], two_ranks: RankPool) -> None:
    expected, state, _ = train(0, 1, dtypes, range(4))
    saved = [(state, plain) for _, state, plain in two_ranks.run(train, dtypes, range(2))]
    assert all(values.dtype == torch.float32 for state, _ in saved for values in state.values())
    weights, resumed, _ = train(0, 1, dtypes, range(2, 4), saved)
    assert all(torch.equal(weights[name], values) for name, values in expected.items())
    assert all(torch.equal(resumed[key], values) for key, values in state.items())
    back: Saved = [train(0, 1, dtypes, range(2))[1:]]
    for weights, _, _ in two_ranks.run(train, dtypes, range(2, 4), back):
        assert all(torch.equal(weights[name], values) for name, values in expected.items())


def test_bf16_gradients_are_reduced_alike_with_and_without_the_flag(two_ranks: RankPool) -> None:
    plain, flagged = (two_ranks.run(train, NARROWEST, range(2), None, flag)[0][0] for flag in (False, True))
    assert all(torch.equal(flagged[name], values) for name, values in plain.items())


def test_gradients_accumulate_in_their_dtype() -> None:
    """256 + 1 == 256 in bf16."""
    trainer = Trainer(narrow_adam(main_grads_dtype="bf16"), BF16)
    slot = trainer.buffers.main_grad("up.bias")
    trainer.stores.begin_step(2)
    slot.add_(torch.full(slot.shape, 256.0))
    slot.add_(torch.full(slot.shape, 1.0))
    assert (slot == 256).all()


def test_params_norm_and_chunks_cover_narrow_masters() -> None:
    narrow_one, whole = Trainer(narrow_adam(main_params_dtype="fp16"), FP16), Trainer(ADAM, FP16)
    assert narrow_one.optimizer.parameters_norm() == pytest.approx(whole.optimizer.parameters_norm(), rel=1e-6)
    shard = narrow_one.optimizer.shards[0]
    covered: Callable[[Chunk], range] = lambda chunk: range(chunk.start, chunk.stop)  # noqa: E731
    elements = [place for chunk in shard.chunks() for place in covered(chunk)]
    assert elements == sorted(set(elements))
