"""A rank that ends in the midst of a message."""

from __future__ import annotations

from typing import Any

from holdfast.parallel.comm.transport import PeerGroup
from tests.support.ranks import RankContext

SENDING = 0.003
"""Seconds, in which some of a message of 32 MB is sent, and not all."""


def dies_sending(rank: RankContext, peers: PeerGroup) -> None:
    """From the beginning of its next message on, this rank has `SENDING` left."""
    send = peers.send

    def sending(*args: Any) -> None:
        rank.die_within(SENDING)
        send(*args)

    peers.send = sending  # type: ignore[method-assign]
