"""Finds hung workers and silent nodes in the heartbeats of a running generation.

`HangDetector` compares what the nodes report of their workers. The watch gets it the reports that
it needs, and acts on its findings. The node kills a hung worker; a node that stays silent is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf
from typing import Protocol

from holdfast.elastic.coordinator.hang_detector import HangDetector
from holdfast.elastic.protocol.coordinator_messages import HANG_REASON, Heartbeat
from holdfast.elastic.protocol.hung_worker import HungWorker
from holdfast.policy.membership.transitions import (
    TERMINAL_PHASES,
    CoordinatorState,
    Directive,
    NodeCommand,
    Phase,
    directive_for,
)

NODE_REPLY_WINDOW_S = 0.3
"""Seconds within which agents react to an event and report it."""


class WatchedTerm(Protocol):
    """The coordinator as the watch sees it."""

    state: CoordinatorState

    def halt(self, reason: str, *, at_step_end: bool = False) -> None: ...

    def declare_lost(self, name: str, cause: str) -> None:
        """Count a node as lost."""
        ...


class HangWatch:
    """The hang watch of one term. Lives in one event loop."""

    def __init__(self, term: WatchedTerm, open_heartbeats: OpenHeartbeats) -> None:
        self._term, self._open_heartbeats = term, open_heartbeats
        self._hang_detector = HangDetector()
        self._hung_workers: dict[str, list[HungWorker]] = {}
        self._silent_nodes_task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def observe(self, said: Heartbeat) -> bool:
        """Take a member's report on workers without progress; return True if it must kill one."""
        name, at, still, state = said.name, said.at, said.stalled, self._term.state
        if blamed := self._hang_detector.observe(
            name, at, still, self._now, lambda: self._oldest_heartbeat_at(name)
        ):
            self._hung_workers[name] = blamed
        if still and (self._silent_nodes_task is None or self._silent_nodes_task.done()):
            self._silent_nodes_task = asyncio.create_task(self._remove_silent_nodes())
        if still and self._hang_detector.find_deadlock(self._now, state.members):
            if late := self._hang_detector.find_hung_devices(self._now):
                self._hung_workers.update(late)
                self._open_heartbeats.answer(late)
            else:
                self._term.halt(HANG_REASON)
        elif still and (found := self._hang_detector.find_hung_worker(self._now, state.members)):
            self._hung_workers[found[0]] = [found[1]]
            self._open_heartbeats.answer([found[0]])
        return name in self._hung_workers

    def _oldest_heartbeat_at(self, name: str) -> float:
        """Return the time of the oldest last heartbeat of the members other than `name`."""
        state = self._term.state
        nodes = [node for one in state.members - {name} if (node := state.node(one))]
        return min((-inf if node.must_report else node.last_heard for node in nodes), default=inf)

    def take_hung_workers(self, name: str) -> list[HungWorker] | None:
        """Return once the workers that the node must kill."""
        return self._hung_workers.pop(name, None)

    async def _remove_silent_nodes(self) -> None:
        """While workers wait, probe every node that reported nothing.

        Declare such a node lost if it stays silent for longer than a worker may stall: all of the
        node may be suspended."""
        if not await self._sleep_on_time(NODE_REPLY_WINDOW_S):
            return
        since, limit = self._hang_detector.waiting_since(0.0), self._hang_detector.stall_limit_s
        if since is None or limit is None:
            return
        generation = self._term.state.generation
        silent = self._silent_nodes(since)
        asked = self._now
        self._open_heartbeats.answer(silent)
        if not silent or not await self._sleep_on_time(
            max(NODE_REPLY_WINDOW_S, since + limit - asked)
        ):
            return
        silent, checked = self._silent_nodes(asked), self._now
        self._open_heartbeats.answer(self._term.state.members)
        if not await self._sleep_on_time(NODE_REPLY_WINDOW_S):
            return
        # compare again now that all nodes have reported
        self._open_heartbeats.answer(self._hang_detector.node_names)
        if not silent:
            return
        now, waiting = self._now, self._hang_detector.waiting_since(checked)
        state = self._term.state
        going = state.are_workers_computing and state.phase is not Phase.STARTING
        same = going and state.generation == generation
        if not same or waiting is None or now - waiting <= limit:
            return
        for name in silent & self._silent_nodes(asked):
            self._term.declare_lost(
                name, f"not heard while other nodes waited for it for {now - waiting:.1f} s"
            )

    def _silent_nodes(self, since: float) -> frozenset[str]:
        state = self._term.state
        nodes = (state.node(name) for name in state.members)
        return frozenset(
            node.name for node in nodes if node is not None and node.last_heard < since
        )

    @property
    def _now(self) -> float:
        return self._loop.time()

    async def _sleep_on_time(self, seconds: float) -> bool:
        """Sleep; return False if this process woke late.

        Other nodes may be late too then, and must not be judged."""
        due = self._now + seconds
        await asyncio.sleep(seconds)
        return self._now - due < NODE_REPLY_WINDOW_S


class OpenHeartbeats:
    """The open heartbeats of one term. Lives in one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[asyncio.Future[None], Directive, bool]] = {}
        self._closed_at: dict[str, float] = {}  # clock, seconds

    def silent_s(self, name: str, now: float) -> float:
        """Return for how long a node that was heard has no heartbeat open. A live agent sends the
        next one as soon as one is answered."""
        return 0.0 if name in self._open else now - self._closed_at.get(name, now)

    def add(self, name: str, doing: Directive, is_leaving: bool) -> asyncio.Future[None]:
        """Add a node's heartbeat; the result is done once it is to be answered. doing: what the
        node does now."""
        woken = asyncio.get_running_loop().create_future()
        self._open[name] = woken, doing, is_leaving
        return woken

    async def wait(self, name: str, woken: asyncio.Future[None], max_wait_s: float) -> None:
        """Wait until the heartbeat is to be answered, at most so long."""
        timer = asyncio.get_running_loop().call_later(max_wait_s, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            if self._open.get(name, (None,))[0] is woken:
                del self._open[name]
                self._closed_at[name] = asyncio.get_running_loop().time()

    def close(self, name: str) -> None:
        """Answer a node's older request: its agent sends a new one and reads only that answer."""
        if name in self._open:
            _wake(self._open.pop(name)[0])

    def answer(self, names: Iterable[str]) -> None:
        """Answer the nodes' open requests, so that they send new ones with their present state."""
        for name in names:
            if name in self._open:
                _wake(self._open[name][0])

    def answer_changed(self, state: CoordinatorState, names: Iterable[str] | None = None) -> None:
        """Answer those of the waiting nodes that have something else to do. names: of these only;
        None: of all."""
        for name in list(self._open) if names is None else names:
            self._answer_if_changed(state, name)

    def _answer_if_changed(self, state: CoordinatorState, name: str) -> None:
        waiting = self._open.get(name)
        if waiting is None:
            return
        woken, doing, leaving = waiting
        node = state.node(name)
        if node is None and state.phase not in TERMINAL_PHASES:
            _wake(woken)
            return
        due = directive_for(state, name)
        # Do not wake a node just to repeat WAIT or WORK, unless it is leaving. A leaving node must
        # learn that the remaining nodes work without it.
        if due != doing and (leaving or due.command not in (NodeCommand.WAIT, NodeCommand.WORK)):
            _wake(woken)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
