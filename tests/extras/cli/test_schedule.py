"""The `megapipe schedule` command: printed text, written files, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megapipe.extras.cli.schedule import main
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.families import build_lowered, build_schedule
from tools.draw_all_schedules import pictures

REPOSITORY = Path(__file__).resolve().parents[3]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "schedules"


def test_compare_prints_a_line_a_schedule_and_the_reasons_of_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1f1b", "-p", "3", "zb-v", "-m", "7", "--p2p", "0.1", "dualpipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["schedule", "stages", "makespan", "barrier"]
    assert [line.split()[0] for line in lines[1:4]] == ["1f1b", "zb-v", "dualpipe"]
    assert "refused" in lines[3] and "use 2 or 4" in lines[3]


def test_compare_as_json_holds_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    costs = "--forward 1 --input-grad 0.5 --weight-grad 0.5"
    assert main(f"compare 1f1b pipedream -p 4 -m 8 {costs} --json".split()) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["schedule"], first["makespan_seconds"], first["barrier_ratio"]) == ("1f1b", 22, 3 / 8)
    assert second["is_synchronous"] is False


def test_check_proves_torchs_file_and_names_every_channel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--csv", str(FIXTURES / "dualpipe-v_p2_m4.csv"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is True
    assert len(report["channels"]) == 4
    assert main(["check", "1f1b", "-p", "4", "--send-depth", "0", "--receive-depth", "0"]) == 1
    complaint = capsys.readouterr().err
    assert "deadlock" in complaint and ">" in complaint


def test_check_marks_the_culprit_of_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert main(["check", "--csv", str(path)]) == 1
    assert ">1B0<" in capsys.readouterr().err


def test_draw_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace, rows = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.csv"
    assert (
        main(
            [
                "draw",
                "zb-h1",
                "-p",
                "3",
                "-m",
                "6",
                "--svg",
                str(svg),
                "--trace",
                str(trace),
                "--csv-out",
                str(rows),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["written"] == [str(svg), str(trace), str(rows)]
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text())["traceEvents"]
    assert from_csv(rows.read_text(), "zb-h1") == build_schedule("zb-h1", 3, 1, 6)
    assert main(["draw", "--csv", str(rows), "--csv-out", str(rows), "--lowered"]) == 0
    assert from_csv(rows.read_text(), "zb-h1") == build_lowered("zb-h1", 3, 1, 6)
    assert main(["draw", "1f1b", "-p", "2", "-m", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("rank 0 F0 F1")


def test_simulate_prints_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "dualpipe", "-p", "4", "-m", "8", "--pair-share", "0.7", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [rank["peak_live_chunks"] for rank in result["ranks"]] == [5] * 4
    assert max(rank["barrier_idle_seconds"] for rank in result["ranks"]) == pytest.approx(
        (4 / 2 - 1) * (0.7 * 3 + 2 - 3)
    )
    assert main(["simulate", "dualpipe", "-p", "4", "-m", "8"]) == 0
    assert "barrier idle" in capsys.readouterr().out


def test_a_file_in_two_directions_loads_with_its_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.csv"
    assert main(["draw", "dualpipe", "-p", "4", "-m", "8", "--csv-out", str(path)]) == 0
    assert main(["check", "--csv", str(path)]) == 1
    assert "give the placement" in capsys.readouterr().err
    assert main(["check", "--csv", str(path), "--placement", "two-directions"]) == 0


def test_the_command_imports_no_torch() -> None:
    code = (
        "import sys; from megapipe.extras.cli.schedule import main; main(['compare', 'gpipe', '-p', '2']); "
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "gpipe" in ended.stdout


def test_the_schedule_pictures_of_the_documentation_are_current() -> None:
    stored = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "docs" / "schedules").glob("*.svg")}
    assert stored == pictures(), "draw them again: python tools/draw_all_schedules.py"


def test_compare_tells_what_each_schedule_hides_of_the_all_to_alls(capsys: pytest.CaptureFixture[str]) -> None:
    words = "compare --experts -p 4 -m 8 --layers 13 --dense-layers 1 gpipe dualpipe zb-v".split()
    assert main([*words, "--json"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gpipe"]["pairs_seconds"] is None
    assert rows["dualpipe"]["bound_seconds"] < rows["dualpipe"]["pairs_seconds"] < rows["dualpipe"]["serial_seconds"]
    # 8 microbatches pass 12 layers with experts, each with 14 ms of all-to-alls; gpipe's longest stage has 4 of them
    assert rows["gpipe"]["exchange_seconds"] == pytest.approx(8 * 4 * 14.0)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "schedule stages serial weights pairs bound all-to-all exposed hidden peak".split()
    assert [line.split()[0] for line in lines[1:4]] == ["gpipe", "dualpipe", "zb-v"]


def test_rows_of_parts_are_proven_by_name_or_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dualpipe", "-p", "4", "-m", "8", "--experts", "--layers", "8"]
    assert main(["check", *words]) == 0
    assert "8 microbatches): 718 actions, valid; 12 channels" in capsys.readouterr().out
    path = tmp_path / "rows.csv"
    assert main(["draw", *words, "--csv-out", str(path)]) == 0
    assert main(["check", *words, "--parts", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("0F0.0A,0F0.0M,0F0.1A,")
    path.write_text(text.replace("0F0.0A,0F0.0M", "0F0.0M,0F0.0A", 1))
    assert main(["check", *words, "--parts", str(path)]) == 1
    assert "0F0.0M needs the activation of stage 0, layer 0, attention" in capsys.readouterr().err


def test_the_picture_of_parts_is_current(tmp_path: Path) -> None:
    path = tmp_path / "expert_schedule.svg"
    words = "draw dualpipe-v -p 2 -m 4 --experts --layers 4 --dense-layers 0 --head 2 2 2 --width 600".split()
    assert main([*words, "--svg", str(path)]) == 0
    stored = REPOSITORY / "docs" / "images" / "expert_schedule.svg"
    assert path.read_text(encoding="utf-8") == stored.read_text(encoding="utf-8")
    assert path.read_text(encoding="utf-8").count(">rank ") == 2
    ET.parse(path)


SHARDED = ["--data-parallel-sharding-strategy", "optim_grads_params"]
TIMES = ["--gather", "1.5", "--reduce", "3"]


def test_gathers_and_reductions_are_counted_timed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["breadth-first", "-p", "2", "-v", "2", "-m", "4"]
    assert main(["compare", *shape, *SHARDED, *TIMES, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["gathers"], row["reductions"], row["most_gathered"]) == (3, 2, 2)
    assert main(["compare", *shape, "--json"]) == 0
    (bare,) = json.loads(capsys.readouterr().out)
    assert row["makespan_seconds"] > bare["makespan_seconds"] and "gathers" not in bare
    assert main(["draw", *shape, *SHARDED, *TIMES]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("network U0") and "U2" in lines[1] and lines[1].endswith("R0  =   =")
    path = tmp_path / "rows.csv"
    assert main(["draw", *shape, *SHARDED, "--lowered", "--csv-out", str(path)]) == 0
    assert path.read_text().startswith("0UNSHARD,") and "2RESHARD,2REDUCE_GRAD" in path.read_text()
    capsys.readouterr()
    assert main(["check", "--csv", str(path), "--max-gathered", "2"]) == 0
    assert "at most 2 stages of a rank gathered at once" in capsys.readouterr().out
    assert main(["check", "--csv", str(path), "--max-gathered", "1"]) == 1
    assert "are gathered at once, at most 1 may be" in capsys.readouterr().err
    path.write_text(path.read_text().replace("2UNSHARD,", "", 1))
    assert main(["check", "--csv", str(path)]) == 1
    assert "needs the weights of stage 2, which are not gathered" in capsys.readouterr().err


def test_units_of_a_stage_are_gathered_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    units = ["--data-parallel-sharding-units", "4", "--data-parallel-sharding-prefetch", "0"]
    assert main(["simulate", "1f1b", "-p", "2", "-m", "4", *SHARDED, *units, "--gather", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    # on rank 0 the last unit of three forwards stays for a backward, the first of two backwards for a forward
    assert (row["gathers"], row["reductions"], row["most_gathered"]) == (4 * 2 * 4 - 3 - 2, 4 * 4, 1)


def test_the_pictures_of_sharded_weights_are_current(tmp_path: Path) -> None:
    images, path = REPOSITORY / "docs" / "images", tmp_path / "drawn.svg"
    drawn = ["-m", "8", *SHARDED, "--width", "600", "--svg", str(path)]
    assert main(["draw", "breadth-first", "-p", "4", "-v", "2", *TIMES, *drawn]) == 0
    assert path.read_text() == (images / "sharded_breadth_first.svg").read_text()
    units = ["--data-parallel-sharding-units", "2", "--gather", "0.5", "--reduce", "1"]
    assert main(["draw", "1f1b", "-p", "4", *units, *drawn]) == 0
    assert path.read_text() == (images / "sharded_1f1b.svg").read_text()
