"""Network interfaces of this machine (of its network namespace), and which of them leads to an address."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megapipe.errors import CommunicationError

SYS_CLASS_NET = Path("/sys/class/net")
SIOCGIFADDR = 0x8915  # Linux: get the IPv4 address of an interface
RESOLVE_SECONDS = 3.5  # a rank also waits 6 s for the message of a peer before it prints its own (cli.frame)
POLL_SECONDS = 0.25
DISCARD_PORT = 9  # any port will do: connecting a UDP socket sends no packet


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...]  # IPv4, then IPv6
    state: str  # the kernel's operstate, "up" or "down"; loopback has "unknown"
    megabits_per_second: int | None = None  # as the driver reports it, which makes it up for virtual interfaces
    driver: str = ""  # "" for virtual interfaces

    @property
    def is_loopback(self) -> bool:
        return any(address.startswith("127.") or address == "::1" for address in self.addresses)


def interfaces() -> tuple[Interface, ...]:
    """Return all interfaces in the kernel's order; an empty tuple where the system does not list them."""
    import fcntl  # not on every system

    found: list[Interface] = []
    with suppress(OSError, AttributeError):
        ipv6: dict[str, tuple[str, ...]] = {}
        for line in _read(Path("/proc/net/if_inet6")).splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local addresses need a scope to be used
                ipv6[name] = (*ipv6.get(name, ()), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
        for _, name in socket.if_nameindex():
            addresses, speed = ipv6.get(name, ()), _read(SYS_CLASS_NET / name / "speed")
            with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses = (socket.inet_ntoa(answer[20:24]), *addresses)
            state = _read(SYS_CLASS_NET / name / "operstate") or "unknown"
            megabits = int(speed) if speed.isdigit() else None  # "-1" if the interface has no speed
            driver = SYS_CLASS_NET / name / "device" / "driver"
            found.append(Interface(name, addresses, state, megabits, driver.resolve().name if driver.exists() else ""))
        return tuple(found)
    return ()


def local_address_towards(host: str) -> str | None:
    """Return the local address that packets to `host` would leave from; None if the host is unknown or unreachable."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def check_name(host: str, way_out: str = "set MASTER_ADDR to a name or address that this machine knows") -> None:
    """Return once a name has an address. Raises CommunicationError if it has none within RESOLVE_SECONDS.

    The name of a container can become known only after this one was started, so the look-up is repeated.
    """
    deadline, why = time.monotonic() + RESOLVE_SECONDS, "the name service does not answer"
    while (left := deadline - time.monotonic()) > 0:
        answers: list[str] = []  # of one look-up: "" or the error
        thread = threading.Thread(target=lambda to=answers: to.append(_look_up(host)), daemon=True)
        thread.start()
        thread.join(left)  # a look-up can block for longer than the limit
        if answers and not answers[0]:
            return
        why = answers[0] if answers else why
        time.sleep(POLL_SECONDS)
    raise CommunicationError(f"the address {host} of the job's first node cannot be resolved: {why}; {way_out}")


def await_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Return once a process listens at an address. Raises CommunicationError if none does in time.

    torch itself prints a stack of C++ frames for every attempt that fails.
    """
    check_name(host)
    deadline, why = time.monotonic() + timeout_seconds, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), max(POLL_SECONDS, left)).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(POLL_SECONDS)
    raise CommunicationError(
        f"no rank 0 listens at {host}:{port} within {timeout_seconds:g} s ({why}): it was not started, has ended, or "
        "another MASTER_ADDR or MASTER_PORT was given"
    )


def _look_up(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def interface_with(address: str) -> Interface | None:
    """Return the interface that has this address, or None."""
    return next((interface for interface in interfaces() if address in interface.addresses), None)


def interface_towards(host: str, num_nodes: int) -> str | None:
    """Return the name of the interface over which this process reaches the job's address.

    None if it is unknown, or the loopback interface of a job on several nodes (see `listening_address`).
    """
    local = local_address_towards(host)
    found = None if local is None else interface_with(local)
    if found is None and local is not None and local.startswith("127."):
        found = next((interface for interface in interfaces() if interface.is_loopback), None)
    return None if found is None or (num_nodes > 1 and found.is_loopback) else found.name


def listening_address(host: str, num_nodes: int) -> str:
    """Return the address on which a job whose ranks connect to `host` should listen; "" for every interface.

    It is "" where the name means another address on this machine than on others: a loopback address (Debian maps the
    machine's own name to one in /etc/hosts), or one that this machine does not have (behind NAT).
    """
    local = local_address_towards(host)
    if local is None:
        return ""
    interface = interface_with(local)
    if num_nodes > 1 and (interface is None or interface.is_loopback):
        return ""
    if local.startswith("127."):
        return local
    with suppress(OSError):  # the first address of the name is the one that torch connects to
        if socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0] == local:
            return local
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # reading "speed" of an interface that is down raises EINVAL
        return ""
