"""What a heartbeat costs the coordinator does not grow with the number of nodes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.protocol.coordinator_messages import Heartbeat
from holdfast.policy.membership import transitions
from holdfast.policy.membership.state import Directive, NodeCommand, NodeStage, Phase
from holdfast.policy.membership.transitions import MembershipRules, NodeRecord

WORKING = Directive(NodeCommand.WORK, 1)
BEATS = 100


async def _no_plan(reign: Any, generation: int, names: Any, known: Any) -> Any:
    raise AssertionError("none is to be made")


async def _beat(coordinator: Coordinator, names: list[str]) -> None:
    """All these send a heartbeat before the coordinator takes in what they say."""
    beats = [
        coordinator.handle_heartbeat(0, Heartbeat(name, name, 1, WORKING, 1, NodeStage.WORKING))
        for name in names
    ]
    await asyncio.gather(*beats)
    await asyncio.sleep(0)


async def _calls(count: int) -> int:
    """Calls of Python functions for `BEATS` heartbeats of a run with so many nodes."""
    names = [f"n{i:05d}" for i in range(count)]
    nodes = [NodeRecord(name, name, 1, 0.0, 0.0) for name in names]
    reign = transitions.begin_term(1, asyncio.get_running_loop().time(), 1, nodes)
    rules = MembershipRules(lambda nodes: [node.name for node in nodes])
    coordinator = Coordinator(reign, rules, _no_plan)
    await _beat(coordinator, names)
    assert coordinator.state.phase is Phase.TRAINING
    calls = 0

    def count_calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_calls)
    try:
        await _beat(coordinator, names[:BEATS])
    finally:
        sys.setprofile(None)
    return calls


def test_a_heartbeat_costs_as_much_with_many_nodes_as_with_few() -> None:
    few, many = asyncio.run(_calls(BEATS)), asyncio.run(_calls(16 * BEATS))
    assert few > BEATS  # something was counted
    assert many < 2 * few
