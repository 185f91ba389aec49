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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.core.format.manifest import commit_key
from holdfast.core.json_parsing import JsonMessage, JsonObject, ParsedJson
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError, RunStore

if TYPE_CHECKING:
    from holdfast.checkpoint.save.save_manager import SaveManager

LEADER_HOLD_S = 1.0
"""A question waits so long at the leader, while the followers are FEW; it has a thread for each."""
FEW = 16

SAVE_PATH = "/save"
"""Path of the requests to the leader's listener."""
LEADER_ANSWER_TIMEOUT_S = 10.0
LEADER_RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between two questions, by how many in a row have brought nothing."""


@dataclass(frozen=True)
class SaveReport:
    """A follower's parts of saves, and its request for how they ended."""

    node: str
    asked: list[SaveId]  # saves whose parts it has stored, and whose end it waits for
    busy: list[int]  # steps that it is writing
    failed: dict[SaveId, str]  # saves that it will not store, and why

    def to_json(self) -> JsonObject:
        failed = [[*save, reason] for save, reason in self.failed.items()]
        return {**vars(self), "failed": failed}

    @staticmethod
    def from_json(value: ParsedJson) -> SaveReport:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        return SaveReport(
            str(value["node"]),
            [(int(generation), int(step)) for generation, step in value["asked"]],
            [int(step) for step in value["busy"]],
            {(int(g), int(step)): str(reason) for g, step, reason in value["failed"]},
        )


@dataclass(frozen=True)
class SaveReply(JsonMessage):
    """How saves ended."""

    ended: list[tuple[int, int, str | None, str]]  # generation, step, key of the commit, reason
    heard: bool  # False: the mover does not lead the generation


@dataclass
class GenerationSaves:
    """The state of the present generation's saves. Guarded by its owner's lock."""

    context: SaveContext
    cohort: Cohort
    nodes: frozenset[str]
    own_ranks: frozenset[int]  # of this node
    ranks_stored: dict[int, set[int]] = field(default_factory=dict)  # step -> own ranks that stored
    nodes_stored: dict[int, set[str]] = field(default_factory=dict)  # step -> nodes that stored
    # node -> steps it is writing
    busy_steps: dict[str, frozenset[int]] = field(default_factory=dict)
    awaited_saves: set[SaveId] = field(default_factory=set)  # ends that the leader is to say
    # that the leader is to hear
    unreported_failures: dict[SaveId, str] = field(default_factory=dict)


class CommitProtocol:
    """One mover's part in it. Alone, until a cohort has been named. Safe to use from any thread."""

    def __init__(self, save_tracker: SaveTracker, store: RunStore, callbacks: SaveManager) -> None:
        self._save_tracker, self._store, self._callbacks = save_tracker, store, callbacks
        self._change = threading.Condition()  # guards `_saves`
        self._saves: GenerationSaves | None = None  # None: this mover is alone
        self._connect: Callable[[str, int], PeerClient] | None = None
        self._steps_being_written: Callable[[int], Iterable[int]] = lambda generation: ()
        self._is_closed = self._has_thread = False
        save_tracker.failure_listeners.append(self._on_save_failed)

    def set_leader_access(
        self, secret: Secret, run_id: str, steps_being_written: Callable[[int], Iterable[int]]
    ) -> None:
        """Set how to reach the leader. steps_being_written: the steps of a generation that are
        being written here."""
        self._connect = lambda address, generation: PeerClient(
            address, secret, generation, run_id, silence_timeout_s=LEADER_ANSWER_TIMEOUT_S
        )
        self._steps_being_written = steps_being_written

    @property
    def is_alone(self) -> bool:
        return self._saves is None

    @property
    def is_leader(self) -> bool:
        known = self._saves
        return known is None or known.cohort.leader_peer is None

    def own_ranks(self, context: SaveContext) -> frozenset[int]:
        """The ranks whose parts are written here."""
        known = self._saves
        return frozenset(range(context.topology.world_size)) if known is None else known.own_ranks

    def begin_generation(self, context: SaveContext, cohort: Cohort | None) -> None:
        """A generation begins, or is said again with other addresses."""
        over: set[SaveId] = set()
        with self._change:
            known = self._saves
            if known is not None and cohort is not None and known.context is context:
                known.cohort = cohort
            else:
                over = set() if known is None else set(known.awaited_saves)  # answers still come
                nodes = context.topology.nodes
                self._saves = (
                    None
                    if cohort is None
                    else GenerationSaves(context, cohort, frozenset(nodes), cohort.own_ranks(nodes))
                )
            self._change.notify_all()
        if over:  # what the store says is asked elsewhere than on this thread
            threading.Thread(
                target=self._end_saves,
                args=(over, context.generation),
                name="saves over",
                daemon=True,
            ).start()

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    # --- what happens here ----------------------------------------------------------------------
    def record_stored(self, save: SaveId, rank: int) -> bool:
        """A part of a rank of this node is in the run store; whether to commit now."""
        with self._change:
            known = self._saves
            if known is None or known.context.generation != save[0]:
                return True  # alone; or of an older generation, which the fence will tell
            written = known.ranks_stored.setdefault(save[1], set())
            written.add(rank)
            if written < known.own_ranks:
                return False
            if known.cohort.leader_peer is None:
                return self._record_node_stored(known, known.cohort.own_node, save[1])
            known.awaited_saves.add(save)
            self._wake()
            return False

    def await_outcome(self, save: SaveId) -> None:
        """Have the leader say what becomes of a save that it makes."""
        with self._change:
            if self._saves is not None and self._saves.cohort.leader_peer is not None:
                self._saves.awaited_saves.add(save)
                self._wake()

    def is_busy_elsewhere(self, step: int) -> bool:
        """Return True if another node may still store its part of a step."""
        with self._change:
            known = self._saves
            return known is not None and any(step in steps for steps in known.busy_steps.values())

    def _on_save_failed(self, save: SaveId, reason: str) -> None:
        """A save has failed here: the leader is to know."""
        with self._change:
            known = self._saves
            if (
                known is not None
                and known.cohort.leader_peer
                and known.context.generation == save[0]
            ):
                known.unreported_failures[save] = reason
                known.awaited_saves.discard(save)
                known.ranks_stored.pop(save[1], None)
                self._wake()

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
            known = self._saves
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
            if self._saves is not None and self._saves.context.generation == save[0]:
                self._saves.nodes_stored.pop(save[1], None)
                self._saves.ranks_stored.pop(save[1], None)

    # --- the follower's thread ------------------------------------------------------------------
    def _wake(self) -> None:
        """There is more to ask for; who calls this holds `change`."""
        if not self._has_thread and not self._is_closed:
            self._has_thread = True
            threading.Thread(
                target=self._ask_until_closed, name="to the leader", daemon=True
            ).start()
        self._change.notify_all()

    def _ask_until_closed(self) -> None:
        client: PeerClient | None = None
        idle = 0  # questions in a row that brought nothing
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: self._is_closed or self._saves_to_ask_for() is not None
                )
                known = self._saves_to_ask_for()
                if self._is_closed or known is None:
                    return
                leader, generation = known.cohort.leader_peer, known.context.generation
                asked, failed = set(known.awaited_saves), dict(known.unreported_failures)
            assert leader is not None, "a follower has one"
            assert self._connect is not None, "a cohort comes with a way to connect"
            if client is None or (client.address, client.generation) != (
                leader.address,
                generation,
            ):
                client = self._connect(leader.address, generation)
            try:
                news = self._ask_leader(client, known, asked, failed)
            except Exception as error:  # our own bug must not end this thread either
                news = not isinstance(error, FencedError) and self._look_in_store(asked)
            idle = 0 if news else idle + 1
            pause = (
                LEADER_RETRY_DELAYS_S[min(idle, len(LEADER_RETRY_DELAYS_S) - 1)] if idle else 0.0
            )
            self._pause(known, asked, pause)

    def _pause(self, saves: GenerationSaves, awaited_saves: set[SaveId], seconds: float) -> None:
        """A pause, which ends early where there is more to ask for."""

        def more() -> bool:
            return (
                self._is_closed
                or self._saves is not saves
                or not saves.awaited_saves <= awaited_saves
            )

        with self._change:
            self._change.wait_for(more, seconds)

    def _saves_to_ask_for(self) -> GenerationSaves | None:
        known = self._saves
        if (
            known is None
            or known.cohort.leader_peer is None
            or not (known.awaited_saves or known.unreported_failures)
        ):
            return None
        return known

    def _ask_leader(
        self,
        client: PeerClient,
        saves: GenerationSaves,
        awaited_saves: set[SaveId],
        unreported_failures: dict[SaveId, str],
    ) -> bool:
        """One question; whether it brought anything."""
        with self._change:
            partly = [step for step, ranks in saves.ranks_stored.items() if ranks < saves.own_ranks]
        busy = sorted({*self._steps_being_written(saves.context.generation), *partly})
        report = SaveReport(saves.cohort.own_node, sorted(awaited_saves), busy, unreported_failures)
        answer = SaveReply.from_json(client.post(SAVE_PATH, report.to_json()))
        if not answer.heard:
            return False
        with self._change:
            for save in unreported_failures:
                saves.unreported_failures.pop(save, None)
        for generation, step, key, reason in answer.ended:
            self._end_save(saves, (int(generation), int(step)), key, str(reason))
        return bool(unreported_failures or answer.ended)

    def _end_save(self, saves: GenerationSaves, save: SaveId, key: str | None, reason: str) -> None:
        with self._change:
            saves.awaited_saves.discard(save)
            saves.ranks_stored.pop(save[1], None)
        self._callbacks.on_save_ended(save, key, reason)

    def _look_in_store(self, awaited_saves: Iterable[SaveId]) -> bool:
        """The leader does not answer: the run store may say how it ended."""
        known = self._saves
        news = False
        for save in awaited_saves:
            if known is not None and self._is_committed(save):
                self._end_save(known, save, commit_key(*save), "")
                news = True
        return news

    def _end_saves(self, ended_saves: set[SaveId], newer_generation: int) -> None:
        """End the saves of a generation that is over and whose result no leader reported."""
        for save in ended_saves:
            key = commit_key(*save) if self._is_committed(save) else None
            self._callbacks.on_save_ended(
                save, key, f"generation {newer_generation} began before it was committed"
            )

    def _is_committed(self, save: SaveId) -> bool:
        try:
            self._store.size(commit_key(*save))
        except (MissingKeyError, HoldfastError):
            return False
        return True
