"""Two machines, each in its network namespace: training over them, a slow link, a cut one, a machine that is lost.

The figures of docs/doctor.md are printed with pytest -rP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.extras.inspect.checkpoint import compare
from tests.lab.nodes import PORT, Nodes, why_not
from tests.launch.scripts import REPOSITORY, Command, Ended, launch
from tests.tiny import TINY_FLAGS

SCRIPT = str(REPOSITORY / "pretrain_gpt.py")
LIMIT_SECONDS = 3.0
MOST_SECONDS = 20.0  # from the fault to the end of all processes, on a busy machine
GRID = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--mock-data")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two machines; a test that breaks one repairs it."""
    if why_not():
        pytest.skip(why_not())
    with Nodes(2) as found:
        yield found


def on_all(nodes: Nodes, folder: Path, ranks: int, *words: str) -> list[Ended]:
    """Run the same command on every machine and wait for its end."""
    commands = [nodes.launch(node, folder, ranks, *words) for node in range(nodes.count)]
    try:
        return [command.ended() for command in commands]
    finally:
        close(commands)


def close(commands: list[Command]) -> None:
    for command in commands:
        command.__exit__()


def diagnosis(ended: list[Ended]) -> dict:  # type: ignore[type-arg]
    assert ended[1].out == "", "one rank speaks"
    found: dict = json.loads(ended[0].out)  # type: ignore[type-arg]
    return found


def training(folder: Path, steps: int, limit_seconds: float = 100.0) -> list[str]:
    save = ["--save", str(folder / "run"), "--load", str(folder / "run"), "--save-interval", "2", "--keep-last", "20"]
    return [
        SCRIPT,
        *TINY_FLAGS,
        *GRID,
        "--train-iters",
        str(steps),
        "--hang-timeout-seconds",
        str(limit_seconds),
        *save,
    ]


def assert_same_state(one: Path, other: Path, step: int) -> None:
    checkpoints = [find_checkpoint(folder / "run", step) for folder in (one, other)]
    assert checkpoints[0] is not None and checkpoints[1] is not None
    compared = list(compare(*checkpoints))
    assert len(compared) > 10
    assert all(tensor.num_equal == tensor.num_elements for tensor in compared)


@pytest.mark.slow
def test_a_slow_direction_between_two_machines_is_named(nodes: Nodes, tmp_path: Path) -> None:
    nodes.slow_down(1, "20mbit")
    try:
        began = time.monotonic()
        ended = on_all(nodes, tmp_path, 1, "-m", "megapipe", "doctor", "--json", "--timeout-seconds", "30")
        print(f"{time.monotonic() - began:.1f} s for the examination")
    finally:
        nodes.free(1)
    assert [end.code for end in ended] == [1, 1], ended[0].error
    found = diagnosis(ended)
    assert found["blame"] == ["the link from node-b to node-a"]
    (link,) = {tuple(row["ranks"]) for row in found["slow"] if row["operation"] == "send"}
    assert link == (1, 0)
    worst = found["slow"][0]
    assert 1e6 < worst["bytes_per_second"] < 5e6, "20 Mbit/s are 2.5 MB/s"
    assert [report["name"] for report in found["hosts"]] == ["node-a", "node-b"]
    assert [report["interface"] for report in found["hosts"]] == ["eth0", "eth0"]
    assert abs(found["clock_seconds"]["node-b"]["ahead"]) < 0.1, "both have the clock of one kernel"


def test_each_side_of_a_cut_names_the_other_and_exits(nodes: Nodes, tmp_path: Path) -> None:
    commands = [nodes.launch(node, tmp_path, 1, *training(tmp_path, 100_000, LIMIT_SECONDS)) for node in range(2)]
    try:
        commands[0].wait_for("step      3/")
        status = nodes.run(0, [sys.executable, "-m", "megapipe", "status", str(tmp_path / "run"), "--json"])
        assert [rank["host"] for rank in json.loads(status)["ranks"]] == ["node-a", "node-b"]
        nodes.cut(1)
        began, reported = time.monotonic(), {}
        while len(reported) < 2 and time.monotonic() - began < MOST_SECONDS:
            for node, command in enumerate(commands):
                if "training hangs" in command.error():
                    reported.setdefault(node, time.monotonic() - began)
            time.sleep(0.02)
        ended = [command.ended() for command in commands]
        print(f"{reported[0]:.1f} s to the report of the store's side, {reported[1]:.1f} s to that of the other")
        assert time.monotonic() - began < MOST_SECONDS
    finally:
        nodes.join(1)
        close(commands)
    assert [end.code for end in ended] == [1, 1]
    assert "host node-b (rank 1) no longer answers node-a" in ended[0].error
    assert "host node-a (rank 0) no longer answers node-b" in ended[1].error
    assert all(end.error.count("communication error") == 1 for end in ended)


@pytest.mark.slow
def test_training_over_two_machines_equals_one_machine(nodes: Nodes, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    ended = on_all(nodes, there, 2, *training(there, 6))
    assert [end.code for end in ended] == [0, 0], ended[0].error
    with launch(here, 4, *training(here, 6)[1:]) as command:
        assert command.ended().code == 0
    assert_same_state(there, here, 6)


@pytest.mark.slow
def test_healthy_machines_are_reported_fine(nodes: Nodes, tmp_path: Path) -> None:
    words = ["--tensor-model-parallel-size", "2", "--slow-factor", "10"]  # the cores are shared by all tests
    ended = on_all(nodes, tmp_path, 2, "-m", "megapipe", "doctor", *words)
    assert [end.code for end in ended] == [0, 0], ended[0].out
    assert "4 ranks, tp 2 x pp 1 x dp 2, on 2 hosts: node-a (ranks 0-1), node-b (ranks 2-3)" in ended[0].out


@pytest.mark.slow
def test_after_a_machine_is_lost_a_relaunch_resumes_bit_exactly(nodes: Nodes, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    steps = 40
    commands = [nodes.launch(node, broken, 1, *training(broken, steps, LIMIT_SECONDS)) for node in range(2)]
    try:
        commands[0].wait_for("step  5/")
        nodes.kill(1)
        began = time.monotonic()
        while "communication error" not in commands[0].error():
            assert time.monotonic() - began < MOST_SECONDS, commands[0].error()
            time.sleep(0.02)
        print(f"{time.monotonic() - began:.1f} s to the message, ", end="")
        ended = commands[0].ended()
        print(f"{time.monotonic() - began:.1f} s to the end of all ranks")
        assert ended.code == 1
        assert "host node-b (rank 1) no longer answers node-a" in ended.error
    finally:
        nodes.restart(1)
        close(commands)
    again = on_all(nodes, broken, 1, *training(broken, steps))
    assert [end.code for end in again] == [0, 0], again[0].error
    assert "continuing after step" in again[0].out
    assert [end.code for end in on_all(nodes, whole, 1, *training(whole, steps))] == [0, 0]
    assert_same_state(broken, whole, steps)


@pytest.mark.slow
def test_machines_rendezvous_by_c10d_too(nodes: Nodes, tmp_path: Path) -> None:
    commands = []
    try:
        for node in range(2):
            endpoint = [
                f"--rdzv-endpoint={nodes.address(0)}:{PORT}",
                f"--rdzv-conf=is_host={int(node == 0)}",
                "--rdzv-id=test",
            ]
            flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--local-addr", nodes.address(node), *endpoint]
            commands.append(nodes.launch(node, tmp_path, 1, *training(tmp_path, 2), flags=flags))
        assert [command.ended().code for command in commands] == [0, 0], commands[0].error()
    finally:
        close(commands)


@pytest.mark.slow
def test_of_three_machines_the_one_whose_sending_is_slow_is_named(tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    with Nodes(3) as three:
        three.slow_down(1, "20mbit")
        ended = on_all(three, tmp_path, 1, "-m", "megapipe", "doctor", "--json")
    assert [end.code for end in ended] == [1, 1, 1]
    assert json.loads(ended[0].out)["blame"] == ["everything that node-b sends"]


@pytest.mark.slow
def test_a_hardware_file_finds_a_slow_link_without_peers(nodes: Nodes, tmp_path: Path) -> None:
    """Both directions are slow, so only the hardware table shows it."""
    file = tmp_path / "hardware.yaml"
    link = "{bytes_per_second: 5.0e+8, latency_seconds: 1.0e-3}"
    file.write_text(f"like: h100\nname: two nodes\nnode: {link}\nnetwork: {link}\n")
    for node in range(2):
        nodes.slow_down(node, "20mbit")
    try:
        ended = on_all(nodes, tmp_path, 1, "-m", "megapipe", "doctor", "--json", "--hardware", str(file))
    finally:
        for node in range(2):
            nodes.free(node)
    assert [end.code for end in ended] == [1, 1]
    found = diagnosis(ended)
    assert found["hardware"] == "two nodes"
    assert found["blame"] == ["every link between hosts"]
    assert {row["slow_against"] for row in found["slow"]} == {"what the hardware table expects"}


@pytest.mark.slow
def test_ctrl_c_on_one_machine_saves_and_stops_both(nodes: Nodes, tmp_path: Path) -> None:
    commands = [nodes.launch(node, tmp_path, 1, *training(tmp_path, 100_000)) for node in range(2)]
    try:
        commands[0].wait_for("step      3/")
        os.kill(commands[1].ranks()[0], signal.SIGINT)  # the launcher, of which nsenter is the parent
        assert [command.ended().code for command in commands] == [0, 0], commands[0].error()
    finally:
        close(commands)
    assert find_checkpoint(tmp_path / "run", None) is not None
