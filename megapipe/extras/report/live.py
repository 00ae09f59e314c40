"""`ReportServer`: the report of a run over HTTP on this machine, rendered again when the run's files change."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.report.folder import METRICS, RUN, Run, read_run
from megapipe.extras.report.page import page
from megapipe.extras.report.profile import profiles_in
from megapipe.extras.report.trace import profile_trace

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")  # by which a browser may ask: other names are those of other sites (DNS rebinding)
AGAIN_SECONDS = 10  # after which the page of a run that has not ended is rendered again: it shows the time since then


class ReportServer(ThreadingHTTPServer):
    """The report of a run at / and its trace at /trace. Raises ConfigError if the folder or the port cannot be used."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._lock = folder, Lock()
        self._files: list[tuple[str, int, int]] | None = None  # name, time and size of those from which _run was read
        self._run = read_run(folder)
        self._key: Any = None
        self._page = b""
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port} cannot be used: {error.strerror}; choose another") from None

    def run(self) -> Run:
        """Return the run as its files are now. Raises ConfigError, DataError, OSError."""
        paths = [self._folder / METRICS, self._folder / RUN, *profiles_in(self._folder)]
        stats = [(path.name, path.stat()) for path in paths if path.is_file()]
        files = [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
        if files != self._files:
            self._run, self._files = read_run(self._folder), files
        return self._run

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return media type and content of a path, None if nothing is there. Raises as `run` does."""
        with self._lock:
            run = self.run()
            if path == "/trace" and run.profile is not None:
                return "application/json", profile_trace(run.profile).encode()
            if path != "/":
                return None
            has_ended = run.last.ending in ("ended", "stopped", "failed")
            key = (self._files, run.last.ending, None if has_ended else int(time.time() / AGAIN_SECONDS))
            if key != self._key:
                self._key, self._page = key, page(run, is_served=True).encode()
            return "text/html; charset=utf-8", self._page

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else the browser has closed the connection
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "megapipe", ""
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer a request, or say in a line why not."""
        host = re.sub(r":\d*$", "", self.headers.get("Host", ""))
        status, found = HTTPStatus.OK, None
        try:
            if host not in NAMES:
                status, refusal = HTTPStatus.FORBIDDEN, f"this server is {ADDRESS}, not {host}"
            elif (found := self.server.answer(self.path)) is None:
                status, refusal = HTTPStatus.NOT_FOUND, "not found; the report is at /"
        except (MegapipeError, OSError) as error:
            status, refusal = HTTPStatus.SERVICE_UNAVAILABLE, str(error)
        kind, content = found or ("text/plain; charset=utf-8", refusal.encode())
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        if found and self.headers.get("If-None-Match") == tag:
            content, status = b"", HTTPStatus.NOT_MODIFIED
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": len(content), "ETag": tag, "Cache-Control": "no-cache"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        headers |= {"Cross-Origin-Resource-Policy": "same-origin", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""
