"""`megapipe report --serve`: pages that follow the run's files, the trace, refused requests, its start and its end."""

from __future__ import annotations

import http.client
import json
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.extras.cli.report import main
from megapipe.extras.report.live import ReportServer
from megapipe.extras.report.profile import profiles_in
from tests.extras.report.test_page import RECORDED, Checked, edited


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    shutil.copytree(RECORDED, tmp_path / "runs" / "interleaved")
    return tmp_path / "runs" / "interleaved"


@pytest.fixture
def address(recorded: Path) -> Iterator[str]:
    """Serve the recorded run in a thread."""
    with ReportServer(recorded, free_port()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def got(url: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_page_is_that_of_the_run_and_follows_its_files(address: str, recorded: Path) -> None:
    status, text, headers = got(address)
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "14 of 14" in Checked(text).text
    tag = headers["ETag"]
    assert got(address, **{"If-None-Match": tag})[:2] == (304, "")  # nothing has changed
    edited(recorded / "metrics.jsonl", lambda records: [each for each in records if each["step"] <= 12])
    status, text, headers = got(address, **{"If-None-Match": tag})
    assert status == 200 and headers["ETag"] != tag and "12 of 14" in Checked(text).text


def test_the_page_of_a_run_notices_that_its_process_has_died(address: str, recorded: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    edited(
        recorded / "run.jsonl",
        lambda records: [
            each | ({"host": platform.node(), "pid": child.pid} if each["kind"] == "start" else {})
            for each in records
            if each["kind"] != "end"
        ],
    )
    assert "running, last record" in got(address)[1]
    child.communicate(b"\n")
    assert "no end recorded" in got(address)[1]


def test_the_trace_of_the_profile_is_served(address: str, recorded: Path) -> None:
    status, text, headers = got(f"{address}/trace")
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert len(json.loads(text)["traceEvents"]) > 100
    assert 'data-trace="pipeline_trace_00000011_00000012.json"' in got(address)[1]
    profiles_in(recorded)[0].unlink()
    assert got(f"{address}/trace")[0] == 404 and "data-trace=" not in got(address)[1]


@pytest.mark.parametrize(
    "path", ["/run.jsonl", "/metrics.jsonl", "/../run.jsonl", "/%2e%2e/run.jsonl", "//etc/passwd", "/trace/", "/?x"]
)
def test_other_paths_are_not_found(address: str, path: str) -> None:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", path)  # urllib would shorten some of them
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (404, b"not found; the report is at /")
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_is_answered(address: str, method: str) -> None:
    assert got(address, method)[0] == 501


def test_pages_of_other_sites_cannot_read_it(address: str) -> None:
    port = address.rpartition(":")[2]
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", ""):
        status, text, _ = got(address, Host=host)
        assert status == 403 and "steps" not in text
    assert got(address, Host="localhost:9999")[0] == 200  # an ssh tunnel from another port
    _, _, headers = got(address)
    assert headers["Access-Control-Allow-Origin"] is None
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["X-Frame-Options"] == "DENY"


def test_a_request_that_is_none_and_a_lost_client_leave_the_server_answering(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    for sent in (b"\x00\xff nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET"):
        with socket.create_connection(place, timeout=60) as client:
            client.sendall(sent)
    assert got(address)[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_that_is_deleted_is_reported_and_one_that_comes_back_is_served(address: str, recorded: Path) -> None:
    shutil.move(recorded, recorded.with_name("moved"))
    status, text, _ = got(address)
    assert status == 503 and "is not a folder" in text
    shutil.move(recorded.with_name("moved"), recorded)
    assert got(address)[0] == 200


def test_what_cannot_be_served_is_one_message(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, message in (
            (["--serve", "--port", str(port)], f"--port {port} cannot be used: Address already in use; choose another"),
            (["--serve", "--port", "0"], "--port 0 must be at least 1"),
            (["--serve", "--port", "65536"], "--port 65536 must be at most 65535"),
            (["--port", "8123"], "--port is only read with --serve"),
            (["--serve", "--output", "x.html"], "--serve does not go with --output"),
            (["--serve", "--svg", "x.svg"], "--serve does not go with --svg"),
        ):
            assert main([str(recorded), *words]) == 2
            assert message in capsys.readouterr().err
    assert main([str(recorded.parent), "--serve"]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_the_command_says_its_address_and_ctrl_c_ends_it_with_a_line(recorded: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "megapipe", "report", str(recorded), "--serve", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        (address,) = re.findall(r"http://\S+/", server.stdout.readline())
        assert address == f"http://127.0.0.1:{port}/" and got(address)[0] == 200
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=60)[0].strip() == "stopped" and server.returncode == 0
    finally:
        server.kill()
        server.wait()
    assert not (recorded / "report.html").exists()
