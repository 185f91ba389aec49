"""The members that sum one cell, and how they reach each other."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

from holdfast.core.sharding.reduction_cells import Member
from holdfast.parallel.comm.device_group import DeviceGroup
from holdfast.parallel.comm.trace import REDUCE, SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup

FIRST_TAG = 16  # lower tags are free for small exchanges in the same group
TAGS_PER_REDUCER = 1 << 20  # what one reducer may use from its first tag on

ExchangeKind = Literal["direct", "gathered"]
"""How pieces and sums travel: messages from rank to rank, or collectives of the group."""


@dataclass(frozen=True)
class CellTeam:
    """The members that sum one cell, and how they reach each other.

    own_index: index of this rank in `members`. positions: each member's number in `peers`, which
    may connect more ranks than these. first_tag: reducers that share peers need `TAGS` tags each.
    recorder: notes when each bucket is summed. exchange: how pieces and sums travel.
    Raises ValueError if two members contribute the same part of one replica, or none receives. It
    also does if collectives are wanted in a group that connects more ranks than the members.
    """

    peers: PeerGroup | DeviceGroup
    members: tuple[Member, ...]
    own_index: int
    positions: tuple[int, ...]
    first_tag: int = FIRST_TAG
    recorder: SpanRecorder | None = None
    exchange: ExchangeKind = "direct"

    def __post_init__(self) -> None:
        given = [(m.replica, m.part) for m in self.members if m.contributes]
        if len(set(given)) != len(given):
            raise ValueError(f"a part of a replica is contributed twice in {self.members}")
        if not any(m.receives for m in self.members):
            raise ValueError(f"nobody receives in {self.members}")
        if self.exchange == "gathered" and len(self.members) != self.peers.size:
            raise ValueError(f"{len(self.members)} members share {self.peers.size} peers")

    @staticmethod
    def of_replicas(peers: PeerGroup, exchange: ExchangeKind = "direct") -> CellTeam:
        """One member per replica, which is its number in `peers`; all contribute and receive."""
        everybody = range(peers.size)
        members = tuple(Member(i, i, 0, contributes=True, receives=True) for i in everybody)
        return CellTeam(peers, members, peers.rank, tuple(everybody), exchange=exchange)

    @property
    def own_member(self) -> Member:
        return self.members[self.own_index]

    @property
    def others(self) -> tuple[int, ...]:
        """Every member but this one, beginning with the next, so that not all write to one."""
        size = len(self.members)
        return tuple((self.own_index + i) % size for i in range(1, size))

    def span(self, name: str) -> AbstractContextManager[None]:
        """Note when something of the reduction happens, where that is asked for."""
        marked = ExitStack()
        if self.recorder is not None:
            marked.enter_context(self.recorder.span(REDUCE, name))
        if self.peers.traffic is not None:
            end = partial(self.peers.traffic.note, REDUCE, name, time.monotonic(), tells=False)
            marked.callback(end)
        return marked

    def exposed(self) -> AbstractContextManager[None]:
        """The passes are over, and this rank waits for the sums."""
        traffic = self.peers.traffic
        return nullcontext() if traffic is None else traffic.exposed(REDUCE)

    @property
    def is_plain_all_reduce(self) -> bool:
        """Return True if the backend's own all-reduce over `peers` would be the same sum."""
        return len(self.members) == self.peers.size and all(
            m.contributes and m.receives for m in self.members
        )
