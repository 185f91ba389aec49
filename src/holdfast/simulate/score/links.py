"""A degraded link as slow nodes, for the engine, which has no links. Pure.

A synchronous step ends with one all-reduce over a ring of all nodes. The ring crosses the link, so
each of its rounds takes as long as a part of the payload needs on it. The formula is the
alpha-beta model of a ring all-reduce (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.simulate.score.scenarios import ScenarioRun
from holdfast.simulate.traces.events import TraceEvent


def ring_seconds(event: TraceEvent, nodes: int, payload_bytes: float) -> float:
    """Seconds of a ring all-reduce of `payload_bytes` whose rounds wait for a link.

    event: of kind `net`; a value of 0 is a bandwidth that is not known, and takes no time."""
    late_s = float(event.extra.get("rtt_ms", 0.0)) / 2000
    byte_s = 8 / (event.value * 1e9) if event.value else 0.0
    return 2 * (nodes - 1) * (late_s + payload_bytes / nodes * byte_s)


def with_slow_nodes(run: ScenarioRun, step_s: float, payload_bytes: float) -> ScenarioRun:
    """The same with a `slow` event in place of each `net` event. step_s: of a step on all nodes
    before, in seconds."""
    events = []
    for event in run.events:
        if event.kind == "net":
            node = event.node.partition("->")[0]
            factor = 1 + ring_seconds(event, run.nodes, payload_bytes) / step_s
            event = TraceEvent(event.t_s, "slow", node, value=factor)
        events.append(event)
    return replace(run, events=tuple(events))
