"""A coordinator whose process stood still heard nobody meanwhile, and blames nobody for that."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from holdfast.elastic.coordinator.coordinator import Coordinator, Made
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import MembershipRules, NodeRecord

LOST_AFTER = 1.5


async def _no_generation(reign: Any, generation: int, names: Any, known: Any) -> Made:
    raise AssertionError("none is to be made")


async def _asleep() -> tuple[list[str], list[str]]:
    """Who is there when it wakes, and when those who are silent have had their time."""
    loop = asyncio.get_running_loop()
    rules = MembershipRules(lambda nodes: (), node_timeout_s=LOST_AFTER, gather_wait_s=1000.0)
    nodes = [NodeRecord(name, name, 1, 0.0, 0.0) for name in "ab"]
    reign = transitions.begin_term(1, loop.time(), 1, nodes)
    coordinator = Coordinator(reign, rules, _no_generation)
    running = asyncio.create_task(coordinator.run())
    await asyncio.sleep(0.05)
    time.sleep(1.5 * LOST_AFTER)  # nothing of this process runs: it was stopped
    await asyncio.sleep(0.05)
    then = [node.name for node in coordinator.state.nodes]
    async with asyncio.timeout(60):
        while coordinator.state.nodes:
            await asyncio.sleep(0.01)
    running.cancel()
    return then, [node.name for node in coordinator.state.nodes]


def test_who_was_not_heard_while_the_coordinator_slept_is_given_time() -> None:
    assert asyncio.run(_asleep()) == (["a", "b"], [])
