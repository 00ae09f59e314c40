"""The store through which the ranks of a job find each other.

torch's own store listens on every interface and has no password, so any program that can reach it can read and write
it. `create_store` listens only where ranks can connect from: on the loopback interface, or on the interface of the
job's address.

torchrun's agents keep one store across restarts (torch 2.13: always with a static rendezvous; with c10d as long as its
store lives). Ranks that read addresses of an earlier start from it cannot connect, or connect to a rank that is about
to be terminated. Counting restarts does not help: each agent has its own count, which leaves out the restarts that
a joining node causes. `fresh_store` gives each start its own keys.
"""

from __future__ import annotations

import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from megapipe.comm.network import listening_address

START_KEY = "megapipe start"
POLL_SECONDS = 0.02
RANKS_PER_WAIT = 1024


def create_store(
    host: str, port: int, world_size: int, is_server: bool, timeout_seconds: float, num_nodes: int
) -> dist.TCPStore:
    """Return the store at an address once all ranks have connected. is_server: this process hosts the store.

    Raises OSError if the port is taken, RuntimeError (torch's DistError) if the other ranks do not connect in time.
    """
    listener = _listen(host, port, num_nodes).detach() if is_server else None  # torch closes it
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, world_size, is_server, timeout, multi_tenant=True, master_listen_fd=listener)


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> dist.PrefixStore:
    """Return a view of the store that no earlier start has written to, the same for all ranks of this start. Called by
    all of them.

    Rank 0 draws a new name for this start, waits for a token from each rank under that name, and echoes it. A rank that
    has read the name of an earlier start gets no echo and reads again. Raises RuntimeError if the other ranks do not
    come in time.
    """
    if rank == 0:
        start = secrets.token_hex(8)
        store.set(START_KEY, start)
        for first in range(1, world_size, RANKS_PER_WAIT):
            others = range(first, min(world_size, first + RANKS_PER_WAIT))
            tokens = [_key(start, "token", other) for other in others]
            store.wait(tokens, timedelta(seconds=timeout_seconds))
            echoes = [_key(start, "echo", other) for other in others]
            store.multi_set(echoes, store.multi_get(tokens))  # type: ignore[attr-defined]  # missing in torch's stubs
    else:
        start = _find_start(store, rank, timeout_seconds)
    return dist.PrefixStore(f"megapipe {start}", store)


def _find_start(store: dist.Store, rank: int, timeout_seconds: float) -> str:
    """Return the name of the start under which rank 0 has echoed this rank's token."""
    token, deadline, asked = secrets.token_hex(8), time.monotonic() + timeout_seconds, ""
    store.wait([START_KEY], timedelta(seconds=timeout_seconds))
    while time.monotonic() < deadline:
        start = store.get(START_KEY).decode()
        if start != asked:
            store.set(_key(start, "token", rank), token)
            asked = start
        echo = _key(start, "echo", rank)
        if store.check([echo]) and store.get(echo).decode() == token:
            return start
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"rank 0 did not answer within {timeout_seconds:g} s")


def _key(start: str, what: str, rank: int) -> str:
    return f"{START_KEY} {start} {what} {rank}"


def _listen(host: str, port: int, num_nodes: int) -> socket.socket:
    address = listening_address(host, num_nodes)
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=4096)
