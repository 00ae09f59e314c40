"""The store in which ranks meet, listening only where they can come from: on the loopback device, or the interface of the job's address.

torch's own store listens on every interface of the machine, and knows no password: whoever reaches it can read and write it.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megapipe.comm.interfaces import address_towards, interface_of, interfaces


def meeting_store(
    host: str, port: int, world_size: int, is_server: bool, timeout_seconds: float, num_nodes: int
) -> dist.TCPStore:
    """The store at an address, once all are there. is_server: it is kept by this process.

    Raises OSError where the port is taken, RuntimeError (torch's DistError) where the others do not come.
    """
    listening = _listening(host, port, num_nodes).detach() if is_server else None  # torch closes it
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, world_size, is_server, timeout, multi_tenant=True, master_listen_fd=listening)


def listening_address(host: str, num_nodes: int) -> str:
    """Where the store of a job listens whose ranks look for it at `host`; "" for every interface.

    That is left for a name that means another address on this machine than on the others: a loopback address (as Debian gives the
    machine's own name in /etc/hosts), or one that is not the machine's (behind a translation of addresses).
    """
    own = address_towards(host)
    if own is None:
        return ""
    interface = interface_of(own)
    if num_nodes > 1 and (interface is None or interface.is_loopback):
        return ""
    return own if _resolved(host) == own or own.startswith("127.") else ""


def interface_towards(host: str, num_nodes: int) -> str | None:
    """Name of the interface over which this process reaches the job's address; None where that does not tell (see listening_address)."""
    own = address_towards(host)
    found = None if own is None else interface_of(own)
    if found is None and own is not None and own.startswith("127."):
        found = next((interface for interface in interfaces() if interface.is_loopback), None)
    return None if found is None or (num_nodes > 1 and found.is_loopback) else found.name


def _listening(host: str, port: int, num_nodes: int) -> socket.socket:
    address = listening_address(host, num_nodes)
    if not address:
        dual = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=4096
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


def _resolved(host: str) -> str | None:
    """The first address of a name, as torch takes it."""
    with suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return None
