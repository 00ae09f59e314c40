"""`megapipe launch` keeps exit codes, passes signals on and hides torchrun's own messages."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.launch.flags import read_launch
from megapipe.extras.launch.forwarder import Forwarder
from megapipe.extras.launch.torchrun import free_port, outcome_of, parse, ranks_here
from tests.launch.scripts import Command, launch

REPORTS_AND_WAITS = """
import os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "MEGAPIPE_RANKS_PER_GPU")
received = []
signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
sys.stdout.write(" ".join(["rank", *(os.environ[name] for name in names)]) + "\\n")  # in one piece: ranks share it
sys.stdout.flush()
while not received:
    time.sleep(0.02)
time.sleep(0.2 * int(os.environ["RANK"]))  # what a rank needs to save
print("saved", os.environ["RANK"], flush=True)
"""
ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(60)
"""


def test_an_interrupt_reaches_the_ranks_and_their_success_is_the_launchers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REPORTS_AND_WAITS)
    with launch(tmp_path, 2, script=script, before=["--ranks-per-gpu", "2"]) as command:
        for rank in range(2):
            command.wait_for(f"rank {rank} 2 {rank} 127.0.0.1 1 2\n")
        command.signal(signal.SIGINT)
        ended = command.ended()
    assert (ended.code, ended.error) == (0, "")
    assert "saved 0" in ended.out and "saved 1" in ended.out


def test_the_exit_code_of_the_first_rank_that_failed_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_FAILS)
    with launch(tmp_path, 2, script=script) as command:
        ended = command.ended()
    assert (ended.code, ended.out) == (7, "")
    assert ended.error == "rank 1 ended with exit code 7; all ranks were terminated\n"


def test_ranks_that_exited_on_request_are_not_restarted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('started', flush=True); time.sleep(100)")
    with Command([sys.executable, "-m", "megapipe", "launch", "--max-restarts", "3", str(script)], tmp_path) as command:
        command.wait_for("started")
        command.signal(signal.SIGTERM)
        ended = command.ended()
    assert (ended.code, ended.out.count("started")) == (143, 1), ended.error


ASKED_EARLY = """
import signal, time
time.sleep(0.5)  # what imports take: until then the signal is ignored
received = []
signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
while not received:
    time.sleep(0.02)
print("saved", flush=True)
"""


def test_a_signal_before_the_ranks_start_is_delivered_later(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKED_EARLY)
    words = [
        "bash",
        "-c",
        'trap "" USR1; exec "$@"',
        "bash",
        sys.executable,
        "-c",
        TELLS_WHEN_IT_LISTENS,
        "--nproc-per-node",
        "2",
        str(script),
    ]
    with Command(words, tmp_path) as command:
        command.wait_for("listening")
        command.signal(signal.SIGUSR1)
        ended = command.ended()
    assert (ended.code, ended.error) == (0, "")
    assert ended.out.count("saved") == 2


# printed once the launcher has installed its handlers, before it imports torch
TELLS_WHEN_IT_LISTENS = """
import sys
from megapipe.extras.cli.launch import main
from megapipe.extras.launch.forwarder import Forwarder
enter = Forwarder.__enter__
def entered(self):
    found = enter(self)
    print("listening", flush=True)
    return found
Forwarder.__enter__ = entered
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("exit_codes", "received", "code", "message"),
    [
        ({0: 2, 1: -15}, None, 2, ""),
        ({3: 1}, None, 1, ""),
        ({0: 130, 1: 130}, signal.SIGINT, 130, ""),
        ({2: -9, 0: -15}, None, 137, "rank 2 was killed by SIGKILL; the system may have run out of memory"),
        ({2: -7, 0: -15}, None, 135, "rank 2 was killed by SIGBUS; a file that it had mapped was cut"),
        ({0: -15, 2: -11}, None, 139, "rank 2 was killed by SIGSEGV"),
        ({0: -15, 1: -15}, signal.SIGTERM, 143, "ended by SIGTERM before the ranks could save"),
        ({5: 7}, None, 7, "rank 5 ended with exit code 7"),
    ],
    ids=["refused", "error", "interrupted twice", "killed", "cut file", "crashed", "terminated early", "own exit code"],
)
def test_one_rank_prints_for_all(
    exit_codes: dict[int, int], received: signal.Signals | None, code: int, message: str
) -> None:
    outcome = outcome_of(exit_codes, received)
    assert outcome.exit_code == code
    assert outcome.message.startswith(message) if message else outcome.message == ""


def test_an_abbreviation_of_one_flag_in_two_spellings_is_that_flag() -> None:
    assert parse(["--nproc", "2", "--master-a=x", "pretrain"]).nproc_per_node == "2"
    assert read_launch(["--nproc", "2", "--dry-run", "pretrain"]).ranks_per_node == 2
    with pytest.raises(ConfigError, match="--rdzv could match"):
        parse(["--rdzv", "2", "pretrain"])


SAVES_AND_ENDS = """
import signal, sys, time
def say(text):
    sys.stdout.write(text + "\\n")  # in one piece: ranks share it
    sys.stdout.flush()
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
say("ready")
while not received:
    time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a process that ends
say("asked")
time.sleep(1.0)
say("saved")
"""


def test_repeated_terminations_change_nothing_and_the_exit_code_says_that_the_ranks_saved(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAVES_AND_ENDS)
    with launch(tmp_path, 2, script=script) as command:
        command.wait_for("ready\nready\n")
        command.signal(signal.SIGTERM)
        command.wait_for("asked\nasked\n")
        command.signal(signal.SIGTERM)
        command.signal(signal.SIGHUP)
        ended = command.ended()
    assert (ended.code, ended.out.count("saved"), ended.error) == (0, 2, "")


def test_a_hangup_that_nohup_ignores_stays_ignored_by_the_launcher() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Forwarder():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_number_of_ranks_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--nproc-per-node two"):
        ranks_here(parse(["--nproc-per-node", "two", "pretrain"]))
    with pytest.raises(ConfigError, match="it belongs to the launcher: megapipe launch --nproc-per-node N pretrain"):
        load_config(["--nproc-per-node", "2"])


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
