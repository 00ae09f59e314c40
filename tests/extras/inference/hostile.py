"""Requests that no server wants: absurd values, broken JSON and HTTP, bodies without end, clients that hang up."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

NUMBERS = [
    "1e-320", "1e-308", "5e-324", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-1", "0", "-0.0", "0.5", "2", "3",
    str(2**31), str(2**63 - 1), str(2**63), "1" + "0" * 400, "1" * 5000, "true", "null", '"1"', "[]", "{}", "[1]",
]  # fmt: skip
FIELDS = [
    "temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n",
    "stop", "stream", "stream_options", "echo", "model", "prompt", "messages", "logit_bias", "presence_penalty", "user",
]  # fmt: skip
TEXTS = [
    "", " ", "\x00", "\x7f\x1b[2J", "\ud800", "a\udfff", "\u202e\u0301\u0301", "\N{PILE OF POO}" * 9, "<|im_end|>",
    "<|endoftext|>", "{{ 7 * 7 }}{% for i in range(10**9) %}x{% endfor %}", "%s%n", "x" * 20_000, " " * 60_000,
    "\n" * 3_000, "\u4e2d" * 5_000, "0 " * 3_000,
]  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions"]
MIB = 1 << 20


@dataclass(frozen=True)
class Hostile:
    """What a client sends. pieces: the bytes, made as they are sent. reads: how many bytes it reads before it hangs up,
    None: all. ends: it sends no more afterwards. resets: it hangs up with a reset instead of an end.
    """

    kind: str
    pieces: Callable[[], Iterator[bytes]]
    reads: int | None = None
    ends: bool = False
    resets: bool = False

    def send(self, host: str, port: int, seconds: float = 60.0) -> bytes:
        """Send it; return what the server answers."""
        found = b""
        with socket.create_connection((host, port), timeout=seconds) as client:
            with suppress(BrokenPipeError, ConnectionResetError):
                for piece in self.pieces():
                    client.sendall(piece)
            if self.ends:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_WR)
            if self.resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(ConnectionResetError):
                while (self.reads is None or len(found) < self.reads) and (data := client.recv(65536)):
                    found += data
        return found


def head(path: str, *lines: str, method: str = "POST", host: str = "localhost") -> bytes:
    words = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Content-Type: application/json",
        *lines,
    ]
    return ("\r\n".join(words) + "\r\n\r\n").encode("utf-8", "surrogatepass")


def posted(path: str, body: bytes) -> bytes:
    return head(path, f"Content-Length: {len(body)}") + body


def hostile_requests(seed: int, count: int) -> Iterator[Hostile]:
    """Yield requests of all kinds in turn."""
    draw = random.Random(seed)
    kinds = [_values, _structures, _broken_json, _texts, _tokens, _http, _large, _hang_ups]
    for number in range(count):
        yield kinds[number % len(kinds)](draw)


def _whole(kind: str, data: bytes, **how: Any) -> Hostile:
    return Hostile(kind, lambda: iter([data]), **how)


def _body(draw: random.Random, path: str, *fields: str) -> bytes:
    source = '"messages": [{"role": "user", "content": "x"}]' if "chat" in path else '"prompt": "x"'
    return ("{" + ", ".join([source, '"max_tokens": 4', *fields]) + "}").encode("utf-8", "surrogatepass")


def _values(draw: random.Random) -> Hostile:
    path = draw.choice(PATHS)
    names = draw.sample([name for name in FIELDS if name not in ("prompt", "messages")], draw.randint(1, 2))
    if draw.random() < 0.5:
        names = [draw.choice(["temperature", "top_p"])]
    fields = [f'"{name}": {draw.choice(NUMBERS)}' for name in names]
    source = '"messages": [{"role": "user", "content": "x"}]' if "chat" in path else '"prompt": "x"'
    return _whole(f"values {fields}"[:80], posted(path, ("{" + ", ".join([source, *fields]) + "}").encode()))


def _structures(draw: random.Random) -> Hostile:
    def value(depth: int) -> Any:
        kind = draw.randrange(8 if depth else 5)
        if kind < 5:
            return [None, True, -1, 1.5, draw.choice(TEXTS)[:50]][kind]
        if kind < 7:
            return [value(depth - 1) for _ in range(draw.randint(0, 3))]
        return {draw.choice([*FIELDS, "role", "content", "text", "type", "x"]): value(depth - 1) for _ in range(3)}

    path = draw.choice(PATHS)
    name = "messages" if "chat" in path else "prompt"
    body = {name: value(3), draw.choice(FIELDS): value(2)}
    if "chat" in path and draw.random() < 0.6:
        body["messages"] = [{"role": draw.choice(["user", "assistant", "system", "x"]), "content": value(3)}]
    return _whole(f"structures {json.dumps(body)}"[:80], posted(path, json.dumps(body).encode()))


def _broken_json(draw: random.Random) -> Hostile:
    path, depth = draw.choice(PATHS), 10 ** draw.randint(2, 5)
    bodies = [
        b"", b"\x00", b"null", b'"x"', b"[]", b"{", b"{]", b'{"prompt": "x"', b'{"a": 1}}', b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "x"}', b'{"model": "\\udfff", "prompt": "x"}', b"[" * depth,
        b"[" * depth + b"]" * depth, b'{"prompt": ' * depth, b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
        b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "x", "temperature": 0, "temperature": 1}',
        _body(draw, path, '"seed": ' + "9" * 5_000), _body(draw, path, '"logit_bias": {"1": NaN}'),
        _body(draw, path, '"user": "\\ud83d"'), bytes(draw.randrange(256) for _ in range(60)),
    ]  # fmt: skip
    body = draw.choice(bodies)
    return _whole(f"broken JSON {body[:60]!r}", posted(path, body))


def _texts(draw: random.Random) -> Hostile:
    path = draw.choice(PATHS)
    text = draw.choice(TEXTS) + draw.choice(TEXTS)
    stop = json.dumps([draw.choice(TEXTS) for _ in range(draw.randint(0, 5))])
    if "chat" in path:
        count = draw.choice([1, 2, 3_000])
        message = {"role": draw.choice(["user", "assistant", "system"]), "content": text if count < 3 else ""}
        body = json.dumps({"messages": [message] * count, "max_tokens": 3, "stop": json.loads(stop)})
    else:
        body = json.dumps({"prompt": text, "max_tokens": 3, "stop": json.loads(stop)})
    return _whole(f"texts {body}"[:80], posted(path, body.encode()))


def _tokens(draw: random.Random) -> Hostile:
    one: list[Any] = [draw.choice([0, 5, 399, 400, -1, 2**31, 2**70, True, 1.0, "x", None]) for _ in range(3)]
    prompt = draw.choice(
        [one, [one], [[1], one], [[]], [], [[1]] * 5_000, [1] * 95, [1] * 96, [1] * 50_000, ["x", [1]]]
    )
    more: dict[str, Any] = draw.choice(
        [{}, {"echo": True, "logprobs": 5}, {"logprobs": 2**70}, {"echo": 1}, {"stream": True}]
    )
    body = json.dumps({"prompt": prompt, "max_tokens": draw.choice([0, 1, 2])} | more)
    return _whole(f"tokens {body}"[:80], posted("/v1/completions", body.encode()))


def _http(draw: random.Random) -> Hostile:
    body = b'{"prompt": "x", "max_tokens": 2}'
    path = PATHS[0]
    given = [
        head("/", host="[::1"), head("/v1/models", host="[::1", method="GET"), head("/", host="\u00e9", method="GET"),
        head("/v1/models", host="localhost:99999999", method="GET"), head("/v1/models", host="a b", method="GET"),
        head("/v1/models", host="", method="GET"), head("http://[/v1/models", method="GET"), head("//[", method="GET"),
        head("/v1/models/" + "x" * 9_000, method="GET"), head("/v1/models/%ff%00%0d%0a", method="GET"),
        head("/v1/models", method="DELETE"), head("/%2e%2e/%2e%2e/etc/passwd", method="GET"),
        head("*", method="OPTIONS"), b"GET\r\n\r\n", b"\r\n" * 5_000, b"\x00" * 70_000, head("/", method="G" * 200),
        head(path, "Content-Length: -1") + body, head(path, "Content-Length: x") + body,
        head(path, "Content-Length: 5", "Content-Length: 32") + body, head(path, "Transfer-Encoding: gzip") + body,
        head(path, "Content-Length: 32", "Transfer-Encoding: chunked") + body, head(path) + body,
        head(path, "Transfer-Encoding: chunked") + b"zz\r\n" + body, head(path, "X: " + "y" * 100_000) + body,
        head(path, "Content-Length: 99999999999999999999") + body, head(path, f"Content-Length: {10**12}"),
        head(path, "Authorization: Bearer \u00e9\u4e2d", f"Content-Length: {len(body)}") + body,
        head(path, "Content-Encoding: gzip", f"Content-Length: {len(body)}") + body,
        head(path, "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13", method="GET"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
        b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", head("/", method="HEAD"),
    ]  # fmt: skip
    data = draw.choice(given)
    return _whole(f"HTTP {data[:70]!r}", data, ends=True)


def _large(draw: random.Random) -> Hostile:
    path, count = draw.choice(PATHS), draw.choice([2, 3, 8, 40])
    start = b'{"prompt": "' if path == PATHS[0] else b'{"messages": [{"role": "user", "content": "'
    end = b'"}' if path == PATHS[0] else b'"}]}'
    block = draw.choice([b"x", b"y ", b" ", b"\\u0041", b"0 "]) * (MIB // 2)
    block = block[: MIB - MIB % 6] if block.startswith(b"\\") else block[:MIB]
    length = len(start) + count * len(block) + len(end)

    def announced() -> Iterator[bytes]:
        yield head(path, f"Content-Length: {length}") + start
        yield from (block for _ in range(count))
        yield end

    def chunked() -> Iterator[bytes]:
        yield head(path, "Transfer-Encoding: chunked")
        for piece in (start, *[block] * count, end):
            yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
        yield b"0\r\n\r\n"

    return Hostile(f"large {count} MiB", draw.choice([announced, chunked]))


def _hang_ups(draw: random.Random) -> Hostile:
    path, resets = draw.choice(PATHS), draw.random() < 0.5
    source = '"messages": [{"role": "user", "content": "x"}]' if "chat" in path else '"prompt": "x"'
    body = (
        "{" + source + ', "max_tokens": 60, "temperature": 2, "stream": ' + draw.choice(["true", "false"]) + "}"
    ).encode()
    whole = posted(path, body)
    kind = draw.randrange(4)
    if kind == 0:  # while it sends
        return _whole("hang up, sending", whole[: draw.randrange(1, len(whole))], reads=0, resets=resets)
    if kind == 1:  # in the middle of a chunk
        data = head(path, "Transfer-Encoding: chunked") + b"ff\r\n" + body
        return _whole("hang up, in a chunk", data, reads=0, resets=resets)
    return _whole("hang up, reading", whole, reads=draw.choice([0, 1, 300]), resets=resets)
