"""Durable saves of a run on several nodes: every mover writes its own ranks' parts, the leader
commits. The leader is the mover of the node with the first rank. If that node is lost, the
generation ends.

    a follower   writing --> stored --tells the leader, until it says--> committed, or failed
    the leader   open --every node has said "stored"--> committed
                   '--one said "failed", or gave it up--> failed

Only the leader commits, so only the leader may give a step up and remove other movers' parts of it.
Between "stored" and "committed", no follower knows whether a commit object is just being made. A
follower removes only its own parts, and only if it has not said "stored" or the leader has said
"failed". Retention and the sweep are the leader's, too.

Followers ask, the leader answers. A few followers are kept waiting for the end; many ask again. If
the leader is away, the follower asks again, and meanwhile looks for the commit object in the run
store. A replaced mover that leads knows nothing: it learns from the same requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.save.save_follower import (
    CommitCallbacks,
    GenerationSaves,
    SaveFollower,
    SaveReply,
    SaveReport,
)
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore

LEADER_HOLD_S = 1.0
"""A question waits so long at the leader, while the followers are FEW; it has a thread for each."""
FEW = 16


class CommitProtocol:
    """One mover's part in it. Alone, until a cohort has been named. Safe to use from any thread."""

    def __init__(
        self, save_tracker: SaveTracker, store: RunStore, callbacks: CommitCallbacks
    ) -> None:
        self._save_tracker, self._callbacks = save_tracker, callbacks
        self._follower = SaveFollower(store, callbacks)
        self._change = self._follower.change
        save_tracker.failure_listeners.append(self._on_save_failed)

    def set_leader_access(
        self, secret: Secret, run_id: str, steps_being_written: Callable[[int], Iterable[int]]
    ) -> None:
        """Set how to reach the leader. steps_being_written: the steps of a generation that are
        being written here."""
        self._follower.set_leader_access(secret, run_id, steps_being_written)

    @property
    def is_alone(self) -> bool:
        return self._follower.generation_saves is None

    @property
    def is_leader(self) -> bool:
        known = self._follower.generation_saves
        return known is None or known.cohort.leader_peer is None

    def own_ranks(self, context: SaveContext) -> frozenset[int]:
        """The ranks whose parts are written here."""
        known = self._follower.generation_saves
        return frozenset(range(context.topology.world_size)) if known is None else known.own_ranks

    def begin_generation(self, context: SaveContext, cohort: Cohort | None) -> None:
        """A generation begins, or is said again with other addresses."""
        over: set[SaveId] = set()
        with self._change:
            known = self._follower.generation_saves
            if known is not None and cohort is not None and known.context is context:
                known.cohort = cohort
            else:
                over = set() if known is None else set(known.awaited_saves)  # answers still come
                nodes = context.topology.nodes
                self._follower.generation_saves = (
                    None
                    if cohort is None
                    else GenerationSaves(context, cohort, frozenset(nodes), cohort.own_ranks(nodes))
                )
            self._change.notify_all()
        if over:  # what the store says is asked elsewhere than on this thread
            threading.Thread(
                target=self._follower.end_saves,
                args=(over, context.generation),
                name="saves over",
                daemon=True,
            ).start()

    def close(self) -> None:
        self._follower.close()

    # --- what happens here ----------------------------------------------------------------------
    def record_stored(self, save: SaveId, rank: int) -> bool:
        """A part of a rank of this node is in the run store; whether to commit now."""
        with self._change:
            known = self._follower.generation_saves
            if known is None or known.context.generation != save[0]:
                return True  # alone; or of an older generation, which the fence will tell
            written = known.ranks_stored.setdefault(save[1], set())
            written.add(rank)
            if written < known.own_ranks:
                return False
            if known.cohort.leader_peer is None:
                return self._record_node_stored(known, known.cohort.own_node, save[1])
            known.awaited_saves.add(save)
            self._follower.wake()
            return False

    def await_outcome(self, save: SaveId) -> None:
        """Have the leader say what becomes of a save that it makes."""
        with self._change:
            if (
                self._follower.generation_saves is not None
                and self._follower.generation_saves.cohort.leader_peer is not None
            ):
                self._follower.generation_saves.awaited_saves.add(save)
                self._follower.wake()

    def is_busy_elsewhere(self, step: int) -> bool:
        """Return True if another node may still store its part of a step."""
        with self._change:
            known = self._follower.generation_saves
            return known is not None and any(step in steps for steps in known.busy_steps.values())

    def _on_save_failed(self, save: SaveId, reason: str) -> None:
        """A save has failed here: the leader is to know."""
        with self._change:
            known = self._follower.generation_saves
            if (
                known is not None
                and known.cohort.leader_peer
                and known.context.generation == save[0]
            ):
                known.unreported_failures[save] = reason
                known.awaited_saves.discard(save)
                known.ranks_stored.pop(save[1], None)
                self._follower.wake()

    def _record_node_stored(self, saves: GenerationSaves, node: str, step: int) -> bool:
        stored = saves.nodes_stored.setdefault(step, set())
        stored.add(node)
        return stored >= saves.nodes

    # --- the leader's answers -------------------------------------------------------------------
    def on_follower_report(self, generation: int, report: SaveReport) -> SaveReply:
        """Take a follower's report of parts stored and lost, and its requests. Raises ValueError
        for a node that has no rank."""
        node, asked = report.node, report.asked
        whole: list[SaveId] = []
        with self._change:
            known = self._follower.generation_saves
            if known is None or known.context.generation != generation or known.cohort.leader_peer:
                return SaveReply([], heard=False)
            if node not in known.nodes:
                raise ValueError(f"{node} has no rank in generation {generation}")
            known.busy_steps[node] = frozenset(report.busy)
            for save in asked:
                if save[0] == generation and self._record_node_stored(known, node, save[1]):
                    whole.append(save)
        for save in asked:
            self._save_tracker.begin_save(save)
        for save, reason in report.failed.items():
            self._callbacks.part_failed(save, f"{node}: {reason}")
        for save in whole:
            self._callbacks.all_parts_stored(save)
        wait = LEADER_HOLD_S if len(known.cohort.peers) <= FEW else 0.0
        ends = self._save_tracker.wait_for_ends(asked, wait)
        ended = [(*save, key, reason) for save, (key, reason) in ends.items()]
        return SaveReply(ended, heard=True)

    def forget(self, save: SaveId) -> None:
        """A save has ended."""
        with self._change:
            if (
                self._follower.generation_saves is not None
                and self._follower.generation_saves.context.generation == save[0]
            ):
                self._follower.generation_saves.nodes_stored.pop(save[1], None)
                self._follower.generation_saves.ranks_stored.pop(save[1], None)
