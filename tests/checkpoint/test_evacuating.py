"""Nodes that are about to go hand their snapshots over: real movers, one after the other, until the
last has the whole state alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.checkpoint.several import Nodes
from tests.checkpoint.support import Mover

Start = Callable[..., Mover]


def test_nodes_that_go_leave_their_state_and_what_they_kept_with_those_that_stay(
    start: Start,
) -> None:
    nodes = Nodes(start, *"abc", every=1000)  # nothing is copied by itself
    topo = nodes.topology(1, "abc", dp_shard=3)
    nodes.open(1)
    nodes.begin(topo, start=0)
    nodes.equip(topo)
    for step in (1, 2):
        nodes.capture(step)
    assert [nodes.held(name) for name in "abc"] == [[], [], []]

    stopped = nodes.movers["c"].process.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        said = nodes.movers["a"].client(1).evacuate(1.0, ["c"])
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert not said["safe"]
    assert said["own"][0]["held"] is None
    assert said["own"][0]["reason"]
    said = nodes.movers["a"].client(1).evacuate(30.0, [])
    assert "no machine stays" in said["own"][0]["reason"]

    said = nodes.movers["a"].client(1).evacuate(30.0, ["b"])
    assert said["safe"]
    assert said["own"] == [{"generation": 1, "step": 2, "rank": 0, "held": "b"}]
    assert (2, 0) in nodes.held("b")
    nodes.kill("a")
    said = nodes.movers["b"].client(1).evacuate(30.0, ["c"])
    assert said["safe"]
    assert [part["held"] for part in said["own"] + said["copies"]] == ["c", "c"]
    nodes.kill("b")

    newest = nodes.choose("c", 2, "c")
    assert (newest.step, newest.durable) == (2, False)
    assert newest.key is not None
    nodes.begin(nodes.topology(2, "c"), newest)
    assert nodes.restored("c", 2, newest.key, 2) == {"memory"}
