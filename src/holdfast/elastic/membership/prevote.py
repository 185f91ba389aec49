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

from holdfast.elastic.protocol.coordinator_messages import TermReply
from holdfast.errors import HoldfastError
from holdfast.policy.membership.election import PreVoteReply
from holdfast.wire.http.async_client import AgentEndedError, AsyncClient
from holdfast.wire.journal import segment_key
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import TERM_PATH, newest_generation

PREVOTE_REPLY_TIMEOUT_S = 3.0
"""Seconds that another agent has for its answer, whether a round waits for it or not."""
PREVOTE_ROUND_LATENESS_S = 0.3
"""Seconds past the end of a round from which this agent itself counts as late."""
MAX_OPEN_QUERIES = 64
"""Agents asked at a time. Each query holds a descriptor, and 1,024 are a common limit."""


class PreVote:
    """The pre-vote of one agent, from a coordinator's silence until an agent leads.

    Lives in one event loop.
    """

    def __init__(self, secret: Secret) -> None:
        self.journal_sizes = ""
        """Progress of the other agents' journals, as the run store shows it."""
        self._leader_journal_size: str | None = None  # the same of the leader's journal alone
        self._leader_progress_at = -inf
        self._secret = secret
        self._queries: dict[str, asyncio.Task[tuple[PreVoteReply, int]]] = {}
        self._query_slots = asyncio.Semaphore(MAX_OPEN_QUERIES)
        self._rejoin_task: asyncio.Task[None] | None = None
        self._unresponsive: set[str] = set()

    def observe_journals(self, store: RunStore, own_name: str, leader_name: str) -> int:
        """Read the sizes of the journals in the run store, except those of `own_name`.

        Return the newest generation there. leader_name: the node that coordinated. Call it in a
        thread.
        """
        newest = newest_generation(store)
        keys = store.list(segment_key(newest, "").removesuffix(".jsonl"))
        sizes = {key: store.size(key) for key in keys if _segment_node(key) != own_name}
        ahead = sum(size for key, size in sizes.items() if _segment_node(key) == leader_name)
        lead = f"{newest} {ahead}"
        if self._leader_journal_size not in (None, lead):
            self._leader_progress_at = time.monotonic()
        self.journal_sizes = f"{newest} {len(sizes)} {sum(sizes.values())}"
        self._leader_journal_size = lead
        return newest

    def has_leader_progress(self, within_s: float) -> bool:
        """Return True if the leader's journal has grown in the last `within_s`: rounds may follow
        each other faster than the leader writes."""
        return time.monotonic() - self._leader_progress_at <= within_s

    async def ask_round(
        self,
        agent_addresses: Mapping[str, str],
        term: int,
        rejoin: Callable[[], Coroutine[Any, Any, None]],
        is_leader_silent: Callable[[], bool],
        duration_s: float,
    ) -> dict[str, PreVoteReply] | None:
        """Return what the other agents say of the coordinator of `term`; None if this agent was
        late. Raises what `rejoin` raises.

        `agent_addresses`: name -> address. rejoin: asks that coordinator to admit this agent.
        is_leader_silent: returns True while the coordinator is silent; the round ends with its
        silence."""
        loop = asyncio.get_running_loop()
        due = loop.time() + duration_s
        for name, address in agent_addresses.items():
            if name not in self._queries:
                self._queries[name] = asyncio.create_task(self._query_agent(address))
        if self._rejoin_task is None:
            self._rejoin_task = asyncio.create_task(rejoin())
        asked: dict[str, asyncio.Task[Any]] = {**self._queries, "": self._rejoin_task}
        while is_leader_silent() and (left := due - loop.time()) > 0:
            waited = [
                t for name, t in asked.items() if name not in self._unresponsive and not t.done()
            ]
            if not waited:
                break
            await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        late = loop.time() > due + PREVOTE_ROUND_LATENESS_S
        if not late:
            self._unresponsive |= {name for name, task in asked.items() if not task.done()}
        # Collect the answers; an agent that has answered is asked again in the next round.
        said: dict[str, PreVoteReply] = {}
        for name, task in list(self._queries.items()):
            said[name] = PreVoteReply.UNKNOWN
            if task.done():
                del self._queries[name]
                peer, theirs = task.result()
                # An agent that follows a fenced coordinator does not know yet.
                said[name] = (
                    peer if peer is PreVoteReply.DEAD or theirs >= term else PreVoteReply.UNKNOWN
                )
                if peer is not PreVoteReply.UNKNOWN:
                    self._unresponsive.discard(name)
        if self._rejoin_task is not None and self._rejoin_task.done():
            back, self._rejoin_task = self._rejoin_task, None
            back.result()
        return None if late else said

    async def _query_agent(self, address: str) -> tuple[PreVoteReply, int]:
        """Ask one agent once there is a slot; return its answer and the term that it knows of."""
        async with self._query_slots:
            talker = AsyncClient(address, self._secret, connect_timeout_s=PREVOTE_REPLY_TIMEOUT_S)
            try:
                answer = await talker.post(TERM_PATH, {}, PREVOTE_REPLY_TIMEOUT_S)
            except AgentEndedError:
                return PreVoteReply.DEAD, 0
            except HoldfastError:
                return PreVoteReply.UNKNOWN, 0
            finally:
                talker.close()
            reply = TermReply.from_json(answer)
            heard, missed = PreVoteReply.HEARS_LEADER, PreVoteReply.MISSES_LEADER
            return heard if reply.hears_leader else missed, reply.term

    async def finish(self, has_leader_answered: bool) -> None:
        """End the pre-vote. has_leader_answered: the coordinator itself answered, so its commands
        are applied first. Raises what `rejoin` raises."""
        back = self._rejoin_task if has_leader_answered else None
        if back is not None:
            await back
        self.close()

    def close(self) -> None:
        for task in (*self._queries.values(), self._rejoin_task):
            if task is not None:
                task.cancel()


def _segment_node(key: str) -> str:
    """Return the node whose agent writes a segment; names may have dots."""
    return key.rpartition("/")[2].removesuffix(".jsonl").partition(".")[2]
