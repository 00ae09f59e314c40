"""`StoreExchange`: heartbeats between hosts, through the store in which the ranks met."""

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

STORE_SECONDS = 3.0  # for one question to the store
PUBLISH_SECONDS = 1.0
RETRY_SECONDS = 5.0  # between two attempts to reach a store that was lost: torch prints a stack each time
STORE_ERRORS = (RuntimeError, ValueError, OSError)  # torch's DistError is a RuntimeError

Question = Callable[[dist.Store], Any]


class StoreExchange:
    """Publishes this rank's record every second from a thread of its own, and answers what other ranks published (monitor.watchdog).

    A store that does not answer is asked again only for the records of others, which are asked for when something is wrong already.
    token: of this run, the same on all ranks.
    """

    def __init__(self, rank: int, token: str, record: Callable[[], bytes], store: dist.Store | None = None) -> None:
        given = dist.distributed_c10d._get_default_store() if store is None else store
        self._connect = lambda: _own_connection(given, f"megapipe {token}")
        self._line = _Line(self._connect)
        self._rank, self._record = rank, record
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="heartbeat", daemon=True)
        self.is_told = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The last record goes out too."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STORE_SECONDS)
        self._say(f"record {self._rank}", self._record())

    def fetch(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """The records last published by some ranks; none where the store cannot be reached now."""
        self._reach()
        found = {}
        for rank in ranks:
            data = self._read(f"record {rank}")
            if data:
                found[rank] = data
        return found

    def stack(self, rank: int) -> str:
        return self._read(f"stack {rank}").decode(errors="replace")

    def publish_stack(self, text: str) -> None:
        self._say(f"stack {self._rank}", text)

    def claim(self) -> bool:
        """Only the first rank that asks gets True; a store that does not answer cannot give it away twice either, so then True."""
        return self._line.ask(lambda store: store.add("claim", 1)) in (1, None)

    def tell(self) -> None:
        self._say("told", "1")

    def _reach(self) -> None:
        """A new connection, where the old one is lost."""
        if self._line.is_lost and time.monotonic() >= self._line.lost_at + RETRY_SECONDS:
            self._line = _Line(self._connect)

    def _say(self, key: str, value: str | bytes) -> None:
        self._line.ask(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def _read(self, key: str) -> bytes:
        return self._line.ask(lambda store: store.get(key) if store.check([key]) else b"") or b""

    def _publish(self) -> None:
        while not self._stopped.wait(PUBLISH_SECONDS):
            self._say(f"record {self._rank}", self._record())
            self.is_told = self.is_told or bool(self._read("told"))


class _Line:
    """One connection to a store and the thread that speaks over it: torch waits for ever for the answer of a machine that is cut off."""

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._questions: queue.SimpleQueue[tuple[Question, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self.lost_at = math.inf
        threading.Thread(target=self._speak, args=(connect,), name="store", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        return self.lost_at < math.inf

    def ask(self, question: Question) -> Any:
        """None once the store has failed, or did not answer in time; it is asked no more."""
        if self.is_lost:
            return None
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._questions.put((question, answer))
        with suppress(queue.Empty):
            return answer.get(timeout=STORE_SECONDS)
        self.lost_at = time.monotonic()
        return None

    def _speak(self, connect: Callable[[], dist.Store]) -> None:
        try:
            store = connect()
            while not self.is_lost:
                question, answer = self._questions.get()
                answer.put(question(store))
        except STORE_ERRORS:
            self.lost_at = time.monotonic()
            with suppress(UnboundLocalError):
                answer.put(None)


def _own_connection(given: dist.Store, prefix: str) -> dist.Store:
    """Beside the one in which a wait of torch's may stand."""
    own = given.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=STORE_SECONDS))
    return dist.PrefixStore(prefix, own)
