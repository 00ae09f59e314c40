"""`megapipe calibrate` writes a file of measurements that plans can be made with; two ranks measure their link."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.calibrate import rates
from megapipe.extras.calibrate.hardware_file import (
    ASSUMED_LINKS,
    Machine,
    as_data,
    hardware_measured,
    refuse_taken,
    to_yaml,
)
from megapipe.extras.calibrate.hardware_reader import NOT_IN_FILES, read_hardware
from megapipe.extras.calibrate.rates import (
    MIN_REPEATS,
    WARM_UPS,
    Found,
    MeasuredLink,
    MeasuredRates,
    Stopwatch,
    fitted,
    link_trials,
    slowest,
)
from megapipe.extras.cli.calibrate import calibrate_machine as main
from megapipe.extras.cli.command import main as megapipe
from megapipe.extras.doctor.examination import SEND, Sample, Trial
from megapipe.plan.hardware import HARDWARE, Hardware, Link
from megapipe.topology import Topology
from tests.harness import RankPool

SMALL = rates.Sizes(64, 64, (32, 1, 2, 16), 1 << 16, (64, 64))
MODEL = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--vocab-size": "512",
    "--global-batch-size": "8",
}
RATES = MeasuredRates({"fp32": 8e10, "bf16": 4e11}, {64: 2e10, 256: 6e10, 1024: 8e10}, 1e10, 2e10, 5e9)
MACHINE = Machine("Some Processor", 8 << 30, 2, "fp32", ("measured by: a test", "of nothing"))


def test_one_rank_writes_a_file_that_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(rates.SIZES, "cpu", SMALL)
    path = tmp_path / "here.yaml"
    assert main(["--output", str(path), "--seconds", "0.1", "--device", "cpu", "--name", "h100-measured"]) == 0
    printed, text, found = capsys.readouterr().out, path.read_text(), read_hardware(path)
    assert "not measured: needs ranks in one node" in printed and f"written: {path}" in printed
    assert text.count("NOT measured: assumed") == 2 and f"torch {torch.__version__}" in text
    assert time.strftime("# %Y-%m-%dT", time.gmtime()) in text
    assert (found.name, found.node, found.network) == ("h100-measured", ASSUMED_LINKS["node"], ASSUMED_LINKS["network"])
    assert {"fp32", "bf16", "fp64"} <= set(found.flops) and all(rate > 1e6 for rate in found.flops.values())
    assert len(found.gemm_shares) >= 2 and all(0 < share <= 1 for _, share in found.gemm_shares)
    assert found.attention_share > 0 and found.pointwise_share > 0 and found.memory_bytes > 1 << 28
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.yaml"]
    assert (
        megapipe(
            [
                "plan",
                "--gpus",
                "2",
                "--hardware",
                str(path),
                "--json",
                *(word for pair in MODEL.items() for word in pair),
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)


def two_ranks(rank: int, world_size: int, path: str) -> None:
    environment = Environment(rank, world_size, rank, world_size, 1, 0, "127.0.0.1", 0, "torchrun", num_threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.SIZES, "cpu", SMALL)
        own = main.parse(["--output", path, "--seconds", "0.3", "--device", "cpu"])
        assert main.body(own, environment) is None


def test_two_ranks_measure_the_link_of_their_node(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    rank_pools(2).run(two_ranks, str(path))
    found, text = read_hardware(path), path.read_text()
    assert "# all-reduce over 2 ranks" in text and text.count("NOT measured: assumed") == 1
    assert (
        found.node.latency_seconds != ASSUMED_LINKS["node"].latency_seconds
        and found.network == ASSUMED_LINKS["network"]
    )
    assert 1e6 < found.node.bytes_per_second < 1e12 and 1e-7 < found.node.latency_seconds < 10
    assert found.ranks_per_node == 2


def test_ranks_on_two_nodes_measure_both_links_each_node_at_once() -> None:
    trials = list(link_trials(Topology(tp=2, dp=2, ranks_per_node=2)))
    assert {(trial.kind, trial.group, trial.operation, trial.ranks) for trial in trials} == {
        *(("node", "tp", how, ranks) for how in ("all_reduce", SEND) for ranks in ((0, 1), (2, 3))),
        *(("network", "replicas", how, ranks) for how in ("all_reduce", SEND) for ranks in ((0, 2), (1, 3))),
    }


@pytest.mark.parametrize(
    ("operation", "sent"), [("all_reduce", 1.5), (SEND, 1.0)], ids=["all-reduce over 4", "message"]
)
def test_a_link_is_recovered_from_its_times(operation: str, sent: float) -> None:
    link = Link(2e9, 3e-5)
    ranks = (0, 1, 2, 3) if operation == "all_reduce" else (0, 1)
    times = {
        size: [2 * (len(ranks) - 1) * link.latency_seconds + sent * size / link.bytes_per_second] * 3
        for size in (8, 1 << 18, 1 << 22)
    }
    found = fitted(Sample(Trial("node", "tp", operation, ranks), times))
    assert found.bytes_per_second == pytest.approx(link.bytes_per_second, rel=1e-3)
    assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=1e-3)


def test_reading_a_written_file_returns_the_same(tmp_path: Path) -> None:
    links = [MeasuredLink("node", 2, Link(1.5e9, 2.5e-5), Link(1e9, 1e-5))]
    hardware = hardware_measured(None, MACHINE, RATES, links)
    assert hardware.gemm_shares == ((64, 0.25), (256, 0.75), (1024, 1.0))
    assert (hardware.attention_share, hardware.pointwise_share) == (0.125, 0.25)
    (tmp_path / "x.yaml").write_text(to_yaml(hardware, MACHINE, links))
    assert read_hardware(tmp_path / "x.yaml") == hardware


def test_json_has_the_files_keys_and_both_figures_of_each_link() -> None:
    links = [MeasuredLink("node", 2, Link(1.5e9, 2.5e-5), Link(1e9, 1e-5))]
    hardware = hardware_measured("here", MACHINE, RATES, links)
    data = json.loads(
        json.dumps(as_data(hardware, MACHINE, Found(torch.device("cpu"), "fp32", RATES, tuple(links), ("a", "a"), 3.0)))
    )
    fields = {field.name for field in dataclasses.fields(Hardware)} - {*NOT_IN_FILES, "gemm_highest", "num_sms"}
    assert set(data) == fields | {"measured"}
    assert (
        data["node"]
        == data["measured"]["links"]["node"]["all_reduce"]
        == {"bytes_per_second": 1.5e9, "latency_seconds": 2.5e-5}
    )
    assert data["measured"]["links"]["node"]["message"]["bytes_per_second"] == 1e9 and data["flops"] == {
        "fp32": 8e10,
        "bf16": 4e11,
    }


def test_a_gpu_of_the_table_gets_its_links_where_none_was_measured() -> None:
    card = Machine("NVIDIA H200", 141 << 30, 8, "bf16", ())
    hardware = hardware_measured(None, card, RATES, [])
    assert (hardware.node, hardware.network) == (HARDWARE["h200"].node, HARDWARE["h200"].network)
    assert "NOT measured: from the table" in to_yaml(hardware, card, [])


def test_the_slowest_rank_counts_for_what_all_have_measured() -> None:
    other = MeasuredRates({"fp32": 9e10}, {64: 1e10, 256: 7e10}, 2e10, 1e10, 6e9)
    assert slowest([RATES, other]) == MeasuredRates({"fp32": 8e10}, {64: 1e10, 256: 6e10}, 1e10, 1e10, 5e9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "taken.yaml"], "taken.yaml exists: give another name, or --force"),
        (["--output", "folder"], "folder is a folder"),
        (["--output", "nowhere/x.yaml"], "nowhere does not exist"),
    ],
    ids=["taken", "folder", "nowhere"],
)
def test_impossible_requests_are_refused_before_measuring(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.yaml").write_text("mine")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("megapipe.extras.calibrate.rates.measure", never)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "taken.yaml").read_text() == "mine"


def never(*_: Any) -> None:
    raise AssertionError("measured")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megapipe.extras.calibrate.rates.measure_rates", interrupted)
    assert main(["--output", str(tmp_path / "x.yaml"), "--device", "cpu"]) == 130
    assert "no file was written" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_force_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("old")
    with pytest.raises(ConfigError, match="exists: give another name"):
        refuse_taken(path, force=False)
    refuse_taken(path, force=True)


def test_a_stopwatch_warms_up_and_repeats_within_its_budget() -> None:
    calls: list[float] = []
    seconds = Stopwatch(torch.device("cpu")).seconds(lambda: calls.append(sum(map(math.sqrt, range(50_000)))), 0.0)
    assert 1e-5 < seconds < 10
    assert len(calls) >= WARM_UPS["cpu"] + 1 + MIN_REPEATS
