"""`megapipe queues` prints the tables of docs/gpu_queues.md."""

from __future__ import annotations

import json

import pytest

from megapipe.extras.cli.schedule import queues as main

SMALL = ["gpipe", "1f1b", "-p", "3", "-m", "6"]


def test_the_depths_that_hang_are_listed_by_connections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    gpipe, one = json.loads(capsys.readouterr().out)
    assert gpipe["1"] == "2 3 4" and gpipe["32"] == "-"
    assert one["1"].startswith("3") or one["1"] == "-"
    assert main(SMALL) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["gpipe", "1"]


def test_evaluations_of_a_v_hang_at_a_depth_at_which_training_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["zb-v", "-p", "4", "-m", "8", "--tp", "--json"]
    for flags, hangs in (([], ["3", "4"]), (["--evaluation"], ["2", "3", "4"])):
        assert main([*shape, *flags]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["1"].split() == hangs


def test_offloading_adds_streams_but_no_hang_at_depth_1(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--sm-table"]):
        assert main([*SMALL, "--offload", "2", *flags, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == (8 if flags else 2)
    assert main([*SMALL, "--offload", "2", "--json"]) == 0
    assert all("1" not in row["1"].split() for row in json.loads(capsys.readouterr().out))
    assert main(["--offload", "-1"]) == 2
    assert "--offload -1 must be at least 0" in capsys.readouterr().err


def test_channels_and_sms_scale_the_table_of_sms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--sm-table", "--channels", "32", "--sms", "128", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["SMs"].endswith(f"/{row['peak'] * 32}") and row["of the GPU"] == f"{row['peak'] / 4:.0%}"
        assert 0 < float(row["mean"]) <= row["peak"] <= row["bound"]


def test_an_unknown_schedule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1f2b"]) == 2
    assert "unknown pipeline schedule '1f2b'" in capsys.readouterr().err
