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
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.peers.client import PeerClient, PeerError
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.messages import GenerationPlan, Offer
from holdfast.checkpoint.peers.receiver import OFFER_HELD, OFFER_NEEDS_PLAN
from holdfast.core.json_parsing import JsonObject
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import Event, PeerFailed, SettingIgnored, SnapshotKept
from holdfast.layout import Topology
from holdfast.policy.placement import place_copies
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

MIN_SLOTS_TO_PIN = 3
"""Slots of an arena from which on one is kept for what is being sent."""

OFFER_ATTEMPTS = 3
"""Offers of one step that may fail before it is given up."""
OFFER_RETRY_DELAYS_S = (0.5, 2.0)
"""Seconds between them."""
STEP_TRANSFER_TIMEOUT_S = 600.0
"""A holder that has not taken a step within this time has failed."""
OFFER_REQUEST_TIMEOUT_S = 30.0
"""Timeout of an offer. The receiver answers within ten seconds, with "pulling" at least."""
FAILED_DESTINATION_PAUSES_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds for which a failed holder is skipped, by its number of failures in a row."""


@dataclass
class OfferedStep:
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
class Destination:
    """One holder: what waits for it, and how it has done."""

    peer: Peer
    has_thread: bool = False  # its thread
    is_removed: bool = False  # nothing is sent there any more
    client: PeerClient | None = None  # of the newest generation that something was sent in
    waiting_step: OfferedStep | None = None
    is_busy: bool = False
    # generations whose plan it has been sent
    generations_with_plan: set[int] = field(default_factory=set)
    newest_kept: tuple[int, int] = (0, -1)
    skipped_since_kept: int = 0  # steps that gave way to newer ones since the last that was kept
    reused_bytes: int = 0  # bytes of the step under way that need not travel
    failures_in_a_row: int = 0  # in a row
    retry_at: float = 0.0  # passed over until then
    counts: dict[str, int] = field(
        default_factory=lambda: {"kept": 0, "superseded": 0, "failed": 0}
    )
    reason: str = ""

    def record_result(self, offered: OfferedStep, reason: str, is_over: bool, now: float) -> str:
        """Note how sending a step ended; return "kept", "failed" or "superseded". is_over: its
        generation, or copying to this holder, had ended."""
        fate = "failed" if reason else "kept"
        if reason and (is_over or not all(s.is_intact for s in offered.snapshots)):
            fate = "superseded"  # by a generation or by later captures: no fault
            self.skipped_since_kept += 1
        self.counts[fate] += 1
        if fate == "kept":
            self.failures_in_a_row, self.newest_kept, self.reason = (0, offered.name, "")
        elif fate == "failed":
            away = FAILED_DESTINATION_PAUSES_S[
                min(self.failures_in_a_row, len(FAILED_DESTINATION_PAUSES_S) - 1)
            ]
            self.failures_in_a_row += 1
            self.retry_at, self.reason = now + away, reason
        return fate


class SnapshotSender:
    """Sends snapshots of a mover to other machines. `on_snapshot_stored` never blocks. Every method
    may be called from any thread."""

    def __init__(
        self,
        settings: PeerSettings,
        snapshot_store: SnapshotStore,
        secret: Secret,
        own_address: str,
        run_id: str,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own_address` is the address at which other machines reach this mover's listener,
        `run_id` what is computed (`identity`); `emit` takes events."""
        self._settings, self._snapshot_store = settings, snapshot_store
        self._emit, self._clock = emit, clock
        self._secret, self._own_address, self._run_id = secret, own_address, run_id
        self._change = threading.Condition()  # guards what follows, and the destinations
        self._is_closed = False
        self._topology_and_table: tuple[Topology, StateTable] | None = None
        self._stored_ranks: dict[tuple[int, int], set[int]] = {}  # own ranks shelved, by step
        self._destinations = {peer.name: Destination(peer) for peer in settings.peers}
        self._placement: dict[str, tuple[str, ...]] = {}  # the placement in force
        self._warned: set[str] = set()
        self._finished_pins: list[ExitStack] = []  # unneeded pins: ended without our lock held

    def set_peers(
        self, peers: Iterable[Peer], previous_placement: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """Send to these peers from now on, in addition to those that the run file names. A machine
        that is lost, or listens at another address now, is not waited for. `previous_placement`:
        the placement in force, if this mover has none of its own."""
        named = {peer.name: peer for peer in (*self._settings.peers, *peers)}
        named.pop(self._settings.machine.name, None)
        removed: list[Destination] = []
        with self._change:
            for name, line in list(self._destinations.items()):
                if named.get(name) != line.peer:
                    removed.append(self._destinations.pop(name))
                    line.is_removed = True
                    self._drop_waiting(line)
            for name, peer in named.items():
                self._destinations.setdefault(name, Destination(peer))
            if not self._placement:
                self._placement = dict(previous_placement or {})
            self._change.notify_all()
        for client in filter(None, (line.client for line in removed)):
            client.abort()
        self._close_finished_pins()

    @property
    def placement(self) -> dict[str, tuple[str, ...]]:
        """The plan in force: who keeps whose copies."""
        with self._change:
            return dict(self._placement)

    def begin_generation(self, topology: Topology, table: StateTable) -> None:
        """A generation begins: what waits of older ones is dropped."""
        with self._change:
            if self._topology_and_table is not None and self._topology_and_table[0] == topology:
                return  # said again
            self._topology_and_table = (topology, table)
            self._stored_ranks = {}
            for line in self._destinations.values():
                self._drop_waiting(line)
        self._close_finished_pins()

    def on_snapshot_stored(
        self, generation: int, step: int, rank: int, ignore_step_rule: bool = False
    ) -> None:
        """A rank of this node has a snapshot on the shelf; offers the step if it was the last.
        ignore_step_rule: also a step that the rule by steps leaves out."""
        if step % self._settings.every_steps and not ignore_step_rule:
            return
        with self._change:
            if (
                self._topology_and_table is None
                or self._topology_and_table[0].generation != generation
                or self._is_closed
            ):
                return
            ranks = self._own_ranks(rank)
            here = self._stored_ranks.setdefault((generation, step), set())
            here.add(rank)
            if here != ranks:
                return
            self._stored_ranks = {
                key: some for key, some in self._stored_ranks.items() if key[1] > step
            }
            offered = _pin_step(self._snapshot_store, generation, step, sorted(ranks))
            if offered is not None:
                self._enqueue(offered)
        self._close_finished_pins()

    def status(self) -> JsonObject:
        with self._change:
            return {
                name: {
                    "kept": list(line.newest_kept),
                    "counts": dict(line.counts),
                    "busy": line.is_busy,
                    "reason": line.reason,
                }
                for name, line in self._destinations.items()
            }

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            clients = [line.client for line in self._destinations.values()]
            self._change.notify_all()
        for client in filter(None, clients):
            client.close()

    # --- what is offered to whom ------------------------------------------------------------
    def _own_ranks(self, rank: int) -> set[int]:
        """The ranks of this node: those under its name; where that is not in the topology, those
        on the node of one of them."""
        assert self._topology_and_table is not None
        nodes = self._topology_and_table[0].nodes
        name = self._settings.machine.name
        mine = name if name in nodes else nodes[rank]
        return {other for other, node in enumerate(nodes) if node == mine}

    def _enqueue(self, step: OfferedStep) -> None:
        step.users = 1  # this method
        for name in self._choose_destinations(sum(s.part.blob.size for s in step.snapshots)):
            line = self._destinations[name]
            if line.waiting_step is not None:
                line.counts["superseded"] += 1
                line.skipped_since_kept += 1
                self._drop_waiting(line)
            line.waiting_step = step
            step.users += 1
            if not line.has_thread:
                line.has_thread = True
                threading.Thread(
                    target=self._run_destination, args=(line,), name=f"to {name}", daemon=True
                ).start()
        self._release_step(step)
        self._change.notify_all()

    def _choose_destinations(self, step_bytes: int) -> tuple[str, ...]:
        """Return the machines that are to hold this node's copies now. If other nodes train in the
        same generation, under their names in its topology, the plan is for all of them. So each
        mover computes the same plan. It assumes that they are as large as this node."""
        assert self._topology_and_table is not None
        now = self._clock()
        machines = [
            line.peer.machine for line in self._destinations.values() if now >= line.retry_at
        ]
        own, names = self._settings.machine, {machine.name for machine in machines}
        owners = {own.name} | names.intersection(self._topology_and_table[0].nodes)
        stable = self._settings.stable if self._settings.stable in names else None
        plan = place_copies(
            dict.fromkeys(owners, 2 * step_bytes),
            [own, *machines],
            copies=self._settings.copies,
            stable_machine=stable,
            previous=self._placement,
        )
        self._placement = dict(plan.holders)
        is_asked_for = self._settings.peers or self._settings.copies > 1
        for text in plan.warnings if self._destinations or is_asked_for else ():
            if text not in self._warned and text.startswith(f"{own.name} "):
                self._warned.add(text)
                self._emit(SettingIgnored("checkpoint.peers", text))
        return plan.holders[own.name]

    def _drop_waiting(self, destination: Destination) -> None:
        if destination.waiting_step is not None:
            self._release_step(destination.waiting_step)
            destination.waiting_step = None

    def _release_step(self, step: OfferedStep) -> None:
        step.users -= 1
        if not step.users:
            self._finished_pins.append(step.pins)

    def _close_finished_pins(self) -> None:
        """End pins without our lock held. Released slots wake threads that may wait for this
        lock."""
        with self._change:
            over, self._finished_pins = self._finished_pins, []
        for pins in over:
            pins.close()

    # --- one holder's thread ----------------------------------------------------------------
    def _run_destination(self, destination: Destination) -> None:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: (
                        self._is_closed
                        or destination.is_removed
                        or destination.waiting_step is not None
                    )
                )
                if self._is_closed or destination.waiting_step is None:
                    return
                offered, destination.waiting_step = destination.waiting_step, None
                destination.is_busy = True
            start, reason = self._clock(), ""
            try:
                reason = self._send_step(destination, offered)
            except Exception as error:  # our own bug: it costs a copy, never the save
                reason = f"{type(error).__name__}: {error}"
            self._finish_step(destination, offered, self._clock() - start, reason)

    def _finish_step(
        self, destination: Destination, offered: OfferedStep, seconds: float, reason: str
    ) -> None:
        with self._change:
            self._release_step(offered)
            destination.is_busy = False
            is_over = (
                self._topology_and_table is None
                or self._topology_and_table[0].generation > offered.generation
                or destination.is_removed
            )
            fate = destination.record_result(offered, reason, is_over, self._clock())
            skipped = destination.skipped_since_kept
            if fate == "kept":
                destination.skipped_since_kept = 0
        self._close_finished_pins()
        if fate == "kept":
            size = sum(s.part.blob.size for s in offered.snapshots)
            self._emit(
                SnapshotKept(
                    destination.peer.name,
                    size,
                    seconds,
                    destination.reused_bytes,
                    skipped,
                    step=offered.step,
                )
            )
        elif (
            fate == "failed" and destination.failures_in_a_row == 1
        ):  # later failures are only counted
            self._emit(PeerFailed(destination.peer.name, reason, step=offered.step))

    def _send_step(self, destination: Destination, offered: OfferedStep) -> str:
        """Offer every rank's part until all are held; why that failed, or ""."""
        spared: dict[int, int] = {}
        deadline = self._clock() + STEP_TRANSFER_TIMEOUT_S
        client = self._client_of(destination, offered.generation)
        if client is None:
            return "it does not take part any more"
        for attempt in range(OFFER_ATTEMPTS):
            try:
                for snapshot in offered.snapshots:
                    spared[snapshot.part.rank] = self._offer_part(
                        destination, client, offered, snapshot, deadline
                    )
                destination.reused_bytes = sum(spared.values())
                return ""
            except FencedError as error:
                return str(error)
            except HoldfastError as error:
                reason = str(error)
            if not all(snapshot.is_intact for snapshot in offered.snapshots):
                return reason  # overtaken: there is nothing left to send
            if attempt < OFFER_ATTEMPTS - 1 and not self._pause(
                destination, OFFER_RETRY_DELAYS_S[attempt]
            ):
                break
        return reason

    def _client_of(self, destination: Destination, generation: int) -> PeerClient | None:
        """What stays open to a holder from one step to the next; None: nothing is sent there any
        more."""
        with self._change:
            if destination.is_removed or self._is_closed:
                return None
            before = destination.client
            if before is not None and before.generation == generation:
                return before
            destination.client = PeerClient(
                destination.peer.address,
                self._secret,
                generation,
                self._run_id,
                silence_timeout_s=OFFER_REQUEST_TIMEOUT_S,
                listener_identity=None if before is None else before.listener_identity,
            )
        if before is not None:
            before.close()
        return destination.client

    def _offer_part(
        self,
        destination: Destination,
        client: PeerClient,
        offered: OfferedStep,
        snapshot: Snapshot,
        deadline: float,
    ) -> int:
        """Until the holder has one rank's part; bytes of it that did not travel. Raises
        HoldfastError."""
        needs_plan = offered.generation not in destination.generations_with_plan
        offer = Offer(
            snapshot.sealed_manifest.decode(),
            self._run_id,
            self._own_address,
            tuple(s.part.rank for s in offered.snapshots),
            self._plan_of(offered.generation) if needs_plan else None,
        )
        while True:
            answer = client.send_offer(offer)
            destination.generations_with_plan.add(offered.generation)
            if answer.state == OFFER_HELD:
                return answer.reused or 0
            if answer.state == OFFER_NEEDS_PLAN:  # it has restarted since it got the plan
                offer = replace(offer, plan=self._plan_of(offered.generation))
            if self._is_closed or destination.is_removed or self._clock() > deadline:
                raise PeerError(f"{client.address} has not taken step {offered.step} in time")

    def _plan_of(self, generation: int) -> GenerationPlan:
        try:
            return GenerationPlan(*self._snapshot_store.topology_and_table(generation))
        except KeyError:
            raise FencedError(f"generation {generation} is over") from None

    def _pause(self, destination: Destination, seconds: float) -> bool:
        """Wait; return False if copying there has ended meanwhile."""
        with self._change:
            return not self._change.wait_for(
                lambda: self._is_closed or destination.is_removed, seconds
            )


def _pin_step(
    snapshot_store: SnapshotStore, generation: int, step: int, ranks: Iterable[int]
) -> OfferedStep | None:
    """A step with its slots kept; None when one has been given back already.

    Of two slots none is kept: a holder that is slow would keep the next capture waiting. A copy
    that is overtaken then breaks off, and a newer step is sent.
    """
    pins = ExitStack()
    try:
        found = [snapshot_store.get(generation, step, rank) for rank in ranks]
        for snapshot in found:
            if snapshot.memory.arena.slots >= MIN_SLOTS_TO_PIN:
                pins.enter_context(snapshot_store.pin(generation, step, snapshot.part.rank))
    except MissingKeyError:
        pins.close()
        return None
    return OfferedStep(generation, step, found, pins)
