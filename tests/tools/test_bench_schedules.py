"""The schedule benchmark runs, counts actions and inserts its tables into a page. Times are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / "tools" / "bench"
PAGE = (
    "# Title\n<!-- p2-m3 -->\nold\n<!-- /p2-m3 -->\nbetween\n<!-- p2-m4 -->\n<!-- /p2-m4 -->\n"
    "<!-- replays -->\n<!-- /replays -->\n<!-- real -->\n<!-- /real -->\nend\n"
)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(BENCH)])}
    return subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, text=True, env=environment, timeout=280
    )


def test_a_quick_run_measures_every_contender_and_fills_the_page(tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    page.write_text(PAGE)
    done = run(
        str(BENCH / "bench_schedules.py"),
        "--quick",
        "--no-real-time",
        "--json",
        str(figures),
        "--page",
        str(page),
    )
    assert done.returncode == 0, done.stderr
    emulated, v_shape, replayed, stream, real = json.loads(figures.read_text())["cases"]
    assert list(emulated["contenders"]) == ["megapipe", "torch", "floor"]
    for found in (*emulated["contenders"].values(), *v_shape["contenders"].values()):
        assert len(found["steps"]) == 2
        assert all(step["cpu_seconds"] > 0 for step in found["steps"])
    for found in emulated["contenders"].values():  # lower bound with sleeps of 2 ms: (m + p - 1) (F + I + W)
        assert all(step["replay_seconds"] >= 4 * 0.006 for step in found["steps"])
    for found in replayed["contenders"].values():  # m (F + R + I + W) + (p - 1) (F + I + W)
        assert all(step["replay_seconds"] >= 3 * 0.008 + 0.006 for step in found["steps"])
    for found in stream["contenders"].values():  # three steps, between which it does not drain
        assert all(step["replay_seconds"] >= (3 * 3 + 1) * 0.006 for step in found["steps"])
    assert {name for name, found in real["contenders"].items() if found["steps"]} == {"alone", "megapipe", "torch"}
    text = page.read_text()
    assert "old" not in text and text.startswith("# Title\n<!-- p2-m3 -->\n") and "\nbetween\n" in text
    assert text.count("| 1f1b |") == 2 and text.count("| zb-v |") == 1
    assert text.count("| 1f1b, replays in bubbles |") == 1


SPANS = """
from schedule_bench.figures import mean_durations, replay_seconds
from megapipe.schedule.families import build_schedule

# two ranks, one microbatch: F takes 1 ms, and B 2 ms
ranks = [{(stage, op): [0.001] for op in "FIW"} for stage in range(2)]
print(round(replay_seconds(build_schedule("1f1b", 2, 1, 1), mean_durations(ranks)) * 1e6))
"""


def test_the_replay_of_a_hand_written_row() -> None:
    done = run("-c", SPANS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6000\n"


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    code = (
        f"from pathlib import Path; from schedule_bench.page import insert; insert(Path({str(page)!r}), "
        f"{{'zero': 'table'}}, 'here')"
    )
    done = run("-c", code)
    assert "has 0 pairs of the marks <!-- zero --> and <!-- /zero -->" in done.stderr
