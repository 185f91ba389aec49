"""A node that is about to go hands its newest snapshots to those that stay: at once, past the
budget for copies, and whatever the rule by steps says.

Handed over are the parts of this node's ranks of the newest step that is complete here, and the
newest copies that it keeps of others' ranks, which would have one holder less. Each goes to the
machine that holds this node's copies already, which has most of it, else to another that stays;
where one refuses or is gone, to the next. The answer says what is held elsewhere when the time is
over, and what is not, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from holdfast.checkpoint.peer_keep import HELD, PLAN
from holdfast.checkpoint.peer_settings import Peer
from holdfast.checkpoint.peer_wire import PeerClient, PeerError
from holdfast.checkpoint.snapshots import Shelf, Snapshot
from holdfast.errors import HoldfastError
from holdfast.wire.runstore import MissingKeyError
from holdfast.wire.secret import Secret

THREADS = 4
ASK_SECONDS = 15.0
"""An offer is answered within ten seconds, be it with "pulling"."""


class Evacuation:
    """One hand-over; `run` once."""

    def __init__(
        self, shelf: Shelf, secret: Secret, run: str, source: str, generation: int,
        targets: Callable[[int], Sequence[Peer]], wait: float,
    ) -> None:  # fmt: skip
        """`source`: the address at which the others reach this mover. `generation`: that which
        runs. targets: who may hold so many bytes, the best first. wait: seconds."""
        self._shelf, self._secret, self._run, self._source = shelf, secret, run, source
        self._generation, self._targets = generation, targets
        self._end = time.monotonic() + wait

    def run(self, due: Collection[int]) -> dict[str, Any]:
        """Hand everything over. due: the ranks of this node. The answer: "own" and "copies", each a
        list of parts with "generation", "step", "rank", and "held": the machine that has it now,
        or None with the "reason"; "safe": whether every rank of this node has its state elsewhere.
        """
        with ExitStack() as pins:
            own = [self._pinned(pins, snapshot) for snapshot in self._shelf.newest()]
            copies = self._shelf.copies()
            with ThreadPoolExecutor(THREADS, "evacuate") as threads:
                said = list(threads.map(self._place, [*own, *copies]))
        ours = said[: len(own)]
        held = {part["rank"] for part in ours if part["held"] is not None}
        return {"own": ours, "copies": said[len(own) :], "safe": held >= set(due)}

    def _pinned(self, pins: ExitStack, snapshot: Snapshot) -> Snapshot:
        """Kept while it is sent, where it is not given back already: its bytes stay for a while."""
        part = snapshot.part
        try:
            return pins.enter_context(self._shelf.pin(part.generation, part.step, part.rank))
        except MissingKeyError:
            return snapshot

    def _place(self, snapshot: Snapshot) -> dict[str, Any]:
        part = snapshot.part
        about = {"generation": part.generation, "step": part.step, "rank": part.rank}
        reason = "no machine stays that could hold it"
        for peer in self._targets(part.blob.size):
            if not snapshot.own and peer.name == self._owner(snapshot):
                continue  # it has it itself
            try:
                self._offer(snapshot, peer)
                return about | {"held": peer.name}
            except (HoldfastError, KeyError) as error:
                reason = str(error)
            if self._left() <= 0:
                break
        return about | {"held": None, "reason": reason}

    def _owner(self, snapshot: Snapshot) -> str | None:
        try:
            topology, _ = self._shelf.plan(snapshot.part.generation)
        except KeyError:
            return None
        return topology.nodes[snapshot.part.rank]

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _offer(self, snapshot: Snapshot, peer: Peer) -> None:
        """Until the machine has it. Raises HoldfastError, and KeyError for a part of a generation
        that is forgotten."""
        body: dict[str, Any] = {
            "part": snapshot.stored.decode(), "run": self._run, "source": self._source,
            "ranks": [snapshot.part.rank], "urgent": True,
        }  # fmt: skip
        client = PeerClient(peer.address, self._secret, self._generation, self._run)
        try:
            while (left := self._left()) > 0:
                state = client.offer(body, min(left, ASK_SECONDS)).get("state")
                if state == HELD:
                    return
                if state == PLAN:
                    topology, table = self._shelf.plan(snapshot.part.generation)
                    body["plan"] = {
                        "topology": topology.to_json(), "table": [spec.to_json() for spec in table],
                    }  # fmt: skip
            raise PeerError(f"{client.address} has not taken it in time")
        finally:
            client.close()
