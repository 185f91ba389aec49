"""What the leader says while no generation begins: never that nodes lack if they do not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.coordinator import node_shortage
from holdfast.elastic.coordinator.node_shortage import NodeShortage
from holdfast.elastic.coordinator.run_controller import describe_cause
from holdfast.elastic.protocol.generation_outcome import LostOutcome
from holdfast.policy.membership.state import NodeRecord, NodeStage, UnreachablePair


def node(name: str, **facts: Any) -> NodeRecord:
    return NodeRecord(name, "1", 1, 0.0, 0.0, **facts)


class Lacking:
    """A shortage without a coordinator's machinery. fits: whether a layout fits, at each look."""

    def __init__(self, nodes: list[NodeRecord], fits: list[bool], **facts: Any) -> None:
        self.said: list[str] = []
        self._fits = iter(fits)
        hooks: Any = SimpleNamespace(stop_reason=lambda: "", newest_generation=lambda: 1)
        self.shortage = NodeShortage(
            ClusterConfig(), hooks, self.said.append, False, lambda nodes: self._select()
        )
        state = SimpleNamespace(nodes=tuple(nodes), unreachable_pairs=(), **facts)
        coordinator: Any = SimpleNamespace(state=state, node_reports={})
        self.state, self.shortage.coordinator = state, coordinator
        self.shortage.leave_out_failed = AsyncMock(return_value=False)

    def _select(self) -> tuple[str, ...]:
        return ("one",) if next(self._fits) else ()

    def wait(self) -> list[str]:
        asyncio.run(self.shortage.wait_for_nodes())
        return self.said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_shortage, "ENOUGH_CHECK_INTERVAL_S", 0.0)


def test_a_lack_is_named_only_once_no_layout_fits() -> None:
    lacking = Lacking([node("one")], [True, True, True, False])
    assert lacking.wait() == [
        "no layout fits the 1 place that is here (see holdfast layout show); waiting for more, "
        "without a limit of time"
    ]
    with pytest.raises(StopIteration):
        next(lacking._fits)


def test_what_keeps_enough_nodes_from_training_is_named_once() -> None:
    """The workers of one node have not stopped."""
    busy = node("two", stage=NodeStage.WORKING, generation=1)
    said = Lacking([node("one"), busy], [True, True, True, False]).wait()
    assert said[0] == "training begins again as soon as the workers of two have stopped"
    assert len(said) == 2


def test_nodes_that_do_not_reach_each_other_are_named() -> None:
    lacking = Lacking([node("one"), node("two")], [])
    lacking.state.unreachable_pairs = (UnreachablePair("one", "two", 9.0, 1.0),)
    assert lacking.wait()[0].startswith("one and two do not reach each other")


def test_the_cause_of_a_new_generation_is_a_phrase() -> None:
    state: Any = SimpleNamespace(lost_members=(("two", "its agent has ended"), ("x", "")))
    assert describe_cause([], state) == "node two was lost (its agent has ended)"
    assert describe_cause([LostOutcome("", "worker 1: exit 1")], state) == "worker 1: exit 1"
    consequence = LostOutcome("peer_lost", "worker 0: a peer was lost during the reduction")
    assert describe_cause([consequence], state) == "node two was lost (its agent has ended)"
    alone: Any = SimpleNamespace(lost_members=())
    assert describe_cause([consequence], alone) == consequence.cause
    assert describe_cause([], alone) == ""
