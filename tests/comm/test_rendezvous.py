"""Ranks restarted in a store that an earlier start has used find each other, and only each other."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megapipe.comm.rendezvous import START_KEY, fresh_store


def meet(store: dist.Store, order: list[int], names: list[list[str]]) -> None:
    """Start the ranks of `order`, each one when the previous one waits or has finished."""
    found: dict[int, str] = {}

    def arrive(rank: int) -> None:
        fresh = fresh_store(store, rank, len(order), 20.0)
        fresh.set(f"by {rank}", "")
        found[rank] = fresh.get(f"by {(rank + 1) % len(order)}").decode() or str(
            fresh.underlying_store.get(START_KEY), "ascii"
        )

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join(20)
    names.append([found[rank] for rank in sorted(found)])


def test_every_start_meets_under_its_own_name_whichever_rank_comes_first() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    names: list[list[str]] = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 0], [3, 0, 2, 1]):  # the set of ranks changes between starts
        meet(store, order, names)
    assert [len(set(found)) for found in names] == [1] * 4
    assert [len(found) for found in names] == [3, 3, 2, 4]
    assert len({found[0] for found in names}) == 4


def test_a_rank_without_the_others_gives_up_in_time() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError):
        fresh_store(store, 0, 2, 0.2)
    with pytest.raises(RuntimeError, match="rank 0 did not answer"):
        fresh_store(store, 1, 2, 0.2)
