"""The line between two regions of a network on one machine, whose shape changes while it is used.

A process carries all packets of the line from the beginning (`relay.py`), so a change of the shape
loses none. It is the same process on every machine, with or without netem in its kernel.
"""

from __future__ import annotations

import subprocess

from holdfast_lab.chaos.relay import LinkShape


class RegionLink:
    """Made by `Network.split`; ends with the network."""

    def __init__(self, relay: subprocess.Popen[bytes]) -> None:
        self._relay = relay

    def shape(self, shape: LinkShape) -> None:
        """From now on packets are so late, so many are lost, and the line carries so much."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{' '.join(shape.words())}\n".encode())
        self._relay.stdin.flush()
