"""Whom a node does not reach, and what its coordinator makes of that. (With real networks and real
nodes: `tests/system/test_network_partition.py`.)"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.liveness_probe import ProbeResult, probe
from holdfast.elastic.membership import reachability
from holdfast.elastic.membership.reachability import ReachabilityProbe
from holdfast.elastic.protocol.coordinator_messages import Heartbeat
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    Directive,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    NodeStage,
    Phase,
)

NAMES = "abc"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that answers nothing: its queue is full, and packets are dropped."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(server.getsockname())
            waiting.append(one)
        host, port = server.getsockname()
        yield f"{host}:{port}"
        for one in waiting:
            one.close()


def test_who_does_not_answer_is_missed_until_he_does(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "REACH_PROBE_TIMEOUT_S", 0.5)

    async def world() -> None:
        ended = asyncio.Event()
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        agents = {"a": "own", "b": f"{host}:{port}", "c": silent, "d": nobody, "e": "none"}
        found = ReachabilityProbe()
        found.retry(agents)
        assert not found.is_probing, "nobody is missed"
        found.probe_all("a", agents, ended.set)
        assert found.is_probing
        await asyncio.wait_for(ended.wait(), 60)
        assert (found.unreachable, found.is_probing) == (("c",), False)
        found.retry({"a": "own"})  # a generation without those that are missed
        assert found.unreachable == ("c",)
        found.close()
        await asyncio.sleep(0)
        found.retry({**agents, "c": agents["b"]})
        assert not found.is_probing, "that is behind whoever asks"
        async with asyncio.timeout(60):
            while found.unreachable:
                await asyncio.sleep(0.01)
        found.close()
        server.close()

    asyncio.run(world())


async def _no_generation(reign: Any, generation: int, names: Any, known: Any) -> dict[str, Any]:
    raise AssertionError("none is to be made")


WORKING = Directive(NodeCommand.WORK, 1)


async def _beat(coordinator: Coordinator, name: str, *misses: str) -> None:
    await coordinator.handle_heartbeat(
        0, Heartbeat(name, name, 1, WORKING, 1, NodeStage.WORKING, misses=misses)
    )
    await asyncio.sleep(0)  # what was heard is taken in


async def _pairs(*heard: tuple[str, ...]) -> tuple[Phase, str, list[str]]:
    """Phase, reason and who is kept apart, once these have said whom they miss."""
    loop = asyncio.get_running_loop()
    nodes = [NodeRecord(name, name, 1, 0.0, 0.0) for name in NAMES]
    reign = transitions.begin_term(1, loop.time(), 1, nodes)
    rules = MembershipRules(lambda nodes: [node.name for node in nodes])
    coordinator = Coordinator(reign, rules, _no_generation)
    for name in NAMES:
        await _beat(coordinator, name)
    assert coordinator.state.phase is Phase.TRAINING
    for name, *misses in heard:
        await _beat(coordinator, name, *misses)
    reign = coordinator.state
    return (
        reign.phase,
        reign.reason,
        [f"{pair.one}{pair.other}" for pair in reign.unreachable_pairs],
    )


@pytest.mark.parametrize(
    ("heard", "apart"),
    [
        ([("b", "c")], []),  # c may be dead
        ([("b", "c"), ("a",), ("b", "c")], []),
        ([("b", "c"), ("c",)], ["bc"]),
        ([("c", "b"), ("b", "c"), ("c", "b")], ["bc"]),
        ([("c", "b", "a"), ("b",), ("a",)], ["bc", "ac"]),
        ([("b", "c"), ("b",), ("c",)], []),  # it has reached it since
        ([("b", "nobody"), ("c",)], []),
    ],
)
def test_who_is_missed_and_heard_is_kept_apart(
    heard: list[tuple[str, ...]], apart: list[str]
) -> None:
    phase, reason, found = asyncio.run(_pairs(*heard))
    assert found == apart
    assert (phase, reason == "link_cut") == (
        (Phase.HALTING, True) if apart else (Phase.TRAINING, False)
    )


@pytest.mark.parametrize("address", ["", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-5", "?:1"])
def test_nothing_is_known_of_what_is_no_address(address: str) -> None:
    assert asyncio.run(probe(address, 1.0)) is ProbeResult.UNKNOWN
