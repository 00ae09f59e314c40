"""`StoreExchange`: heartbeats between hosts, through the store of the rendezvous; one rank publishes for its host."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megapipe.monitor.heartbeat import FILE_BYTES

STORE_SECONDS = 3.0  # timeout of one request to the store
PUBLISH_SECONDS = 1.0
RETRY_SECONDS = 5.0  # between attempts to reach a lost store; torch prints a stack trace at each
STORE_ERRORS = (RuntimeError, ValueError, OSError)  # torch's DistError is a RuntimeError

Request = Callable[[dist.Store], Any]


class StoreExchange:
    """Publishes the records of this rank's host every second from a thread, and reads those of other hosts.

    One rank of a host does both (`speaks`), over a separate connection: two requests a second and host, however many
    ranks it has. The others connect only to `fetch`, `claim` or publish a stack when something is wrong. Only `fetch`
    tries a store that stopped answering again. Used by monitor.watchdog.
    token: of this run, the same on all ranks. hosts: the ranks of each host. records: those of this host in that order,
    of FILE_BYTES each, zeros for a rank without one. speaks: this rank publishes for its host at the moment.
    """

    def __init__(
        self,
        rank: int,
        token: str,
        hosts: Sequence[Sequence[int]],
        records: Callable[[], bytes],
        speaks: Callable[[], bool],
        store: dist.Store | None = None,
    ) -> None:
        self._store = dist.distributed_c10d._get_default_store() if store is None else store
        self._prefix = f"megapipe {token}"
        self._connection: _Connection | None = None
        self._rank, self._records, self._speaks = rank, records, speaks
        self._hosts = hosts
        self._host_of = {rank: index for index, ranks in enumerate(hosts) for rank in ranks}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.is_reported = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and publish a last time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STORE_SECONDS)
        self._publish()

    def fetch(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the records last published by these ranks; an empty dict if the store cannot be reached now."""
        if self._connection is not None and time.monotonic() >= self._connection.lost_at + RETRY_SECONDS:
            self._connection = None
        hosts = sorted({self._host_of[rank] for rank in ranks})
        keys = [f"host {host}" for host in hosts]
        every = self._request(
            lambda store: store.multi_get(keys) if store.check(keys) else None  # type: ignore[attr-defined]
        )
        found: dict[int, bytes] = {}
        for host, data in zip(hosts, every or map(self._get, keys), strict=True):
            for index, rank in enumerate(self._hosts[host]):
                found[rank] = data[index * FILE_BYTES : (index + 1) * FILE_BYTES]
        return {rank: found[rank] for rank in ranks if any(found[rank])}

    def stack(self, rank: int) -> str:
        """Return the stack trace that a rank published, or ""."""
        return self._get(f"stack {rank}").decode(errors="replace")

    def publish_stack(self, text: str) -> None:
        self._set(f"stack {self._rank}", text)

    def claim(self, what: str = "claim") -> bool:
        """Return True to the first rank that asks for it, and also if the store does not answer."""
        return self._request(lambda store: store.add(what, 1)) in (1, None)

    def set_reported(self) -> None:
        """Let all ranks know that the failure has been reported; they see it in `is_reported`."""
        self._set("told", "1")

    def _set(self, key: str, value: str | bytes) -> None:
        self._request(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes:
        return self._request(lambda store: store.get(key) if store.check([key]) else b"") or b""

    def _request(self, request: Request) -> Any:
        if self._connection is None:
            self._connection = _Connection(self._store, self._prefix)
        return self._connection.request(request)

    def _publish(self) -> None:
        if self._speaks():
            self._set(f"host {self._host_of[self._rank]}", self._records())

    def _run(self) -> None:
        while not self._stopped.wait(PUBLISH_SECONDS):
            self._publish()
            # other ranks of the host see it in their folder (monitor.watchdog)
            self.is_reported = self.is_reported or (self._speaks() and bool(self._get("told")))


class _Connection:
    """A connection to the store, used from its own thread because torch waits forever for an unreachable machine."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._requests: queue.SimpleQueue[tuple[Request, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self.lost_at = math.inf  # when the store failed or did not answer in time
        threading.Thread(target=self._serve, args=(store, prefix), name="store", daemon=True).start()

    def request(self, request: Request) -> Any:
        """Return the store's answer, or None if it fails or times out; after that the store is not asked again."""
        if self.lost_at < math.inf:
            return None
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put((request, answer))
        with suppress(queue.Empty):
            return answer.get(timeout=STORE_SECONDS)
        self.lost_at = time.monotonic()
        return None

    def _serve(self, store: dist.Store, prefix: str) -> None:
        answer = None
        try:
            # the given connection may be blocked in one of torch's waits
            own = store.clone()  # type: ignore[attr-defined]
            own.set_timeout(timedelta(seconds=STORE_SECONDS))
            prefixed = dist.PrefixStore(prefix, own)
            while self.lost_at == math.inf:
                request, answer = self._requests.get()
                answer.put(request(prefixed))
        except STORE_ERRORS:
            self.lost_at = time.monotonic()
            if answer is not None:
                answer.put(None)
