"""A token mixer of an extension (examples/extend_mixer.py): grids equal one process, its plan is what is counted, its
checkpoints resume on other grids, and it is refused where it cannot run.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.layers import layer_configs
from megapipe.config.load import load_config
from megapipe.config.rules.check import check
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.snapshot import read_checkpoint
from megapipe.extras.dry_run.rank import STATE, count_rank, random_reader
from megapipe.plan.layer_costs import linear_weights, replayed_flops
from megapipe.plan.memory import rank_memory
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.traces import layer_trace
from megapipe.registry import EXTENSIONS
from megapipe.schedule.action import Op
from megapipe.trace.parameters import model_parameters
from tests.extras.dry_run.grids import make_plan
from tests.extras.verify.grids import compared
from tests.harness import run_ranks
from tests.tables import options, rows
from tests.tiny import tiny_config
from tests.train.jobs import job, job_on_rank, steps_of

FILE = str(Path(__file__).resolve().parent.parent / "examples" / "extend_mixer.py")
DECAY = {"attention_kind": "decay"}
SP2 = {"tp": 2, "sp": True}
ZB = {"pp": 2, "pipeline_schedule": "zb-h1"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME_LAYERS = {"attention_kind": "softmax", "layer_pattern": ("1 attention_kind=decay", "1", "...")}
# a second mixer: a parameter that every tp rank has whole, so that its gradient is summed over tp
SHARED = """
import torch
from torch import nn
from megapipe.extend import register_mixer
from megapipe.model.mixer import Mixer

class Reference(nn.Module):
    def __init__(self, hidden_size, has_biases, options):
        super().__init__()
        self.linear_in = nn.Linear(hidden_size, hidden_size, bias=has_biases)
        self.linear_out = nn.Linear(hidden_size, hidden_size, bias=has_biases)
        self.rates = nn.Parameter(torch.empty(1))

    def forward(self, x):
        return self.linear_out(self.linear_in(x).cumsum(1) * self.rates)

@register_mixer("shared", reference=Reference)
class Shared(Mixer):
    def __init__(self, layer, factory):
        super().__init__(layer, factory)
        self.linear_in, self.linear_out = self.column(self.hidden_size), self.row(self.hidden_size)
        self.rates = self.parameter(1, cut=None, init="ones")

    def mix(self, x, rates):
        return x.cumsum(0) * rates
"""


@pytest.fixture(autouse=True)
def loaded() -> None:
    EXTENSIONS.load(FILE)


def on_a_grid(rank: int, world_size: int, options: dict[str, Any], file: str = FILE) -> tuple[int, bool, str]:
    """Compare a grid with one process, in fp64."""
    EXTENSIONS.load(file)
    steps, report = compared(rank, world_size, tiny_config(**DECAY | options), "fp64")
    return len(steps), all(step.passes for step in steps), report


TABLE = rows(Path(__file__).with_name("mixer.tsv"))
GRIDS, COUNTED = (
    {name: (int(ranks), options(words, globals())) for row, ranks, words, name in TABLE if row == kind}
    for kind in ("grids", "counted")
)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_equals_the_reference(grid: str) -> None:
    world_size, options = GRIDS[grid]
    found = run_ranks(on_a_grid, world_size, options)[0]
    assert found[:2] == (3, True), found[2]


def test_gradients_of_parameters_that_are_not_cut_are_summed_over_tp(tmp_path: Path) -> None:
    file = tmp_path / "shared.py"
    file.write_text(SHARED)
    found = run_ranks(on_a_grid, 2, SP2 | {"attention_kind": "shared"}, str(file))[0]
    assert found[:2] == (3, True), found[2]


def test_verify_grid_passes_from_the_command_line() -> None:
    code, said = job(f"--extension {FILE} --attention-kind decay --train-iters 5 --verify-grid")
    assert code == 0 and "same: loss, gradient norm" in said, said


def test_its_module_declares_its_parameters_and_flops_and_its_trace_has_its_products() -> None:
    config = resolve(tiny_config(**DECAY, hidden_size=16, tp=2), 2).config.model
    found = {
        spec.name.removeprefix("decoder.layers.0.self_attention."): spec for spec in model_parameters(config, True)
    }
    decay = found["decay"]
    assert (decay.shape, decay.local_shape(1, 2), decay.weight_decay, decay.owner) == ((16,), (8,), False, 0)
    assert found["linear_in.weight"].shape == (32, 16) and found["linear_out.weight"].shape == (16, 16)
    plan = make_plan(2, DECAY | {"tensor_model_parallel_size": 2, "hidden_dropout": 0.0})
    layer, hidden = plan.model.layers[0], plan.config.model.hidden_size
    weights = {f"self_attention.{name}": count * hidden**2 for name, count in (("linear_in", 2), ("linear_out", 1))}
    assert {f"{name}.weight": count for name, count in weights.items()}.items() <= linear_weights(layer).items()
    products = [each for each in layer_trace(layer, plan.shape).products if each.op is Op.F]
    assert {each.name: 2 * each.num_weights for each in products[:2]} == weights  # of two ranks
    recompute = resolve(tiny_config(**DECAY, **SELECTIVE), 1).config.recompute
    assert replayed_flops(layer, recompute, 8, True) == 4.0 * hidden


@pytest.mark.parametrize("grid", COUNTED)
def test_planned_memory_is_the_counted_one(grid: str) -> None:
    world_size, options = COUNTED[grid]
    plan = make_plan(world_size, {"hidden_dropout": 0.0, "device": "cpu", **DECAY, **options})
    counted, memory = count_rank(plan, 0, random_reader(plan), "cpu"), rank_memory(plan, 0)
    assert {item: counted.items[item] for item in STATE} == {item: memory.items.get(item, 0) for item in STATE}
    assert counted.peak == pytest.approx(memory.total, rel=0.005), (counted, dict(memory.items))


def test_the_plan_names_the_layers_that_have_it() -> None:
    plan = resolve(tiny_config(**DECAY | SOME_LAYERS, num_layers=4), 1)
    assert [layer.mixer for layer in layer_configs(plan.config.model)] == ["decay", None] * 2
    lines = [line for line in plan_text(plan).splitlines() if "attention_kind" in line]
    assert [line.split("  ")[-1] for line in lines] == ["attention_kind decay", "attention_kind softmax"]


BASE = f"--extension {FILE} --attention-kind decay --hidden-dropout 0 --lr-decay-style constant --dtype fp64"


def test_a_run_resumes_on_another_grid_with_the_same_losses(tmp_path: Path) -> None:
    grid = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    flags = f"{BASE} {grid} --pipeline-schedule zb-h1 --use-distributed-optimizer --save {tmp_path}/run --train-iters 3"
    _, kind, text = run_ranks(job_on_rank, 4, flags)[0]
    assert (kind, text) == ("", None)
    code, said = job(f"{BASE} --load {tmp_path}/run --save {tmp_path}/run --train-iters 5")
    assert code == 0 and "continuing after step 3" in said, said
    code, said = job(f"{BASE} --save {tmp_path}/whole --train-iters 5")
    assert code == 0, said
    resumed, whole = (
        [line["loss"] for line in steps_of(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole")
    )
    assert len(whole) == 5 and resumed == pytest.approx(whole, rel=1e-10) and whole[-1] < whole[0]

    code, said = job(f"{BASE} --attention-options expand=2 --load {tmp_path}/run --train-iters 6")
    assert code != 0 and "--attention-options" in said, said
    code, said = job(f"{BASE.replace('decay ', 'softmax ')} --load {tmp_path}/run --train-iters 6")
    assert code != 0 and "--attention-kind: decay in the checkpoint, softmax here" in said, said
    snapshot = read_checkpoint(tmp_path / "run")
    with pytest.raises(MegapipeError, match="decay"):
        hugging_face.write(snapshot, tmp_path / "converted")
    code, said = job(f"{BASE} --load {tmp_path}/run --sample-prompts 1 --train-iters 6")
    assert code == 2 and "--sample-prompts" in said


REFUSED = {name: (flags, said) for kind, flags, said, name in TABLE if kind == "refused"}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_where_it_cannot_run(case: str) -> None:
    flags, message = REFUSED[case]
    base = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 32 --micro-batch-size 1"
    with pytest.raises(ConfigError) as caught:
        check(load_config([*base.split(), "--attention-kind", "decay", *shlex.split(flags)], is_job=False).config)
    assert message in str(caught.value), str(caught.value)
