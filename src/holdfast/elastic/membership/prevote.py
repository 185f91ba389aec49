"""The search for a coordinator that has fallen silent: everybody is asked, all at once.

    a round   the coordinator is asked to take this agent in, the other agents whether they hear it;
              it ends when all have answered, after `seconds` at the latest
    further   who did not answer in one round is asked in the next, too, and not waited for: what is
              cut off costs a search one round, however long it lasts

A round in which this agent was late itself says nothing about the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from math import inf
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.policy.membership.election import Peer
from holdfast.wire.http.async_client import DeadError, Talker
from holdfast.wire.journal import segment_key
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import QUESTION, newest_generation

ANSWER_SECONDS = 3.0
"""How long another agent has for its answer, be it waited for or not."""
LATE_SECONDS = 0.3
"""Beyond its time, until a round counts as this agent's own delay."""


class Search:
    """Lives in one event loop, from the silence of a coordinator until somebody leads."""

    def __init__(self, secret: Secret) -> None:
        self.sign = ""
        """What the run store shows of all others: how far their journal is."""
        self._lead: str | None = None  # the same of the one who leads
        self._moved = -inf
        self._secret = secret
        self._asked: dict[str, asyncio.Task[tuple[Peer, int]]] = {}
        self._back: asyncio.Task[None] | None = None
        self._mute: set[str] = set()

    def look(self, store: RunStore, own: str, leads: str) -> int:
        """See how far the journals are in the run store, but for that of `own`; the newest
        generation there. leads: the node that coordinated. For a thread of its own."""
        newest = newest_generation(store)
        keys = store.list(segment_key(newest, "").removesuffix(".jsonl"))
        sizes = {key: store.size(key) for key in keys if _node_of(key) != own}
        ahead = sum(size for key, size in sizes.items() if _node_of(key) == leads)
        lead = f"{newest} {ahead}"
        if self._lead not in (None, lead):
            self._moved = time.monotonic()
        self.sign, self._lead = f"{newest} {len(sizes)} {sum(sizes.values())}", lead
        return newest

    def leader_moves(self, seconds: float) -> bool:
        """Whether the journal of the one who leads has grown in the last so many: rounds may follow
        each other quicker than it writes."""
        return time.monotonic() - self._moved <= seconds

    async def round(
        self, others: Mapping[str, str], term: int, rejoin: Callable[[], Coroutine[Any, Any, None]],
        silent: Callable[[], bool], seconds: float,
    ) -> dict[str, Peer] | None:  # fmt: skip
        """What the others (name -> address) say of the coordinator of `term`; None where this agent
        was late. rejoin: asks that coordinator. silent: whether it still is, which ends the round.
        Raises what `rejoin` raises."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        for name, address in others.items():
            if name not in self._asked:
                self._asked[name] = asyncio.create_task(self._hears(address))
        if self._back is None:
            self._back = asyncio.create_task(rejoin())
        asked: dict[str, asyncio.Task[Any]] = {**self._asked, "": self._back}
        while silent() and (left := due - loop.time()) > 0:
            waited = [t for name, t in asked.items() if name not in self._mute and not t.done()]
            if not waited:
                break
            await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        late = loop.time() > due + LATE_SECONDS
        if not late:
            self._mute |= {name for name, task in asked.items() if not task.done()}
        return self._told(late, term)

    def _told(self, late: bool, term: int) -> dict[str, Peer] | None:
        """Whoever has answered is asked anew in the next round."""
        said: dict[str, Peer] = {}
        for name, task in list(self._asked.items()):
            said[name] = Peer.UNKNOWN
            if task.done():
                del self._asked[name]
                peer, theirs = task.result()
                # One that follows somebody who is fenced does not know yet.
                said[name] = peer if peer is Peer.DEAD or theirs >= term else Peer.UNKNOWN
                if peer is not Peer.UNKNOWN:
                    self._mute.discard(name)
        if self._back is not None and self._back.done():
            back, self._back = self._back, None
            back.result()
        return None if late else said

    async def _hears(self, address: str) -> tuple[Peer, int]:
        """What an agent says, and the term that it knows of."""
        talker = Talker(address, self._secret, connect_seconds=ANSWER_SECONDS)
        try:
            answer = await talker.post(QUESTION, {}, ANSWER_SECONDS)
        except DeadError:
            return Peer.DEAD, 0
        except HoldfastError:
            return Peer.UNKNOWN, 0
        finally:
            talker.close()
        hears = Peer.HEARS if answer.get("hears") else Peer.MISSES
        return hears, int(answer.get("term", 0))

    async def end(self, answered: bool) -> None:
        """It is over. answered: by the coordinator itself, whose orders are taken in before all
        else. Raises what `rejoin` raises."""
        back = self._back if answered else None
        if back is not None:
            await back
        self.close()

    def close(self) -> None:
        for task in (*self._asked.values(), self._back):
            if task is not None:
                task.cancel()


def _node_of(key: str) -> str:
    """Whose agent writes a segment; names may have dots."""
    return key.rpartition("/")[2].removesuffix(".jsonl").partition(".")[2]
