"""The follower's side of a durable save of several nodes: it asks the leader how its saves ended.
`commit_protocol.py` says what the two sides owe each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.config import Cohort
from holdfast.checkpoint.save.save_tracker import SaveId
from holdfast.core.format.manifest import commit_key
from holdfast.core.json_parsing import JsonMessage, JsonObject, ParsedJson
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError, RunStore

SAVE_PATH = "/save"
"""Path of the requests to the leader's listener."""
LEADER_ANSWER_TIMEOUT_S = 10.0
LEADER_RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between two questions, by how many in a row have brought nothing."""


class CommitCallbacks(Protocol):
    """The leader's saves, as the protocol calls them (`save_manager.SaveManager`). Returns at
    once."""

    def all_parts_stored(self, save: SaveId) -> None:
        """Every node has stored its parts."""

    def part_failed(self, save: SaveId, reason: str) -> None:
        """Another node has not, and will not."""

    def on_save_ended(self, save: SaveId, key: str | None, reason: str) -> None:
        """The leader's result of a save: the commit object's key, or why there is none."""


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


class SaveFollower:
    """Asks the leader, on a thread of its own, while the present generation's saves wait for an
    end. `change` guards `generation_saves`, which is None for a mover that is alone."""

    def __init__(self, store: RunStore, callbacks: CommitCallbacks) -> None:
        self.change = threading.Condition()
        self.generation_saves: GenerationSaves | None = None
        self._store, self._callbacks = store, callbacks
        self._connect: Callable[[str, int], PeerClient] | None = None
        self._steps_being_written: Callable[[int], Iterable[int]] = lambda generation: ()
        self._is_closed = self._has_thread = False

    def set_leader_access(
        self, secret: Secret, run_id: str, steps_being_written: Callable[[int], Iterable[int]]
    ) -> None:
        """As `CommitProtocol.set_leader_access`."""
        self._connect = lambda address, generation: PeerClient(
            address, secret, generation, run_id, silence_timeout_s=LEADER_ANSWER_TIMEOUT_S
        )
        self._steps_being_written = steps_being_written

    def close(self) -> None:
        with self.change:
            self._is_closed = True
            self.change.notify_all()

    def wake(self) -> None:
        """There is more to ask for; who calls this holds `change`."""
        if not self._has_thread and not self._is_closed:
            self._has_thread = True
            threading.Thread(
                target=self._ask_until_closed, name="to the leader", daemon=True
            ).start()
        self.change.notify_all()

    def _ask_until_closed(self) -> None:
        client: PeerClient | None = None
        idle = 0  # questions in a row that brought nothing
        while True:
            with self.change:
                self.change.wait_for(
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
                or self.generation_saves is not saves
                or not saves.awaited_saves <= awaited_saves
            )

        with self.change:
            self.change.wait_for(more, seconds)

    def _saves_to_ask_for(self) -> GenerationSaves | None:
        known = self.generation_saves
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
        with self.change:
            partly = [step for step, ranks in saves.ranks_stored.items() if ranks < saves.own_ranks]
        busy = sorted({*self._steps_being_written(saves.context.generation), *partly})
        report = SaveReport(saves.cohort.own_node, sorted(awaited_saves), busy, unreported_failures)
        answer = SaveReply.from_json(client.post(SAVE_PATH, report.to_json()))
        if not answer.heard:
            return False
        with self.change:
            for save in unreported_failures:
                saves.unreported_failures.pop(save, None)
        for generation, step, key, reason in answer.ended:
            self._end_save(saves, (int(generation), int(step)), key, str(reason))
        return bool(unreported_failures or answer.ended)

    def _end_save(self, saves: GenerationSaves, save: SaveId, key: str | None, reason: str) -> None:
        with self.change:
            saves.awaited_saves.discard(save)
            saves.ranks_stored.pop(save[1], None)
        self._callbacks.on_save_ended(save, key, reason)

    def _look_in_store(self, awaited_saves: Iterable[SaveId]) -> bool:
        """The leader does not answer: the run store may say how it ended."""
        known = self.generation_saves
        news = False
        for save in awaited_saves:
            if known is not None and self._is_committed(save):
                self._end_save(known, save, commit_key(*save), "")
                news = True
        return news

    def end_saves(self, ended_saves: set[SaveId], newer_generation: int) -> None:
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
