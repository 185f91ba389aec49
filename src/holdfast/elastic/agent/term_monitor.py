"""The term monitor: a leader's look at its own term, and at its links, every few seconds.

If the run store shows a newer term, this agent's coordinator ends. If the link to the run store, or
to all other nodes, keeps failing, the leader closes its term (`policy.membership.link_health`). Its
followers are refused then, and one of them opens the next term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.event_log import Say
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.membership.link_health import MAX_OUTAGES, LinkHealth, link_observed
from holdfast.wire.term import Term

TERM_CHECK_INTERVAL_S = 2.0
"""Seconds between two reads of the newest term in the run store."""
SLOW_STORE_S = 10.0
"""Seconds from which a read of the term counts as an outage of the run store."""


class TermMonitor:
    """The term monitor of one agent. Lives in one event loop."""

    def __init__(
        self,
        node: str,
        role_loop: RoleLoop,
        newest_own_term: Callable[[], Term | None],
        single_node_term: Term | None,
        say: Say,
    ) -> None:
        """newest_own_term: returns the newest term that this agent has led. single_node_term: held
        before this agent leads, by a run of one node."""
        self._node, self._role_loop, self._say = node, role_loop, say
        self._newest_own_term, self._single_node_term = newest_own_term, single_node_term
        self._clock = asyncio.get_running_loop().time
        self._watched: Coordinator | None = None
        self._links: dict[str, LinkHealth] = {}
        self._peers: dict[str, float] = {}  # the other nodes, and when each has joined

    async def run_forever(self) -> None:
        while True:
            await asyncio.sleep(TERM_CHECK_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Look at the term and the links once."""
        coordinator, term = self._role_loop.coordinator, self._newest_own_term()
        if coordinator is None:
            term = self._single_node_term
        if coordinator is not self._watched:
            self._watched, self._links, self._peers = coordinator, {}, {}
        if term is None:
            return
        begun = self._clock()
        try:
            await asyncio.to_thread(_hold_term, term)
        except FencedError:
            if coordinator is not None:
                coordinator.fence()
            return
        except HoldfastError:  # an unreachable run store does not stop the training
            is_up = False
        else:
            is_up = True
        if coordinator is None or self._single_node_term is not None:
            return
        if self._clock() - begun > SLOW_STORE_S:
            self._observe("the run store", False)
        self._observe("the run store", is_up)
        # Look at the other nodes. A node that was lost between two looks has joined again.
        before = self._peers
        self._peers = {
            node.name: node.joined_at for node in coordinator.state.nodes if node.name != self._node
        }
        if before and not before.items() & self._peers.items():
            self._observe("the other nodes", False)
        if self._peers:
            self._observe("the other nodes", True)
        if is_up and (link := self._flapping_link()):
            await self._give_up_lead(term, link)

    def _observe(self, link: str, is_up: bool) -> None:
        self._links[link] = link_observed(self._links.get(link, LinkHealth()), is_up, self._clock())

    def _flapping_link(self) -> str:
        """Return the link that keeps failing, if another node is there to lead; "" for none."""
        if not self._peers:
            return ""
        return next((name for name, link in self._links.items() if link.is_flapping), "")

    async def _give_up_lead(self, term: Term, link: str) -> None:
        try:
            await asyncio.to_thread(term.close)
        except HoldfastError:
            return  # the next look finds the outage
        self._say(
            f"{self._node} lost {link} {MAX_OUTAGES} times within a minute, so another node is to "
            f"coordinate the run (term {term.number} is closed)"
        )
        self._role_loop.give_up_lead()


def _hold_term(term: Term) -> None:
    """Raises what `Term.check` raises; otherwise show that this trainer lives."""
    term.check()
    term.show_life()
