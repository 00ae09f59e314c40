"""Network interfaces of this machine (of its network namespace), and which one leads to an address."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLASS = Path("/sys/class/net")
GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR
ANY_PORT = 9  # no packet is sent to it


@dataclass(frozen=True)
class Interface:
    """addresses: IPv4, then IPv6. state: the kernel's word, "up" or "down"; loopback says "unknown". megabits_per_second: what the driver
    says, which for a virtual interface is made up; None where it says nothing."""

    name: str
    addresses: tuple[str, ...]
    state: str
    megabits_per_second: int | None = None
    driver: str = ""  # "" for virtual ones

    @property
    def is_loopback(self) -> bool:
        return any(address.startswith("127.") or address == "::1" for address in self.addresses)


def interfaces() -> tuple[Interface, ...]:
    """In the kernel's order; empty where the system does not tell."""
    with suppress(OSError, AttributeError):
        names = [name for _, name in socket.if_nameindex()]
        six = _ipv6_addresses()
        return tuple(_interface(name, six.get(name, ())) for name in names)
    return ()


def address_towards(host: str) -> str | None:
    """This machine's own address on the way to a host; None where the name is not known or no way leads there. Sends nothing."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> Interface | None:
    """The interface that has this address; None where none has."""
    return next((interface for interface in interfaces() if address in interface.addresses), None)


def _interface(name: str, six: tuple[str, ...]) -> Interface:
    four = _ipv4_address(name)
    speed = _text(CLASS / name / "speed")
    driver = CLASS / name / "device" / "driver"
    return Interface(
        name,
        (*((four,) if four else ()), *six),
        _text(CLASS / name / "operstate") or "unknown",
        int(speed) if speed.isdigit() else None,  # "-1" of those that have none
        driver.resolve().name if driver.exists() else "",
    )


def _ipv4_address(name: str) -> str | None:
    import fcntl  # not on every system

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _ipv6_addresses() -> dict[str, tuple[str, ...]]:
    """By interface, link-local ones left out: they need a scope to be used."""
    found: dict[str, tuple[str, ...]] = {}
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope != "20":
            found[name] = (*found.get(name, ()), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # "speed" of an interface that is down is EINVAL
        return ""
