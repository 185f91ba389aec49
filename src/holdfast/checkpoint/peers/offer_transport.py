"""Sends one step to one holder: its parts are offered until the holder has pulled them all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.peers.client import PeerClient, PeerError
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.messages import GenerationPlan, Offer
from holdfast.checkpoint.peers.receiver import OFFER_HELD, OFFER_NEEDS_PLAN
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.secret import Secret

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


class OfferTransport:
    """Offers of one mover to its holders. `change` guards `is_closed` and the destinations, and is
    notified when they change."""

    def __init__(
        self,
        snapshot_store: SnapshotStore,
        secret: Secret,
        own_address: str,
        run_id: str,
        clock: Callable[[], float],
    ) -> None:
        self.change = threading.Condition()
        self.is_closed = False
        self._snapshot_store, self._secret = snapshot_store, secret
        self._own_address, self._run_id, self._clock = own_address, run_id, clock

    def send_step(self, destination: Destination, offered: OfferedStep) -> str:
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
        with self.change:
            if destination.is_removed or self.is_closed:
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
            if self.is_closed or destination.is_removed or self._clock() > deadline:
                raise PeerError(f"{client.address} has not taken step {offered.step} in time")

    def _plan_of(self, generation: int) -> GenerationPlan:
        try:
            return GenerationPlan(*self._snapshot_store.topology_and_table(generation))
        except KeyError:
            raise FencedError(f"generation {generation} is over") from None

    def _pause(self, destination: Destination, seconds: float) -> bool:
        """Wait; return False if copying there has ended meanwhile."""
        with self.change:
            return not self.change.wait_for(
                lambda: self.is_closed or destination.is_removed, seconds
            )
