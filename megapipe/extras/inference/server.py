"""`Server`: a session behind HTTP, with OpenAI's paths and a page to talk to the model.

The event loop of uvicorn runs in a thread and puts requests into a bounded queue; the main thread generates, one
request after the other, and sends pieces of text back into the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megapipe.errors import DataError
from megapipe.extras.inference.generate import TextStream
from megapipe.extras.inference.openai_api import ApiError, Asked, Reply, Usage, read_request, usage
from megapipe.extras.inference.session import Request, Session
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.tokenizer import Tokenizer, end_tokens

PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLL_SECONDS = 0.2  # between looks at the signals while no request waits
ALIVE_SECONDS = 20.0  # between signs of life to waiting ranks
GONE_SECONDS = 1.0  # between looks whether the client is still there


@dataclass
class _Job:
    """A request that waits or is being answered. pieces: of its text, and at last the reason of its end with usage."""

    request: Request
    stops: tuple[str, ...]
    pieces: asyncio.Queue[str | tuple[str, Usage]] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_cancelled: bool = False

    def put(self, piece: str | tuple[str, Usage]) -> None:
        """Send a piece from the main thread."""
        if piece:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def received(self, http: HttpRequest) -> AsyncIterator[str | tuple[str, Usage]]:
        """Yield the pieces. The job is cancelled if the client goes away."""
        try:
            while not await http.is_disconnected():
                try:
                    piece = await asyncio.wait_for(self.pieces.get(), GONE_SECONDS)
                except TimeoutError:
                    continue
                yield piece
                if not isinstance(piece, str):
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
    jobs: queue.Queue[_Job]  # that wait, at most its maxsize
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
        text = ""

        def write(piece: str) -> None:
            nonlocal text
            text += piece
            if not job.stops:  # else the text is sent once it is known where it ends
                job.put(piece)

        def is_stopped() -> bool:
            return job.is_cancelled or is_stopping() or any(stop in text for stop in job.stops)

        stream = TextStream(self.tokenizer.decode, job.request.prompt, write)
        tokens = self.session.answer(job.request, stream.add, is_stopped)
        stream.close()
        ends = [text.find(stop) for stop in job.stops if stop in text]
        job.put(text[: min(ends, default=len(text))] if job.stops else "")
        is_full = len(tokens) == job.request.max_new_tokens and not ends
        job.put(("length" if is_full else "stop", usage(len(job.request.prompt), len(tokens))))

    def app(self) -> Starlette:
        """Return the ASGI application."""

        def refused(http: HttpRequest, error: Exception) -> Response:
            if isinstance(error, HTTPException):  # an unknown path or method
                error = ApiError(f"{http.method} {http.url.path}: {error.detail}", error.status_code)
            assert isinstance(error, ApiError)
            return JSONResponse(error.body(), error.status)

        routes = [
            Route("/", self._page),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", partial(self._complete, is_chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, is_chat=False), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={ApiError: refused, HTTPException: refused})

    async def _page(self, http: HttpRequest) -> Response:
        return FileResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY}, media_type="text/html")

    async def _models(self, http: HttpRequest) -> Response:
        self._check(http)
        facts = {"max_model_len": self.positions, "has_chat_template": self.chats is not None}
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "megapipe", **facts}
        return JSONResponse({"object": "list", "data": [model]})

    def _check(self, http: HttpRequest) -> None:
        """Raise ApiError for a wrong token or, without one, for pages of other sites under a name of their own."""
        given = http.headers.get("authorization", "")
        if self.token and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise ApiError("wrong or missing token: send Authorization: Bearer TOKEN", 401, "invalid_api_key")
        if not self.token and http.url.hostname not in LOOPBACK:
            raise ApiError(f"this server is {LOOPBACK[0]}, not {http.url.hostname}", 403)

    def _prompt(self, asked: Asked) -> tuple[list[int], int]:
        """Return the tokens of a request's prompt and the most tokens of its answer. Raises ApiError."""
        if not asked.messages:
            eod = [] if self.tokenizer.eod is None else [self.tokenizer.eod]
            prompt = self.tokenizer.encode(asked.text) or eod
        elif self.chats is None:
            raise ApiError("this model has no chat template; use /v1/completions", code="no_chat_template")
        else:
            try:
                prompt = self.chats.prompt(asked.messages)
            except DataError as error:
                raise ApiError(str(error), param="messages") from None
        if not prompt:
            raise ApiError("prompt is empty; give a text", param="prompt")
        most = self.positions - len(prompt) if asked.max_tokens is None else asked.max_tokens
        if len(prompt) + max(1, most) > self.positions:
            parts = f"{len(prompt)} in the prompt, {max(1, most)} in the answer; shorten it"
            rule = f"the context is {self.positions} tokens, but this request needs more: {parts}"
            raise ApiError(rule, code="context_length_exceeded")
        return prompt, most

    async def _complete(self, http: HttpRequest, is_chat: bool) -> Response:
        self._check(http)
        if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError("send the body as Content-Type: application/json", 415)
        asked = read_request(await http.body(), is_chat, self.name)
        prompt, most = self._prompt(asked)
        ends = end_tokens(self.chats if is_chat and self.chats else self.tokenizer)
        job = _Job(Request(tuple(prompt), most, ends, asked.sampling), asked.stops)
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            raise ApiError(f"{self.jobs.maxsize} requests wait already; try again", 429, "queue_full") from None
        reply = Reply(is_chat, self.name)
        if asked.is_streamed:
            return StreamingResponse(_events(job, http, reply, asked.has_usage), media_type="text/event-stream")
        text, end = "", ("stop", usage(len(prompt), 0))
        async for piece in job.received(http):
            if isinstance(piece, str):
                text += piece
            else:
                end = piece
        return JSONResponse(reply.whole(text, *end))


async def _events(job: _Job, http: HttpRequest, reply: Reply, has_usage: bool) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer."""
    async for piece in job.received(http):
        if isinstance(piece, str):
            bodies = [reply.chunk(piece)]
        else:
            bodies = [reply.chunk("", piece[0]), reply.chunk("") | {"choices": [], "usage": piece[1]}][: 1 + has_usage]
        for body in bodies:
            yield f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"
