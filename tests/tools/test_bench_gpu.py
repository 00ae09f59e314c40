"""tools/bench/bench_gpu.py on a CPU: all contenders train the same model, and missed bars are reported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / "tools" / "bench"
TINY = ("--shapes", "tiny", "--rounds", "2", "--warm-ups", "1", "--no-compile")

Tools = Callable[[str], ModuleType]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # the tool sets it if unset
    return importlib.import_module


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(BENCH)])}
    return subprocess.run(
        [sys.executable, str(BENCH / "bench_gpu.py"), *arguments], capture_output=True, text=True, env=environment
    )


def test_contenders_that_train_the_same_model_are_timed_in_turns(
    tmp_path: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    figures = tmp_path / "figures.json"
    words = (
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--fp8",
        "e4m3",
        "--fp8-recipe",
        "tensorwise",
        "--json",
        str(figures),
    )
    code = tools("bench_gpu").main([*TINY, *words])
    done = capsys.readouterr()
    assert code == 0, done.err
    rows = [line.split(" | ")[0] for line in done.out.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["| megapipe", "| megapipe-fp8", "| plain", "| transformers"]
    found = json.loads(figures.read_text())["shapes"]["tiny"]
    assert {name: len(turns) for name, turns in found["turns"].items()} == dict.fromkeys(found["turns"], 2)
    assert {name: len(rates) for name, rates in found["rates"].items()} == {"GEMM": 2, "fp8 GEMM": 2}
    off = "--no-compile-loss --optimizer-impl torch --compile-blocks off"
    assert found["wishes"]["megapipe-fp8"] == f"--fp8-format e4m3 --fp8-recipe tensorwise {off}"
    fp8, plain = found["agreement"][:2]
    assert (fp8["name"], plain["name"]) == ("megapipe-fp8", "plain")
    assert plain["loss"] < 1e-4 < fp8["norm"] < 5e-2, "the fp8 row computes in fp8"
    assert "at least" not in done.out, "no bar applies to a CPU"


def test_a_model_that_computes_something_else_is_not_timed(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools("gpu_bench.plain"), "rotated", lambda x, cos, sin: x)
    assert (
        tools("bench_gpu").main([*TINY, "--device", "cpu", "--dtype", "fp32", "--contenders", "megapipe", "plain"]) == 2
    )
    said = capsys.readouterr().err
    assert "plain against megapipe (step 1): loss differs by" in said and "they are not the same model" in said


def test_without_a_gpu_the_tool_refuses(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tools("bench_gpu").main([]) == 2
    assert capsys.readouterr() == ("", "bench_gpu: torch sees no GPU (--device cpu only tries the tool)\n")


def test_a_gpu_without_fp8_is_refused_before_anything_runs(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, answer in (
        ("is_available", True),
        ("get_device_capability", (8, 0)),
        ("get_device_name", "NVIDIA A100-SXM4-80GB"),
    ):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, answer=answer: answer)
    assert tools("bench_gpu").main(["--check"]) == 2
    assert (
        "NVIDIA A100-SXM4-80GB, compute capability 8.0, has no fp8 matrix units (8.9 or higher has); omit "
        "megapipe-fp8 from --contenders" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", [("--device", "cpu"), ("--device", "cpu", "--shapes", "8b-4k")], ids=["shape", "device"]
)
def test_a_check_without_anything_to_check_is_refused(
    words: tuple[str, ...], tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools("bench_gpu").main([*words, "--check"]) == 2
    assert (
        "--check has nothing to check: bars are set for --shapes 8b-4k 8b-8k on a GPU in bf16"
        in capsys.readouterr().err
    )


def measured(figures: ModuleType, **seconds: float) -> object:
    """Build measurements of three rounds.

    seconds: time for 100 TFLOP by contender. In the second round all contenders are ten times slower.
    """
    slow = (1.0, 10.0, 1.0)
    turns = {
        name.replace("_", "-"): [figures.Turn(each * factor, 0.1) for factor in slow] for name, each in seconds.items()
    }
    rates = {figures.GEMM: [500e12 / factor for factor in slow], figures.FP8_GEMM: [900e12 / factor for factor in slow]}
    return figures.Measured(turns, rates, 100e12)


def test_ratios_are_formed_within_a_round(tools: Tools) -> None:
    figures = tools("gpu_bench.figures")
    found = measured(figures, megapipe=0.25, plain=0.3)
    assert found.ratio("megapipe", figures.GEMM).text(".2f") == "0.80 [0.80, 0.80]"
    assert found.ratio("megapipe", "plain").text(".2f") == "1.20 [1.20, 1.20]"
    assert found.ratio("megapipe", "transformers") is None
    assert list(figures.remarks(found)) == ["fp8 GEMM to GEMM: 1.800 [1.800, 1.800]"]


@pytest.mark.parametrize(
    ("seconds", "passed", "words"),
    [
        ({"megapipe": 0.25, "megapipe_fp8": 0.19, "plain": 0.25, "transformers": 0.3}, True, ": met"),
        (
            {"megapipe": 0.25, "megapipe_fp8": 0.24, "plain": 0.25, "transformers": 0.3},
            True,
            "goal 1.25: not reached, 83.3% of it",
        ),
        (
            {"megapipe": 0.28, "megapipe_fp8": 0.2, "plain": 0.28, "transformers": 0.4},
            False,
            "at least 0.75: NOT MET, 95.2% of it",
        ),
        (
            {"megapipe": 0.25, "plain": 0.24, "transformers": 0.3},
            False,
            "megapipe to plain: 0.960 [0.960, 0.960], at least 1.0: NOT MET",
        ),
        ({"megapipe": 0.25, "plain": 0.25, "transformers": 0.28}, False, "megapipe to transformers: 1.120"),
        ({"megapipe": 0.25, "plain": 0.25}, False, "megapipe to transformers: NOT MEASURED, transformers did not run"),
    ],
    ids=["all", "goal", "gemm", "plain", "transformers", "absent"],
)
def test_a_missed_bar_fails_while_a_missed_goal_is_only_reported(
    seconds: dict[str, float], passed: bool, words: str, tools: Tools
) -> None:
    figures = tools("gpu_bench.figures")
    said = figures.verdicts(measured(figures, **seconds))
    assert len(said) == len(figures.BARS)
    assert all(ok for _, ok in said) is passed
    assert any(words in sentence and (ok is passed) for sentence, ok in said), said


def test_the_flops_of_a_step_count_attention_half_or_in_full(tools: Tools) -> None:
    figures, shape = tools("gpu_bench.figures"), tools("gpu_bench.shapes").SHAPES["8b-4k"]
    # elements, including the output layer
    linears = shape.layers * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 32768
    attention = 4 * 4096 * 4096 * shape.layers  # FLOPs per token: q k and p v over every key
    for causal, part in ((True, 0.5), (False, 1.0)):
        assert figures.flops_of_step(shape, causal) == 3 * (2 * linears + part * attention) * 32768


@pytest.mark.parametrize(
    ("name", "mine", "holds", "step"),
    [
        ("plain", [(10.0, 2.0), (9.9, 1.9)], True, None),
        ("plain", [(10.0, 2.0), (9.9, 2.0)], False, 2),
        ("megapipe-fp8", [(10.05, 2.06), (9.9, 1.95)], True, None),
        ("megapipe-fp8", [(10.05, 2.3), (9.9, 1.9)], False, 1),
        ("megapipe-fp8", [(float("nan"), 2.0), (9.9, 1.9)], False, 1),
    ],
)
def test_fp8_has_separate_bounds(
    name: str, mine: list[tuple[float, float]], holds: bool, step: int | None, tools: Tools
) -> None:
    found = tools("gpu_bench.agreement").compared(name, "megapipe", mine, [(10.0, 2.0), (9.9, 1.9)], "bf16")
    assert (found.holds, found.step) == (holds, step)


def test_kernels_are_classified_by_their_names(tools: Tools) -> None:
    kind_of = tools("gpu_bench.timing").kind_of
    kinds = {
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT": "GEMM",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128": "GEMM",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
        "triton_poi_fused__to_copy_clamp_mul_0": "fp8 casts",
        "void at::native::elementwise_kernel<float8_copy_kernel_cuda>": "fp8 casts",
        "Memcpy DtoD (Device -> Device)": "copies",
    }
    assert {name: kind_of(name) for name in kinds} == kinds
