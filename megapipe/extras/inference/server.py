"""`Server`: a session behind HTTP, with OpenAI's paths and a page to talk to the model.

The event loop of uvicorn runs in a thread and puts requests into a bounded queue; the main thread generates, one
request after the other, and sends pieces of text back into the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megapipe.errors import ConfigError, DataError
from megapipe.extras.inference.generate import TextStream, another_draw, ignore
from megapipe.extras.inference.logprobs import Scored
from megapipe.extras.inference.openai_api import ApiError, Asked, Piece, Reply, no_model, read_request
from megapipe.extras.inference.session import ANSWERED, Request, Session
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.tokenizer import Tokenizer, end_tokens

PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLL_SECONDS = 0.2  # between looks at the signals while no request waits
ALIVE_SECONDS = 20.0  # between signs of life to waiting ranks
GONE_SECONDS = 1.0  # between looks whether the client is still there
OTHER_BYTES = 1 << 20  # of a body, besides the text of one context
DISCARDED_BYTES = 64 << 20  # of a body that is too long, so that its client reads the answer instead of a reset


@dataclass
class _Job:
    """A request, by its prompts, that waits or is being answered. pieces: of the answers, or an error."""

    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    has_prompt: bool  # each answer begins with its prompt
    pieces: asyncio.Queue[Piece | ApiError] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_cancelled: bool = False

    def put(self, piece: Piece | ApiError) -> None:
        """Send a piece from the main thread."""
        self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def received(self, http: HttpRequest) -> AsyncIterator[Piece]:
        """Yield the pieces up to the end of the last answer. The job is cancelled if the client goes away. Raises
        ApiError.
        """
        try:
            while not await http.is_disconnected():
                try:
                    piece = await asyncio.wait_for(self.pieces.get(), GONE_SECONDS)
                except TimeoutError:
                    continue
                if isinstance(piece, ApiError):
                    raise piece
                yield piece
                if piece.reason and piece.index == len(self.requests) - 1:
                    return
        finally:
            self.is_cancelled = True


@dataclass
class Server:
    """One model behind HTTP."""

    session: Session
    name: str  # of the model
    tokenizer: Tokenizer
    chats: ChatTokenizer | None  # the tokenizer with its chat template, if it has one
    positions: int  # of the context
    num_tokens: int  # of the vocabulary
    jobs: queue.Queue[_Job]  # that wait, at most its maxsize
    most_bytes: int  # of the body of a request
    token: str | None = None  # that requests must send; None: no check

    def run(self, listener: socket.socket, is_stopping: Callable[[], bool]) -> None:
        """Serve on a listening socket until is_stopping() is true. For the main thread."""
        config = uvicorn.Config(self.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        told = time.monotonic()
        while not is_stopping():
            if time.monotonic() - told > ALIVE_SECONDS:
                self.session.keep_alive()
                told = time.monotonic()
            try:
                job = self.jobs.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if not job.is_cancelled:
                self._answer(job, is_stopping)
        server.should_exit = True
        thread.join()

    def _answer(self, job: _Job, is_stopping: Callable[[], bool]) -> None:
        def is_over() -> bool:
            return job.is_cancelled or is_stopping()

        try:
            for index, request in enumerate(job.requests):
                if not is_over():
                    self._continue(job, index, request, is_over)
        except ANSWERED as error:
            job.put(ApiError(str(error), 500))

    def _continue(self, job: _Job, index: int, request: Request, is_over: Callable[[], bool]) -> None:
        """Answer one prompt of a request."""
        has_scores = request.scoring is not None and request.scoring.with_prompt
        held = [Scored(request.prompt[0])] if has_scores else []

        def send(text: str) -> None:
            if text:
                job.put(Piece(index, text, [*held]))
                held.clear()

        if job.has_prompt:
            send(self.tokenizer.decode(request.prompt))
        # with stops the text is sent once it is known where it ends
        stream = TextStream(self.tokenizer.decode, request.prompt, ignore if job.stops else send)
        tokens = self.session.answer(
            request,
            stream.add if request.max_new_tokens else ignore,
            lambda: is_over() or any(stop in stream.text for stop in job.stops),
            lambda scores: held.extend(scores[: None if request.max_new_tokens else -1]),
        )
        stream.close()
        end = min((stream.text.find(stop) for stop in job.stops if stop in stream.text), default=None)
        if job.stops:
            send(stream.text[:end])
        num_tokens = min(len(tokens), request.max_new_tokens)
        is_full = num_tokens == request.max_new_tokens and end is None
        job.put(Piece(index, "", held, "length" if is_full else "stop", num_tokens))

    def app(self) -> Starlette:
        """Return the ASGI application."""

        def refused(http: HttpRequest, error: Exception) -> Response:
            if isinstance(error, HTTPException):  # an unknown path or method
                error = ApiError(f"{http.method} {http.scope['path']}: {error.detail}", error.status_code)
            assert isinstance(error, ApiError)
            # the rest of a body that is too long is not read
            return JSONResponse(error.body(), error.status, {"Connection": "close"} if error.status == 413 else None)

        routes = [
            Route("/", self._page),
            Route("/favicon.ico", lambda http: Response(status_code=204)),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", partial(self._complete, is_chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, is_chat=False), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: refused, HTTPException: refused}
        handlers[ClientDisconnect] = lambda http, error: Response(status_code=499)  # which nobody reads
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _page(self, http: HttpRequest) -> Response:
        return FileResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY}, media_type="text/html")

    def _facts(self) -> dict[str, Any]:
        facts = {"max_model_len": self.positions, "has_chat_template": self.chats is not None}
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "megapipe", **facts}

    async def _models(self, http: HttpRequest) -> Response:
        self._check(http)
        return JSONResponse({"object": "list", "data": [self._facts()]})

    async def _model(self, http: HttpRequest) -> Response:
        self._check(http)
        if http.path_params["name"] != self.name:
            raise no_model(http.path_params["name"], self.name)
        return JSONResponse(self._facts())

    def _check(self, http: HttpRequest) -> None:
        """Raise ApiError for a wrong token or, without one, for pages of other sites under a name of their own."""
        given = http.headers.get("authorization", "")
        if self.token and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise ApiError("wrong or missing token: send Authorization: Bearer TOKEN", 401, "invalid_api_key")
        host = http.headers.get("host", LOOPBACK[0]).lower()
        if not self.token and re.sub(r":\d*$", "", host).strip("[]") not in LOOPBACK:
            raise ApiError(f"this server is {LOOPBACK[0]}, not {host:.80}", 403)

    def _prompts(self, asked: Asked) -> tuple[list[tuple[int, ...]], int]:
        """Return the tokens of a request's prompts and the most tokens of an answer. Raises ApiError."""
        try:
            if not asked.messages:
                prompts = [self._tokens(one) if isinstance(one, str) else one for one in asked.prompts]
            elif self.chats is None:
                raise ApiError("this model has no chat template; use /v1/completions", code="no_chat_template")
            else:
                self._check_length("".join(message["content"] for message in asked.messages))
                prompts = [tuple(self.chats.prompt(asked.messages))]
        except (ConfigError, DataError) as error:
            raise ApiError(str(error), param="messages" if asked.messages else "prompt") from None
        if not all(prompts):
            raise ApiError("prompt is empty; give a text", param="prompt")
        longest = max(map(len, prompts))
        most = self.positions - longest if asked.max_tokens is None else asked.max_tokens
        if longest + max(1, most) > self.positions:
            raise self._too_long(f"{longest} in the prompt, {max(1, most)} in the answer")
        outside = [token for prompt in prompts for token in prompt if not 0 <= token < self.num_tokens]
        if outside:
            raise ApiError(f"token {outside[0]!r:.40} is outside the vocabulary of {self.num_tokens}", param="prompt")
        return prompts, most

    def _too_long(self, parts: str) -> ApiError:
        rule = f"the context is {self.positions} tokens, but this request needs more: {parts}; shorten it"
        return ApiError(rule, code="context_length_exceeded")

    def _tokens(self, text: str) -> tuple[int, ...]:
        self._check_length(text)
        return tuple(self.tokenizer.encode(text) or ([] if self.tokenizer.eod is None else [self.tokenizer.eod]))

    def _check_length(self, text: str) -> None:
        """Raise ApiError if the first part of a long text already has more tokens than fit."""
        size = 4 * self.positions
        while size < len(text):
            if len(self.tokenizer.encode(text[:size])) > 2 * self.positions:
                raise self._too_long(f"{len(text)} characters in the prompt")
            size *= 2

    async def _body(self, http: HttpRequest) -> bytes:
        """Return the body of a request. Raises ApiError if it is too long; a bit more is read but not kept."""
        found, size = bytearray(), int(http.headers.get("content-length", 0))
        if size <= self.most_bytes + DISCARDED_BYTES:
            size = 0
            async for chunk in http.stream():
                size += len(chunk)
                found += chunk if size <= self.most_bytes else b""
                if size > self.most_bytes + DISCARDED_BYTES:
                    break
        if size > self.most_bytes:
            rule = f"the body has more than {self.most_bytes} bytes, the most that this server reads"
            raise ApiError(f"{rule}; shorten it, or start the server with --max-request-bytes", 413)
        return bytes(found)

    async def _complete(self, http: HttpRequest, is_chat: bool) -> Response:
        self._check(http)
        if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError("send the body as Content-Type: application/json", 415)
        asked = read_request(await self._body(http), is_chat, self.name)
        prompts, most = self._prompts(asked)
        ends = end_tokens(self.chats if is_chat and self.chats else self.tokenizer)
        requests = tuple(
            Request(prompt, most, ends, another_draw(asked.sampling, index), asked.scoring)
            for index, prompt in enumerate(prompts)
        )
        job = _Job(requests, asked.stops, asked.has_prompt)
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            raise ApiError(f"{self.jobs.maxsize} requests wait already; try again", 429, "queue_full") from None
        reply = Reply(is_chat, self.name, self.tokenizer.decode, requests)
        if asked.is_streamed:
            return StreamingResponse(_events(job, http, reply, asked.has_usage), media_type="text/event-stream")
        answers = [Piece(index) for index in range(len(prompts))]
        async for piece in job.received(http):
            answers[piece.index].add(piece)
        return JSONResponse(reply.whole(answers))


def body_bytes(tokenizer: Tokenizer, positions: int) -> int:
    """Return the bytes that a request of a full context can need: six for each byte of the longest tokens, as JSON may
    write them, and those of the other fields.
    """
    longest = max(len(tokenizer.decode([token]).encode()) for token in range(tokenizer.vocab_size))
    return OTHER_BYTES + 6 * positions * longest


async def _events(job: _Job, http: HttpRequest, reply: Reply, has_usage: bool) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer."""
    try:
        async for piece in job.received(http):
            yield _event(reply.chunk(piece))
        if has_usage:
            yield _event(reply.end())
    except ApiError as error:
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(body: Any) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
