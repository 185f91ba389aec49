"""The scenarios F0 to F13 of the score, version 1: frozen event streams, each from a seed. Pure.

Times are those of the real world; a level that compresses time divides them by k. Level 1 draws on
a few nodes. Level 0 draws on many, from the generators of `holdfast trace make`, whose constants
were fitted to public traces (docs/studies/traces.md).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.generators import make_trace
from holdfast_lab.traces.scenario import with_notices

VERSION = "v1"
NOTICES_S = (0.0, 30.0, 120.0)
"""Warnings before a machine is taken, in turn over the seeds."""
P3_BURSTS = (39, 13, 15, 7, 1, 4)
"""How often 1 to 6 of about 24 nodes went at once (Bamboo's p3 trace, 79 interruptions)."""
GCP_BURST_SHARES = (0.02,) * 20 + (0.05,) * 9 + (0.1,) * 5 + (0.16, 0.6)
"""Shares of the nodes that went at once (Bamboo's GCP A100 trace, 36 interruptions)."""
_DAY = 86400.0


@dataclass(frozen=True)
class Size:
    """What a level draws for. seconds: of the real world. step_s: of a step on all nodes."""

    nodes: int
    seconds: float
    step_s: float
    is_small: bool = False  # level 1


LEVEL_1 = Size(4, 1200.0, 20.0, True)
LEVEL_0 = Size(64, 2 * _DAY, 20.0)


@dataclass(frozen=True)
class Definition:
    """title: for people. parts: sub-scores to which it applies. levels: that can run it.
    has_notices: the notice changes with the seed. needs: what a machine must be able to do."""

    title: str
    parts: tuple[str, ...]
    levels: tuple[int, ...] = (0, 1)
    has_notices: bool = False
    needs: str = ""


SCENARIOS: dict[str, Definition] = {
    "F0": Definition("no fault", ("EO",)),
    "F1": Definition("one node killed", ("RPO", "RTO")),
    "F2": Definition("independent failures", ("RPO", "RTO")),
    "F3": Definition("spot bursts of 1 to 6 (p3)", ("RPO", "RTO", "P"), has_notices=True),
    "F4": Definition("spot with one large drop", ("RPO", "RTO", "P"), has_notices=True),
    "F5": Definition("whole gangs lost", ("RPO", "RTO", "P"), has_notices=True),
    "F6": Definition("quiet and busy windows of p3", ("RPO", "RTO", "P"), has_notices=True),
    "F7": Definition("one zone lost", ("RPO", "RTO")),
    "F8": Definition("one node slow", ("J",)),
    "F9": Definition("network degraded", (), (1,), needs="network"),
    "F10": Definition("checkpoint corrupted", ("RPO", "RTO"), (1,)),
    "F11": Definition("staircase of nodes", ("EO",)),
    "F12": Definition("lives with a wall", ("RPO", "RTO", "P"), has_notices=True),
    "F13": Definition("1,024 nodes for 90 days", ("RPO", "RTO"), (0,)),
}


@dataclass(frozen=True)
class ScenarioRun:
    """A scenario drawn for a seed.

    Attributes:
        events: on the nodes, in seconds of the real world.
        corrupt_s: when the newest checkpoint is damaged; -1: never.
        between_s: T_b. A scenario with one interruption or none has its length.
    """

    scenario: str
    seed: int
    nodes: int
    seconds: float
    step_s: float
    events: tuple[TraceEvent, ...]
    between_s: float
    corrupt_s: float = -1.0

    def compressed(self, k: float) -> ScenarioRun:
        """The same with all times divided by k: also the time that a byte takes on a link."""
        events = tuple(_compressed(event, k) for event in self.events)
        return replace(
            self,
            seconds=self.seconds / k,
            step_s=self.step_s / k,
            events=events,
            between_s=self.between_s / k,
            corrupt_s=self.corrupt_s / k if self.corrupt_s >= 0 else -1.0,
        )


def _compressed(event: TraceEvent, k: float) -> TraceEvent:
    """Values of some kinds are times, too."""
    found = replace(event, t_s=event.t_s / k)
    if event.kind in ("notice", "fail"):
        return replace(found, value=event.value / k)
    if event.kind == "net":
        extra = {**event.extra, "rtt_ms": event.extra["rtt_ms"] / k}
        return replace(found, value=event.value * k, extra=extra)
    return found


def scoring_seeds(count: int) -> tuple[int, ...]:
    """Seeds that score, from the digest of the manifest. Seeds 0 to 4 are for tuning."""
    # A digest of all that the scenarios come from, and so of the seeds that score.
    rows = [[name, each.title, each.parts, each.levels] for name, each in SCENARIOS.items()]
    told = [VERSION, rows, NOTICES_S, P3_BURSTS, GCP_BURST_SHARES, str(LEVEL_0), str(LEVEL_1)]
    base = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    digests = (hashlib.sha256(f"{base} {n}".encode()).hexdigest() for n in range(count))
    return tuple(5 + int(digest[:6], 16) for digest in digests)


def draw_scenario(name: str, seed: int, size: Size) -> ScenarioRun:
    """The events of a scenario for a seed."""
    if name == "F13":
        size = Size(1024, 90 * _DAY, size.step_s)
    chance = random.Random(f"score {VERSION} {name} {seed}")
    drawing = _Drawing(chance, size)
    if not size.is_small and name in _BY_GENERATOR:
        events = _BY_GENERATOR[name](seed, size)
    else:
        _DRAWINGS[name](drawing)
        events = drawing.events
    first = [TraceEvent(0.0, "join", f"n{n}", value=1.0) for n in range(1, size.nodes + 1)]
    first = [] if any(e.t_s == 0 for e in events) else first
    stream = EventStream(
        TraceHeader(name, seed=seed, seconds=size.seconds), in_order([*first, *events])
    )
    if SCENARIOS[name].has_notices:
        stream = with_notices(stream, NOTICES_S[seed % len(NOTICES_S)])
    inside = tuple(e for e in stream.events if e.t_s < size.seconds)
    losses = interruptions(inside)
    between = drawing.between_s or size.seconds / max(1, len(losses))
    return ScenarioRun(
        name, seed, size.nodes, size.seconds, size.step_s, inside, between, drawing.corrupt_s
    )


def interruptions(events: Sequence[TraceEvent]) -> tuple[float, ...]:
    """When nodes went; what goes at one instant is one interruption."""
    return tuple(sorted({e.t_s for e in events if e.kind in ("preempt", "fail")}))


class _Drawing:
    """Draws events for a few nodes; keeps which of them are there, and when new ones come."""

    def __init__(self, chance: random.Random, size: Size) -> None:
        self.chance, self.size = chance, size
        self.events: list[TraceEvent] = []
        self.between_s = self.corrupt_s = 0.0
        self.corrupt_s = -1.0
        self._back: dict[str, float] = {f"n{n}": 0.0 for n in range(1, size.nodes + 1)}
        self._next = size.nodes + 1

    def steps(self, count: float) -> float:
        """Seconds of so many steps."""
        return count * self.size.step_s

    def between(self, low: float, high: float) -> float:
        """A moment, given as shares of the scenario's length."""
        return self.chance.uniform(low, high) * self.size.seconds

    def present(self, at: float) -> list[str]:
        return [name for name, since in self._back.items() if since <= at]

    def fail(self, at: float, count: int, outage_s: float) -> None:
        """Nodes break at one instant, and are repaired together."""
        here = self.present(at)
        for name in self.chance.sample(here, min(count, len(here))):
            self.events.append(TraceEvent(at, "fail", name, value=outage_s))
            self.events.append(TraceEvent(at + outage_s, "recover", name, value=1.0))
            self._back[name] = at + outage_s

    def take(self, at: float, count: int, back_s: Sequence[float]) -> None:
        """The provider takes nodes at one instant; nodes with new names come later."""
        here = self.present(at)
        for name, later in zip(
            self.chance.sample(here, min(count, len(here))), back_s, strict=False
        ):
            self.events.append(TraceEvent(at, "preempt", name))
            del self._back[name]
            other, self._next = f"n{self._next}", self._next + 1
            self.events.append(TraceEvent(at + later, "join", other, value=1.0))
            self._back[other] = at + later


def _poisson(draw: _Drawing) -> None:
    """Independent failures, so compressed that one comes every 25 steps on average."""
    draw.between_s = draw.steps(25)
    at = min(draw.steps(30), draw.chance.expovariate(1 / draw.between_s))
    while at < 0.9 * draw.size.seconds:
        draw.fail(at, 1, draw.steps(10))
        at += draw.chance.expovariate(1 / draw.between_s)


def _bursts(draw: _Drawing) -> None:
    draw.between_s = draw.steps(22)
    at = draw.steps(4) + min(draw.steps(20), draw.chance.expovariate(1 / draw.between_s))
    while at < 0.9 * draw.size.seconds:
        (size,) = draw.chance.choices(range(1, 7), P3_BURSTS)
        count = max(1, round(size * draw.size.nodes / 24))
        draw.take(at, count, [draw.steps(draw.chance.uniform(6, 14)) for _ in range(count)])
        at += draw.steps(3) + draw.chance.expovariate(1 / draw.between_s)


def _one_drop(draw: _Drawing) -> None:
    """Small losses, and one of more than half of the nodes."""
    at = draw.between(0.2, 0.3)
    draw.take(at, 1, [draw.steps(10)])
    count = max(2, round(0.6 * draw.size.nodes))
    back = [draw.steps(draw.chance.uniform(8, 16)) for _ in range(count)]
    draw.take(draw.between(0.5, 0.6), count, back)


def _gang(draw: _Drawing) -> None:
    at = draw.between(0.3, 0.5)
    draw.take(at, draw.size.nodes, [draw.steps(10)] * draw.size.nodes)


def _zone(draw: _Drawing) -> None:
    share = draw.chance.uniform(0.25, 0.5)
    draw.fail(draw.between(0.25, 0.5), max(1, round(share * draw.size.nodes)), draw.steps(15))


def _slow(draw: _Drawing) -> None:
    names = draw.present(0.0)
    factor = draw.chance.uniform(1.05, 2.5)
    draw.events.append(TraceEvent(draw.steps(5), "slow", draw.chance.choice(names), value=factor))


def _network(draw: _Drawing) -> None:
    """From a fifth of the time on, one half of the nodes reaches the other as between two regions:
    5.7 Gbit/s and 153 ms."""
    half = draw.size.nodes // 2
    for n in range(1, half + 1):
        extra = {"rtt_ms": 153.0}
        at = 0.2 * draw.size.seconds
        draw.events.append(TraceEvent(at, "net", f"n{n}->rest", value=5.7, extra=extra))


def _corrupted(draw: _Drawing) -> None:
    """The newest checkpoint is damaged, and all nodes break a moment later."""
    at = draw.between(0.4, 0.6)
    draw.corrupt_s = at
    draw.fail(at + 0.05 * draw.size.step_s, draw.size.nodes, draw.steps(1))


def _staircase(draw: _Drawing) -> None:
    """64, 48, 32, 64 nodes or as large parts of fewer; each change has a notice of two steps."""
    step, quarter = draw.size.seconds / 4, max(1, draw.size.nodes // 4)
    for number in (1, 2):
        at = number * step
        names = sorted(draw.present(at))[-quarter:]
        for name in names:
            warned = at - draw.steps(2)
            draw.events.append(TraceEvent(warned, "notice", name, value=at - warned))
            draw.events.append(TraceEvent(at, "preempt", name))
            draw._back[name] = float("inf")
    for n in range(2 * quarter):
        name = f"n{draw.size.nodes + 1 + n}"
        draw.events.append(TraceEvent(3 * step, "join", name, value=1.0))


def _lives(draw: _Drawing) -> None:
    """Each node lives for a bathtub-shaped time, and the next one comes a few steps later."""
    wall = 0.6 * draw.size.seconds
    for name in list(draw._back):
        early = draw.chance.random() < 0.35
        shape = draw.chance.betavariate(0.8, 4.0) if early else draw.chance.betavariate(6.0, 0.8)
        at = max(draw.steps(4), shape * wall)
        draw.events.append(TraceEvent(at, "preempt", name))
        other, draw._next = f"n{draw._next}", draw._next + 1
        draw.events.append(
            TraceEvent(at + draw.steps(draw.chance.uniform(6, 12)), "join", other, value=1.0)
        )


_DRAWINGS: dict[str, Callable[[_Drawing], None]] = {
    "F0": lambda draw: None,
    "F1": lambda draw: draw.fail(draw.between(0.25, 0.5), 1, draw.steps(12)),
    "F2": _poisson,
    "F3": _bursts,
    "F4": _one_drop,
    "F5": _gang,
    "F6": _bursts,
    "F7": _zone,
    "F8": _slow,
    "F9": _network,
    "F10": _corrupted,
    "F11": _staircase,
    "F12": _lives,
}


# --- level 0: many nodes ------------------------------------------------------------------------
def _made(generator: str, **given: float) -> Callable[[int, Size], list[TraceEvent]]:
    def make(seed: int, size: Size) -> list[TraceEvent]:
        parameters = {"nodes": float(size.nodes), **given}
        return list(make_trace(generator, seed, size.seconds / _DAY, parameters).events)

    return make


_BY_GENERATOR: dict[str, Callable[[int, Size], list[TraceEvent]]] = {
    "F2": _made("failures", per_node_year=3.79 * 0.365, lemons=0.0, repeat=0.0),
    "F3": _made("spot"),
    "F5": _made("gang"),
    "F6": _made("spot", between_s=220.0),
    "F12": _made("lives"),
    "F13": _made("failures"),
}
