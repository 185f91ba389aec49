"""Sockets to listen on, as the run file names them.

Apart from `server`, because processes name their addresses without asyncio.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from holdfast.errors import RunFolderError


def bind_listener(host: str, port: int, key: str) -> socket.socket:
    """A listening socket on exactly this interface; port 0 takes any free one.

    `key` is the run file's key that named them, for the message. Raises RunFolderError.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(  # an IPv6 zone becomes a number here
            host, port, type=socket.SOCK_STREAM
        )[0]
        if not host:
            raise ValueError("an empty address would be every interface")
        # Name the protocol: otherwise asyncio does not turn Nagle's algorithm off. Then the second
        # write of an answer waits for an acknowledgement of the first, for 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, ValueError) as error:
        raise _address_error(host, port, key, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # "::" is every IPv6 address, and not those of IPv4 as well
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(128)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise _address_error(host, port, key, error) from None
    return bound


def _address_error(host: str, port: int, key: str, error: Exception) -> AddressError:
    words = str(getattr(error, "strerror", None) or error)
    return AddressError(
        f"cannot listen on {host}:{port} ({words})",
        where=key,
        remedy="use an address of this machine and a free port (0 takes any)",
    )


class AddressError(RunFolderError):
    """An address of the run file cannot be listened on."""


def address_of(bound: socket.socket) -> str:
    """ "host:port", the host in brackets for IPv6."""
    name: Sequence[Any] = bound.getsockname()
    return f"[{name[0]}]:{name[1]}" if bound.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"
