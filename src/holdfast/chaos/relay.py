"""A slow, lossy line: takes packets from one device and puts them onto another one, later.

    python -m holdfast.chaos.relay DEVICE DEVICE MILLISECONDS PERCENT

For kernels without netem (`network.py`). Packets are forwarded as the kernel hands them over, up to
64 KiB at once. Their header says what its devices would still have to do (check sums, cutting into
pieces). A lost packet is one of those. The process ends when its input does.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

_ALL_PROTOCOLS = 3  # ETH_P_ALL
_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_MAX_PACKET_BYTES = 1 << 17
_MAX_QUEUED_PACKETS = 4096  # packets in one direction: what more comes is dropped, as by any line


def open_packet_socket(device: str) -> socket.socket:
    """All packets that come in at a device, and a way out."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_PACKET, _VNET_HEADER, 1)
    opened.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    opened.bind((device, _ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


def relay_packets(
    one: socket.socket, other: socket.socket, delay_s: float, loss_share: float
) -> None:
    """Until the input ends. delay in seconds, loss as a share."""
    chooser = random.Random(0)
    towards = {one: other, other: one}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # one delay, so in order
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *towards], [], [], pause)
        if sys.stdin in ready:
            return
        for source in towards.keys() & set(ready):
            with suppress(OSError):  # the device goes down: so does this process, soon
                packet = source.recv(_MAX_PACKET_BYTES)
                if chooser.random() >= loss_share and len(waiting) < 2 * _MAX_QUEUED_PACKETS:
                    waiting.append((time.monotonic() + delay_s, towards[source], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            with suppress(OSError):  # no room: a line drops what it cannot take
                target.send(packet)


def main() -> None:
    one, other, milliseconds, percent = sys.argv[1:]
    lines = open_packet_socket(one), open_packet_socket(other)
    print("ready", flush=True)
    relay_packets(*lines, float(milliseconds) / 1000, float(percent) / 100)


if __name__ == "__main__":
    main()
