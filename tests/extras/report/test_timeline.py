import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megapipe.extras.cli.plan import main as plan
from megapipe.extras.report.timeline import LARGE, STYLES, WAITING, svg, timeline_text
from megapipe.extras.report.trace import chrome_trace
from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.schedule import rows_text
from megapipe.schedule.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"


def interleaved_timeline():
    costs = Costs.equal(8, transfer_seconds=0.1, latency_seconds=0.05)
    reductions = {(stage, Op.REDUCE_GRAD): 0.75 for stage in range(8)}
    return simulate(
        build_lowered("interleaved", 4, 2, 8), Costs(dict(costs.seconds) | reductions, costs.latency_seconds)
    )


def count(timeline, ops):
    return sum(action.op in ops for row in timeline.schedule.rows for action in row)


def test_the_text_of_a_1f1b_timeline_is_the_textbook_picture():
    assert timeline_text(simulate(build_schedule("1f1b", 3, 1, 4), Costs.equal(3, 1.0, 1.0, 1.0))).splitlines() == [
        "rank 0 F0 F1 F2 .  .  .  .  B0 =  F3 B1 =  .  B2 =  .  B3 =",
        "rank 1 .  F0 F1 .  .  B0 =  F2 B1 =  F3 B2 =  .  B3 =  .  .",
        "rank 2 .  .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  .  .  .",
        "one cell: 1 s",
    ]


def test_chunks_are_marked_by_letters():
    text = timeline_text(simulate(build_schedule("interleaved", 2, 2, 2), Costs.equal(4)))
    assert text.splitlines()[:2] == [
        "rank 0 F0a F1a F0b F1b .   B0b .   B1b B0a B1a",
        "rank 1 .   F0a F1a F0b B0b F1b B1b B0a B1a .",
    ]


def test_the_text_of_a_schedule_lists_its_actions():
    assert rows_text(build_lowered("1f1b", 2, 1, 1).rows).splitlines() == [
        "rank 0: 0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD",
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
    ]


def test_a_long_timeline_is_scaled_to_the_columns():
    lines = timeline_text(simulate(build_schedule("1f1b", 8, 1, 500), Costs.equal(8)), max_columns=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("one cell: ")
    assert lines[-1] != "one cell: 1 s"


def test_the_svg_has_a_numbered_box_for_every_action_inside_the_picture():
    timeline = interleaved_timeline()
    root = ET.fromstring(svg(timeline, width=1600))
    titled = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(titled) == count(timeline, COMPUTE_OPS | {Op.REDUCE_GRAD})
    assert all(float(b.get("x")) + float(b.get("width")) <= 1600 for b in titled)
    numbers = [text.text for text in root.iter(f"{SVG}text") if text.get("pointer-events")]
    assert numbers.count("7") == count(timeline, COMPUTE_OPS) / 8
    assert len(list(root.iter(f"{SVG}line"))) == count(timeline, SEND_OPS)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rank 3", "forward, chunk 0 .. 1", "backward, chunk 0 .. 1", "gradient reduction"} <= set(texts)


def test_the_svg_of_a_schedule_without_messages_has_no_lines_and_no_legend_for_them():
    text = svg(simulate(build_schedule("gpipe", 2, 1, 2), Costs.equal(2)))
    assert "<line" not in text
    assert "reduction" not in text


@pytest.mark.parametrize("seconds", [1e-4, 0.03, 1.0, 7.0, 1234.0])
def test_the_axis_has_a_readable_number_of_round_ticks(seconds):
    root = ET.fromstring(
        svg(simulate(build_schedule("1f1b", 2, 1, 4), Costs.equal(2, seconds, seconds / 2, seconds / 2)))
    )
    ticks = [
        t.text for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "middle" and not t.get("pointer-events")
    ]
    assert ticks[0] == "0 s"
    assert 4 <= len(ticks) <= 12
    assert all(float(tick) > 0 for tick in ticks[1:])


def test_the_chrome_trace_holds_every_action_with_its_times():
    timeline = interleaved_timeline()
    events = [event for event in json.loads(chrome_trace(timeline))["traceEvents"] if event["ph"] == "X"]
    assert len(events) == count(timeline, COMPUTE_OPS | SEND_OPS | {Op.REDUCE_GRAD})
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.makespan_seconds * 1e6)
    first = next(event for event in events if event["name"] == "1F0")
    assert (first["pid"], first["args"]) == (1, {"stage": 1, "microbatch": 0})
    assert first["ts"] == pytest.approx(1.15e6)


def test_a_pair_shares_its_box_the_forward_above():
    text = svg(simulate(build_schedule("dualpipe-v", 2, 2, 4), Costs.equal(4)))
    boxes = [box for box in ET.fromstring(text).iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    halves = {box.find(f"{SVG}title").text.split(":")[0]: box for box in boxes if box.get("height") == "13"}
    assert {"0F3", "3B1"} <= set(halves)
    assert float(halves["3B1"].get("y")) == float(halves["0F3"].get("y")) + 13
    assert halves["3B1"].get("x") == halves["0F3"].get("x")


def test_every_lane_has_its_peak_and_waiting_inputs_are_drawn():
    text = svg(simulate(build_schedule("breadth-first", 2, 2, 6), Costs.equal(4)))
    assert text.count(">peak 12<") == 2
    assert text.count(f'stroke="{WAITING}" stroke-width') >= 1


def test_a_large_schedule_is_drawn_as_few_paths_with_every_box():
    timeline = simulate(build_schedule("interleaved", 32, 2, 128), Costs.equal(64))
    root = ET.fromstring(svg(timeline))
    fills = {fill for op in (Op.F, Op.B) for fill in (STYLES[op].first, STYLES[op].last)}
    boxes = [path for path in root.iter(f"{SVG}path") if path.get("fill") in fills]
    assert sum(path.get("d").count("M") for path in boxes) == count(timeline, COMPUTE_OPS) > LARGE
    assert len(boxes) == 4 * 32
    assert not list(root.iter(f"{SVG}title"))


def test_the_schedule_of_a_configuration_is_drawn_with_all_its_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    flags = "--world-size 4 --config quickstart --vocab-size 257 --num-virtual-stages-per-pipeline-rank 1".split()
    assert plan([*flags, "--global-batch-size", "16", "--schedule-svg", str(path)]) == 0
    names = {title.text.split(":")[0] for title in ET.parse(path).iter(f"{SVG}title")}
    microbatches = {name.partition("F")[2] for name in names if "F" in name}
    assert microbatches == {str(number) for number in range(len(microbatches))} and len(microbatches) > 1
