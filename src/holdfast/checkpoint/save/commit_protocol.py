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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.checkpoint.format.save_context import Plan
from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.save.save_tracker import Outcomes, Save
from holdfast.core.format.manifest import commit_key
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError, RunStore

SAVE = "/save"
"""Path of the requests to the leader's listener."""
WAIT_SECONDS = 1.0
"""A question waits so long at the leader, while the followers are FEW; it has a thread for each."""
FEW = 16
ASK_SECONDS = 10.0
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between two questions, by how many in a row have brought nothing."""


class Leading(Protocol):
    """The leader's saves, as the protocol calls them (`save_manager.Saves`). Returns at once."""

    def whole(self, save: Save) -> None:
        """Every node has stored its parts."""

    def lost(self, save: Save, reason: str) -> None:
        """Another node has not, and will not."""

    def ended(self, save: Save, key: str | None, reason: str) -> None:
        """The leader's result of a save: the commit object's key, or why there is none."""


@dataclass
class _Known:
    """The state of the present generation's saves. Guarded by its owner's lock."""

    plan: Plan
    cohort: Cohort
    nodes: frozenset[str]
    ranks: frozenset[int]  # of this node
    written: dict[int, set[int]] = field(default_factory=dict)  # step -> own ranks that stored
    stored: dict[int, set[str]] = field(default_factory=dict)  # step -> nodes that stored
    busy: dict[str, frozenset[int]] = field(default_factory=dict)  # node -> steps it is writing
    asked: set[Save] = field(default_factory=set)  # ends that the leader is to say
    failed: dict[Save, str] = field(default_factory=dict)  # that the leader is to hear


class Together:
    """One mover's part in it. Alone, until a cohort has been named. Safe to use from any thread."""

    def __init__(self, outcomes: Outcomes, store: RunStore, saves: Leading) -> None:
        self._outcomes, self._store, self._saves = outcomes, store, saves
        self._change = threading.Condition()
        self._known: _Known | None = None
        self._connect: Callable[[str, int], PeerClient] | None = None
        self._pending: Callable[[int], Iterable[int]] = lambda generation: ()
        self._closed = self._started = False
        outcomes.failing.append(self._failing)

    def reach(self, secret: Secret, run: str, pending: Callable[[int], Iterable[int]]) -> None:
        """Set how to reach the leader. pending: the steps of a generation that are being written
        here."""
        self._connect = lambda address, generation: PeerClient(
            address, secret, generation, run, timeout=ASK_SECONDS
        )
        self._pending = pending

    @property
    def alone(self) -> bool:
        return self._known is None

    @property
    def leads(self) -> bool:
        known = self._known
        return known is None or known.cohort.leader is None

    def ours(self, plan: Plan) -> frozenset[int]:
        """The ranks whose parts are written here."""
        known = self._known
        return frozenset(range(plan.topology.world_size)) if known is None else known.ranks

    def begin(self, plan: Plan, cohort: Cohort | None) -> None:
        """A generation begins, or is said again with other addresses."""
        over: set[Save] = set()
        with self._change:
            known = self._known
            if known is not None and cohort is not None and known.plan is plan:
                known.cohort = cohort
            else:
                over = set() if known is None else set(known.asked)  # answers still come
                nodes = plan.topology.nodes
                self._known = None if cohort is None else _Known(
                    plan, cohort, frozenset(nodes), cohort.ranks(nodes)
                )  # fmt: skip
            self._change.notify_all()
        if over:  # what the store says is asked elsewhere than on this thread
            threading.Thread(
                target=self._end_all, args=(over, plan.generation), name="saves over", daemon=True
            ).start()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()

    # --- what happens here ----------------------------------------------------------------------
    def stored(self, save: Save, rank: int) -> bool:
        """A part of a rank of this node is in the run store; whether to commit now."""
        with self._change:
            known = self._known
            if known is None or known.plan.generation != save[0]:
                return True  # alone; or of an older generation, which the fence will tell
            written = known.written.setdefault(save[1], set())
            written.add(rank)
            if written < known.ranks:
                return False
            if known.cohort.leader is None:
                return self._whole(known, known.cohort.own, save[1])
            known.asked.add(save)
            self._wake()
            return False

    def ask(self, save: Save) -> None:
        """Have the leader say what becomes of a save that it makes."""
        with self._change:
            if self._known is not None and self._known.cohort.leader is not None:
                self._known.asked.add(save)
                self._wake()

    def busy(self, step: int) -> bool:
        """Return True if another node may still store its part of a step."""
        with self._change:
            known = self._known
            return known is not None and any(step in steps for steps in known.busy.values())

    def _failing(self, save: Save, reason: str) -> None:
        """A save has failed here: the leader is to know."""
        with self._change:
            known = self._known
            if known is not None and known.cohort.leader and known.plan.generation == save[0]:
                known.failed[save] = reason
                known.asked.discard(save)
                known.written.pop(save[1], None)
                self._wake()

    def _whole(self, known: _Known, node: str, step: int) -> bool:
        stored = known.stored.setdefault(step, set())
        stored.add(node)
        return stored >= known.nodes

    # --- the leader's answers -------------------------------------------------------------------
    def told(self, generation: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a follower's report of parts stored and lost, and its requests. Raises KeyError,
        TypeError, ValueError for malformed values."""
        node, busy = str(body["node"]), frozenset(int(step) for step in body["busy"])
        asked = [(int(g), int(step)) for g, step in body["asked"]]
        failed = {(int(g), int(step)): str(reason) for g, step, reason in body["failed"]}
        whole: list[Save] = []
        with self._change:
            known = self._known
            if known is None or known.plan.generation != generation or known.cohort.leader:
                return {"ended": [], "heard": False}
            if node not in known.nodes:
                raise ValueError(f"{node} has no rank in generation {generation}")
            known.busy[node] = busy
            for save in asked:
                if save[0] == generation and self._whole(known, node, save[1]):
                    whole.append(save)
        for save in asked:
            self._outcomes.captured(save)
        for save, reason in failed.items():
            self._saves.lost(save, f"{node}: {reason}")
        for save in whole:
            self._saves.whole(save)
        wait = WAIT_SECONDS if len(known.cohort.peers) <= FEW else 0.0
        ends = self._outcomes.ends(asked, wait)
        return {"ended": [[*save, key, reason] for save, (key, reason) in ends.items()],
                "heard": True}  # fmt: skip

    def forget(self, save: Save) -> None:
        """A save has ended."""
        with self._change:
            if self._known is not None and self._known.plan.generation == save[0]:
                self._known.stored.pop(save[1], None)
                self._known.written.pop(save[1], None)

    # --- the follower's questions ---------------------------------------------------------------
    def _wake(self) -> None:
        if not self._started and not self._closed:
            self._started = True
            threading.Thread(target=self._work, name="to the leader", daemon=True).start()
        self._change.notify_all()

    def _work(self) -> None:
        client: PeerClient | None = None
        idle = 0  # questions in a row that brought nothing
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._due() is not None)
                known = self._due()
                if self._closed or known is None:
                    return
                leader, generation = known.cohort.leader, known.plan.generation
                asked, failed = set(known.asked), dict(known.failed)
            assert leader is not None, "a follower has one"
            assert self._connect is not None, "a cohort comes with a way to connect"
            if client is None or (client.address, client.generation) != (
                leader.address, generation
            ):  # fmt: skip
                client = self._connect(leader.address, generation)
            try:
                news = self._exchange(client, known, asked, failed)
            except Exception as error:  # our own bug must not end this thread either
                news = not isinstance(error, FencedError) and self._look(asked)
            idle = 0 if news else idle + 1
            pause = PAUSES[min(idle, len(PAUSES) - 1)] if idle else 0.0
            self._rest(known, asked, pause)

    def _rest(self, known: _Known, asked: set[Save], seconds: float) -> None:
        """A pause, which ends early where there is more to ask for."""

        def more() -> bool:
            return self._closed or self._known is not known or not known.asked <= asked

        with self._change:
            self._change.wait_for(more, seconds)

    def _due(self) -> _Known | None:
        known = self._known
        if known is None or known.cohort.leader is None or not (known.asked or known.failed):
            return None
        return known

    def _exchange(
        self, client: PeerClient, known: _Known, asked: set[Save], failed: dict[Save, str]
    ) -> bool:
        """One question; whether it brought anything."""
        with self._change:
            partly = [step for step, ranks in known.written.items() if ranks < known.ranks]
        busy = sorted({*self._pending(known.plan.generation), *partly})
        answer = client.ask(SAVE, {
            "node": known.cohort.own, "asked": sorted(asked), "busy": busy,
            "failed": [[*save, reason] for save, reason in failed.items()],
        })  # fmt: skip
        if not answer["heard"]:
            return False
        with self._change:
            for save in failed:
                known.failed.pop(save, None)
        for generation, step, key, reason in answer["ended"]:
            self._end(known, (int(generation), int(step)), key, str(reason))
        return bool(failed or answer["ended"])

    def _end(self, known: _Known, save: Save, key: str | None, reason: str) -> None:
        with self._change:
            known.asked.discard(save)
            known.written.pop(save[1], None)
        self._saves.ended(save, key, reason)

    def _look(self, asked: Iterable[Save]) -> bool:
        """The leader does not answer: the run store may say how it ended."""
        known = self._known
        news = False
        for save in asked:
            if known is not None and self._committed(save):
                self._end(known, save, commit_key(*save), "")
                news = True
        return news

    def _end_all(self, over: set[Save], newer: int) -> None:
        """End the saves of a generation that is over and whose result no leader reported."""
        for save in over:
            key = commit_key(*save) if self._committed(save) else None
            self._saves.ended(save, key, f"generation {newer} began before it was committed")

    def _committed(self, save: Save) -> bool:
        try:
            self._store.size(commit_key(*save))
        except (MissingKeyError, HoldfastError):
            return False
        return True
