"""`StoreExchange`: heartbeats between hosts, through the store in which the ranks met."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

STORE_SECONDS = 3.0  # for one question to the store
PUBLISH_SECONDS = 1.0
STORE_ERRORS = (RuntimeError, ValueError, OSError)  # torch's DistError is a RuntimeError


class StoreExchange:
    """Publishes this rank's record every second from a thread of its own, and answers what other ranks published (monitor.watchdog).

    A store that does not answer is asked no more: it costs what is known of other hosts, nothing else. token: of this run, the same on
    all ranks.
    """

    def __init__(self, rank: int, token: str, record: Callable[[], bytes], store: dist.Store | None = None) -> None:
        given = dist.distributed_c10d._get_default_store() if store is None else store
        own = given.clone()  # type: ignore[attr-defined]  # a connection of its own: a wait of torch's in the other one would hold it
        own.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._store = dist.PrefixStore(f"megapipe {token}", own)
        self._rank, self._record = rank, record
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="heartbeat", daemon=True)
        self._is_lost = False
        self.is_told = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STORE_SECONDS)

    def fetch(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """The records last published by some ranks."""
        found = {}
        for rank in ranks:
            data = self._read(f"record {rank}")
            if data:
                found[rank] = data
        return found

    def stack(self, rank: int) -> str:
        return self._read(f"stack {rank}").decode(errors="replace")

    def publish_stack(self, text: str) -> None:
        self._ask(lambda store: store.set(f"stack {self._rank}", text))

    def claim(self) -> bool:
        """Only the first rank that asks gets True; a store that does not answer cannot give it away twice either, so then True."""
        return self._ask(lambda store: store.add("claim", 1)) in (1, None)

    def tell(self) -> None:
        self._ask(lambda store: store.set("told", "1"))

    def _read(self, key: str) -> bytes:
        return self._ask(lambda store: store.get(key) if store.check([key]) else b"") or b""

    def _ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """None from a store that failed now or before: torch prints a stack each time, and its connection never comes back."""
        with self._lock:
            if self._is_lost:
                return None
            try:
                return question(self._store)
            except STORE_ERRORS:
                self._is_lost = True
                return None

    def _publish(self) -> None:
        while not self._stopped.wait(PUBLISH_SECONDS):
            self._ask(lambda store: store.set(f"record {self._rank}", self._record()))  # type: ignore[arg-type]
            self.is_told = self.is_told or bool(self._read("told"))
