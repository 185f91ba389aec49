"""The heartbeats that wait at the coordinator for their answer, one of each node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast.policy.membership.transitions import (
    TERMINAL_PHASES,
    CoordinatorState,
    Directive,
    NodeCommand,
    directive_for,
)


class OpenHeartbeats:
    """The open heartbeats of one term. Lives in one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[asyncio.Future[None], Directive, bool]] = {}

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
