"""Requests and answers in the form of OpenAI's API: /v1/chat/completions and /v1/completions.

A field that would change the answer and is not supported is refused, unless its value is the one without effect; those
that only concern OpenAI's service are ignored by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapipe.extras.inference.generate import Sampling

Usage = dict[str, int]
# field -> its type and range
NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 2.0), "top_p": (float, 1e-6, 1.0), "top_k": (int, 0, 1 << 31),
    "seed": (int, 0, (1 << 63) - 1), "max_tokens": (int, 1, 1 << 31), "max_completion_tokens": (int, 1, 1 << 31),
}  # fmt: skip
# field that is not supported -> its value without effect, besides null
WITHOUT_EFFECT: dict[str, Any] = {
    "n": 1, "echo": False, "logprobs": False, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0,
    "tools": [], "response_format": {"type": "text"},
}  # fmt: skip
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
READ = frozenset({"model", "stream", "stream_options", "stop", *NUMBERS})
ROLES = ("system", "user", "assistant")


class ApiError(Exception):
    """An error that the client gets. status: of HTTP. param: the field that is wrong."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A valid request. text: the prompt of /v1/completions; messages: those of /v1/chat/completions."""

    text: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int | None  # None: as many as fit
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage: bool  # the stream ends with the numbers of tokens
    sampling: Sampling


def read_request(content: bytes, is_chat: bool, model: str) -> Asked:
    """Return a request to the model of that name. Raises ApiError."""
    try:
        body = json.loads(content)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}  # null: the default
    source = "messages" if is_chat else "prompt"
    for name, value in given.items():
        if name in WITHOUT_EFFECT and value != WITHOUT_EFFECT[name]:
            shown = json.dumps(value)[:80]
            raise ApiError(f"{name}: {shown} is not supported; leave it out", code="unsupported_value", param=name)
        if name not in WITHOUT_EFFECT and name not in READ | IGNORED | {source}:
            raise ApiError(f"{name} is not a field of this request", code="unknown_parameter", param=name)
    if given.get("model", model) != model:
        raise ApiError(f"there is no model {given['model']!r}, only {model!r}", 404, "model_not_found", "model")
    numbers = {name: _number(name, given[name]) for name in NUMBERS if name in given}
    is_streamed, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(is_streamed, bool) or not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise ApiError("stream is true or false; stream_options has include_usage alone", param="stream")
    limits = [numbers.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in numbers]
    return Asked(
        text="" if is_chat else _prompt(given.get("prompt")),
        messages=_messages(given.get("messages")) if is_chat else (),
        max_tokens=min(limits, default=None if is_chat else 16),  # as OpenAI's
        stops=_stops(given.get("stop", [])),
        is_streamed=is_streamed,
        has_usage=bool(options.get("include_usage")),
        sampling=Sampling(**{"seed": secrets.randbits(63), **numbers}),
    )


def _number(name: str, value: Any) -> Any:
    kind, low, high = NUMBERS[name]
    is_number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        what = "a number" if kind is float else "an integer"
        raise ApiError(f"{name} must be {what} from {low:g} to {high:g}, not {json.dumps(value)[:80]}", param=name)
    return kind(value)


def _prompt(value: Any) -> str:
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(text, str):
        raise ApiError("prompt must be one text; several prompts, or tokens, are not supported", param="prompt")
    return text


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ApiError("messages must be a list of at least one message", param="messages")
    found = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ApiError(f"{where} must have a role: {', '.join(ROLES)}", param=where)
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
        unknown = sorted(key for key, given in message.items() if key not in ("role", "content") and given)
        content = "".join(text for text in texts if isinstance(text, str))
        if unknown or not all(isinstance(text, str) for text in texts):
            what = f"has {unknown[0]}, which is" if unknown else "has content other than text, which is"
            raise ApiError(f"{where} {what} not supported", param=where)
        found.append({"role": str(message["role"]), "content": content})
    return tuple(found)


def _stops(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > 4 or not all(isinstance(s, str) and s for s in found):
        raise ApiError("stop must be a text, or a list of at most 4", param="stop")
    return tuple(found)


class Reply:
    """The objects that answer one request: the whole answer, or the chunks of a stream."""

    def __init__(self, is_chat: bool, model: str) -> None:
        self._is_chat = is_chat
        kind, key = "chat.completion" if is_chat else "text_completion", f"cmpl-{secrets.token_hex(12)}"
        self._head = {"id": key, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str, usage: Usage) -> dict[str, Any]:
        part = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return self._with(part, reason) | {"usage": usage}

    def chunk(self, text: str, reason: str | None = None) -> dict[str, Any]:
        """Return a chunk with text, or the last one with the reason of the end."""
        delta = {"role": "assistant", "content": text} if reason is None else {}
        part = {"delta": delta} if self._is_chat else {"text": text}
        return self._with(part, reason) | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def _with(self, part: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return self._head | {"choices": [{"index": 0, **part, "logprobs": None, "finish_reason": reason}]}


def usage(prompt: int, answer: int) -> Usage:
    """Return the numbers of tokens of a request."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
