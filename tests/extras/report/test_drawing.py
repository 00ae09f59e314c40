"""Elements of drawings and pages: what is escaped, how numbers are written, and how boxes are merged."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from megapipe.extras.report.drawing import element, merged, paper, rect, round_step, table_html, table_row, text


def test_words_and_attributes_are_escaped_but_markup_inside_is_not() -> None:
    assert text(1, 2, "a < b") == '<text x="1" y="2">a &lt; b</text>'
    assert rect(0, 0, 1, 1, "F & B").endswith("<title>F &amp; B</title></rect>")
    assert element("g", element("rect"), data_name='"x"') == '<g data-name="&quot;x&quot;"><rect/></g>'


def test_the_class_comes_first_floats_have_two_decimals_and_none_is_left_out() -> None:
    drawn = element("line", x1=1, x2=2.0, y2="3.5", text_anchor=None, stroke_width="0.2", class_="grid")
    assert drawn == '<line class="grid" x1="1" x2="2.00" y2="3.5" stroke-width="0.2"/>'


def test_boxes_of_a_colour_are_one_path() -> None:
    red, blue = merged([("red", 0, 1, 2, 3), ("blue", 5, 1, 2, 3), ("red", 9, 1, 2, 3)], stroke="#ffffff")
    assert red == '<path fill="red" stroke="#ffffff" d="M0.0 1h2.0v3h-2.0zM9.0 1h2.0v3h-2.0z"/>'
    assert ElementTree.fromstring(blue).attrib["d"] == "M5.0 1h2.0v3h-2.0z"


def test_a_file_has_one_element_a_line_on_white_paper() -> None:
    lines = paper(30, 20, [rect(1, 2, 3, 4), text(5, 6, "seven")]).splitlines()
    assert [line.split()[0] for line in lines] == ["<svg", "<rect", "<rect", "<text", "</svg>"]
    assert lines[1] == '<rect width="30" height="20" fill="#ffffff"/>'


def test_cells_of_a_table_are_wrapped_unless_they_are_cells() -> None:
    rows = [table_row(["a"], tag="th"), table_row(["1", '<td class="v">2</td>'], "sum")]
    assert table_html(rows, "ops") == (
        '<table class="ops"><tr><th>a</th></tr><tr class="sum"><td>1</td><td class="v">2</td></tr></table>'
    )


@pytest.mark.parametrize(("value", "step"), [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (2.1e-4, 5e-4)])
def test_a_step_of_an_axis_is_round_and_at_least_the_value(value: float, step: float) -> None:
    assert round_step(value) == step
