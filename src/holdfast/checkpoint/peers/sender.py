"""Offers snapshots to other machines, in the background and within bounds.

The unit is a step. It is offered when every rank of this node has it in memory. Its slots are kept
until the last holder has it or is given up. Each holder has a thread and room for one waiting step.
A newer step replaces the waiting one, and this is counted. So a slow network makes copies rarer,
but never later and later.

    waiting -> offering -> kept
       |           '-----> failed      (refused, out of reach, too slow: the next step tries again)
       '-----> superseded

`policy.placement` chooses the holders by the domains in the run file. A holder that fails is
skipped for some time, and another machine, if there is one, takes its copies. Each generation names
the receivers again (`follow`). The plan in force is passed along, so that few copies move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.memory.snapshot_store import Shelf, Snapshot
from holdfast.checkpoint.peers.client import PeerClient, PeerError
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.receiver import HELD, PLAN
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import Event, PeerFailed, SettingIgnored, SnapshotKept
from holdfast.layout import Topology
from holdfast.policy.placement import place_copies
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

ATTEMPTS = 3
"""Offers of one step that may fail before it is given up."""
PAUSES = (0.5, 2.0)
"""Seconds between them."""
PINNED_SLOTS = 3
"""Slots of an arena from which on one is kept for what is being sent."""
STEP_SECONDS = 600.0
"""A holder that has not taken a step within this time has failed."""
ASK_SECONDS = 30.0
"""Timeout of an offer. The receiver answers within ten seconds, with "pulling" at least."""
AWAY_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds for which a failed holder is skipped, by its number of failures in a row."""


@dataclass
class _Step:
    """One step on its way; the pins end with its last user."""

    generation: int
    step: int
    snapshots: list[Snapshot]
    pins: ExitStack
    users: int = 0

    @property
    def name(self) -> tuple[int, int]:
        return self.generation, self.step


@dataclass
class _Line:
    """One holder: what waits for it, and how it has done."""

    peer: Peer
    started: bool = False  # its thread
    over: bool = False  # nothing is sent there any more
    client: PeerClient | None = None  # of the newest generation that something was sent in
    waiting: _Step | None = None
    busy: bool = False
    told: set[int] = field(default_factory=set)  # generations whose plan it has been sent
    kept: tuple[int, int] = (0, -1)
    skipped: int = 0  # steps that gave way to newer ones since the last that was kept
    spared: int = 0  # bytes of the step under way that need not travel
    failures: int = 0  # in a row
    back: float = 0.0  # passed over until then
    counts: dict[str, int] = field(
        default_factory=lambda: {"kept": 0, "superseded": 0, "failed": 0}
    )
    reason: str = ""


class Copies:
    """Sends snapshots of a mover to other machines. `shelved` never blocks. Every method may be
    called from any thread."""

    def __init__(
        self,
        settings: PeerSettings,
        shelf: Shelf,
        secret: Secret,
        source: str,
        run: str,
        add: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` is the address at which other machines reach this mover's listener, `run` what
        is computed (`identity`); `add` takes events."""
        self._settings, self._shelf, self._secret = settings, shelf, secret
        self._source, self._run, self._add, self._clock = source, run, add, clock
        self._change = threading.Condition()
        self._closed = False
        self._plan: tuple[Topology, StateTable] | None = None
        self._here: dict[tuple[int, int], set[int]] = {}  # own ranks shelved, by step
        self._lines = {peer.name: _Line(peer) for peer in settings.peers}
        self._held: dict[str, tuple[str, ...]] = {}  # the placement in force
        self._warned: set[str] = set()
        self._over: list[ExitStack] = []  # unneeded pins: ended without our lock held

    def follow(
        self, peers: Iterable[Peer], before: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """Send to these peers from now on, in addition to those that the run file names. A machine
        that is lost, or listens at another address now, is not waited for. `before`: the placement
        in force, if this mover has none of its own."""
        named = {peer.name: peer for peer in (*self._settings.peers, *peers)}
        named.pop(self._settings.machine.name, None)
        clients: list[PeerClient] = []
        with self._change:
            for name, line in list(self._lines.items()):
                if named.get(name) != line.peer:
                    del self._lines[name]
                    line.over = True
                    if line.waiting is not None:
                        self._let_go(line.waiting)
                        line.waiting = None
                    if line.client is not None:
                        clients.append(line.client)
            for name, peer in named.items():
                self._lines.setdefault(name, _Line(peer))
            if not self._held:
                self._held = dict(before or {})
            self._change.notify_all()
        for client in clients:
            client.abort()
        self._unpin()

    @property
    def placement(self) -> dict[str, tuple[str, ...]]:
        """The plan in force: who keeps whose copies."""
        with self._change:
            return dict(self._held)

    def expect(self, topology: Topology, table: StateTable) -> None:
        """A generation begins: what waits of older ones is dropped."""
        with self._change:
            if self._plan is not None and self._plan[0] == topology:
                return  # said again
            self._plan = (topology, table)
            self._here = {}
            for line in self._lines.values():
                if line.waiting is not None:
                    self._let_go(line.waiting)
                    line.waiting = None
        self._unpin()

    def shelved(self, generation: int, step: int, rank: int, surely: bool = False) -> None:
        """A rank of this node has a snapshot on the shelf; offers the step if it was the last.
        surely: also a step that the rule by steps leaves out."""
        if step % self._settings.every_steps and not surely:
            return
        with self._change:
            if self._plan is None or self._plan[0].generation != generation or self._closed:
                return
            ranks = self._own(rank)
            here = self._here.setdefault((generation, step), set())
            here.add(rank)
            if here != ranks:
                return
            self._here = {key: some for key, some in self._here.items() if key[1] > step}
            offered = self._pinned(generation, step, sorted(ranks))
            if offered is not None:
                self._queue(offered)
        self._unpin()

    def status(self) -> dict[str, Any]:
        with self._change:
            return {
                name: {
                    "kept": list(line.kept), "counts": dict(line.counts), "busy": line.busy,
                    "reason": line.reason,
                }
                for name, line in self._lines.items()
            }  # fmt: skip

    def close(self) -> None:
        with self._change:
            self._closed = True
            clients = [line.client for line in self._lines.values() if line.client is not None]
            self._change.notify_all()
        for client in clients:
            client.close()

    # --- what is offered to whom ------------------------------------------------------------
    def _own(self, rank: int) -> set[int]:
        """The ranks of this node: those under its name; where that is not in the topology, those
        on the node of one of them."""
        assert self._plan is not None
        nodes = self._plan[0].nodes
        name = self._settings.machine.name
        mine = name if name in nodes else nodes[rank]
        return {other for other, node in enumerate(nodes) if node == mine}

    def _pinned(self, generation: int, step: int, ranks: Iterable[int]) -> _Step | None:
        """A step with its slots kept; None when one has been given back already.

        Of two slots none is kept: a holder that is slow would keep the next capture waiting. A copy
        that is overtaken then breaks off, and a newer step is sent.
        """
        pins = ExitStack()
        try:
            found = [self._shelf.get(generation, step, rank) for rank in ranks]
            for snapshot in found:
                if snapshot.memory.arena.slots >= PINNED_SLOTS:
                    pins.enter_context(self._shelf.pin(generation, step, snapshot.part.rank))
        except MissingKeyError:
            pins.close()
            return None
        return _Step(generation, step, found, pins)

    def _queue(self, offered: _Step) -> None:
        offered.users = 1  # this method
        for name in self._holders(sum(s.part.blob.size for s in offered.snapshots)):
            line = self._lines[name]
            if line.waiting is not None:
                line.counts["superseded"] += 1
                line.skipped += 1
                self._let_go(line.waiting)
            line.waiting = offered
            offered.users += 1
            if not line.started:
                line.started = True
                threading.Thread(
                    target=self._work, args=(line,), name=f"to {name}", daemon=True
                ).start()
        self._let_go(offered)
        self._change.notify_all()

    def _holders(self, size: int) -> tuple[str, ...]:
        """Return the machines that are to hold this node's copies now. If other nodes train in the
        same generation, under their names in its topology, the plan is for all of them. So each
        mover computes the same plan. It assumes that they are as large as this node."""
        assert self._plan is not None
        now = self._clock()
        machines = [line.peer.machine for line in self._lines.values() if now >= line.back]
        own, names = self._settings.machine, {machine.name for machine in machines}
        owners = {own.name} | names.intersection(self._plan[0].nodes)
        stable = self._settings.stable if self._settings.stable in names else None
        plan = place_copies(
            dict.fromkeys(owners, 2 * size), [own, *machines], copies=self._settings.copies,
            stable=stable, before=self._held,
        )  # fmt: skip
        self._held = dict(plan.holders)
        for text in plan.warnings:
            if text not in self._warned and text.startswith(f"{own.name} "):
                self._warned.add(text)
                self._add(SettingIgnored("checkpoint.peers", text))
        return plan.holders[own.name]

    def _let_go(self, offered: _Step) -> None:
        offered.users -= 1
        if not offered.users:
            self._over.append(offered.pins)

    def _unpin(self) -> None:
        """End pins without our lock held. Released slots wake threads that may wait for this
        lock."""
        with self._change:
            over, self._over = self._over, []
        for pins in over:
            pins.close()

    # --- one holder's thread ----------------------------------------------------------------
    def _work(self, line: _Line) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or line.over or line.waiting is not None)
                if self._closed or line.waiting is None:
                    return
                offered, line.waiting, line.busy = line.waiting, None, True
            start, reason = self._clock(), ""
            try:
                reason = self._send(line, offered)
            except Exception as error:  # our own bug: it costs a copy, never the save
                reason = f"{type(error).__name__}: {error}"
            self._end(line, offered, self._clock() - start, reason)

    def _send(self, line: _Line, offered: _Step) -> str:
        """Offer every rank's part until all are held; why that failed, or ""."""
        spared: dict[int, int] = {}
        deadline = self._clock() + STEP_SECONDS
        client = self._client_of(line, offered.generation)
        if client is None:
            return "it does not take part any more"
        for attempt in range(ATTEMPTS):
            try:
                for snapshot in offered.snapshots:
                    spared[snapshot.part.rank] = self._offer(
                        line, client, offered, snapshot, deadline
                    )
                line.spared = sum(spared.values())
                return ""
            except FencedError as error:
                return str(error)
            except HoldfastError as error:
                reason = str(error)
            if not all(snapshot.whole for snapshot in offered.snapshots):
                return reason  # overtaken: there is nothing left to send
            if attempt < ATTEMPTS - 1 and not self._pause(line, PAUSES[attempt]):
                break
        return reason

    def _client_of(self, line: _Line, generation: int) -> PeerClient | None:
        """What stays open to a holder from one step to the next; None: nothing is sent there any
        more."""
        with self._change:
            if line.over or self._closed:
                return None
            before = line.client
            if before is not None and before.generation == generation:
                return before
            line.client = PeerClient(
                line.peer.address, self._secret, generation, self._run, timeout=ASK_SECONDS,
                aim=None if before is None else before.aim,
            )  # fmt: skip
        if before is not None:
            before.close()
        return line.client

    def _offer(
        self, line: _Line, client: PeerClient, offered: _Step, snapshot: Snapshot, deadline: float
    ) -> int:
        """Until the holder has one rank's part; bytes of it that did not travel. Raises
        HoldfastError."""
        body: dict[str, Any] = {
            "part": snapshot.stored.decode(), "run": self._run, "source": self._source,
            "ranks": [s.part.rank for s in offered.snapshots],
        }  # fmt: skip
        if offered.generation not in line.told:
            body["plan"] = self._plan_of(offered.generation)
        while True:
            answer = client.offer(body)
            state = answer["state"]
            line.told.add(offered.generation)
            if state == HELD:
                return int(answer.get("reused", 0))
            if state == PLAN:  # it has restarted since it got the plan
                body["plan"] = self._plan_of(offered.generation)
            if self._closed or line.over or self._clock() > deadline:
                raise PeerError(f"{client.address} has not taken step {offered.step} in time")

    def _plan_of(self, generation: int) -> dict[str, Any]:
        try:
            topology, table = self._shelf.plan(generation)
        except KeyError:
            raise FencedError(f"generation {generation} is over") from None
        return {"topology": topology.to_json(), "table": [spec.to_json() for spec in table]}

    def _pause(self, line: _Line, seconds: float) -> bool:
        """Wait; return False if copying there has ended meanwhile."""
        with self._change:
            return not self._change.wait_for(lambda: self._closed or line.over, seconds)

    def _end(self, line: _Line, offered: _Step, seconds: float, reason: str) -> None:
        with self._change:
            self._let_go(offered)
            line.busy = False
            fate, skipped = self._account(line, offered, reason), line.skipped
            if fate == "kept":
                line.skipped = 0
        self._unpin()
        if fate == "kept":
            size = sum(s.part.blob.size for s in offered.snapshots)
            self._add(SnapshotKept(
                line.peer.name, size, seconds, line.spared, skipped, step=offered.step
            ))  # fmt: skip
        elif fate == "failed" and line.failures == 1:  # later failures are only counted
            self._add(PeerFailed(line.peer.name, reason, step=offered.step))

    def _account(self, line: _Line, offered: _Step, reason: str) -> str:
        fate = "failed" if reason else "kept"
        over = self._plan is None or self._plan[0].generation > offered.generation or line.over
        if reason and (over or not all(s.whole for s in offered.snapshots)):
            fate = "superseded"  # by a generation or by later captures: no fault
            line.skipped += 1
        line.counts[fate] += 1
        if fate == "kept":
            line.failures, line.kept, line.reason = 0, offered.name, ""
        elif fate == "failed":
            away = AWAY_SECONDS[min(line.failures, len(AWAY_SECONDS) - 1)]
            line.failures += 1
            line.back, line.reason = self._clock() + away, reason
        return fate
