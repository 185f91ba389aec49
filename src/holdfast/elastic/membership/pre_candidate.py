"""An agent as a pre-candidate: its coordinator is silent, and it asks the other agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.elastic.membership.coordinator_session import CoordinatorSession
from holdfast.elastic.membership.prevote import PreVote
from holdfast.elastic.membership.run_membership import RunMembership
from holdfast.policy.membership import election
from holdfast.policy.membership.election import PreVoteReply, Role
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import newest_term

MIN_PREVOTE_ROUND_S = 1.0
"""Least seconds of a round in which a silent coordinator and the other agents may answer. A round
lasts a heartbeat if that is longer."""
PREVOTE_ROUND_PAUSE_S = 0.5
"""Seconds between the beginnings of two rounds, if the first one is shorter."""


class PreCandidate:
    """One agent's rounds of the pre-vote, each time that its coordinator is silent.

    Lives in one event loop.
    """

    def __init__(
        self,
        membership: RunMembership,
        session: CoordinatorSession,
        store: RunStore,
        secret: Secret,
        heartbeat_interval_s: float,
        check_run_folder: Callable[[], Awaitable[None]],
    ) -> None:
        """The last three arguments are those of `RoleLoop`."""
        self._membership, self._session = membership, session
        self._store, self._secret = store, secret
        self._round_s = max(MIN_PREVOTE_ROUND_S, heartbeat_interval_s)
        self._pause_s = min(PREVOTE_ROUND_PAUSE_S, heartbeat_interval_s / 2)
        self._check_run_folder = check_run_folder
        self._pre_vote: PreVote | None = None  # while its coordinator is silent

    async def run_round(self) -> None:
        """Run one round of the pre-vote."""
        membership = self._membership
        # this round's requests report what has changed here
        membership.workload.state_changed.clear()
        begun = membership.now
        if self._pre_vote is None:
            self._session.requests.cancel()  # to free a connection for the round
            self._pre_vote = PreVote(self._secret)
        search = self._pre_vote
        term, holder = await asyncio.to_thread(newest_term, self._store)
        if term > membership.state.term:
            await self._follow_newer_term(term, holder)
            return
        leader_name = "" if holder is None else str(holder.get("node", ""))
        if not search.journal_sizes:
            await self._observe_journals(search, leader_name)
        own_name, addresses = membership.state.name, membership.agent_addresses
        peers = await search.ask_round(
            {name: address for name, address in addresses.items() if name != own_name},
            term,
            self._session.join,
            lambda: self._is_leader_silent,
            self._round_s,
        )
        if peers is not None and self._is_leader_silent:
            await self._end_round(search, peers, leader_name)
        if self._is_leader_silent:
            left = self._pause_s - (membership.now - begun)
            await membership.sleep_until_change(max(0.0, left))
        if not self._is_leader_silent:
            await search.finish(membership.state.role is Role.FOLLOWER)
            self.close()

    def close(self) -> None:
        """End the pre-vote, if there is one."""
        self._membership.lacked_majority = None
        if self._pre_vote is not None:
            self._pre_vote.close()
            self._pre_vote = None

    @property
    def _is_leader_silent(self) -> bool:
        return self._membership.state.role is Role.PRE_CANDIDATE

    async def _follow_newer_term(self, term: int, holder: Mapping[str, Any] | None) -> None:
        await self._check_run_folder()
        membership = self._membership
        address = "" if holder is None else str(holder.get("address", ""))
        self.close()
        membership.set_state(
            election.newest_term_read(membership.state, term, address, membership.now)
        )

    async def _observe_journals(self, search: PreVote, leader_name: str) -> int:
        return await asyncio.to_thread(
            search.observe_journals, self._store, self._membership.state.name, leader_name
        )

    async def _end_round(
        self, search: PreVote, peers: Mapping[str, PreVoteReply], leader_name: str
    ) -> None:
        """Take the round's answers, and what the run store shows at its end."""
        membership = self._membership
        newest = await self._observe_journals(search, leader_name)
        alive = search.has_leader_progress(self._round_s)
        now = membership.now
        membership.set_state(
            election.pre_vote_ended(
                membership.state,
                peers,
                newest,
                now,
                membership.timeouts,
                search.journal_sizes,
                alive,
            )
        )
        membership.lacked_majority = election.lacked_majority(
            membership.state, peers, now, membership.timeouts
        )
