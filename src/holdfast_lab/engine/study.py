"""Runs of several policies over several histories, and what they give with intervals. Pure.

A history is one stream of events. More of them come from one trace by beginning at other moments of
it, or from a generator with other seeds. All policies live through the same histories, so their
differences are those of decisions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from holdfast_lab.engine.interfaces import CostModel, PolicyMaker
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.traces.events import EventStream, TraceEvent, in_order
from holdfast_lab.traces.scenario import stream_part

if TYPE_CHECKING:
    from holdfast_lab.engine.run_journal import JournalObserver

RESAMPLES = 1000
KEPT_SHARE = 0.75  # length of a history that begins at another moment of a trace, of the trace's

MAX_SECONDS = 3650 * 86_400.0  # time after which a run that is simulated to its end is given up


@dataclass(frozen=True)
class Case:
    """A policy with its settings. words: what tells it from the rest, for people."""

    words: str
    policy: PolicyMaker
    cost: CostModel


@dataclass(frozen=True)
class Outcome:
    """One ledger for each history, in order."""

    case: Case
    ledgers: tuple[Ledger, ...]

    def values(self, metric: str) -> list[float]:
        return [METRICS[metric](ledger) for ledger in self.ledgers]


@dataclass(frozen=True)
class Estimate:
    """Mean over histories, and the 95 % interval of that mean by bootstrap; both ends are the mean
    if there is one history."""

    mean: float
    low: float
    high: float


METRICS: Mapping[str, Callable[[Ledger], float]] = {
    "makespan_s": lambda ledger: ledger.wall_s,
    "tokens": lambda ledger: ledger.tokens,
    "tokens_per_s": lambda ledger: ledger.tokens_per_s,
    "goodput": lambda ledger: ledger.goodput,
    "g": lambda ledger: ledger.g,
    "lost_work_s": lambda ledger: ledger.lost_s.total,
    "interruptions": lambda ledger: float(ledger.interruptions),
    "layout_changes": lambda ledger: float(ledger.changes),
    "rpo_p50_s": lambda ledger: ledger.lost_s.quantile(0.5),
    "rpo_p95_s": lambda ledger: ledger.lost_s.quantile(0.95),
    "rpo_worst_s": lambda ledger: ledger.lost_s.most,
    "rto_p50_s": lambda ledger: ledger.rto_s.quantile(0.5),
    "rto_p95_s": lambda ledger: ledger.rto_s.quantile(0.95),
    "rto_worst_s": lambda ledger: ledger.rto_s.most,
    "stored_tb": lambda ledger: sum(ledger.saved_bytes.values()) / 1e12,
    "read_tb": lambda ledger: sum(ledger.read_bytes.values()) / 1e12,
    "node_hours": lambda ledger: ledger.node_s / 3600,
    "usd": lambda ledger: ledger.usd,
    "kwh": lambda ledger: ledger.kwh,
    "co2_kg": lambda ledger: ledger.grams_co2 / 1e3,
    "usd_per_1e9_tokens": lambda ledger: _each(ledger.usd, ledger),
    "co2_kg_per_1e9_tokens": lambda ledger: _each(ledger.grams_co2 / 1e3, ledger),
}
"""What a run is judged by. Units are in the names; g is capacity-normalised goodput."""


def _each(amount: float, ledger: Ledger) -> float:
    return amount / ledger.tokens * 1e9 if ledger.tokens else 0.0


def run_case(
    case: Case,
    histories: Sequence[EventStream],
    tokens: float = inf,
    observer: JournalObserver | None = None,
) -> Outcome:
    """Simulate a case over each history. tokens: at which a run is done. A history is repeated
    until then, for `MAX_SECONDS` at most, unless a pass of it keeps no token. observer: of the
    first history."""
    ledgers = []
    for index, history in enumerate(histories):
        heard = observer if index == 0 else None
        is_endless = tokens < inf and _once(case, history).tokens > 0
        limits = Limits(MAX_SECONDS if is_endless else history.seconds, tokens)
        run = Simulation(case.cost, case.policy(case.cost), limits, heard)
        ledgers.append(run.run(repeated(history) if is_endless else history.events))
    return Outcome(case, tuple(ledgers))


def _once(case: Case, history: EventStream) -> Ledger:
    """What one pass of a history gives: a run that keeps nothing of it is never done."""
    run = Simulation(case.cost, case.policy(case.cost), Limits(history.seconds))
    return run.run(history.events)


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean and bootstrap interval (Efron, 1979: percentiles of resampled means)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, mean, mean)
    draw = random.Random(f"{seed}/bootstrap")
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return Estimate(mean, means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1])


# --- histories ------------------------------------------------------------------------------------
def histories_of(stream: EventStream, number: int) -> list[EventStream]:
    """`number` histories of one trace. One: the trace as it is. More: each begins at another moment
    of the trace's first quarter, evenly spread, and is three quarters as long."""
    if number == 1:
        return [stream]
    length = KEPT_SHARE * stream.seconds
    free = stream.seconds - length
    starts = [free * index / (number - 1) for index in range(number)]
    return [_begun(stream, start, start + length) for start in starts]


def _begun(stream: EventStream, start: float, stop: float) -> EventStream:
    part = stream_part(stream, start, stop)
    return EventStream(replace(part.header, seconds=stop - start), part.events)


def repeated(stream: EventStream) -> Iterator[TraceEvent]:
    """The events of a trace again and again without end, for a run that outlives it. At each seam
    the nodes that are left go, and those of the start come."""
    length = stream.seconds
    left = {event.node: event for event in stream.events if event.kind in ("join", "recover")}
    for event in stream.events:
        if event.kind == "preempt":
            left.pop(event.node, None)
    turn = 0
    while True:
        for event in stream.events:
            node = _renamed(event.node, turn)
            yield replace(event, t_s=event.t_s + turn * length, node=node)
        turn += 1
        for name, joined in left.items():
            node = _renamed(name, turn - 1)
            yield replace(joined, t_s=turn * length, kind="preempt", node=node, value=0.0)
        if length <= 0:
            return


def _renamed(node: str, turn: int) -> str:
    return f"{node}#{turn}" if node and turn else node


def with_all_nodes(stream: EventStream, nodes: int) -> EventStream:
    """A trace without nodes, as one of prices, gets so many from its start."""
    if any(event.kind == "join" for event in stream.events):
        return stream
    joins = (TraceEvent(0.0, "join", f"node {index}", value=1.0) for index in range(nodes))
    return EventStream(stream.header, in_order([*joins, *stream.events]))
