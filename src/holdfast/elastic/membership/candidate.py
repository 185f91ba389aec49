"""An agent as a candidate and as a leader: it opens a term, and runs that term's coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.membership.run_membership import RunMembership
from holdfast.policy.membership import election
from holdfast.policy.membership.transitions import Phase
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import Term, create_term

MAX_ELECTION_BACKOFF_S = 60.0
"""Most seconds before an agent whose terms ended by its own fault claims another one."""


class Candidate:
    """One agent's claims to terms, and the coordinator of the term that it holds.

    Lives in one event loop.
    """

    def __init__(
        self,
        membership: RunMembership,
        address: str,
        uses_tls: bool,
        store: RunStore,
        start_coordinator: Callable[[Term], Awaitable[Coordinator]],
        complain: Callable[[str], None],
        own_term: Term | None,
        check_run_folder: Callable[[], Awaitable[None]],
    ) -> None:
        """The arguments after `membership` are those of `RoleLoop`. uses_tls: agents speak TLS."""
        self.coordinator_fault: BaseException | None = None
        """Our own bug that ended the coordinator of a run of one node."""
        self._membership, self._address, self._store = membership, address, store
        self._uses_tls = uses_tls
        self._start_coordinator, self._complain = start_coordinator, complain
        self._own_term, self._check_run_folder = own_term, check_run_folder
        self._fault_count = 0  # terms that ended by such a bug
        self._coordinator_task: asyncio.Task[Any] | None = None

    async def open_term(self) -> bool:
        """Open the next term and start its coordinator; return False if another agent has opened
        it."""
        membership = self._membership
        term, number = self._own_term, membership.state.term
        if self._fault_count:  # the same fault may end the next term, so let another agent claim it
            await asyncio.sleep(min(2.0**self._fault_count, MAX_ELECTION_BACKOFF_S))
        if term is None:
            await self._check_run_folder()
            number += 1
            term = await asyncio.to_thread(
                create_term,
                self._store,
                number,
                self._address,
                membership.state.name,
                uses_tls=self._uses_tls,
            )
        if term is None:
            membership.set_state(
                election.candidacy_ended(membership.state, number, False, membership.now)
            )
            return False
        silent = membership.state.leader_address
        membership.coordinator = coordinator = await self._start_coordinator(term)
        coordinator.suspect(silent)
        membership.set_state(
            election.candidacy_ended(membership.state, number, True, membership.now)
        )
        self._coordinator_task = asyncio.create_task(coordinator.run())
        self._coordinator_task.add_done_callback(
            lambda task: self._on_coordinator_ended(task, coordinator)
        )
        return True

    def close(self) -> None:
        if self._coordinator_task is not None:
            self._coordinator_task.cancel()

    def _on_coordinator_ended(self, task: asyncio.Task[Any], coordinator: Coordinator) -> None:
        membership = self._membership
        if task.cancelled() or membership.coordinator is not coordinator:
            return
        if self._own_term is not None and coordinator.state.phase is not Phase.ENDED:
            self.coordinator_fault = task.exception()
            membership.leave_run()
            return
        if coordinator.state.phase is Phase.FENCED or task.exception() is not None:
            membership.coordinator = None
            membership.set_state(election.newer_term_found(membership.state, membership.now))
            membership.workload.state_changed.set()
        if (error := task.exception()) is not None:
            self._fault_count += 1
            self._complain(f"the coordinator failed with an internal error: {error!r}")
