"""The last resort against a wait that nothing else ends: shut down this process's connections.

gloo cannot end a wait in a group that is still being made, nor a wait that a suspended peer keeps
open. `transport.PeerGroup.abort` needs the group. But a shutdown of a connection, from any thread,
wakes the threads that wait on it. (Seen with torch 2.13: within a few milliseconds.)
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def shut_down_connections(except_address: str) -> int:
    """Shut down every TCP connection of this process; return their number.

    Connections to `except_address` ("host:port"), which is its agent, stay. Each descriptor stays
    its owner's.
    """
    port = int(except_address.rpartition(":")[2])
    count = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # not a socket, not connected, or just closed
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if not internet or connection.getpeername()[1] == port:
                    continue
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
