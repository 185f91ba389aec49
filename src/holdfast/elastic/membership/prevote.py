"""The pre-vote after a coordinator has fallen silent: ask all agents at once.

    a round   The agent asks the coordinator to admit it again, and all other agents whether they
              hear the coordinator. It ends when all have answered, after `seconds` at the latest.
    further   An agent that did not answer is asked again in the next round, but not waited for.
              So an agent that is cut off delays the pre-vote by one round only.

If this agent itself was late in a round, the round says nothing about the other agents.
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
"""Seconds that another agent has for its answer, whether a round waits for it or not."""
LATE_SECONDS = 0.3
"""Seconds past the end of a round from which this agent itself counts as late."""


class Search:
    """The pre-vote of one agent, from a coordinator's silence until an agent leads.

    Lives in one event loop.
    """

    def __init__(self, secret: Secret) -> None:
        self.sign = ""
        """Progress of the other agents' journals, as the run store shows it."""
        self._lead: str | None = None  # the same of the leader's journal alone
        self._moved = -inf
        self._secret = secret
        self._asked: dict[str, asyncio.Task[tuple[Peer, int]]] = {}
        self._back: asyncio.Task[None] | None = None
        self._mute: set[str] = set()

    def look(self, store: RunStore, own: str, leads: str) -> int:
        """Read the sizes of the journals in the run store, except those of `own`.

        Return the newest generation there. leads: the node that coordinated. Call it in a thread.
        """
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
        """Return True if the leader's journal has grown in the last `seconds`: rounds may follow
        each other faster than the leader writes."""
        return time.monotonic() - self._moved <= seconds

    async def round(
        self, others: Mapping[str, str], term: int, rejoin: Callable[[], Coroutine[Any, Any, None]],
        silent: Callable[[], bool], seconds: float,
    ) -> dict[str, Peer] | None:  # fmt: skip
        """Return what the other agents say of the coordinator of `term`; None if this agent was
        late. Raises what `rejoin` raises.

        `others`: name -> address. rejoin: asks that coordinator to admit this agent. silent:
        returns True while the coordinator is silent; the round ends with its silence."""
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
        """Collect the answers; an agent that has answered is asked again in the next round."""
        said: dict[str, Peer] = {}
        for name, task in list(self._asked.items()):
            said[name] = Peer.UNKNOWN
            if task.done():
                del self._asked[name]
                peer, theirs = task.result()
                # An agent that follows a fenced coordinator does not know yet.
                said[name] = peer if peer is Peer.DEAD or theirs >= term else Peer.UNKNOWN
                if peer is not Peer.UNKNOWN:
                    self._mute.discard(name)
        if self._back is not None and self._back.done():
            back, self._back = self._back, None
            back.result()
        return None if late else said

    async def _hears(self, address: str) -> tuple[Peer, int]:
        """Ask one agent; return its answer and the term that it knows of."""
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
        """End the pre-vote. answered: the coordinator itself answered, so its commands are applied
        first. Raises what `rejoin` raises."""
        back = self._back if answered else None
        if back is not None:
            await back
        self.close()

    def close(self) -> None:
        for task in (*self._asked.values(), self._back):
            if task is not None:
                task.cancel()


def _node_of(key: str) -> str:
    """Return the node whose agent writes a segment; names may have dots."""
    return key.rpartition("/")[2].removesuffix(".jsonl").partition(".")[2]
