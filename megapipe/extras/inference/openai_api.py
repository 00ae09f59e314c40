"""Requests and answers in the form of OpenAI's API: /v1/chat/completions and /v1/completions.

A field that would change the answer and is not supported is refused, unless its value is the one without effect; those
that only concern OpenAI's service are ignored by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapipe.extras.inference.generate import INCOMPLETE_CHARACTER, Sampling
from megapipe.extras.inference.logprobs import Scored, Scoring
from megapipe.extras.inference.session import Request
from megapipe.input_files import parse_json

# field -> its type and range
NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 2.0), "top_p": (float, 1e-6, 1.0), "top_k": (int, 0, 1 << 31),
    "seed": (int, 0, (1 << 63) - 1), "max_tokens": (int, 0, 1 << 31), "max_completion_tokens": (int, 1, 1 << 31),
}  # fmt: skip
# field that is not supported -> its value without effect, besides null
WITHOUT_EFFECT: dict[str, Any] = {
    "n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0,
    "tools": [], "response_format": {"type": "text"},
}  # fmt: skip
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
READ = frozenset({"model", "stream", "stream_options", "stop", "logprobs", *NUMBERS})
READ_OF = {True: READ | {"messages", "top_logprobs"}, False: READ | {"prompt", "echo"}}  # by whether it is a chat
ROLES = ("system", "user", "assistant")
MOST_PROMPTS, MOST_STOPS = 128, 16


class ApiError(Exception):
    """An error that the client gets. status: of HTTP. param: the field that is wrong."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A valid request. prompts: those of /v1/completions, texts or tokens; messages: those of /v1/chat/completions."""

    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int | None  # None: as many as fit
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage: bool  # the stream ends with the numbers of tokens
    has_prompt: bool  # the answer begins with the prompt
    scoring: Scoring | None
    sampling: Sampling


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def read_request(content: bytes, is_chat: bool, model: str) -> Asked:
    """Return a request to the model of that name. Raises ApiError."""
    try:
        body = parse_json(content, _no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except ValueError as error:
        raise ApiError(f"the body is not JSON that can be read: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}  # null: the default
    for name, value in given.items():
        if name in WITHOUT_EFFECT and value != WITHOUT_EFFECT[name]:
            shown = json.dumps(value)[:80]
            raise ApiError(f"{name}: {shown} is not supported; leave it out", code="unsupported_value", param=name)
        if name not in WITHOUT_EFFECT and name not in READ_OF[is_chat] | IGNORED:
            raise ApiError(f"{name[:80]} is not a field of this request", code="unknown_parameter", param=name)
    if given.get("model", model) != model:
        raise no_model(given["model"], model)
    numbers = {name: _number(name, given[name]) for name in NUMBERS if name in given}
    is_streamed, has_prompt, options = (
        given.get("stream", False),
        given.get("echo", False),
        given.get("stream_options", {}),
    )
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise ApiError("stream_options has include_usage alone", param="stream_options")
    if not isinstance(is_streamed, bool) or not isinstance(has_prompt, bool):
        raise ApiError("stream is true or false, and so is echo", param="stream")
    limits = [numbers.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in numbers]
    if 0 in limits and not has_prompt:
        raise ApiError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    return Asked(
        prompts=() if is_chat else _prompts(given.get("prompt")),
        messages=_messages(given.get("messages")) if is_chat else (),
        max_tokens=min(limits, default=None if is_chat else 16),  # as OpenAI's
        stops=_stops(given.get("stop", [])),
        is_streamed=is_streamed,
        has_usage=bool(options.get("include_usage")),
        has_prompt=has_prompt,
        scoring=_scoring(given, is_chat, has_prompt),
        sampling=Sampling(**{"seed": secrets.randbits(63), **numbers}),
    )


def no_model(asked: Any, model: str) -> ApiError:
    """Return the error for another model than the one that is served."""
    return ApiError(f"there is no model {asked!r:.80}, only {model!r}", 404, "model_not_found", "model")


def _number(name: str, value: Any, limits: tuple[type, float, float] | None = None) -> Any:
    kind, low, high = limits or NUMBERS[name]
    is_number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        what = "a number" if kind is float else "an integer"
        raise ApiError(f"{name} must be {what} from {low:g} to {high:g}, not {json.dumps(value)[:80]}", param=name)
    return kind(value)


def _scoring(given: Mapping[str, Any], is_chat: bool, has_prompt: bool) -> Scoring | None:
    """Return the log probabilities asked for: in a chat by a boolean and a number, else by a number alone."""
    asked, num_top = given.get("logprobs"), given.get("top_logprobs", 0)
    if not is_chat:
        return None if asked is None else Scoring(_number("logprobs", asked, (int, 0, 5)), has_prompt)
    if not isinstance(asked, bool | None):
        raise ApiError("logprobs is true or false; top_logprobs has their number", param="logprobs")
    if "top_logprobs" in given and not asked:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    return Scoring(_number("top_logprobs", num_top, (int, 0, 20))) if asked else None


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    found = [value] if isinstance(value, str) or _is_tokens(value) else value
    if not isinstance(found, list) or not found or not all(isinstance(one, str) or _is_tokens(one) for one in found):
        rule = "prompt must be a text, a list of tokens, or a list of these, none of them empty"
        raise ApiError(rule, param="prompt")
    if len(found) > MOST_PROMPTS:
        raise ApiError(f"{len(found)} prompts in one request; give at most {MOST_PROMPTS}", param="prompt")
    return tuple(one if isinstance(one, str) else tuple(one) for one in found)


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
    if not isinstance(found, list) or len(found) > MOST_STOPS or not all(isinstance(s, str) and s for s in found):
        raise ApiError(f"stop must be a text, or a list of at most {MOST_STOPS}", param="stop")
    return tuple(found)


@dataclass
class Piece:
    """Text that answers one prompt of a request, by its index. reason: of the end, in the last one."""

    index: int
    text: str = ""
    scores: list[Scored] = field(default_factory=list)
    reason: str | None = None
    num_tokens: int = 0  # of the whole answer, in the last one

    def add(self, other: Piece) -> None:
        """Append the piece that follows."""
        self.text, self.scores = self.text + other.text, self.scores + other.scores
        self.reason, self.num_tokens = other.reason, other.num_tokens


class Reply:
    """The objects that answer one request: the whole answer, or the chunks of a stream."""

    def __init__(
        self, is_chat: bool, model: str, decode: Callable[[Sequence[int]], str], requests: Sequence[Request]
    ) -> None:
        self._is_chat, self._decode, self._has_scores = is_chat, decode, requests[0].scoring is not None
        self._num_prompt, self._num_new = sum(len(request.prompt) for request in requests), 0
        self._offsets: Counter[int] = Counter()  # characters of the tokens so far, by the index of the prompt
        kind, key = "chat.completion" if is_chat else "text_completion", f"cmpl-{secrets.token_hex(12)}"
        self._head = {"id": key, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        choices = [self._choice(one, {"message": {"role": "assistant", "content": one.text}}) for one in answers]
        return self._head | {"choices": choices, "usage": self._usage()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return a chunk with the text of a piece, or with the reason of its end."""
        delta = {"role": "assistant", "content": piece.text} if piece.reason is None else {}
        return self._chunk([self._choice(piece, {"delta": delta})])

    def end(self) -> dict[str, Any]:
        """Return the chunk with the numbers of tokens."""
        return self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {}) | {"choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt, new = self._num_prompt, self._num_new
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _choice(self, piece: Piece, of_chat: dict[str, Any]) -> dict[str, Any]:
        self._num_new += piece.num_tokens
        part = of_chat if self._is_chat else {"text": piece.text}
        logprobs = None
        if self._has_scores:
            logprobs = self._of_chat(piece) if self._is_chat else self._of_completion(piece)
        return {"index": piece.index, **part, "logprobs": logprobs, "finish_reason": piece.reason}

    def _of_chat(self, piece: Piece) -> dict[str, Any]:
        def one(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._decode([token])
            content = None if INCOMPLETE_CHARACTER in text else list(text.encode())
            return {"token": text, "logprob": logprob, "bytes": content}

        tops = [{"top_logprobs": [one(*other) for other in score.top]} for score in piece.scores]
        own = [one(score.token, score.logprob) for score in piece.scores]
        return {"content": [mine | top for mine, top in zip(own, tops, strict=True)], "refusal": None}

    def _of_completion(self, piece: Piece) -> dict[str, Any]:
        tokens, offsets, tops = [], [], []
        for score in piece.scores:
            tokens.append(self._decode([score.token]))
            offsets.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(tokens[-1])
            tops.append(None if score.logprob is None else self._by_text(score))
        logprobs = [score.logprob for score in piece.scores]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _by_text(self, score: Scored) -> dict[str, float | None]:
        """Return the log probabilities of the most likely tokens and of the token itself, by text."""
        found: dict[str, float | None] = {}
        for token, logprob in dict([*score.top, (score.token, score.logprob)]).items():
            text = self._decode([token])
            found[f"token_id:{token}" if text in found else text] = logprob  # texts of parts of characters are equal
        return found
