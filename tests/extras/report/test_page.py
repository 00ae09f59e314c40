"""The HTML report of a run: well-formed, self-contained, and with every number that the run recorded."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megapipe.config.load import from_yaml, load_config
from megapipe.extras import report
from megapipe.extras.cli.report import main
from megapipe.extras.report.charts import (
    LEVELS,
    MAX_POINTS,
    MOST_MAPS,
    Chart,
    Curve,
    chart_svg,
    expected_imbalance,
    expert_maps_html,
    heat,
    thinned,
)
from megapipe.extras.report.comparison import comparison_svg, op_times
from megapipe.extras.report.folder import changed_settings, read_run
from megapipe.extras.report.page import page
from megapipe.extras.report.profile import profiles_in, read_profile
from megapipe.extras.report.profile_summary import summarize
from megapipe.formatting import bytes_text
from megapipe.profile.profile import profile_name, write_profile
from tests.profile.synthetic import lowered, profile_of, step_of

RECORDED = Path(__file__).resolve().parents[2] / "fixtures" / "report" / "interleaved"
SECOND_START = re.compile("<title>(start [^<]*)")
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checked(HTMLParser):
    """Parser that fails at mismatched tags and collects the text and all attributes that could load other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script", "metadata"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    shutil.copytree(RECORDED, tmp_path / "runs" / "interleaved")
    return tmp_path / "runs" / "interleaved"


def shown(folder: Path) -> str:
    """Return the text of the run's report after checking its HTML."""
    text = page(read_run(folder))
    found = Checked(text)
    assert found.links == []
    outside = re.findall(r"(?:https?:)?//[\w.-]+|@import|url\((?!#)", text.replace("http://www.w3.org/2000/svg", ""))
    assert outside == []
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    return found.text


def edited(path: Path, change: Any) -> None:
    """Rewrite a file of JSON lines with a function of all its records."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def test_every_number_of_the_run_is_in_the_report(recorded: Path) -> None:
    text = shown(recorded)
    records = [json.loads(line) for line in (recorded / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "step"][-1]
    for number in (
        f"{last['loss']:.4f}",
        "14 of 14",
        bytes_text(max(r.get("memory_bytes") or 0 for r in records)),
    ):
        assert number in text
    for record in records:
        if record["kind"] == "evaluation" and record["step"] == 14:
            assert f"{record['loss']:.4f}" in text
    (start,) = [json.loads(line) for line in (recorded / "run.jsonl").read_text().splitlines() if '"start"' in line]
    for word in (
        *start["versions"].values(),
        start["machine"]["system"],
        "gloo",
        "finished",
        "all 14 steps done",
        "No warnings.",
    ):
        assert word in text
    assert "4 ranks = tp 1 x pp 2 x 2 chunks x dp 2" in text and "every element of the model once" in text


def test_the_profile_is_shown_with_its_sums(recorded: Path) -> None:
    assert main([str(recorded), "--svg", str(recorded / "drawing.svg")]) == 0
    ElementTree.parse(recorded / "drawing.svg")
    text = shown(recorded)
    summary = summarize(read_profile(profiles_in(recorded)[0]))
    for row in summary.table:
        assert row.planned in text and row.measured in text
    for time in op_times(summary.comparisons):
        assert f"{time.mean_seconds * 1e3:,.2f}" in text


def test_what_differs_from_the_defaults_is_listed_with_its_origin(recorded: Path) -> None:
    text = shown(recorded)
    changed, why = changed_settings(read_run(recorded).config_text)
    assert why == ""
    named = {setting.flag for setting in changed}
    assert {"--num-layers", "--pipeline-model-parallel-size", "--profile-pipeline", "--mock-data"} <= named
    assert "--hidden-dropout" not in named
    for setting in changed:
        assert f"{setting.flag} {setting.value}" in text
        assert setting.origin.startswith("flag")


def test_charts_hold_their_points_as_json() -> None:
    drawn = chart_svg(
        Chart("t", [Curve("a", [(1.0, 2.0), (3.0, 1.5)]), Curve("b", [(3.0, 1.0)], "dots", 1), Curve("none", [])], "u")
    )
    found = ElementTree.fromstring(drawn)
    data = json.loads(found.findtext("metadata") or "")
    assert [(curve["name"], curve["points"]) for curve in data] == [
        ("a", [[1, 2], [3, 1.5]]),
        ("b", [[3, 1]]),
        ("none", []),
    ]
    left, slope, *_ = map(float, found.attrib["data-frame"].split())
    assert left + slope * 1 == pytest.approx(58) and left + slope * 3 == pytest.approx(540 - 16)
    assert chart_svg(Chart("empty", [Curve("a", [])])) == ""


def test_thinning_keeps_every_spike_and_both_ends() -> None:
    points = [(float(i), 100.0 if i == 4321 else float(i % 7)) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS + 2 and (4321.0, 100.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1] and kept == sorted(kept)


def test_running_and_killed_runs_are_distinguished(recorded: Path) -> None:
    def going(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        start = next(record for record in records if record["kind"] == "start")
        return [start | {"host": platform.node(), "pid": os.getpid()}]

    edited(recorded / "run.jsonl", going)
    metrics = recorded / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-200])  # a line that is being written
    assert "running, last record" in shown(recorded)
    edited(recorded / "run.jsonl", lambda records: [records[0] | {"pid": 2**22 + 1}])
    text = shown(recorded)
    assert "no end recorded" in text and "it was killed" in text and "cannot be read" not in text


def test_a_crash_is_reported_with_the_failed_ranks_message(recorded: Path) -> None:
    failure = {
        "kind": "failure",
        "time": 1.9e9,
        "rank": 3,
        "error": "TrainingError",
        "text": "the loss of <rank 3> is NaN",
    }
    edited(recorded / "run.jsonl", lambda records: [*(r for r in records if r["kind"] != "end"), failure])
    edited(recorded / "metrics.jsonl", lambda records: [r | {"loss": None} if r["step"] == 14 else r for r in records])
    text = shown(recorded)
    assert "rank 3: TrainingError: the loss of <rank 3> is NaN" in text and "failed" in text
    assert "the loss of step 14 is NaN or infinite" in text and "TrainingError on rank 3" in text


def test_an_error_of_several_ranks_is_shown_once(recorded: Path) -> None:
    failure = {"kind": "failure", "time": 1.9e9, "error": "CheckpointError", "text": "the disk is full"}
    edited(
        recorded / "run.jsonl",
        lambda records: [*(r for r in records if r["kind"] != "end"), *(failure | {"rank": r} for r in (0, 2))],
    )
    assert shown(recorded).count("the disk is full") == 1
    assert "ranks 0 2: CheckpointError: the disk is full" in shown(recorded)


def test_a_resumed_run_shows_its_segments_and_the_steps_taken_again(recorded: Path) -> None:
    (metrics, run) = (recorded / "metrics.jsonl", recorded / "run.jsonl")
    first = [json.loads(line) for line in run.read_text().splitlines()]
    later = 5000.0
    moved = [record | {"time": record["time"] + later} for record in first]
    moved.insert(1, {"kind": "resumed", "time": moved[0]["time"], "path": "runs/interleaved/step_00000008"})
    edited(run, lambda records: [r for r in records if r["kind"] != "end"] + moved)
    again = [json.loads(line) for line in metrics.read_text().splitlines()]
    again = [
        record | {"time": record["time"] + later, "loss": record["loss"] - 1} for record in again if record["step"] > 8
    ]
    edited(metrics, lambda records: records + again)
    read = read_run(recorded)
    assert [len(segment.steps) for segment in read.segments] == [14, 6]
    assert [record["step"] for record in read.steps] == list(range(1, 15))
    assert read.steps[-1]["loss"] == again[-3]["loss"]
    assert [record["step"] for record in read.lost_steps[0]] == [8, 9, 10, 11, 12, 13, 14]
    text = shown(recorded)
    assert (
        "from runs/interleaved/step_00000008" in text
        and "9 to 14" in text
        and "steps repeated" in text
        and "2 starts" in text
    )
    html = page(read)
    assert "start 2" in SECOND_START.findall(html) and 'class="restart"' in html
    assert html.count('data-label="ended"') == 2  # a narrow page names every value
    assert "nats per token" in text and "dashed" in text


def test_steps_and_their_total_can_break_into_lines(recorded: Path) -> None:
    edited(recorded / "metrics.jsonl", lambda records: [record | {"train_iters": 1_000_000} for record in records])
    assert '<span class="big">14</span> <span class="beside">of 1,000,000</span>' in page(read_run(recorded))


def test_a_run_without_a_pipeline_shows_none_but_the_trace_of_its_profile(recorded: Path) -> None:
    edited(recorded / "run.jsonl", lambda rs: [r | {"grid": r["grid"] | {"pp": 1}} if "grid" in r else r for r in rs])
    edited(recorded / "metrics.jsonl", lambda records: [record | {"bubble_note": "n/a"} for record in records])
    found = page(read_run(recorded))
    assert "<h2>Profile</h2>" in found and "ubble of each step: n/a" not in found and "bubble, barrier" not in found
    profiles_in(recorded)[0].unlink()
    found = page(read_run(recorded))
    assert "<h2>Profile</h2>" not in found and "plan and measurement" not in found and "was profiled" not in found


def test_without_a_profile_the_report_explains_how_to_record_one(recorded: Path) -> None:
    profiles_in(recorded)[0].unlink()
    text = shown(recorded)
    assert main([str(recorded), "--svg", str(recorded / "drawing.svg")]) == 2
    assert (
        "No step of this run was profiled" in text
        and "--profile-pipeline --profile-step-start 14 --profile-step-end 16" in text
    )


def test_a_damaged_profile_is_left_out_with_a_warning(recorded: Path) -> None:
    profiles_in(recorded)[0].write_text("{}")
    text = shown(recorded)
    assert "is not a pipeline profile" in text and "6.4045"[:3] in text


def test_metrics_alone_are_enough(recorded: Path) -> None:
    (recorded / "run.jsonl").unlink()
    edited(recorded / "metrics.jsonl", lambda records: [{k: v for k, v in r.items() if k != "time"} for r in records])
    text = shown(recorded)
    assert "14 of 14" in text and "the run recorded no configuration" in text and "This run wrote no run.jsonl" in text


def test_a_run_without_logged_steps_has_a_report(recorded: Path) -> None:
    (recorded / "metrics.jsonl").write_text("")
    assert "No step has been logged yet" in shown(recorded)


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("1f1b", 8, 32, 1), ("interleaved", 8, 32, 2), ("zb-h1", 4, 8, 1), ("dualpipe-v", 4, 16, 2)],
)
def test_the_drawing_names_every_microbatch_of_plan_and_measurement(name: str, p: int, m: int, v: int) -> None:
    schedule = lowered(name, p, m, v)
    step = step_of(schedule, latency_seconds=0.0005)
    summary = summarize(profile_of(schedule, (step,)))
    drawn = comparison_svg(summary.typical, tuple(range(p)))
    found = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    numbers = [text.text for text in found.iter(f"{space}text") if "n" in (text.attrib.get("class") or "").split()]
    boxes = sum(action.op.value in "FBIW" for row in schedule.rows for action in row)
    assert len(numbers) >= 0.9 * 2 * boxes
    assert set(numbers) == {str(number) for number in range(m)}
    assert len({element.text for element in found.iter(f"{space}title")}) > 0.9 * boxes


def test_a_large_drawing_stays_small() -> None:
    schedule = lowered("1f1b", 16, 256)
    summary = summarize(profile_of(schedule, (step_of(schedule),)))
    assert len(comparison_svg(summary.typical, tuple(range(16)))) < 1_500_000


def test_the_newest_profile_is_shown(recorded: Path) -> None:
    schedule = lowered("zb-h1", 4, 8)
    write_profile(profile_of(schedule, (step_of(schedule, number=99),)), recorded / profile_name(99, 99))
    text = shown(recorded)
    assert "zb-h1 (4 ranks" in text and "the newest of 2 profiles" in text and "weight gradient" in text


def test_the_command_writes_the_page_and_imports_no_torch(recorded: Path) -> None:
    code = (
        "import sys; from megapipe.extras.cli.command import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(recorded)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert str(recorded / "report.html") in done.stdout and done.stdout.strip().endswith("False")
    Checked((recorded / "report.html").read_text(encoding="utf-8"))


def test_a_folder_that_is_no_run_is_refused_and_those_below_are_named(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} is not a run" in error and f"there is {recorded}" in error
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main([str(recorded), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_an_axis_has_at_least_four_ticks_whatever_its_range() -> None:
    for low, high in ((0.0, 1.0), (2.9, 6.4), (0.013, 0.0171), (3.0, 3.4), (0.0, 2300.0), (511.0, 511.2), (-3.0, 17.0)):
        drawn = chart_svg(Chart("t", [Curve("a", [(1.0, low), (900.0, high)])]))
        assert 4 <= drawn.count('text-anchor="end"') - 1 <= 11, (low, high)  # without the name of the x axis
        assert 5 <= drawn.count('text-anchor="middle"') <= 12


@pytest.mark.parametrize(("low", "high"), [(4.89552104, 4.89557), (0.51293, 0.51294), (12_345.0, 12_346.5), (2.0, 2.0)])
def test_ticks_of_a_narrow_range_have_different_labels(low: float, high: float) -> None:
    drawn = chart_svg(Chart("t", [Curve("a", [(1.0, low), (2.0, high)])]))
    labels = re.findall(r'text-anchor="end">([^<]*)<', drawn)[:-1]  # without the name of the x axis
    assert len(labels) >= 4 and len(set(labels)) == len(labels)


def test_settings_are_shown_with_the_default_that_they_would_have_had() -> None:
    text = "model:\n  ffn_hidden_size: 512\n  num_layers: 2\n  hidden_size: 64\ntraining:\n  micro_batch_size: 4\n"
    text += "  global_batch_size: 16\n"
    defaults = {setting.flag: setting.default for setting in changed_settings(text)[0]}
    assert defaults["--global-batch-size"] == "micro-batch-size x dp" and defaults["--micro-batch-size"] == "required"
    assert defaults["--ffn-hidden-size"].startswith("4 x hidden size")


def test_the_load_that_chance_gives_stands_beside_the_measured_one(recorded: Path) -> None:
    path = recorded / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    model = from_yaml(read_run(recorded).config_text).model
    for record in steps:
        record["expert_load"] = {"1": [0.5, 1.5, 1.0], "3": [1.0, 1.1, 0.9]}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokens = steps[-1]["global_batch_size"] * model.seq_length
    chance = expected_imbalance(3, tokens, model.moe_router_topk)
    expected = f"routing {chance:.2f} (chance alone, {tokens:,} tokens, top 2 of 3), measured 1.30 in the mean"
    assert f"{expected} of the layers, 1.50 in the worst" in " ".join(shown(recorded).split())


def test_loads_of_experts_are_drawn_by_layer_at_some_steps(recorded: Path) -> None:
    path = recorded / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    for number, record in enumerate(steps):
        record["expert_load"] = {"1": [0.5, 1.5 + number, 1.0], "3": [1.0, 1.0, 1.0]}
        record["expert_imbalance"], record["dropped_share"] = 1.5 + number, 0.25
    assert "Load of experts" not in shown(recorded)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = shown(recorded)
    for words in (
        "Load of experts",
        "Busiest expert",
        "Dropped rows",
        "at most 1.50 times the mean",
    ):
        assert words in text
    assert f"step {steps[-1]['step']:,} at most {0.5 + len(steps):.2f} times the mean" in text
    assert "layer 1: expert 1 has" in text
    drawn = expert_maps_html(steps)
    assert drawn.count("<svg") == min(MOST_MAPS, len(steps))
    for load, level in ((0.0, 0), (1.0, (LEVELS - 1) // 2), (2.0, LEVELS - 1), (9.0, LEVELS - 1)):
        one_map = expert_maps_html([steps[0] | {"expert_load": {"1": [load]}}]).partition("<svg")[2]
        assert re.findall('<path fill="([^"]*)"', one_map) == [heat(level)]
    for wrong in (3, {"1": []}, {"1": ["x"]}, {"1": 2}):
        records[0]["expert_load"] = wrong
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert "Load of experts" in shown(recorded)
    many = [steps[0] | {"expert_load": {str(layer): [1.0] * 512 for layer in range(70)}}] * 3
    assert expert_maps_html(many).count("<svg") == 1


def test_a_heat_map_numbers_experts_and_marks_the_ranks_that_hold_them() -> None:
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --num-experts 8"
    flags += " --moe-ffn-hidden-size 8 --expert-model-parallel-size 4"
    flags += " --micro-batch-size 2 --train-iters 4 --lr 1 --mock-data"
    config = load_config(flags.split()).config
    record = {"step": 3, "global_batch_size": 2, "expert_load": {"0": [1.0] * 8, "1": [0.5] * 7 + [4.5]}}
    text = expert_maps_html([record], config)
    drawn = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    words = [each.text for each in drawn.iter("text")]
    assert [word for word in words if word and word.startswith("ep")] == ["ep 0", "ep 1", "ep 2", "ep 3"]
    assert words[:8] == [str(expert) for expert in range(8)]  # of the axis; those of layers come after
    left, cell, *_ = map(float, drawn.attrib["data-frame"].split())
    borders = [float(line.attrib["x1"]) for line in drawn.iter("line")]
    assert borders == [left + cell * expert for expert in (2, 4, 6)]
    data = json.loads(drawn.findtext("metadata") or "")
    assert data == {"layers": ["0", "1"], "load": list(record["expert_load"].values()), "per_rank": 2, "ep": 4}
    assert "layer 1: expert 7 has 4.50 times the mean" in [each.text for each in drawn.iter("title")]
    alone = expert_maps_html([record])
    assert "<line" not in alone and ">ep 0<" not in alone


@pytest.mark.parametrize("columns", [1, 3, 16, 60, 256, 1000])
def test_numbers_of_experts_do_not_overlap(columns: int) -> None:
    text = expert_maps_html([{"step": 1, "global_batch_size": 1, "expert_load": {"0": [1.0] * columns}}])
    drawn = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    numbers = [each for each in drawn.iter("text") if each.attrib["text-anchor"] == "middle"]
    places = [float(each.attrib["x"]) for each in numbers]
    assert numbers[0].text == "0" and 1 <= len(numbers) <= columns
    assert all(b - a > 6.5 * len(str(columns - 1)) for a, b in pairwise(places))


def test_dots_of_a_curve_have_titles_that_need_no_script() -> None:
    drawn = ElementTree.fromstring(chart_svg(Chart("t", [Curve("validation", [(5.0, 2.5), (9.0, 2.25)], "dots")])))
    assert [each.findtext("title") for each in drawn.iter("circle")] == [
        "validation, step 5: 2.5",
        "validation, step 9: 2.25",
    ]


def test_a_browser_may_run_no_script_but_the_pages_own_and_load_nothing(recorded: Path) -> None:
    text = page(read_run(recorded))
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert "connect-src" not in policy


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which parses the scripts")
def test_the_script_of_the_page_can_be_parsed() -> None:
    path = Path(report.__file__).with_name("page.js")
    done = subprocess.run([shutil.which("node") or "", "--check", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
