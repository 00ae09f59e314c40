"""tools/bench/first_day.py: measured and planned steps, parts that fail, resume and archive."""

from __future__ import annotations

import dataclasses
import importlib
import json
import socket
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from megapipe.config.load import load_config
from megapipe.plan.hardware import HARDWARE, hardware_of
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def first_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("first_day")


def test_every_measured_step_stands_beside_its_estimate(first_day: ModuleType) -> None:
    shapes = importlib.import_module("gpu_bench.shapes")
    shape, hardware = shapes.SHAPES["8b-8k"], hardware_of(H100)
    assert hardware is not None
    predicted = predict_step(resolve(shapes.configuration(shape, "bf16", "cuda"), 1), hardware)
    turns = [{"gradients": 1.5 * predicted.seconds, "update": 0.5 * predicted.seconds}] * 3
    found = {"shape": dataclasses.asdict(shape), "turns": {"megapipe": turns, "plain": turns}, "bars": []}
    figures = {"device": H100, "torch": "2.13.0", "shapes": {"8b-8k": found}}
    (row,) = first_day.comparison(figures)
    assert row[:2] == ("8b-8k", "megapipe")
    assert row[4:] == ("2.000", f"{predicted.mfu / 2:.1%}", f"{predicted.mfu:.1%}")
    figures["device"] = "CPU"
    assert next(first_day.comparison(figures))[3] == "no data sheet of this device"


def test_every_training_run_fits_and_has_an_estimate(first_day: ModuleType, tmp_path: Path) -> None:
    hardware = hardware_of(H100)
    assert hardware is not None
    for name, (ranks, _, _) in first_day.RUNS.items():
        plan = resolve(load_config(first_day.run_flags(name, "cuda")).config, ranks)
        assert max(rank_memory(plan, rank).total for rank in range(plan.topology.pp)) < 30 << 30, name
        steps = [{"kind": "step", "step_seconds": seconds, "memory_bytes": 1 << 30} for seconds in (9.0, 0.5, 0.5)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    rows = list(first_day.run_rows("cuda", hardware, tmp_path))
    assert [row[0] for row in rows] == list(first_day.RUNS)
    for row in rows:
        assert row[2] == "500.0" and float(row[4]) == pytest.approx(500 / float(row[3]), rel=0.01) and row[5] == "1.00"


def test_measured_rates_stand_beside_those_of_the_table(first_day: ModuleType) -> None:
    h100 = HARDWARE["h100"]
    rows = {name: texts for name, *texts in first_day.rate_rows(h100, h100, "cuda", 2)}
    assert all(found == sheet for found, sheet in rows.values()) and len(rows) == 6
    reached = float(rows["GEMM of 8192 in bf16, TFLOP/s"][0])
    assert reached == pytest.approx(989 * h100.gemm_share(8192, 8192, 8192), rel=0.01)
    measured = dataclasses.replace(h100, gemm_shares=((64, 0.1), (512, 0.5)))  # there was no time for larger ones
    rates = {name: texts for name, *texts in first_day.rate_rows(measured, h100, "cuda", 1)}
    assert rates["GEMM of 512 in bf16, TFLOP/s"] == ["494", f"{989 * h100.gemm_share(512, 512, 512):.3g}"]
    assert {texts[1] for _, *texts in first_day.rate_rows(h100, None, "cuda", 1)} == {first_day.NO_SHEET}


@pytest.mark.parametrize("gpu", ["h100", "a100-80", "b200", "mi300x"])
def test_the_assumed_share_of_attention_is_the_one_that_plans_use(first_day: ModuleType, gpu: str) -> None:
    """Measured in place of the kernel's curves, the share gives the same seconds of attention in a plan."""
    hardware = HARDWARE[gpu]
    plan = resolve(load_config(first_day.run_flags("run-dense", "cuda")).config, 1)
    share = first_day.attention_share(hardware, "cuda")
    measured = dataclasses.replace(hardware, attention_share=share, attention_rates={})
    curves, one_share = (predict_step(plan, each).parts["attention"] for each in (hardware, measured))
    assert one_share == pytest.approx(curves, rel=1e-3)
    assert first_day.attention_share(measured, "cuda") == pytest.approx(share)
    rows = {name: texts for name, *texts in first_day.rate_rows(measured, hardware, "cuda", 1)}
    (rate,) = (texts for name, texts in rows.items() if name.startswith("attention") and name.endswith("TFLOP/s"))
    (shown,) = (texts for name, texts in rows.items() if "(attention_share)" in name)
    assert shown == [f"{share:.3g}"] * 2 and rate == [f"{share * hardware.peak('bf16') / 1e12:.3g}"] * 2


def test_parts_need_the_gpus_that_there_are(first_day: ModuleType, tmp_path: Path) -> None:
    one, four = (list(first_day.commands("cuda", count, tmp_path)) for count in (1, 4))
    assert {"nccl", "features-2", "features-4", "run-ep"} <= set(four) - set(one)
    assert one[:3] == ["gpus", "doctor", "kernels"] and one[-1] == "bench-8b-8k"


@pytest.fixture
def scripts(first_day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Parts of the day as Python code, by their names."""
    parts = {
        "gpus": "raise SystemExit(9)",
        "doctor": "print('seen'); raise SystemExit(3)",
        "kernels": "print('7 passed in 1 s'); print('left out: none')",
        "bench-tiny": "print('x | y')",
    }
    monkeypatch.setattr(
        first_day,
        "commands",
        lambda *_: {name: (sys.executable, "-c", code) for name, code in parts.items()} | {"links": ("/no/such",)},
    )
    return parts


def rows_of(folder: Path) -> dict[str, str]:
    lines = (folder / "first_day.md").read_text().splitlines()
    return {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}


def test_a_part_that_fails_is_reported_and_does_not_stop_the_others(
    first_day: ModuleType, scripts: dict[str, str], tmp_path: Path
) -> None:
    assert first_day.main(["--device", "cpu", "--out", str(tmp_path / "day")]) == 1
    rows = rows_of(tmp_path / "day")
    assert "| 3 |" in rows["doctor"] and "7 passed" in rows["kernels"] and "| 127 |" in rows["links"]
    assert "No figures yet" in (tmp_path / "day" / "first_day.md").read_text()


def test_the_same_command_goes_on_and_leaves_out_what_has_passed(
    first_day: ModuleType, scripts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = first_day.Part.run, []

    def noted(name: str, words: list[str], folder: Path) -> object:
        ran.append(name)
        if name == "kernels" and ran.count(name) == 1:
            raise KeyboardInterrupt
        return run(name, words, folder)

    monkeypatch.setattr(first_day.Part, "run", noted)
    words = ["--device", "cpu", "--out", str(tmp_path / "day")]
    assert first_day.main(words) == 130
    assert ran == ["gpus", "doctor", "kernels"] and "| 3 |" in rows_of(tmp_path / "day")["doctor"]
    del ran[:2]
    first_day.main(words)
    assert ran == ["kernels", "gpus", "doctor", "kernels", "bench-tiny", "links"], "what failed runs again"
    ran[:] = ["kernels"]
    first_day.main([*words, "--again", "kernels"])
    assert ran == ["kernels", "gpus", "doctor", "kernels", "links"]
    first_day.main([*words, "--pack"])
    assert len(ran) == 5
    with pytest.raises(SystemExit):
        first_day.main([*words, "--again", "kernel"])


def test_a_part_ends_after_its_time_with_all_of_its_processes(
    first_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_day, "PART_SECONDS", 1.0)
    part = first_day.Part.run("slow", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    assert part.code == 124 and part.seconds < 30


def test_the_archive_names_no_host_user_path_or_address(
    first_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    monkeypatch.setattr(first_day.getpass, "getuser", lambda: "ada")
    folder = tmp_path / "day"
    folder.mkdir()
    secrets = [
        "node7.example.org",
        "node7",
        f"{first_day.REPOSITORY}/megapipe",
        f"{folder}/x",
        f"{Path.home()}/.cache",
        "192.0.2.7",
        "fd00::2",
        "GPU-01234567-89ab-cdef-0123-456789abcdef",
    ]
    text = f"{' '.join(secrets)} ada: at 12:34:56 std::vector c10::Error 2.13.0 adam"
    (folder / "doctor.log").write_text(text)
    with tarfile.open(first_day.pack(folder)) as tar:
        found = {one.name: tar.extractfile(one).read().decode() for one in tar}  # type: ignore[union-attr]
    assert found["first_day/doctor.log"] == (
        "<HOST> <HOST> <REPOSITORY>/megapipe <OUT>/x <HOME>/.cache <ADDRESS> <ADDRESS> <GPU> <USER>: at 12:34:56 "
        "std::vector c10::Error 2.13.0 adam"
    )
    assert "torch==" in found["first_day/versions.txt"]
