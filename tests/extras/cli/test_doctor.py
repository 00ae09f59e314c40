"""`megapipe doctor` from the command line: one process, and wrong flags."""

from __future__ import annotations

import pytest

from megapipe.extras.cli.calibrate import doctor


def test_doctor_reports_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("host ")
    assert lines[-1] == ("fine" if code == 0 else "NOT fine")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h1000"], "--gpu h1000 is not in the table: there are a100-40"),
        (["--gpu", "h100", "--hardware", "x.yaml"], "give one of the two"),
        (["--hardware", "missing.yaml"], "--hardware missing.yaml cannot be read"),
        (["--slow-factor", "1"], "--slow-factor 1 must be above 1"),
        (["--slow-factor", "much"], "--slow-factor much: expected a number"),
        (["--seconds", "0"], "--seconds 0 must be above 0"),
        (["--tensor-model-parallel-sise", "2"], "--tensor-model-parallel-sise"),
        (["--tensor-model-parallel-size", "2"], "a world of 1 ranks cannot hold tensor 2"),
        (["--pipeline-schedule", "zb-v"], "--pipeline-model-parallel-size of at least 2"),
    ],
    ids=["gpu", "both", "no file", "factor", "no number", "no time", "no flag", "no world", "no pipeline"],
)
def test_what_cannot_be_examined_is_refused_with_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
