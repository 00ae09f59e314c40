"""The meeting of ranks: they find each other only, agree with few messages, and hear of whatever is wrong with one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megapipe.comm import meeting
from megapipe.comm.bootstrap import start
from megapipe.comm.meeting import START_KEY, Arrival, Fact, Facts, Opening, Process, _announce, attend, chair, digest_of
from megapipe.errors import CommunicationError, DisagreementError
from megapipe.monitor.process import process_space, start_ticks
from tests.comm.test_bootstrap import environment_of, free_port
from tests.harness import run_ranks

INIT = {"pid": 1, "ticks": start_ticks(1), "space": process_space()}  # it lives as long as the tests


def process(rank: int | None, world_size: int, **changes: Any) -> Process:
    values: dict[str, Any] = {**INIT, "place": f"local rank {rank} of node 0", **changes}
    return Process(rank, world_size, f"host-{rank}", **values)


def facts(**values: Any) -> Facts:
    return {f"--{name}": Fact(str(value)) for name, value in ({"lr": 0.001, "seed": 1} | values).items()}


def hash_store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def meet(
    store: dist.Store, processes: Sequence[Process], own: Callable[[int], Facts] = lambda _: facts(), **odd: Any
) -> list[str]:
    """Let processes come in their order, each when the one before waits or is done; return their errors, '' for none.

    odd: timeout, and `text_of`: why the process with that number in the order cannot start.
    """
    errors = [""] * len(processes)
    timeout, text_of = odd.get("timeout", 20.0), odd.get("text_of", {})

    def come(number: int) -> None:
        mine = processes[number]
        try:
            if mine.rank == 0:
                chair(store, mine, own(number), {"note": "of rank 0"}, timeout, text_of.get(number, ""))
            else:
                attend(store, mine, lambda _: own(number), timeout, text_of.get(number, ""))
        except (DisagreementError, CommunicationError) as error:
            errors[number] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=come, args=(number,)) for number in range(len(processes))]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def test_every_start_meets_under_its_own_name_whichever_rank_comes_first() -> None:
    store = hash_store()
    names = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 0], [3, 0, 2, 1]):  # the set of ranks changes between starts
        assert meet(store, [process(rank, len(order)) for rank in order]) == [""] * len(order)
        names.append(store.get(START_KEY))
    assert len(set(names)) == 4


def test_all_ranks_hear_the_rank_host_key_and_values_that_differ() -> None:
    found = meet(
        hash_store(), [process(rank, 4) for rank in range(4)], lambda rank: facts(lr=0.1 if rank == 2 else 0.2)
    )
    assert set(found) == {
        "DisagreementError: the ranks disagree, so nothing was started:\n"
        "  --lr: 0.1 on rank 2 (host-2), but 0.2 on ranks 0 to 1, 3 (the first on host-0)\n"
        "  Give all ranks the same flags, files and versions (what may differ: docs/reliability.md)"
    }


def test_rank_0_can_be_the_one_that_differs() -> None:
    found = meet(hash_store(), [process(rank, 3) for rank in (1, 2, 0)], lambda number: facts(seed=number // 2))
    assert set(found) == {found[0]} and "--seed: 1 on rank 0 (host-0), but 0 on ranks 1 to 2 " in found[0]


def test_many_ranks_that_all_differ_are_asked_for_a_few_of_their_facts() -> None:
    found = meet(hash_store(), [process(rank, 12) for rank in range(12)], lambda rank: facts(seed=rank))
    assert set(found) == {found[0]} and "4 more ranks differ in other ways" in found[0]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        pytest.param(
            process(7, 3), "rank 7 (process 1 on host-7): the global rank is 7, but", id="a rank out of range"
        ),
        pytest.param(process(None, 3), "a process that knows no rank (process 1 on host-None): the g", id="no rank"),
        pytest.param(
            process(2, 4),
            "rank 2 (process 1 on host-2): it was started with WORLD_SIZE 4, but rank 0 (process 1 on host-0) with 3",
            id="another world size",
        ),
        pytest.param(process(1, 3), "rank 1 (process 1 on host-1): its rank is taken by process 1 on", id="taken"),
        pytest.param(
            process(2, 3, place="local rank 1 of node 0"),
            "rank 1 (process 1 on host-1) and rank 2 (process 1 on host-2) are both on local rank 1 of node 0; their "
            "launcher must give each process of a node another LOCAL_RANK",
            id="the same local rank",
        ),
        pytest.param(process(0, 3), "rank 0 (process 1 on host-0): rank 0 is there already", id="a second rank 0"),
    ],
)
def test_a_process_with_a_wrong_place_ends_the_others_with_its_message(
    odd: Process, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "QUIET_SECONDS", 0.5)
    store, text = hash_store(), ""
    if odd.rank in (7, None):
        text = "the global rank is 7, but it must be in 0 .. 2"
    errors: list[str] = []
    if odd.rank == 0:  # it has found the port taken

        def come() -> None:
            with pytest.raises(DisagreementError):
                attend(store, odd, lambda _: {}, 20.0, "rank 0 is there already")

        thread = threading.Thread(target=come)
        thread.start()
        errors = meet(store, [process(rank, 3) for rank in range(2)])
        thread.join(20)
    else:
        errors = meet(store, [process(0, 3), process(1, 3), odd], text_of={2: text})
    assert all(said in error and error.startswith("DisagreementError") for error in errors), errors


def test_gpus_that_two_ranks_cannot_share_are_named() -> None:
    processes = [process(rank, 2, device="GPU a1b2") for rank in range(2)]
    found = meet(hash_store(), processes)
    said = "rank 0 (process 1 on host-0) and rank 1 (process 1 on host-1) are both on GPU a1b2; start at most one rank"
    assert all(said in error for error in found)
    assert meet(hash_store(), [replace(one, device=f"GPU {one.rank}") for one in processes]) == ["", ""]


def test_ranks_that_never_come_are_named_at_the_time_limit() -> None:
    started = time.monotonic()
    found = meet(hash_store(), [process(rank, 6) for rank in (0, 1, 4)], timeout=0.5)
    assert time.monotonic() - started < 15
    said = "CommunicationError: ranks 2 to 3, 5 did not arrive within 0.5 s; ranks 0 to 1, 4 did, from host-0, host-1, "
    assert all(error.startswith(said) for error in found), found


def test_a_rank_without_rank_0_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "VERDICT_SECONDS", 0.1)
    store = hash_store()
    store.set(START_KEY, json.dumps(asdict(Opening("an earlier start", 2, "rank 0", {}))))
    with pytest.raises(CommunicationError, match=r"rank 0 .*rank 1 \(process 1 on host-1\) .*0.2 s"):
        attend(store, process(1, 2), lambda _: {}, 0.2)


def test_a_rank_that_was_started_again_takes_its_own_place() -> None:
    store, ended = hash_store(), process(1, 3, pid=2**22 - 1, ticks=1)
    errors: list[list[str]] = []
    chairing = threading.Thread(target=lambda: errors.append(meet(store, [process(0, 3)])))
    chairing.start()
    store.wait([START_KEY], timedelta(seconds=20))
    opening = Opening(**json.loads(store.get(START_KEY)))
    room = dist.PrefixStore(f"megapipe {opening.start}", store)
    _announce(room, opening, Arrival(ended, "of the one that has ended", digest_of(facts())))
    assert meet(store, [process(1, 3), process(2, 3)]) == ["", ""]
    chairing.join(20)
    assert errors == [[""]]


class CountingStore(dist.Store):
    """A store that counts requests by kind, the bytes of keys and values, and connections."""

    def __init__(self) -> None:
        super().__init__()
        self.of, self.requests, self.bytes, self.connections = hash_store(), Counter[str](), 0, 0

    def _count(self, kind: str, *sent: Any) -> None:
        self.requests[kind] += 1
        self.bytes += sum(len(one) for one in sent if isinstance(one, str | bytes))

    def clone(self) -> CountingStore:
        self.connections += 1
        return self

    def set_timeout(self, timeout: timedelta) -> None: ...

    def set(self, key: str, value: Any) -> None:
        self._count("set", key, value)
        self.of.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.of.get(key)
        self._count("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count("add", key)
        return self.of.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return self.of.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.of.multi_get(keys)  # type: ignore[attr-defined]
        self._count("multi_get", *keys, *values)
        return list(values)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count("multi_set", *keys, *values)
        self.of.multi_set(keys, values)  # type: ignore[attr-defined]

    def has_extended_api(self) -> bool:
        return True


@pytest.mark.parametrize("odd", [None, 9999], ids=["all agree", "one differs"])
def test_16384_ranks_compare_in_a_few_requests_and_bytes_each(odd: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce all ranks one after another; rank 0 answers them in another thread."""
    world_size, asked = 16_384, []
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)  # the real one asks only stores of torch
    monkeypatch.setattr(meeting, "VERDICT_SECONDS", 0.1)
    answer = meeting._answer

    def answered(room: Any, arrivals: Sequence[Arrival], what: str) -> None:
        asked.extend((arrival.process.rank, what) for arrival in arrivals)
        answer(room, arrivals, what)
        if what == "details":
            room.set(f"details {odd}", meeting.to_json(facts(lr=2)))

    monkeypatch.setattr(meeting, "_answer", answered)
    store: Any = CountingStore()
    errors: list[str] = []

    def open_meeting() -> None:
        try:
            chair(store, process(0, world_size), facts(), {}, 300.0)
        except DisagreementError as error:
            errors.append(str(error))

    chairing = threading.Thread(target=open_meeting)
    chairing.start()
    while not store.of.check([START_KEY]):
        time.sleep(0.001)
    opening = Opening(**json.loads(store.get(START_KEY)))
    before, started = (store.requests.total(), store.bytes), time.monotonic()
    for rank in range(1, world_size):
        arrival = Arrival(
            process(rank, world_size), f"token {rank}", digest_of(facts(lr=2) if rank == odd else facts())
        )
        _announce(store, opening, arrival)
    chairing.join(300)
    polls = int(4 * (time.monotonic() - started) / meeting.POLL_SECONDS)  # at most, of rank 0
    requests, sent = store.requests.total() - before[0], store.bytes - before[1]
    assert requests <= 3 * world_size + polls + 300, "a claim, an arrival and a count of each rank"
    assert sent <= 1200 * world_size + 100 * polls
    if odd is None:
        assert not errors and [what for _, what in asked] == ["go"] * (world_size - 1)
    else:
        assert [rank for rank, what in asked if what == "details"] == [odd]
        assert "--lr: 2 on rank 9999 (host-9999), but 0.001 on ranks 0 to 9998, 10000 to 16383" in errors[0]


def meet_over_tcp(rank: int, world_size: int, port: int, folder: Path) -> tuple[str, float, float]:
    """Leave the harness's group, come late as the last rank, and return the error with times of arrival and end."""
    dist.barrier()
    dist.destroy_process_group()
    if rank == world_size - 1:
        time.sleep(1.0)
    arrived = time.time()
    try:
        start(environment_of(rank, world_size, port), "gloo", 60.0, "cpu", facts_of=lambda _: facts(seed=rank // 2))
    except DisagreementError as error:
        return str(error), arrived, time.time()
    return "", arrived, time.time()


def test_real_ranks_that_differ_end_within_5_seconds_of_the_last_arrival(tmp_path: Path) -> None:
    found = run_ranks(meet_over_tcp, 3, free_port(), tmp_path)
    texts, arrivals, ends = zip(*found, strict=True)
    assert len(set(texts)) == 1 and "--seed: 1 on rank 2 (" in texts[0] and ", but 0 on ranks 0 to 1 (" in texts[0]
    assert max(ends) - max(arrivals) < 5.0
