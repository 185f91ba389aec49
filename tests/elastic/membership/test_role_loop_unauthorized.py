"""A stranger at the listener where agents join and follow their coordinator."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from holdfast.policy.membership.election import Patience
from holdfast.policy.membership.transitions import Phase, Stage
from holdfast.wire.http.auth import Aim
from holdfast.wire.http.client import Client
from holdfast.wire.store.run_store import FolderStore
from tests.support.agents import SECRET, FleetAgent, until
from tests.support.attacked_run import ATTEMPTS, REFUSED, SEED, attack, signing, tapped
from tests.support.attacker import Stranger

SLOW = Patience(silence=600.0, turn=1.0, alone=600.0)
"""On a busy machine nobody is taken for lost: what changes here is a stranger's work."""


def test_nobody_joins_or_leaves_for_a_stranger(tmp_path: Path) -> None:
    async def scene() -> None:
        store = FolderStore(tmp_path)
        agents = [FleetAgent(name, store, 2, 2, patience=SLOW, lost_after=600.0) for name in "ab"]
        await until(lambda: all(a.work.stage is Stage.WORKING for a in agents), "both", 120.0)
        leader = next(agent for agent in agents if agent.reigns)
        coordinator = leader.follower.coordinator
        assert coordinator is not None
        await until(
            lambda: coordinator.reign.phase is Phase.TRAINING, "their leader to know", 120.0
        )

        def state() -> tuple[object, ...]:
            reign = coordinator.reign
            return (
                reign.term, reign.phase, reign.generation, reign.members, reign.names, reign.lost,
                set(coordinator.known), store.list(""), [agent.work.history for agent in agents],
            )  # fmt: skip

        before = state()
        await asyncio.to_thread(_attack, leader.address, list(leader.follower.handlers))
        assert state() == before
        assert [agent.said for agent in agents] == [[], []]

    async def whole() -> None:
        try:
            await scene()
        finally:
            others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(whole())


def _attack(address: str, paths: list[str]) -> None:
    assert {"/join", "/beat", "/term"} <= set(paths)
    honest = Client(address, SECRET)
    honest.post("/term", {})
    with tapped(address) as tap:
        recorded = Client(tap.address, SECRET)
        for _ in range(3):
            recorded.post("/term", {})
        recorded.close()
    body = json.dumps({"name": "ghost", "mark": "m", "places": 1, "at": 1, "stage": "working",
                       "told": {}, "term": 1, "seen": 0, "nodes": ["a"]}).encode()  # fmt: skip
    aim = Aim(time.time)
    aim._known = honest._aim._known
    fresh = signing(address, SECRET, 0, [("POST", path, body) for path in paths], aim)
    counts = attack(
        address, Stranger(SEED, paths, tap.requests, fresh).attempts(ATTEMPTS // 2), None,
        lambda: honest.post("/term", {}), REFUSED,
    )  # fmt: skip
    assert counts[401] > ATTEMPTS // 8, counts
    honest.close()
