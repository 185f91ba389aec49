"""Handles a notice that a machine is about to end: chooses the save that will be complete in time.

A notice has a deadline in seconds, the nodes that end (none named: this one), and whether the run
must leave. There are three sources:

    - SIGTERM, if `cluster.grace_seconds` gives the time until the kill
    - the cloud's metadata service (`clouds.py`, `cluster.notices`)
    - the verb `/notice`, which `holdfast notice` sends, signed like every request

From the measured bandwidth of each tier `policy/saving/emergency.py` picks the tiers in which a
save will be complete in time:

    the run continues   rank 0 receives one request for a save into those tiers, after the next step
    the run leaves      a durable save, as always. If the disk would be too slow and a peer is not,
                        a snapshot for peers instead ("brief"), and the agent waits until they have
                        it

If no tier would be complete, the fastest is tried anyway: a bandwidth is a guess, too.

A durable save that a change of generation has cut off is requested again in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    EmergencyPlanned,
    Event,
    GenerationStarted,
    NoticeReceived,
    Record,
    SnapshotKept,
)
from holdfast.layout import Topology
from holdfast.policy.saving.emergency import MARGIN, Emergency, Route, at_risk, emergency
from holdfast.policy.saving.tier_durations import Measured
from holdfast.policy.saving.tiers import BUCKET, DISK, PEERS, Tiers
from holdfast.wire.waiting import wait_event

NOTICE = "/notice"
"""HTTP path of a notice on the agent's control port."""
ASSUMED = {PEERS: 100e6, DISK: 200e6, BUCKET: 50e6}
"""Bytes per second of a tier before the first measurement: a link of 1 Gbit/s, a slow disk."""


@dataclass(frozen=True)
class Notice:
    """A notice. seconds: time until the nodes end. must_leave: the run must end by then."""

    seconds: float
    nodes: tuple[str, ...] = ()
    leave: bool = False
    source: str = "notice"

    @staticmethod
    def from_json(value: dict[str, Any]) -> Notice:
        """Parse a notice. Raises ValueError, KeyError and TypeError if it is malformed."""
        seconds, nodes = float(value["seconds"]), tuple(map(str, value.get("nodes", ())))
        if not 0 < seconds < 1e6:
            raise ValueError(f"a notice of {seconds:g} seconds makes no sense")
        return Notice(seconds, nodes, bool(value.get("leave", False)))


class Pending:
    """Notices that came while no generation ran, kept for the next one.

    Pure: the caller gives the time, in seconds of any steady clock.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, tuple[str, ...], bool], tuple[float, Notice]] = {}

    def hold(self, notice: Notice, now: float) -> None:
        """Keep a notice. Of two from one source about the same nodes the later counts."""
        self._held[notice.source, notice.nodes, notice.leave] = (now + notice.seconds, notice)

    def take(self, now: float) -> list[Notice]:
        """Return and forget all notices, with the seconds that are left.

        Notices that make the run leave come first, the soonest first. A mere warning is dropped
        when its time is over. A notice to leave stays valid, with at least a second left.
        """
        found = [replace(notice, seconds=max(1.0, end - now))
                 for end, notice in self._held.values() if notice.leave or end > now]  # fmt: skip
        self._held.clear()
        return sorted(found, key=lambda notice: (not notice.leave, notice.seconds))


class Notices:
    """The notices of a run, and the resulting requests to its workers. Lives in the agent's event
    loop."""

    def __init__(
        self, config: RunConfig, emit: Callable[[Event], object], say: Callable[[str], None]
    ) -> None:
        self.measured = Measured()
        self._config, self._emit, self._say = config, emit, say
        self._folder_survives = config.checkpoint.folder_survives
        self._present = Tiers.of(config.checkpoint).present
        self._request = 0
        self._into: tuple[int, ...] = ()
        self._deadline: float | None = None
        self._brief = False
        self._kept = -1  # the newest step of this generation that a peer has
        self._owed: int | None = None  # the step of a durable save that a new generation cut off
        self._news = asyncio.Event()

    # --- what is done about it ------------------------------------------------------------------
    def heard(self, notice: Notice, topology: Topology, step: int) -> Emergency:
        """Choose the tiers, record the choice and request the save. Raises ValueError for an
        unknown node."""
        nodes = notice.nodes or tuple(sorted(set(topology.nodes)))
        table = state_table(self._config.model, self._config.train.precision)
        lost = at_risk(topology, table, nodes)
        plan = emergency(notice.seconds, lost.bytes, self.routes(lost.bytes))
        self._emit(NoticeReceived(
            notice.seconds, list(nodes), notice.leave, notice.source, step=step))  # fmt: skip
        self._emit(EmergencyPlanned(
            list(plan.tiers), notice.seconds, lost.bytes, plan.reason, step=step))  # fmt: skip
        self._say(f"{', '.join(nodes)} will be gone in {notice.seconds:g} s: {plan.reason}")
        chosen = plan.tiers or self._quickest(lost.bytes)
        if notice.leave:
            self._deadline = time.monotonic() + notice.seconds * (1 - MARGIN / 2)
            # A bucket that will have it gets it from a durable save, and keeps it for good.
            self._brief = PEERS in chosen and not {DISK, BUCKET} & set(chosen)
        else:
            self._request += 1
            # The bucket is fed from the run folder, wherever that is.
            fed = BUCKET in chosen and DISK not in chosen
            self._into = (*chosen, DISK) if fed else tuple(chosen)
        return plan

    def routes(self, nbytes: int) -> tuple[Route, ...]:
        """Return the ways out of this machine, as measured.

        A save begins at the next step boundary, and the bucket is fed from the run store.
        """
        wait = self.measured.step_seconds
        speed = {
            tier: self.measured.bytes_per_second(tier) or assumed
            for tier, assumed in ASSUMED.items()
        }
        links = {PEERS: (wait, "network"), DISK: (wait, "disk"),
                 BUCKET: (wait + nbytes / speed[DISK], "network")}  # fmt: skip
        return tuple(
            Route(tier, speed[tier], seconds, tier != DISK or self._folder_survives, link)
            for tier, (seconds, link) in links.items() if tier in self._present
        )  # fmt: skip

    def _quickest(self, nbytes: int) -> tuple[int, ...]:
        routes = self.routes(nbytes)
        surviving = [route for route in routes if route.survives] or routes
        return (min(surviving, key=lambda route: route.needs(nbytes)).tier,)

    # --- replies to the workers -----------------------------------------------------------------
    def answer(self, rank: int, first: int = 0) -> dict[str, Any]:
        """Return this handler's fields of the reply to a worker's report.

        first_rank: the rank of this node that passes the requests on for all, with its vote.
        """
        told: dict[str, Any] = {"brief": self._brief}
        if rank == first:
            told |= {"request": self._request, "into": list(self._into)}
        if rank == 0:
            told["durations"] = self.measured.to_json()
        return told

    def begin(self) -> None:
        """Begin a generation: peers' copies of older generations are not its state."""
        self._kept = -1

    # --- leaving --------------------------------------------------------------------------------
    def seconds_left(self) -> float | None:
        """Return the seconds until this machine ends, minus a margin; None without a deadline."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def observe(self, record: Record) -> None:
        self.measured.observe(record)
        if isinstance(record.event, GenerationStarted):
            self.begin()
        elif isinstance(record.event, SnapshotKept):
            self._kept = max(self._kept, record.event.step)
            self._news.set()
        elif isinstance(record.event, CheckpointFailed):
            if 0 < record.event.generation < record.generation:
                self._owe(record.event.step)
        elif isinstance(record.event, CheckpointCommitted):
            self._made_good(record.event.step)

    def _made_good(self, step: int) -> None:
        if self._owed is not None and step >= self._owed:
            self._owed, self._into = None, ()

    def _owe(self, step: int) -> None:
        """Request a durable save in place of one that a new generation cut off: its writer is
        fenced.

        Request it at once: if nodes come and go, the next regular save may be cut off too.
        """
        self._owed = step
        self._request += 1
        self._into = tuple(dict.fromkeys((*self._into, DISK)))

    async def not_kept(self, step: int) -> str | None:
        """Wait for a peer's copy of the state after `step`, if the run leaves with a snapshot for
        peers.

        Return why no peer has it when time is up; None otherwise.
        """
        if not self._brief or self._deadline is None:
            return None
        while self._kept < step:
            self._news.clear()
            left = self._deadline - time.monotonic()
            if not await wait_event(self._news, max(0.0, left)):
                return "time was up before a peer had it"
        return None
