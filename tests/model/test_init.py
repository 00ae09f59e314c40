"""Initial weights depend only on the seed and the name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.comm.groups import Group
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.verify.conversion import replace_parameter
from megapipe.model.stage import GPTStage
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import Init, ParamSpec
from megapipe.tensor_parallel import random
from megapipe.tensor_parallel.random import draw, draw_box_into
from megapipe.trace.parameters import model_parameters
from tests.model.grids import GPT2, LLAMA, local_slice, model_config

SEED = 1234


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "BLOCK_ELEMENTS", 100)  # a few rows, so that slices start and end inside blocks


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("options", [GPT2, LLAMA, LLAMA | {"num_query_groups": 1}], ids=["gpt2", "llama", "mqa"])
def test_slices_of_any_grid_are_slices_of_one_tensor(options: dict, tp: int) -> None:
    for spec in model_parameters(model_config(**options), False):
        whole = draw(spec, 0, 1, SEED)
        assert whole.shape == spec.shape
        for tp_rank in range(tp):
            assert torch.equal(draw(spec, tp_rank, tp, SEED), local_slice(spec, whole, tp_rank, tp)), (
                spec.name,
                tp_rank,
            )


@given(st.data())
@settings(max_examples=40)
def test_any_rectangle_equals_that_of_the_full_weight(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 30))
    spec = ParamSpec("x.weight", (rows, columns), 0, init=Init("normal", 0.5))
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    box = Box((row, column), (data.draw(st.integers(1, rows - row)), data.draw(st.integers(1, columns - column))))
    values = torch.empty(box.shape)
    draw_box_into(values, spec, box, SEED)
    assert torch.equal(values, draw(spec, 0, 1, SEED)[box.slices])


@pytest.mark.parametrize("cut", [[(0, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 2), (2, 3)]], ids=["pp1", "pp2", "pp3"])
def test_stages_of_any_cut_draw_the_same_weights(cut: list[tuple[int, int]]) -> None:
    config = model_config(**GPT2, num_layers=3)
    specs = model_parameters(config, False)
    held: dict[str, torch.Tensor] = {}
    for start, stop in cut:
        layers = StageLayers(start, stop, start == 0, stop == 3)
        stage = GPTStage(
            config,
            layers,
            Group.alone("tp"),
            sequence_parallel=False,
            recompute=RecomputeConfig(),
            loss=TrainingConfig(),
        )
        by_name = {spec.name: spec for spec in specs}
        for name, parameter in list(stage.named_parameters()):
            replace_parameter(stage, parameter, torch.nn.Parameter(draw(by_name[name], 0, 1, SEED)))
        for name, parameter in stage.named_parameters():
            assert name not in held or torch.equal(held[name], parameter), name  # both ends of a tied weight
            held[name] = parameter
    assert held.keys() == {spec.name for spec in specs}
    for spec in specs:
        assert torch.equal(held[spec.name], draw(spec, 0, 1, SEED)), spec.name


def test_the_values_are_normal_with_the_declared_deviation() -> None:
    values = draw(ParamSpec("x.weight", (400, 300), 0, init=Init("normal", 0.02)), 0, 1, SEED)
    assert abs(values.mean().item()) < 3e-4
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.unique().numel() > 0.99 * values.numel()  # no block repeats another


def test_seed_and_name_make_the_values_and_padding_and_dtype_do_not() -> None:
    spec = ParamSpec("x.weight", (30, 7), 0, init=Init("normal", 1.0))
    values = draw(spec, 0, 1, SEED)
    assert not torch.equal(values, draw(spec, 0, 1, SEED + 1))
    assert not torch.equal(values, draw(dataclasses.replace(spec, name="y.weight"), 0, 1, SEED))
    assert torch.equal(values, draw(dataclasses.replace(spec, shape=(64, 7)), 0, 1, SEED)[:30])
    assert torch.equal(values.double(), draw(spec, 0, 1, SEED, torch.float64))
    assert torch.equal(values.bfloat16(), draw(spec, 0, 1, SEED, torch.bfloat16))


def test_the_stream_is_the_same_on_every_machine_and_python() -> None:
    spec = ParamSpec("embedding.word_embeddings.weight", (2, 2), "embedding", init=Init("normal", 1.0))
    expected = torch.tensor([[-0.5436623692512512, 0.14228740334510803], [0.811017632484436, 0.07488301396369934]])
    assert torch.equal(draw(spec, 0, 1, SEED), expected)
