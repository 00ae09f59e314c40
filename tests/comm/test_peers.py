"""A master address without an address, and a rank 0 that never comes: one message each, in time."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from megapipe.comm import network
from megapipe.comm.bootstrap import first_line, start
from megapipe.errors import CommunicationError
from tests.comm.test_bootstrap import environment_of, free_port


def test_an_unknown_name_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *arguments: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=r"node-x .*Name or service"):
        network.check_name("node-x")
    assert time.monotonic() - began >= network.RESOLVE_SECONDS
    assert network.RESOLVE_SECONDS + 6 < 10, "a rank of several waits 6 s more before it prints"


def test_a_name_service_that_blocks_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments: blocks.wait(60))
    monkeypatch.setattr(network, "RESOLVE_SECONDS", 0.3)
    with pytest.raises(CommunicationError, match="cannot be resolved"):
        network.check_name("node-x")
    blocks.set()


def test_a_name_that_becomes_known_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def later(host: str, *arguments: Any) -> Any:
        calls.append(host)
        if len(calls) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", later)
    monkeypatch.setattr(network, "POLL_SECONDS", 0.01)
    network.check_name("node-x")
    assert len(calls) == 3


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_a_rank_0_that_never_comes_is_one_message(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    environment = environment_of(1, 2, free_port(), launcher)
    with pytest.raises(CommunicationError, match=r"rank 0 .*127\.0\.0\.1:\d+ .*0\.5 s") as raised:
        start(environment, "gloo", timeout_seconds=0.5, device="cpu", facts_of=lambda _: {})
    assert len(str(raised.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


def test_a_peer_that_never_comes_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    environment = environment_of(0, 2, free_port())
    with pytest.raises(CommunicationError, match=r"^rank 1 did not arrive within 1 s; rank 0 did, from ") as raised:
        start(environment, "gloo", timeout_seconds=1.0, device="cpu", facts_of=lambda _: {})
    assert len(str(raised.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


def test_only_the_first_line_of_an_error_is_shown() -> None:
    assert first_line(RuntimeError("wait timeout\nframe #0: c10::Error")) == "wait timeout"
    assert first_line(KeyError()) == "KeyError"
