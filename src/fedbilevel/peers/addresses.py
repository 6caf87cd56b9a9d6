"""Addresses of peers, written as host:port."""

from __future__ import annotations

import ipaddress
import re

from fedbilevel.errors import RosterError

LISTEN = "the address to listen at"  # as named in errors
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):([1-9][0-9]{0,4})")


def split_address(address: str, place: str, *, unspecified: bool = False) -> tuple[str, int]:
    """Split an address into its host (an IPv6 address in brackets) and its port.

    place: name of the address in errors.
    unspecified: whether to accept 0.0.0.0 and [::], which are valid only for listening.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise RosterError(
            f"{place} is {address!r}, expected host:port with a port from 1 to 65535, and [..] around an IPv6 address."
        )
    host = found[1]
    try:
        number = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        if not _HOST.fullmatch(host) or set(host) <= set("0123456789."):
            raise RosterError(
                f"{place} is {address!r}, whose host is neither a name nor an IP address: write host:port."
            ) from None
    else:
        if number.is_unspecified and not unspecified:
            raise RosterError(
                f"{place} is {address!r}, which other machines cannot reach: "
                "write the name or the IP address of the machine."
            )
    return host, int(found[2])


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    host, _ = split_address(address, "an address", unspecified=True)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name server decides what the name means, and that may change


def without_localhost(host: str) -> str:
    """Replace localhost by its address, because `interface` maps names to all interfaces."""
    return "127.0.0.1" if host.lower() == "localhost" else host


def interface(host: str) -> str:
    """Return the interface to listen at for connections to a host.

    libzmq accepts no names here, and a name may belong to a router, so a name means all interfaces.
    """
    host = without_localhost(host)
    return host if host.startswith("[") or host.replace(".", "").isdigit() else "*"
