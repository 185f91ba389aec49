"""A leader's answer that comes when its generation is over: every save is still reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.peers.config import Cohort, Peer
from holdfast.checkpoint.save.commit_protocol import SAVE_PATH, CommitProtocol
from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.policy.placement import Machine
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.checkpoint.peers.test_server import listening
from tests.support.mover_process import TABLE, topology
from tests.support.peer_nodes import SECRET
from tests.support.ranks import wait_until

SAVES: list[SaveId] = [(1, 10), (1, 20), (1, 30)]


class Slow(FolderStore):
    """The first listing of it takes until it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def size(self, key: str) -> int:
        self.asked.set()
        assert self.go_on.wait(120)
        return super().size(key)


class Ends:
    def __init__(self) -> None:
        self.told: dict[SaveId, str] = {}

    def all_parts_stored(self, save: SaveId) -> None:
        raise AssertionError("this one follows")

    part_failed = all_parts_stored  # type: ignore[assignment]

    def on_save_ended(self, save: SaveId, key: str | None, reason: str) -> None:
        self.told.setdefault(save, reason)


def plan(generation: int) -> SaveContext:
    return SaveContext(generation, topology(2, generation=generation), TABLE, "c", "d", 1024)


def test_a_late_answer_about_one_save_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer(generation: int, body: Mapping[str, Any]) -> dict[str, Any]:
        asked.set()
        assert go_on.wait(120)
        return {"ended": [[1, 10, None, "generation 2 began"]], "heard": True}

    store, ends = Slow(tmp_path), Ends()
    with listening() as (server, address):
        server.post_handlers[SAVE_PATH] = answer
        leader = Peer(Machine("a"), address)
        follower = CommitProtocol(SaveTracker(time.monotonic), store, ends)
        follower.set_leader_access(SECRET, "", lambda generation: ())
        follower.begin_generation(plan(1), Cohort("b", (leader,), leader_peer=leader))
        for save in SAVES:
            follower.await_outcome(save)
        assert asked.wait(120)
        follower.begin_generation(plan(2), Cohort("b", (leader,), leader_peer=leader))
        assert store.asked.wait(120)
        go_on.set()  # the leader's answer comes while the run store is looked into
        wait_until(lambda: (1, 10) in ends.told)
        store.go_on.set()
        wait_until(lambda: set(ends.told) == set(SAVES))
        follower.close()
