"""`megapipe serve` as clients see it: one process, two ranks, errors, the queue, and the way it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe import load
from megapipe.extras.cli.command import main
from megapipe.extras.inference.openai_api import IGNORED, WITHOUT_EFFECT, ApiError, read_request
from tests.extras.inference.chat_run import ANSWERS, nan_run, train_chat_run
from tests.launch.scripts import Command

REASON = "the optional packages of megapipe serve are not installed: pip install 'megapipe[serve]'"
pytestmark = pytest.mark.timeout(200)
ASKED, ANSWER = next(iter(ANSWERS.items()))
MESSAGES = [{"role": "user", "content": ASKED}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("starlette", reason=REASON)
    pytest.importorskip("uvicorn", reason=REASON)
    return train_chat_run(tmp_path_factory.mktemp("served"))


@contextmanager
def served(run: Path, folder: Path, *words: str, ranks: int = 1) -> Iterator[tuple[str, Command]]:
    """Start a server on a free port, and give its address."""
    folder.mkdir(exist_ok=True)
    grid = ["launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    sizes = ["--tensor-model-parallel-size", str(ranks)]
    command = [sys.executable, "-m", "megapipe", *grid, "serve", str(run), "--port", "0", "--device", "cpu", *sizes]
    with Command([*command, *words], folder) as running:
        end = time.monotonic() + 90
        while not (found := re.search(r"serving \S+ at (http://\S+);", running.out())):
            assert running.process.poll() is None and time.monotonic() < end, running.out() + running.error()
            time.sleep(0.05)
        yield found[1], running


def post(url: str, body: Any, token: str | None = None, content_type: str = "application/json") -> tuple[int, Any]:
    """Return status and JSON of a request. body: None for GET, bytes as they are."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def events(url: str, body: Any) -> list[Any]:
    """Return the events of a streamed answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def ended_by_interrupt(running: Command) -> str:
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(30) == 0, running.error()
    return running.out() + running.error()


@pytest.fixture(scope="module")
def address(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(run, tmp_path_factory.mktemp("server")) as (url, _):
        yield url


def test_a_chat_is_answered_and_stops(address: str, run: Path) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "user": "me", "n": 1, "stop": None}
    status, answer = post(f"{address}/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert status == 200 and choice["message"] == {"role": "assistant", "content": ANSWER}
    assert (choice["finish_reason"], answer["object"], answer["model"]) == ("stop", "chat.completion", run.parent.name)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["prompt_tokens"] > 10


def test_a_stream_gives_the_same_text_in_pieces(address: str) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, usage = events(f"{address}/v1/chat/completions", body)
    assert len(chunks) > 1 and "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == ANSWER
    assert last["choices"][0]["finish_reason"] == "stop" and last["choices"][0]["delta"] == {}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in (*chunks, last, usage)}) == 1


def test_a_text_is_continued_up_to_its_limits(address: str) -> None:
    url, prompt = f"{address}/v1/completions", f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    _, answer = post(url, {"prompt": prompt, "temperature": 0})
    assert answer["choices"][0]["text"].startswith(ANSWER)  # this path ends at the end of a document alone
    _, answer = post(url, {"prompt": [prompt], "temperature": 0, "max_tokens": 2})
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 2)
    stop = ANSWER[-2:]
    _, answer = post(url, {"prompt": prompt, "temperature": 0, "stop": [stop, "never"]})
    assert answer["choices"][0]["text"] == ANSWER[:-2] and answer["choices"][0]["finish_reason"] == "stop"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 30, "stop": ANSWER[1:3], "stream": True}
    assert "".join(chunk["choices"][0]["text"] for chunk in events(url, body)) == ANSWER[:1]


def test_a_seed_repeats_a_draw(address: str) -> None:
    url, body = f"{address}/v1/completions", {"prompt": "x", "temperature": 2, "max_tokens": 12}
    texts = [post(url, body | more)[1]["choices"][0]["text"] for more in ({"seed": 5}, {"seed": 5}, {}, {})]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_the_context_is_never_exceeded(address: str) -> None:
    for body in ({"max_tokens": 96}, {"messages": [{"role": "user", "content": "x " * 400}]}):
        status, answer = post(f"{address}/v1/chat/completions", {"messages": MESSAGES} | body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
        assert "the context is 96 tokens, but this request needs more" in answer["error"]["message"]
    status, answer = post(f"{address}/v1/completions", {"prompt": "x", "max_tokens": 95})
    assert status == 200 and answer["usage"]["total_tokens"] <= 96


def test_the_model_and_the_page_are_shown(address: str, run: Path) -> None:
    status, answer = post(f"{address}/v1/models", None)
    (model,) = answer["data"]
    assert status == 200 and (model["id"], model["max_model_len"]) == (run.parent.name, 96)
    with urllib.request.urlopen(address, timeout=30) as page:
        text = page.read().decode()
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert post(f"{address}/v1/models/{run.parent.name}", None) == (200, model)
    status, answer = post(f"{address}/v1/models/gpt-4", None)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    with urllib.request.urlopen(f"{address}/favicon.ico", timeout=30) as icon:
        assert icon.status == 204
    # the field shows what the page asks for
    assert re.search(r'MOST_OF_TEXT = 64;.*placeholder = .*"all" : MOST_OF_TEXT;.*max_tokens: MOST_OF_TEXT', text, re.S)
    # nothing is loaded from elsewhere
    assert "v1/chat/completions" in text and not re.findall(r"https?://|@import|\bsrc=|\bhref=|innerHTML", text)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"messages": [', 400, "the body is not JSON"),
        (b"[]", 400, "the body must be a JSON object"),
        ({"messages": MESSAGES, "model": "gpt-4"}, 404, "there is no model 'gpt-4'"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "holds the special token <|im_end|>"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogates"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, "utf-8"),
        (b'{"stream": true, "stream": false}', 400, "'stream' occurs twice"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "the body is not JSON"),
        (b'{"temperature": NaN}', 400, "NaN"),
    ],
    ids="cut list model special deep surrogate bytes twice huge nan".split(),
)
def test_wrong_requests_get_one_message(body: Any, status: int, message: str, address: str) -> None:
    found, answer = post(f"{address}/v1/chat/completions", body)
    assert found == status and message in answer["error"]["message"] and answer["error"]["type"]


def test_an_unknown_path_or_method_gets_a_message(address: str) -> None:
    for path, body, status in (("/v1/embeddings", {}, 404), ("/v1/completions", None, 405)):
        found, answer = post(address + path, body)
        assert found == status and f"{path}: " in answer["error"]["message"]


def test_other_sites_cannot_use_a_server_without_a_token(address: str) -> None:
    assert post(f"{address}/v1/chat/completions", {"messages": MESSAGES}, content_type="text/plain")[0] == 415
    request = urllib.request.Request(f"{address}/v1/models", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)


def test_a_client_that_leaves_frees_the_server(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 90, "stream": True, "temperature": 2}).encode()
    for _ in range(4):
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            client.recv(100)
    assert post(f"{address}/v1/chat/completions", {"messages": MESSAGES, "temperature": 0})[0] == 200


LMEVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}  # of a log likelihood


def test_the_log_likelihoods_of_lm_eval_are_those_of_the_model(address: str, run: Path) -> None:
    """The request and the way to read its answer are those of lm-evaluation-harness 0.4.13, local-completions."""
    model, _ = load(run)
    prompts = [[7, 40, 41, 60, 61], [90, 91, 92], [100, 7, 8, 9, 10, 11, 12]]
    expected = [model(torch.tensor([prompt]))[0].double().log_softmax(-1) for prompt in prompts]
    prompts.append([*prompts[0], int(expected[0][-1].argmax())])  # whose last token is the most likely one
    expected.append(model(torch.tensor([prompts[-1]]))[0].double().log_softmax(-1))
    _, answer = post(f"{address}/v1/completions", {"model": run.parent.name, "prompt": prompts} | LMEVAL)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for prompt, choice, logprobs in zip(prompts, choices, expected, strict=True):
        start = len(prompt) - 1
        values, tops = (choice["logprobs"][name][start:-1] for name in ("token_logprobs", "top_logprobs"))
        assert sum(values) == pytest.approx(logprobs[start - 1, prompt[-1]].item(), abs=1e-4)
        assert (values[0] == max(tops[0].values())) == (prompt[-1] == int(logprobs[start - 1].argmax()))
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1 and choice["logprobs"]["token_logprobs"][0] is None
    assert choices[-1]["logprobs"]["top_logprobs"][-2] == {
        choices[-1]["logprobs"]["tokens"][-2]: choices[-1]["logprobs"]["token_logprobs"][-2]
    }
    _, answer = post(f"{address}/v1/completions", {"prompt": prompts[1]} | LMEVAL | {"max_tokens": 0})
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3 and answer["usage"]["completion_tokens"] == 0


def test_several_prompts_are_answered_as_each_alone(address: str) -> None:
    url, prompts = f"{address}/v1/completions", ["What", "comes", [7, 8, 9]]
    alone = [post(url, {"prompt": one, "temperature": 0})[1]["choices"][0]["text"] for one in prompts]
    for more in ({}, {"echo": True}):
        _, answer = post(url, {"prompt": prompts, "temperature": 0} | more)
        texts = [choice["text"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert all(text.endswith(one) and (text == one) != bool(more) for text, one in zip(texts, alone, strict=True))
        body = {"prompt": prompts, "temperature": 0, "stream": True, "logprobs": 2} | more
        found = ["", "", ""]
        for chunk in events(url, body):
            (choice,) = chunk["choices"]
            found[choice["index"]] += choice["text"]
        assert found == texts
    _, answer = post(url, {"prompt": ["x"] * 6, "temperature": 2, "seed": 3})
    assert len({choice["text"] for choice in answer["choices"]}) > 1  # each has its own draws


def test_the_tokens_of_a_chat_have_log_probabilities(address: str) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    _, answer = post(f"{address}/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert (
        "".join(one["token"] for one in content) == ANSWER and len(content) == answer["usage"]["completion_tokens"] + 1
    )
    for one in content:
        assert one["logprob"] == one["top_logprobs"][0]["logprob"] > one["top_logprobs"][1]["logprob"]
        assert bytes(one["bytes"]).decode() == one["token"]
    chunks = events(f"{address}/v1/chat/completions", body | {"stream": True})
    assert [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["content"]] == content


@pytest.mark.parametrize("is_chunked", [False, True], ids=["announced", "chunked"])
def test_a_body_that_is_too_long_is_refused_and_the_connection_closed(is_chunked: bool, address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {10**12}"
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{length}\r\n".encode())
        client.sendall(b"Content-Type: application/json\r\n\r\n")
        if is_chunked:
            client.sendall(b"200000\r\n" + b"x" * (2 << 20) + b"\r\n0\r\n\r\n")
        answer = b""
        while data := client.recv(65536):  # up to the end of the connection
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()
    assert "--max-request-bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_model_of_nan_answers_with_an_error_and_goes_on(run: Path, tmp_path: Path) -> None:
    with served(nan_run(run, tmp_path / "nan"), tmp_path / "server", ranks=2) as (url, running):
        for body in ({"prompt": "x"}, {"prompt": ["x", "y"], "temperature": 0, "logprobs": 1, "echo": True}):
            status, answer = post(f"{url}/v1/completions", body)
            assert (status, answer["error"]["type"]) == (500, "server_error") and "NaN" in answer["error"]["message"]
        (event,) = events(f"{url}/v1/completions", {"prompt": "x", "stream": True})
        assert "NaN" in event["error"]["message"]
        assert "Traceback" not in ended_by_interrupt(running)


def test_requests_wait_in_a_bounded_queue(run: Path, tmp_path: Path) -> None:
    with served(run, tmp_path, "--queue", "1", "--max-request-bytes", "1000") as (url, running):
        status, answer = post(f"{url}/v1/completions", {"prompt": "x" * 1000})
        assert status == 413 and "1000 bytes" in answer["error"]["message"]
        body = {"prompt": "x", "max_tokens": 90, "temperature": 2}
        found: list[tuple[int, Any]] = []
        ask = [threading.Thread(target=lambda: found.append(post(f"{url}/v1/completions", body))) for _ in range(8)]
        for thread in ask:
            thread.start()
        for thread in ask:
            thread.join()
        codes = [status for status, _ in found]
        assert set(codes) == {200, 429} and len(codes) == 8
        assert (
            "1 requests wait already" in next(answer for status, answer in found if status == 429)["error"]["message"]
        )
        assert ended_by_interrupt(running).endswith("stopped\n")


@pytest.mark.parametrize("while_answering", [False, True], ids=["idle", "answering"])
def test_two_ranks_answer_as_one_and_end_together(while_answering: bool, run: Path, tmp_path: Path) -> None:
    with served(run, tmp_path, "--token", "secret", ranks=2) as (url, running):
        body = {"messages": MESSAGES, "temperature": 0}
        status, answer = post(f"{url}/v1/chat/completions", body, "secret")
        assert status == 200 and answer["choices"][0]["message"]["content"] == ANSWER
        for wrong in (None, "wrong"):
            status, answer = post(f"{url}/v1/chat/completions", body, wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        if while_answering:
            long = {"prompt": "x", "max_tokens": 90, "temperature": 2}
            threading.Thread(target=lambda: post(f"{url}/v1/completions", long, "secret"), daemon=True).start()
            time.sleep(0.3)
        said = ended_by_interrupt(running)
        assert "stopped\n" in said and "Traceback" not in said and "error" not in said


def test_mistakes_at_the_start_are_one_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str, code: int = 2) -> str:
        assert main(["serve", *words, "--device", "cpu"]) == code
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}: Address already in use" in refused(str(run), "--port", port)
    assert "--port 99999 must be at most 65535" in refused(str(run), "--port", "99999")
    for host in ("no.such.invalid", "192.0.2.1"):  # unknown, and of another machine
        assert refused(str(run), "--host", host, "--token", "x").endswith("; give an address of this machine\n")
    assert "give a --token that they must send" in refused(str(run), "--host", "0.0.0.0")
    assert "--token is empty" in refused(str(run), "--host", "0.0.0.0", "--token", "")
    assert "holds no checkpoint" in refused(str(tmp_path), code=1)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'megapipe[serve]'" in refused(str(run))


# ------------------------------------------------------------------------------------------- fields, without a server


def read(is_chat: bool = True, **fields: Any) -> Any:
    source = {"messages": MESSAGES} if is_chat else {"prompt": "a"}
    return read_request(json.dumps(source | fields).encode(), is_chat, "m")


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_fields_without_support_are_refused_unless_they_have_no_effect(name: str) -> None:
    for value in (None, WITHOUT_EFFECT[name]):
        read(**{name: value})
    with pytest.raises(ApiError, match=f"^{name}: 7 is not supported; leave it out$"):
        read(**{name: 7})


def test_harmless_fields_are_ignored_and_unknown_ones_refused() -> None:
    assert read(**dict.fromkeys(IGNORED, "x")).messages == tuple(MESSAGES)
    for name in ("temprature", "reasoning_effort", "prompt"):
        with pytest.raises(ApiError, match=f"{name} is not a field of this request"):
            read(**{name: "x"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.1}, "temperature must be a number from 0 to 2, not 2.1"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": float("nan")}, "NaN is not a number"),
        ({"top_p": 0}, "top_p must be a number"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": -1}, "max_tokens must be an integer from 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"stop": ["a"] * 17}, "stop must be a text, or a list of at most 16"),
        ({"logprobs": 3}, "logprobs is true or false"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20"),
        ({"echo": True}, "echo is not a field"),
        ({"stop": ""}, "stop must be a text"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0] must have a role: system, user, assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0] has content other than text"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0] has tool_calls"),
        ({"stream_options": {"x": 1}}, "stream_options has include_usage alone"),
        ({"stream": "yes"}, "stream is true or false"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "has content other than text"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)):
        read(**fields)


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read(messages=[{"role": "user", "content": parts, "name": None}]).messages[0]["content"] == "one two"
    assert read(is_chat=False).max_tokens == 16 and read().max_tokens is None


def test_a_prompt_is_a_text_or_tokens_or_several() -> None:
    for given, found in (
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], "a"], ((1, 2), "a")),
    ):
        assert read(is_chat=False, prompt=given).prompts == found
    for given in ([], [[]], [1, "a"], [True], [[1.0]], {}, 5, ["a"] * 129):
        with pytest.raises(ApiError, match="prompt"):
            read(is_chat=False, prompt=given)
    for value in (6, -1, True, 1.0):
        with pytest.raises(ApiError, match="logprobs must be an integer from 0 to 5"):
            read(is_chat=False, logprobs=value)
