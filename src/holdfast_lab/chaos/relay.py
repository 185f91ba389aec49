"""A slow, narrow, lossy line: takes packets from one device and puts them onto another one, later.

    python -m holdfast_lab.chaos.relay DEVICE DEVICE [MILLISECONDS PERCENT [GBIT_PER_S]]

For kernels without netem (`network.py`), and for a line whose shape changes while packets are on it
(`RegionLink`). A line on the input, with the same three numbers, gives a new shape. Packets are
forwarded as the kernel hands them over, up to 64 KiB at once. Their header says what its devices
would still have to do (check sums, cutting into pieces). A lost packet is one of those. The process
ends when its input does.
"""

from __future__ import annotations

import os
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

_ALL_PROTOCOLS = 3  # ETH_P_ALL
_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_MAX_PACKET_BYTES = 1 << 17
_RECEIVE_BUFFER_FORCE, _RECEIVE_BUFFER_BYTES = 33, 1 << 26  # SO_RCVBUFFORCE
_MAX_QUEUED_PACKETS = 4096  # packets in one direction: what more comes is dropped, as by any line


def open_packet_socket(device: str) -> socket.socket:
    """All packets that come in at a device, and a way out."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_PACKET, _VNET_HEADER, 1)
    opened.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, _RECEIVE_BUFFER_FORCE):  # a burst is no loss of the line
        with suppress(OSError):  # the second one is for root alone
            opened.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BUFFER_BYTES)
    opened.bind((device, _ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


@dataclass(frozen=True)
class LinkShape:
    """Of each direction of a line. delay_s: seconds that a packet is late. loss: a share of the
    packets. gbit_per_s: 0: as much as this process can carry."""

    delay_s: float = 0.0
    loss: float = 0.0
    gbit_per_s: float = 0.0

    def words(self) -> list[str]:
        return [str(1000 * self.delay_s), str(100 * self.loss), str(self.gbit_per_s)]

    @staticmethod
    def of(words: Sequence[str]) -> LinkShape:
        """Milliseconds, percent and Gbit/s; what is left out is 0."""
        milliseconds, percent, gbit_per_s = map(float, [*words, *"000"[len(words) :]])
        return LinkShape(milliseconds / 1000, percent / 100, gbit_per_s)


class LineDirection:
    """What waits on a line in one direction, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0

    def push(self, packet: bytes, now: float, shape: LinkShape) -> None:
        """Take in a packet at `now`, in seconds. A full line drops it."""
        if len(self._waiting) >= _MAX_QUEUED_PACKETS:
            return
        sent_at = max(now, self._free_at)
        if shape.gbit_per_s:
            sent_at = self._free_at = sent_at + 8 * len(packet) / (shape.gbit_per_s * 1e9)
        due = sent_at + shape.delay_s
        if self._waiting:  # a shape may have become quicker
            due = max(due, self._waiting[-1][0])
        self._waiting.append((due, packet))

    @property
    def next_due(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def pop_due(self, now: float) -> list[bytes]:
        """The packets that have come to the end of the line."""
        found = []
        while self._waiting and self._waiting[0][0] <= now:
            found.append(self._waiting.popleft()[1])
        return found


def relay_packets(one: socket.socket, other: socket.socket, shape: LinkShape) -> None:
    """Until the input ends."""
    chooser = random.Random(0)
    lines = {one: (LineDirection(), other), other: (LineDirection(), one)}
    while True:
        times = [due for line, _ in lines.values() if (due := line.next_due) is not None]
        pause = max(0.0, min(times) - time.monotonic()) if times else None
        ready, _, _ = select.select([sys.stdin, *lines], [], [], pause)
        if sys.stdin in ready:
            if not (text := os.read(sys.stdin.fileno(), _MAX_PACKET_BYTES)):
                return
            shape = LinkShape.of(text.decode().splitlines()[-1].split())
        for source in lines.keys() & set(ready):
            with suppress(OSError):  # the device goes down: so does this process, soon
                packet = source.recv(_MAX_PACKET_BYTES)
                if chooser.random() >= shape.loss:
                    lines[source][0].push(packet, time.monotonic(), shape)
        now = time.monotonic()
        for line, target in lines.values():
            for packet in line.pop_due(now):
                with suppress(OSError):  # no room: a line drops what it cannot take
                    target.send(packet)


def main() -> None:
    one, other, *words = sys.argv[1:]
    devices = open_packet_socket(one), open_packet_socket(other)
    print("ready", flush=True)
    relay_packets(*devices, LinkShape.of(words))


if __name__ == "__main__":
    main()
