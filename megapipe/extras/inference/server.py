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
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.errors import DataError
from megapipe.extras.inference.generate import TextStream
from megapipe.extras.inference.openai_api import ApiError, Asked, Reply, TextUntil, Usage, read_request
from megapipe.extras.inference.session import Request, Session
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.tokenizer import Tokenizer, end_tokens

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLL_SECONDS = 0.2  # between looks at the signals while no request waits
ALIVE_SECONDS = 20.0  # between signs of life to waiting ranks
GONE_SECONDS = 1.0  # between looks whether the client is still there
MOST_BODY_BYTES = 1 << 22


@dataclass(frozen=True)
class Served:
    """What is served. chats: None and the reason if it has no chat template. positions: of its context."""

    name: str
    tokenizer: Tokenizer
    chats: ChatTokenizer | None
    no_chats: str
    positions: int

    def prompt(self, asked: Asked) -> tuple[list[int], int]:
        """Return the tokens of a request's prompt and the most tokens of its answer. Raises ApiError."""
        if not asked.messages:
            eod = [] if self.tokenizer.eod is None else [self.tokenizer.eod]
            prompt = self.tokenizer.encode(asked.text) or eod
        elif self.chats is None:
            rule = f"{self.name} has no chat template ({self.no_chats}); use /v1/completions"
            raise ApiError(rule, code="no_chat_template", param="messages")
        else:
            try:
                prompt = self.chats.prompt(asked.messages)
            except DataError as error:
                raise ApiError(str(error), param="messages") from None
        if not prompt:
            raise ApiError("prompt is empty; give a text", param="prompt")
        most = self.positions - len(prompt) if asked.max_tokens is None else asked.max_tokens
        if len(prompt) + max(1, most) > self.positions:
            parts = f"{len(prompt)} in the prompt" + (f", {most} in the answer" if asked.max_tokens else "")
            rule = f"the context of {self.name} is {self.positions} tokens, but this request needs more: {parts}"
            field_name = "messages" if asked.messages else "prompt"
            raise ApiError(f"{rule}; shorten it", code="context_length_exceeded", param=field_name)
        return prompt, most


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


class Server:
    """One model behind HTTP. most_waiting: requests in the queue besides the one that is answered. token: None for
    requests without a check.
    """

    def __init__(self, session: Session, served: Served, most_waiting: int, token: str | None = None) -> None:
        self._session, self._served, self._token = session, served, token
        self._jobs: queue.Queue[_Job] = queue.Queue(most_waiting)

    def run(self, listener: socket.socket, is_stopping: Callable[[], bool]) -> None:
        """Serve on a listening socket until is_stopping() is true. For the main thread."""
        import uvicorn

        config = uvicorn.Config(self.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        told = time.monotonic()
        while not is_stopping():
            if time.monotonic() - told > ALIVE_SECONDS:
                self._session.keep_alive()
                told = time.monotonic()
            try:
                job = self._jobs.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if not job.is_cancelled:
                self._answer(job, is_stopping)
        server.should_exit = True
        thread.join()

    def _answer(self, job: _Job, is_stopping: Callable[[], bool]) -> None:
        until = TextUntil(job.stops)
        stream = TextStream(self._served.tokenizer.decode, job.request.prompt, lambda text: job.put(until.add(text)))
        is_stopped = lambda: until.is_ended or job.is_cancelled or is_stopping()  # noqa: E731
        tokens = self._session.answer(job.request, stream.add, is_stopped)
        stream.close()
        job.put(until.close())
        is_full = len(tokens) == job.request.max_new_tokens and not until.is_ended
        job.put(("length" if is_full else "stop", Usage(len(job.request.prompt), len(tokens))))

    def app(self) -> Starlette:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        def refused(http: HttpRequest, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return JSONResponse(error.body(), error.status)

        # without a token, pages of other sites must not reach the server under a name of their own
        names = [*LOOPBACK[:2], "[::1]"]
        guards = [] if self._token else [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)]
        routes = [
            Route("/", self._page),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", partial(self._complete, is_chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, is_chat=False), methods=["POST"]),
        ]
        return Starlette(routes=routes, middleware=guards, exception_handlers={ApiError: refused})

    async def _page(self, http: HttpRequest) -> Response:
        from starlette.responses import FileResponse

        return FileResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY}, media_type="text/html")

    async def _models(self, http: HttpRequest) -> Response:
        from starlette.responses import JSONResponse

        self._check_token(http)
        facts = {"max_model_len": self._served.positions, "has_chat_template": self._served.chats is not None}
        model = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "megapipe", **facts}
        return JSONResponse({"object": "list", "data": [model]})

    def _check_token(self, http: HttpRequest) -> None:
        given = http.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise ApiError("wrong or missing token: send Authorization: Bearer TOKEN", 401, "invalid_api_key")

    async def _complete(self, http: HttpRequest, is_chat: bool) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        self._check_token(http)
        if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError("send the body as Content-Type: application/json", 415)
        content = b""
        async for part in http.stream():
            content += part
            if len(content) > MOST_BODY_BYTES:
                raise ApiError(f"the body has more than {MOST_BODY_BYTES:,} bytes", 413)
        asked = read_request(content, is_chat, self._served.name)
        prompt, most = self._served.prompt(asked)
        ends = end_tokens(self._served.chats if is_chat and self._served.chats else self._served.tokenizer)
        job = _Job(Request(tuple(prompt), most, ends, asked.sampling), asked.stops)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise ApiError(f"{self._jobs.maxsize} requests wait already; try again", 429, "queue_full") from None
        reply = Reply(is_chat, self._served.name)
        if asked.is_streamed:
            return StreamingResponse(_events(job, http, reply, asked.has_usage), media_type="text/event-stream")
        text, end = "", ("stop", Usage(len(prompt), 0))
        async for piece in job.received(http):
            if isinstance(piece, str):
                text += piece
            else:
                end = piece
        return JSONResponse(reply.whole(text, *end))


async def _events(job: _Job, http: HttpRequest, reply: Reply, has_usage: bool) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer."""

    def event(body: Mapping[str, Any] | str) -> str:
        return f"data: {body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)}\n\n"

    async for piece in job.received(http):
        if isinstance(piece, str):
            yield event(reply.chunk(piece))
            continue
        reason, usage = piece
        yield event(reply.chunk("", reason))
        if has_usage:
            yield event(reply.usage_chunk(usage))
        yield event("[DONE]")
