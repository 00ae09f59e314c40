"""tools/bench/card.py on a CPU: the twin of every part, failures, and the plans of a card's sizes."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megapipe.plan.memory import rank_memory

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
H100_BYTES = 80 * 10**9
FIGURES = {  # one of each part, that its twin has too
    "layer-bf16": "2 layers.compiled blocks.model",
    "layer-fp8": "fp8 by blocks to bf16",
    "layer-peers": "megapipe to torch.compile",
    "train-0.5b": "tokens a second",
    "train-1.5b": "tokens a second",
    "experts": "grouped products.step",
    "latent": "megapipe.step",
    "ring": "largest difference of a loss",
    "muon": "muon to adam",
    "optimizer": "torch.bytes a second",
    "memory": "latent attention.allocated",
    "rank": "step",
    "graphs": "launches on",
    "compile": "tiny.steps, off to on",
    "offload": "memory freed",
    "calibrate": "memory, TB/s",
    "primitives": "loss backward TB/s",
}

QUICK = ("optimizer", "muon", "primitives")

Tools = Callable[[str], ModuleType]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # the tool sets it if unset
    return importlib.import_module


@pytest.fixture
def on_card(tools: Tools) -> Any:
    """Return a report that takes the sizes of a card of 80 GB; nothing can be measured with it."""
    report = tools("card_bench.report").Report

    class Card(report):  # type: ignore[misc, valid-type]
        total_memory = H100_BYTES

    card = Card("cpu")
    card.device, card.on_gpu = torch.device("cuda", 0), True
    return card


def run(tools: Tools, file: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = tools("card").main([*words, "--device", "cpu", "--json", str(file)])
    return code, json.loads(file.read_text())


def test_every_part_has_an_expected_figure(tools: Tools) -> None:
    assert list(tools("card").PARTS) == list(FIGURES)


@pytest.mark.parametrize("name", QUICK)
def test_a_twin_measures_what_a_card_would(
    name: str, tools: Tools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tools, tmp_path / "figures.json", name)
    assert code == 0, found["failed"]
    assert set(found) == {"figures", "bars", "sentences", "failed", "machine"}
    assert all(key.startswith(f"{name}.") and math.isfinite(value) for key, value in found["figures"].items())
    assert f"{name}.{FIGURES[name]}" in found["figures"]
    assert all(set(bar) == {"name", "value", "bar", "met"} for bar in found["bars"])
    assert found["machine"]["predictions"] == "h100"
    assert f"| {name}.{FIGURES[name]} |" in capsys.readouterr().out


# train-1.5b has the twin of train-0.5b
@pytest.mark.parametrize("name", [name for name in FIGURES if name not in (*QUICK, "train-1.5b")])
def test_a_longer_twin_measures_what_a_card_would(name: str, tools: Tools, tmp_path: Path) -> None:
    code, found = run(tools, tmp_path / "figures.json", name)
    assert code == 0 and f"{name}.{FIGURES[name]}" in found["figures"], found["failed"]


def test_a_failed_measurement_is_recorded_and_does_not_stop_the_others(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    features = tools("card_bench.features")
    job = features.Job

    def planted(plan: Any, device: torch.device) -> Any:
        if plan.config.optimizer.optimizer == "muon":
            raise RuntimeError("planted")
        return job(plan, device)

    monkeypatch.setattr(features, "Job", planted)
    code, found = run(tools, tmp_path / "figures.json", "muon", "primitives")
    assert code == 1 and list(found["failed"]) == ["muon.muon"] and "planted" in found["failed"]["muon.muon"]
    assert {"muon.adam.update", "primitives.copy TB/s"} <= found["figures"].keys()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["layer-bf17"], "layer-bf17"),
        ([], "part"),
        (["muon", "--json", "no/such/folder.json"], "--json"),
        (["muon", "--check"], "--check"),
    ],
    ids=["name", "no name", "json", "check"],
)
def test_a_call_that_cannot_run_is_one_message(
    words: list[str], key: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools("card").main([*words, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert key in said and said.count("\n") == 1


def test_without_a_gpu_the_tool_refuses(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tools("card").main(["muon"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_card_runs_is_planned_and_fits_into_80_gigabytes(tools: Tools, on_card: Any) -> None:
    features, switches, memory, training, jobs = (
        tools(f"card_bench.{name}") for name in ("features", "switches", "memory", "training", "jobs")
    )
    flags = [features.EXPERTS, features.LATENT, f"{features.UPDATED} --optimizer-impl compiled", features.UPDATED]
    flags += [f"{jobs.QWEN_05B} {features.SMALL_BATCH} --optimizer muon", f"{switches.SMALL} {switches.GRAPHS}"]
    flags += [f"--num-layers 8 --seq-length 4096 {switches.LAYERS_OF_8B} {switches.OFFLOAD}"]
    flags += [*switches.BLOCKS_OF.values(), features.RING_HEADS["cuda"] + " " + features.SMALL_BATCH]
    flags += [training.flags_of(on_card, name) for name in training.MODELS]
    flags += jobs.SHAPES.values()
    plans = [jobs.plan_of(on_card, each) for each in flags]
    plans += [memory.plan_for(on_card, name) for name in memory.CONFIGURATIONS] + [memory.rank_plan(on_card)]
    assert len(memory.CONFIGURATIONS) == 12
    for plan in plans:
        assert rank_memory(plan, 0).total < 0.9 * H100_BYTES, plan.config.model
    predictions = [jobs.predicted_ms(on_card, plan) for plan in plans if plan.config.precision.dtype == "bf16"]
    assert all(each is not None and each > 0.0 for each in predictions)


def test_models_of_the_published_rows_have_their_parameters(tools: Tools, on_card: Any) -> None:
    training, jobs = tools("card_bench.training"), tools("card_bench.jobs")
    for name, billions in (("train-0.5b", 0.494), ("train-1.5b", 1.544)):  # of the model cards
        plan = jobs.plan_of(on_card, training.flags_of(on_card, name))
        assert plan.num_elements([0]) / 1e9 == pytest.approx(billions, abs=5e-4)
        assert plan.batch.full * plan.config.model.seq_length == 524_288


def test_a_peer_that_computes_something_else_fails(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools("card_bench.plain"), "rotated", lambda x, cos, sin: x)
    layers = tools("card_bench.layers")
    monkeypatch.setattr(layers, "PEERS", {"torch.compile": layers.PEERS["torch.compile"]})
    code, found = run(tools, tmp_path / "figures.json", "layer-peers")
    assert code == 1 and list(found["failed"]) == ["agreement of 2 layers, torch.compile"]


def test_a_missed_bar_fails_a_check_and_a_missed_goal_does_not(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    card = tools("card")
    monkeypatch.setattr(card, "refusal", lambda arguments: None)
    for is_goal, code in ((True, 0), (False, 1)):
        part = lambda report: report.bar("speed", 0.7, 0.75, is_goal=is_goal)  # noqa: B023, E731
        monkeypatch.setitem(card.PARTS, "muon", part)
        assert card.main(["muon", "--device", "cpu", "--check"]) == code
        assert card.main(["muon", "--device", "cpu"]) == 0


def test_ratios_are_formed_within_a_round(tools: Tools) -> None:
    """In the second round everything is ten times slower."""
    turns, slow = tools("card_bench.turns"), (1.0, 10.0, 1.0)
    steps = {name: [turns.Turn(each * factor, 0.1) for factor in slow] for name, each in (("a", 0.25), ("b", 0.3))}
    measured = turns.Measured(steps, {turns.GEMM: [500e12 / factor for factor in slow]}, 100e12)
    assert measured.ratio("a", turns.GEMM) == pytest.approx(0.8) and measured.ratio("a", "b") == pytest.approx(1.2)
    assert measured.speedup("a", "b") == pytest.approx(0.4 / 0.35)


@pytest.mark.parametrize(
    ("name", "mine", "step"),
    [
        ("plain", [(10.0, 2.0), (9.9, 1.9)], None),
        ("plain", [(10.0, 2.0), (9.9, 2.0)], 2),
        ("fp8 by tensor", [(10.05, 2.06), (9.9, 1.95)], None),
        ("fp8 by tensor", [(10.05, 2.3), (9.9, 1.9)], 1),
        ("fp8 by tensor", [(float("nan"), 2.0), (9.9, 1.9)], 1),
    ],
)
def test_fp8_has_separate_bounds(name: str, mine: list[tuple[float, float]], step: int | None, tools: Tools) -> None:
    found = tools("card_bench.agreement").compared(name, "megapipe", mine, [(10.0, 2.0), (9.9, 1.9)], "bf16")
    assert (found.holds, found.step) == (step is None, step)


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cudaLaunchKernel", True),
        ("cudaLaunchKernelExC", True),
        ("cuLaunchKernelEx", True),
        ("cudaGraphLaunch", True),
        ("cudaStreamSynchronize", False),
        ("nvjet_hsh_256x128", False),
    ],
)
def test_calls_that_launch_kernels_are_counted(name: str, launches: bool, tools: Tools) -> None:
    assert bool(re.match(tools("card_bench.timing").LAUNCH, name)) is launches
