"""A degraded link as slow nodes, for the engine, which has no links. Pure.

A synchronous step sends some messages, each of which waits for the one before. So it is longer by
that many one-way delays of a link that all of them cross, and by the time of its bytes. This is the
alpha-beta model of Hockney, "The communication challenge for MPP", 1994.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_lab.score.scenarios import ScenarioRun
from holdfast_lab.traces.events import TraceEvent

HOLDFAST_WAITS = 4
"""A piece of the gradient to its owner, the sum back, and the ballots of the step. Before a ballot
is sent, its receiver says that it is ready."""


def gloo_ring_waits(nodes: int) -> int:
    """Of an all-reduce of gloo. A ring has 2 (n - 1) rounds. In each one the receiver says that it
    is ready, and then the sender sends."""
    return 2 * 2 * (nodes - 1)


def link_seconds(event: TraceEvent, waits: int, payload_bytes: float) -> float:
    """Seconds by which a link makes a step longer.

    event: of kind `net`; a value of 0 is a bandwidth that is not known, and takes no time.
    payload_bytes: that cross the link in one direction."""
    byte_s = 8 / (event.value * 1e9) if event.value else 0.0
    return waits * float(event.extra.get("rtt_ms", 0.0)) / 2000 + payload_bytes * byte_s


def with_slow_nodes(
    run: ScenarioRun, step_s: float, waits: int, payload_bytes: float
) -> ScenarioRun:
    """The same with a `slow` event in place of each `net` event. step_s: of a step on all nodes
    before, in seconds."""
    events = []
    for event in run.events:
        if event.kind == "net":
            node = event.node.partition("->")[0]
            factor = 1 + link_seconds(event, waits, payload_bytes) / step_s
            event = TraceEvent(event.t_s, "slow", node, value=factor)
        events.append(event)
    return replace(run, events=tuple(events))
