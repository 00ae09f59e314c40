"""`megapipe plan --days`: the days of a run as text and JSON, of a grid and of a search, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megapipe.extras.cli.plan import main

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 512 "
    "--max-position-embeddings 128 --bf16 --global-batch-size 8"
).split()
GRID = ["--world-size", "4", "--gpu", "h100", *MODEL]
SEARCH = ["--gpus", "4", "--gpu", "h100", *MODEL]
RATE = ["--gpu-hours-per-failure", "50700"]
RESTART = ["--restart-seconds", "600"]
SAVE = ["--save-seconds", "30"]
DAYS = ["--days", "1T", *RATE, *RESTART, *SAVE]


def lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(words) == 0
    text = capsys.readouterr().out
    return text[text.index("  days  ") :].splitlines()


def test_a_grid_shows_days_failures_interval_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines([*GRID, *DAYS, "--price", "2.5", "--watts", "900"], capsys)
    assert len(shown) == 4
    assert "for 1,000,000,000,000 tokens: computing " in shown[0] and "; goodput 9" in shown[0]
    # 50,700 hours on 4 GPUs are 528 days; 12 bytes each of 3.3 million parameters
    assert "one every 528 d 3 h; a checkpoint of 38.0 MiB blocks training for 30.00 s" in shown[1]
    assert "of computation, --save-interval " in shown[2]
    found = re.search(r"([\d,.]+) GPU hours, a price of ([\d,.]+), ([\d,.]+) MWh", shown[3])
    assert found is not None
    hours, price, energy = (float(word.replace(",", "")) for word in found.groups())
    assert price == pytest.approx(2.5 * hours, rel=0.01) and energy == pytest.approx(9e-4 * hours, rel=0.01)


def test_a_search_gives_the_days_of_the_best_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, *DAYS, "--price", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    computing = report["days"]["expected"]["computing"]
    assert computing * 86400 == pytest.approx(1e12 / report["best"][0]["tokens_per_second"])
    assert report["days"]["money"] == 2 * report["days"]["gpu_hours"] and report["days"]["megawatt_hours"] is None
    assert report["days"]["seconds"] == {"between": 50700 * 900.0, "restart": 600.0, "blocked": 30.0, "background": 0.0}
    assert len(lines([*SEARCH, *DAYS], capsys)) == 4
    assert main([*SEARCH, "--json"]) == 0
    assert "days" not in json.loads(capsys.readouterr().out)


def test_tokens_are_those_of_the_configured_length(capsys: pytest.CaptureFixture[str]) -> None:
    for length, tokens in (("--train-iters", 100 * 8 * 128), ("--train-samples", 100 * 128)):
        shown = lines([*GRID, length, "100", "--days", *RATE, *RESTART, *SAVE], capsys)
        assert f"for {tokens:,} tokens" in shown[0]


def test_an_asynchronous_save_blocks_for_the_copy_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GRID, *DAYS, "--save", "runs/x", "--save-interval", "1000"]
    waiting, background = lines(words, capsys), lines([*words, "--async-save"], capsys)
    assert "blocks training for 30.00 s" in waiting[1]
    assert re.search(r"blocks training for [\d.]+ (us|ms), 30\.00 s in the background$", background[1])
    assert waiting[3].startswith("           as configured, ") and "goodput" in waiting[3]


def test_the_storage_gives_the_time_of_a_save(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines([*GRID, "--days", "1T", *RATE, *RESTART, "--storage-bytes-per-second", "1e6"], capsys)
    assert "a checkpoint of 38.0 MiB blocks training for 39.8" in shown[1]


def test_a_price_in_a_hardware_file_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hardware.yaml"
    words = ["--world-size", "4", "--hardware", str(file), *MODEL, *DAYS]
    file.write_text("like: h100\nprice_per_hour: 3\n")
    assert "a price of " in lines(words, capsys)[-1]
    file.write_text("like: h100\nprice_per_hour: -3\n")
    assert main(words) == 2
    assert "price_per_hour -3 is not what the key holds, with numbers above 0" in capsys.readouterr().err
