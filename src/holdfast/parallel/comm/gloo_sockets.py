"""The connections of this process to other ranks, found again and cut.

gloo has no call that ends the waits of a group. A wait that times out closes its connections. But
for each of them gloo then waits until its own event loop turns: 10 ms a peer (torch 2.13). If a
connection is shut down under its hands, gloo notices within a millisecond.

To find a group's connections: its device listens on a port of its own. A connection that came in
has that address on this side; one that went out has another member's on the far side. The members
exchange their listening addresses when they meet. Nothing is known if the system does not list a
process's descriptors (only Linux does).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

Address = tuple[str, int]

_DESCRIPTOR_FOLDER = "/proc/self/fd"
_RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in Linux' struct tcp_info."""
_SO_MAX_PACING_RATE = 47  # of Linux; Python's socket module has no name for it


def listening_addresses() -> set[Address]:
    """Return the addresses on which this process listens for TCP connections."""
    found: set[Address] = set()
    for each in _sockets():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.add(each.getsockname()[:2])
    return found


def received_bytes(own: Address, others: Collection[Address]) -> int:
    """Return the bytes that have come in over the connections of a group, see `cut_connections`. A
    part of a message counts. 0 if the system counts none (only Linux does)."""
    total = 0
    for each in _connections(own, others):
        with suppress(OSError, AttributeError, struct.error):
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
            total += struct.unpack_from("=Q", info, _RECEIVED_AT)[0]
    return total


def pace_connections(own: Address, others: Collection[Address], rates: Mapping[str, float]) -> None:
    """Let the connections of a group send no faster than so many bytes a second. Only Linux can.

    The first two are those of `cut_connections`. rates: by the far side's host."""
    for each in _connections(own, others):
        with suppress(OSError):
            rate = rates.get(each.getpeername()[0])
            if rate is not None:
                value = struct.pack("=Q", int(rate))
                each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, value)


def cut_connections(own: Address, others: Collection[Address]) -> None:
    """Shut down every connection that came in at `own`, or goes to one of the `others`. The
    descriptors stay their owner's, and listeners keep listening."""
    for each in _connections(own, others):
        with suppress(OSError):  # it is no connection any more
            each.shutdown(socket.SHUT_RDWR)


def shut_down_connections(except_address: str) -> None:
    """Shut down every TCP connection of this process, but those to `except_address` ("host:port"),
    which is its agent.

    It is the last resort. `cut_connections` needs a group, and some waits have none yet. Nor can
    gloo end a wait that a suspended peer keeps open. But if any thread shuts a connection down, the
    threads that wait on it wake (torch 2.13: within a few milliseconds).
    """
    port = int(except_address.rpartition(":")[2])
    for each in _sockets():
        with suppress(OSError):  # it listens, or is no connection any more
            if each.getpeername()[1] != port:
                each.shutdown(socket.SHUT_RDWR)


def address_to_text(address: Address | None) -> str:
    return "" if address is None else f"{address[0]} {address[1]}"


def address_from_text(text: str) -> Address | None:
    host, _, port = text.partition(" ")
    return (host, int(port)) if port else None


def _connections(own: Address, others: Collection[Address]) -> Iterator[socket.socket]:
    for each in _sockets():
        try:
            is_inside = each.getsockname()[:2] == own or each.getpeername()[:2] in others
            each.getpeername()
        except OSError:  # it listens, or is no connection any more
            continue
        if is_inside:
            yield each


def _sockets() -> Iterator[socket.socket]:
    """Yield each internet socket of this process, by a descriptor of our own. The listed number
    may belong to something else by the time it is looked at."""
    for name in os.listdir(_DESCRIPTOR_FOLDER) if os.path.isdir(_DESCRIPTOR_FOLDER) else ():
        with suppress(OSError):  # just closed, or no socket
            if not os.readlink(f"{_DESCRIPTOR_FOLDER}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
