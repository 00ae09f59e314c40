"""Loss and gradient-norm curves of Megatron-Core.

They are reproduced on many grids through the training step of pretrain_gpt.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.optimizer.schedule import Rates
from tests.extras.reference.megatron_curves import Curve, load_curve
from tests.harness import run_ranks
from tests.train.grids import runtime_of, step_microbatches, trainer

GPT2 = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2_chunks2": {"pp": 2, "chunks": 2},
    "dp2": {"dp": 2},
    "dp2_zero": {"dp": 2, "zero": True},
    "tp2_pp2_dp2_sp_zero": {"tp": 2, "pp": 2, "dp": 2, "sp": True, "zero": True},
    "tp2_pp2_chunks2_dp2_sp_zero": {"tp": 2, "pp": 2, "chunks": 2, "dp": 2, "sp": True, "zero": True},
}
LLAMA = {
    "one": {},
    "tp3": {"tp": 3},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2_chunks2": {"pp": 2, "chunks": 2},
    "dp2": {"dp": 2},
    "dp2_zero": {"dp": 2, "zero": True},
    "tp3_pp2_dp2_sp_zero": {"tp": 3, "pp": 2, "dp": 2, "sp": True, "zero": True},
}
CASES = [("megatron_gpt2", name) for name in GPT2] + [("megatron_llama", name) for name in LLAMA]


def configuration(
    curve: Curve, tp: int = 1, pp: int = 1, dp: int = 1, chunks: int = 1, sp: bool = False, zero: bool = False
) -> Config:
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    model: dict[str, Any] = {key: value for key, value in curve.config.items() if key in fields}
    return Config(
        model=ModelConfig(**(model | {"hidden_dropout": 0.0, "attention_dropout": 0.0})),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            num_virtual_stages_per_pipeline_rank=chunks,
            sequence_parallel=sp,
            use_distributed_optimizer=zero,
            overlap_grad_reduce=True,
            overlap_param_gather=zero,
        ),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=len(curve.losses)),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.999, adam_eps=1e-8),
    )


def run_curve(rank: int, world_size: int, name: str, grid: dict[str, Any]) -> list[tuple[float, float]]:
    """Train over the curve's batches and return (loss, gradient norm) of every step."""
    curve = load_curve(name)
    runtime = runtime_of(configuration(curve, **grid), rank, world_size, curve.weights)
    step = trainer(runtime)
    results = []
    for index, lr in enumerate(curve.lrs):
        rows = curve.rows[8 * index : 8 * index + 8].numpy()
        result = step.run(step_microbatches(runtime, rows, index), Rates(lr, 0.1))
        results.append((result.loss, result.update.grad_norm))
    return results


@pytest.mark.parametrize(("name", "grid"), CASES, ids=[f"{name}-{grid}" for name, grid in CASES])
def test_the_curve_of_megatron_is_reproduced(name: str, grid: str) -> None:
    axes = (GPT2 if name == "megatron_gpt2" else LLAMA)[grid]
    world = axes.get("tp", 1) * axes.get("pp", 1) * axes.get("dp", 1)
    curve = load_curve(name)
    results = run_ranks(run_curve, world, name, axes)
    assert all(result == results[0] for result in results), "ranks disagree"
    for step, ((loss, norm), (loss_tolerance, norm_tolerance)) in enumerate(
        zip(results[0], curve.tolerances, strict=True)
    ):
        assert loss == pytest.approx(curve.losses[step], abs=loss_tolerance), f"loss of step {step}"
        assert norm == pytest.approx(curve.grad_norms[step], rel=norm_tolerance), f"gradient norm of step {step}"
