"""No request, well formed or not, ends `megapipe serve`, stops its answers or makes it keep much memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extras.inference.chat_run import ANSWERS, train_chat_run
from tests.extras.inference.hostile import hostile_requests
from tests.extras.inference.test_server import REASON, ended_by_interrupt, post, served
from tests.launch.scripts import Command

pytestmark = pytest.mark.timeout(400)
ASKED, ANSWER = next(iter(ANSWERS.items()))
GOOD = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0}
MOST_GROWTH_BYTES = 1 << 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("starlette", reason=REASON)
    pytest.importorskip("uvicorn", reason=REASON)
    return train_chat_run(tmp_path_factory.mktemp("attacked"))


def memory_bytes(running: Command, name: str) -> int:
    """Return the memory of the server's largest process. name: VmRSS for now, VmHWM for its peak."""
    found = []
    for process in (running.process.pid, *running.ranks()):
        text = Path(f"/proc/{process}/status").read_text()
        found += [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")]
    return max(found)


@pytest.mark.parametrize(("ranks", "count"), [(1, 80), (1, 800), (2, 64)], ids=["few", "many", "two ranks"])
def test_a_server_survives_hostile_requests(ranks: int, count: int, run: Path, tmp_path: Path) -> None:
    with served(run, tmp_path, ranks=ranks) as (url, running):
        host, port = url.removeprefix("http://").split(":")
        assert post(f"{url}/v1/chat/completions", GOOD)[0] == 200
        idle, wrong = memory_bytes(running, "VmRSS"), []
        for number, request in enumerate(hostile_requests(7, count), 1):
            answer = request.send(host, int(port))
            first, _, rest = answer.partition(b"\r\n")
            code = int(first.split()[1]) if first.startswith(b"HTTP/1.1 ") else 0
            is_json = b"application/json" in rest.partition(b"\r\n\r\n")[0]
            if code >= 500 or (code in (400, 413, 415) and is_json and not error_of(rest)):
                wrong.append((request.kind, answer[:200]))
            if number % 40 == 0 or number == count:
                status, answered = post(f"{url}/v1/chat/completions", GOOD)
                assert (status, answered["choices"][0]["message"]["content"]) == (200, ANSWER), request.kind
        growth = memory_bytes(running, "VmHWM") - idle
        print(f"{count} requests, at most {growth >> 20} MiB above idle")
        said = ended_by_interrupt(running)
        assert wrong == []
        assert growth < MOST_GROWTH_BYTES, growth
        assert "Traceback" not in said and "stopped\n" in said, said


def error_of(rest: bytes) -> str:
    """Return the message of an error."""
    content = rest.partition(b"\r\n\r\n")[2]
    return str(json.loads(content)["error"]["message"])
