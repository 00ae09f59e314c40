"""SIGTERM and SIGINT before the first step: the code of the signal, one line, no traceback; wherever the rank is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY, Command, environment
from tests.tiny import TINY_FLAGS

# says where it is, then waits there: between bytecodes, or in native code that no Python handler interrupts
WAITS = """
import ctypes, sys, time
from megapipe.monitor.signals import ended_by_signals
with ended_by_signals():
    print("waits", flush=True)
    if sys.argv[1] == "native":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second waits for ever
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    time.sleep(100)
"""
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
BEGINS = """
import ctypes, sys, time
from megapipe.monitor.signals import ended_by_signals
from megapipe.train.guard import stop_requests
with ended_by_signals(), stop_requests(sys.argv[1] == "handled") as stop:
    stop.begin()
    print("waits", flush=True)
    while stop.signal is None:
        time.sleep(0.01)
    mutex = ctypes.create_string_buffer(64)
    try:
        print("asked", flush=True)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    except KeyboardInterrupt:  # the second interrupt came before it waited
        sys.exit(130)
"""


def waiting(words: list[str], more: dict[str, str]) -> subprocess.Popen[str]:
    """Start a script, and return it once it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", *words],
        env=environment() | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("where", ["python", "native"])
def test_a_signal_ends_a_process_with_its_code_and_one_line(where: str, number: signal.Signals, code: int) -> None:
    process = waiting([WAITS, where], {})
    process.send_signal(number)
    _, error = process.communicate(timeout=280)
    assert (process.returncode, error) == (code, f"ended by {number.name}\n")


@pytest.mark.parametrize("launcher", ["another", "megapipe launch"])
def test_another_rank_says_nothing(launcher: str) -> None:
    more = {"MEGAPIPE_LAUNCHER_PID": str(os.getpid())} if launcher == "megapipe launch" else {}
    process = waiting([WAITS, "native"], RANK_1 | more)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=280)
    assert (process.returncode, error) == (-signal.SIGTERM if more else 143, "")


def test_from_the_first_step_a_third_interrupt_ends_a_rank_that_hangs() -> None:
    process = waiting([BEGINS, "handled"], {})
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=280)
    # the signal itself ends it, which shells report as 130 too, unless the two arrive as one before it waits
    assert process.returncode in (130, -signal.SIGINT) and error == ""


def test_without_a_handler_a_termination_ends_training() -> None:
    process = waiting([BEGINS, "unhandled"], {})
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=280)
    assert (process.returncode, error) == (143, "ended by SIGTERM\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_its_peers_ends_at_once(number: signal.Signals, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    words = ["env", "RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}"]
    words += [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *TINY_FLAGS, "--mock-data", "--train-iters", "3"]
    with Command(words, tmp_path) as command:
        command.wait_for("  kept ")
        while True:  # until it listens for the other rank
            with socket.socket() as peer:
                if peer.connect_ex(("127.0.0.1", int(port))) == 0 or command.process.poll() is not None:
                    break
        command.signal(number)
        ended = command.ended()
    assert (ended.code, ended.error) == (128 + number, f"ended by {number.name}\n")
