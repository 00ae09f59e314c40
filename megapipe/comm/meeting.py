"""Where ranks that a launcher has started again meet: apart from what earlier starts left behind in the same store.

torchrun's agents keep one store over restarts (torch 2.13: with a static rendezvous always, with c10d while its store lives). Ranks that
read there where their peers of an earlier start listened cannot connect, or meet a rank that is about to be ended. Counting restarts does
not help: agents count for themselves, and not those that a new node causes.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

MEETING = "megapipe meeting"
POLL_SECONDS = 0.02
RANKS_AT_ONCE = 1024


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> dist.PrefixStore:
    """A part of the store that no earlier start has written to, the same on all ranks of this one. Called by all of them.

    Rank 0 names a new place and answers there to each rank's own token; a rank that was lured to a place of an earlier start sees its token
    unanswered and looks again. Raises RuntimeError if the others do not come in time.
    """
    if rank == 0:
        place = secrets.token_hex(8)
        store.set(MEETING, place)
        for first in range(1, world_size, RANKS_AT_ONCE):
            others = range(first, min(world_size, first + RANKS_AT_ONCE))
            here = [_key(place, "here", other) for other in others]
            store.wait(here, timedelta(seconds=timeout_seconds))
            store.multi_set([_key(place, "seen", other) for other in others], store.multi_get(here))  # type: ignore[attr-defined]  # missing in torch's stubs
    else:
        place = _found(store, rank, timeout_seconds)
    return dist.PrefixStore(f"megapipe {place}", store)


def _found(store: dist.Store, rank: int, timeout_seconds: float) -> str:
    """The place at which rank 0 has answered."""
    token, until, asked = secrets.token_hex(8), time.monotonic() + timeout_seconds, ""
    store.wait([MEETING], timedelta(seconds=timeout_seconds))
    while time.monotonic() < until:
        place = store.get(MEETING).decode()
        if place != asked:
            store.set(_key(place, "here", rank), token)
            asked = place
        answer = _key(place, "seen", rank)
        if store.check([answer]) and store.get(answer).decode() == token:
            return place
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"rank 0 did not answer within {timeout_seconds:g} s")


def _key(place: str, what: str, rank: int) -> str:
    return f"{MEETING} {place} {what} {rank}"
