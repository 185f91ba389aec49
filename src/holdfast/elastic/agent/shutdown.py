"""The shutdown of a node or of the run: signals, notices, `holdfast notice`.

If other nodes take part, a node that is asked to leave is dropped. The coordinator ends the
generation after a step, and the next generation has the remaining nodes. If no other node takes
part, or all must leave, the run stops. The workers learn it from the answers to their reports, and
leave at one common step. A mere warning (the machine comes back, or may go) causes a save into
tiers that survive the machine (`elastic/notices/handler.py`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.elastic.agent.final_upload import LastUpload
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.run_controller import Office
from holdfast.elastic.event_log import Board, Say
from holdfast.elastic.membership.role_loop import Follower
from holdfast.elastic.node.node_runner import Station
from holdfast.elastic.node.worker_group import Generation
from holdfast.elastic.notices.clouds import Warned
from holdfast.elastic.notices.handler import Notice, Notices, Pending
from holdfast.events import NoticeReceived, StopRequested
from holdfast.policy.membership.election import Standing
from holdfast.policy.membership.transitions import Phase

LEAVE_SECONDS = 20.0
"""Seconds until a node that is asked to leave is dropped."""


class Leaving:
    """The shutdown controller of one agent. Lives in one event loop."""

    def __init__(
        self, config: RunConfig, node: str, alone: bool, *, board: Board, say: Say,
        station: Station, follower: Follower, office: Office, notices: Notices,
        upload: LastUpload, at_once: Callable[[str], None],
    ) -> None:  # fmt: skip
        """alone: the run has no other node. at_once: makes the agent exit without waiting; it
        receives what is not saved then, "" for nothing."""
        self.why: str | None = None
        self._everybody = False  # all of the run must stop, though other nodes take part
        self._config, self._node, self._only = config, node, alone
        self._board, self._say = board, say
        self._station, self._follower, self._office = station, follower, office
        self._notices, self._upload, self._at_once = notices, upload, at_once
        self._pending = Pending()
        self._clock = asyncio.get_running_loop().time
        self.understood: Callable[[int], bool] = lambda number: False
        """Returns True if a notice source knows what the signal means, and will report it."""

    # --- what follows from it -------------------------------------------------------------------
    @property
    def alone(self) -> bool:
        """Return True if no other node takes part, so that leaving stops the run."""
        coordinator = self._follower.coordinator
        if coordinator is not None and len(coordinator.reign.nodes) == 1:
            return True
        return self._only or len(self._follower.agents) <= 1

    @property
    def stopping(self) -> str:
        """Reason for which all of the run must stop; "" while it continues."""
        return self.why if self.why and (self._everybody or self.alone) else ""

    # --- signals --------------------------------------------------------------------------------
    def signalled(self, number: signal.Signals) -> None:
        name, grace = number.name, self._config.cluster.grace_seconds
        if self._upload.missing:  # only the final upload is still under way
            self._at_once(f"{name}; {self._upload.missing}")
        elif self.why is not None:
            if number is signal.SIGINT:
                self._at_once("")
        elif number is signal.SIGTERM and self.understood(number):
            return  # the notice source will say how much time is left
        elif number is signal.SIGTERM and grace and self.alone:
            self.warned(Warned(grace, True, name, name))
        else:
            self.leave(name, grace if number is signal.SIGTERM else 0.0)

    def leave(self, why: str, seconds: float = 0.0) -> None:
        """Leave the run; if the run continues without this node, within `seconds`."""
        if self.why is not None:
            return
        self.why = why
        if not (self.alone or self._everybody):
            self._say(f"{why}: the run continues without {self._node}")
            self._follower.leaving = seconds or LEAVE_SECONDS
            self._station.changed.set()
            return
        if not self._station.at and not self._only:
            self._follower.leave()  # nothing has begun
            return
        self._say(f"{why}: saving and leaving at the next step (Ctrl-C again: at once)")
        if self._station.at:
            self._board.emit("agent", StopRequested(why, step=self._step))
        self._office.stop(why)  # acts if no node works

    @property
    def _step(self) -> int:
        return 0 if self._station.current is None else self._station.current.step

    # --- notices --------------------------------------------------------------------------------
    def warned(self, warned: Warned) -> None:
        """Act on a cloud's termination warning: save into tiers that survive this machine, and
        leave if the machine will not come back."""
        if self.why is not None:
            return
        notice = Notice(warned.seconds, (), warned.leave, warned.source)
        if not self.alone:
            notice = Notice(warned.seconds, (self._node,), warned.leave, warned.source)
        if notice.leave and not self.alone:
            self._write_down(notice)
            self.leave(notice.source, notice.seconds)
            return
        self._heard(notice)
        if notice.leave:
            self.leave(notice.source)

    def _heard(self, notice: Notice) -> None:
        current = self._station.current
        if current is None:
            self._pending.hold(notice, self._clock())
        elif not set(notice.nodes) <= set(current.topology.nodes):
            self._write_down(notice)  # no worker sits there
        else:
            self._notices.heard(notice, current.topology, self._step)

    def _write_down(self, notice: Notice) -> None:
        if self._station.at:
            self._board.emit("agent", NoticeReceived(
                notice.seconds, list(notice.nodes), notice.leave, notice.source, step=self._step,
            ))  # fmt: skip

    def began(self, current: Generation) -> None:
        """Pass the notices that came while no generation was at work to the one that begins."""
        self._notices.begin()
        for notice in self._pending.take(self._clock()):
            if set(notice.nodes) <= set(current.topology.nodes):
                self._notices.heard(notice, current.topology, current.step)

    async def asked(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle `holdfast notice` about nodes that will be lost.

        Raises ValueError for an unknown node, or if another agent coordinates by now."""
        notice = Notice.from_json(body)
        coordinator, current = self._follower.coordinator, self._station.current
        if coordinator is None and self._follower.seat.standing is not Standing.REIGNING:
            raise ValueError("another agent coordinates the run by now: ask again")
        if not self._only and coordinator is not None and self._moves(notice, coordinator):
            names = ", ".join(notice.nodes)
            reason = f"the others go on without {names} after the step that is under way"
            self._say(f"{names} will be gone in {notice.seconds:g} s: {reason}")
            return {"tiers": [], "moves": list(notice.nodes), "reason": reason}
        if current is None:
            self._pending.hold(notice, self._clock())
            return {"tiers": [], "reason": "kept for the generation that begins next"}
        plan = self._notices.heard(notice, current.topology, self._step)
        if notice.leave:
            self._everybody = True
            self.leave(notice.source)
        return {"tiers": list(plan.tiers), "reason": plan.reason}

    def _moves(self, notice: Notice, coordinator: Coordinator) -> bool:
        """Make the run continue without the notice's nodes, if the remaining nodes suffice.

        Return True if they do. Raises ValueError for an unknown node."""
        reign, names = coordinator.reign, set(notice.nodes)
        if unknown := names - {node.name for node in reign.nodes}:
            raise ValueError(f"there is no node {min(unknown)} in this run")
        rest = [node for node in reign.nodes if node.name not in names]
        if not names or reign.phase is not Phase.TRAINING or not self._office.fits(rest):
            return False
        self._write_down(notice)
        if notice.leave:
            coordinator.sent_away |= names
        for name in sorted(names):
            coordinator.warned(name, notice.seconds)
        return True
