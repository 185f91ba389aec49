"""Generators of traces by name, and the parameters that make one like a given trace.

`make_trace` calls a generator; `fit_trace` estimates its parameters. What is estimated is what the
generator reproduces: rates, sizes of bursts, runs, lives with a wall, means and daily swings. Pure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, exp, log, pi

from holdfast.errors import DataError
from holdfast_lab.traces import synthetic
from holdfast_lab.traces.events import (
    EventStream,
    TraceEvent,
    TraceHeader,
    in_order,
    stream_of_changes,
)
from holdfast_lab.traces.node_changes import Trace
from holdfast_lab.traces.summary import Churn, churn_of

Parameters = Mapping[str, float]
_DAY = 86400.0
_SPAN = 6 * 3600.0  # for which the generator of a spot pool keeps a rate


@dataclass(frozen=True)
class Generator:
    """defaults: parameters and what they are if nothing is given."""

    make: Callable[[int, float, Parameters], EventStream]
    days: float
    defaults: Parameters


@dataclass(frozen=True)
class Fit:
    """A generator, and parameters that make its traces like one that was read."""

    generator: str
    parameters: Parameters


# --- generators ---------------------------------------------------------------------------------
def _stream(trace: Trace, seed: int) -> EventStream:
    header = TraceHeader(
        trace.kind,
        trace.source,
        victim_rule="random",
        seed=seed,
        seconds=trace.seconds,
        step_s=trace.step,
    )
    return EventStream(header, stream_of_changes(trace))


def _spot(seed: int, days: float, p: Parameters) -> EventStream:
    weights = [round(1000 * p[f"size_{k}"]) for k in range(1, 7)]
    if not any(weights):
        raise DataError(
            "no size of a burst has a weight",
            where="command line, --set",
            remedy="give one of them 0.001 or more: size_1=1",
        )
    return _stream(
        synthetic.spot_pool(
            seed,
            days=days,
            wanted=int(p["nodes"]),
            between=p["between_s"],
            swing=p["swing"],
            sizes=weights,
        ),
        seed,
    )


def _gang(seed: int, days: float, p: Parameters) -> EventStream:
    made = synthetic.gang_offers(
        seed, days=days, wanted=int(p["nodes"]), up=p["up_s"], down=p["down_s"]
    )
    return _stream(made, seed)


def _lives(seed: int, days: float, p: Parameters) -> EventStream:
    made = synthetic.bathtub_lives(seed, nodes=int(p["nodes"]), days=days, wall=p["wall_h"])
    return _stream(made, seed)


def _failures(seed: int, days: float, p: Parameters) -> EventStream:
    made = synthetic.cluster_failures(
        seed,
        nodes=int(p["nodes"]),
        days=days,
        per_node_year=p["per_node_year"],
        lemons=p["lemons"],
        repeat=p["repeat"],
    )
    return _stream(made, seed)


def _prices(seed: int, days: float, p: Parameters) -> EventStream:
    """A price that holds for weeks and then steps, never above the fixed price."""
    draw = random.Random(f"{seed}/prices")
    at, value, events = 0.0, p["mean"], list[TraceEvent]()
    while at < days * _DAY:
        extra = {"on_demand": p["on_demand"]}
        events.append(TraceEvent(at, "price", "", "made", "made", value, "made", extra))
        step = draw.gauss(0.0, p["step"])
        value = min(p["on_demand"], p["mean"] ** 0.5 * value**0.5 * exp(step))
        at += max(_DAY, draw.expovariate(1 / (p["between_days"] * _DAY)))
    return _levels("step prices", seed, days, events)


def _carbon(seed: int, days: float, p: Parameters) -> EventStream:
    """Hours with a daily curve, lowest at 13:00, and noise that lasts for some hours."""
    draw = random.Random(f"{seed}/carbon")
    noise, events = 0.0, list[TraceEvent]()
    for hour in range(int(days * 24)):
        noise = 0.9 * noise + draw.gauss(0.0, p["noise"] * (1 - 0.81) ** 0.5)
        curve = -0.5 * p["swing"] * cos(2 * pi * (hour - 13) / 24)
        value = max(0.0, p["mean"] * (1 + curve + noise))
        events.append(TraceEvent(hour * 3600.0, "carbon", "", "made", "", value, "made"))
    return _levels("daily carbon", seed, days, events)


def _levels(name: str, seed: int, days: float, events: list[TraceEvent]) -> EventStream:
    header = TraceHeader(name, f"synthetic {name}, seed {seed}", seed=seed, seconds=days * _DAY)
    return EventStream(header, in_order(events))


_SIZES = {
    f"size_{k}": many / sum(synthetic.BURST_SIZE_WEIGHTS)
    for k, many in enumerate(synthetic.BURST_SIZE_WEIGHTS, start=1)
}
GENERATORS: Mapping[str, Generator] = {
    "spot": Generator(_spot, 1.0, {"nodes": 32, "between_s": 520.0, "swing": 5.0, **_SIZES}),
    "gang": Generator(_gang, 12.0, {"nodes": 16, "up_s": 5400.0, "down_s": 7200.0}),
    "lives": Generator(_lives, 7.0, {"nodes": 32, "wall_h": 24.0}),
    "failures": Generator(
        _failures, 365.0, {"nodes": 512, "per_node_year": 1.2, "lemons": 0.02, "repeat": 0.35}
    ),
    "prices": Generator(
        _prices, 365.0, {"mean": 10.0, "on_demand": 40.0, "between_days": 19.0, "step": 0.3}
    ),
    "carbon": Generator(_carbon, 30.0, {"mean": 256.0, "swing": 0.5, "noise": 0.2}),
}

_LIMITS: Mapping[str, tuple[float, float]] = {
    "nodes": (1, 100_000),
    "between_s": (0.1, 1e9),
    "up_s": (1, 1e9),
    "down_s": (1, 1e9),
    "wall_h": (0.1, 10_000),
    "per_node_year": (0.001, 100_000),
    "lemons": (0, 1),
    "repeat": (0, 0.95),
    "mean": (0, 1e6),
    "on_demand": (0, 1e6),
    "between_days": (1, 36_500),
    "step": (0, 10),
    "noise": (0, 10),
    "swing": (0, 100),
    "spot swing": (0.01, 100),
    **dict.fromkeys(_SIZES, (0, 1)),
}
"""The least and the most of each parameter: beyond them a generator divides by 0, or does not end.
Units are in the names; shares are from 0 to 1."""


def make_trace(name: str, seed: int, days: float | None, given: Parameters) -> EventStream:
    """A trace of a generator. given: parameters that replace its defaults.

    Raises DataError for a parameter that the generator does not have, or a value beyond its limits.
    """
    generator = GENERATORS[name]
    for key, value in given.items():
        if key not in generator.defaults:
            raise DataError(
                f"{name} has no parameter {key!r}",
                where="command line, --set",
                remedy=f"use one of: {', '.join(generator.defaults)}",
            )
        least, most = _LIMITS.get(f"{name} {key}", _LIMITS[key])
        if not least <= value <= most or (key == "nodes" and value % 1):
            kind = "a whole number" if key == "nodes" else "a number"
            raise DataError(
                f"{name} cannot be made with {key}={value:g}",
                where="command line, --set",
                remedy=f"give {kind} from {least:g} to {most:g}",
            )
    length = generator.days if days is None else days
    return generator.make(seed, length, {**generator.defaults, **given})


# --- fits ---------------------------------------------------------------------------------------
def fit_trace(stream: EventStream) -> list[Fit]:
    """The generators whose kind of trace this is, with parameters."""
    kinds = {event.kind for event in stream.events}
    churn = churn_of(stream)
    fits = []
    if "fail" in kinds:
        fits.append(_fit_failures(stream, churn))
    elif churn.lost > 1:
        fits.append(_fit_churn(stream, churn))
    if "price" in kinds:
        fits.append(_fit_prices(stream))
    if "carbon" in kinds:
        fits.append(_fit_carbon(stream))
    if not fits:
        raise DataError(
            "no generator makes traces of this kind",
            where=stream.header.source,
            remedy="give a trace in which nodes are lost, or prices or intensities change",
        )
    return fits


def _fit_churn(stream: EventStream, churn: Churn) -> Fit:
    most, lives = churn.most, churn.lives
    at_wall = sum(life > 0.95 * lives[-1] for life in lives) / len(lives)
    if at_wall >= 0.25:
        return Fit("lives", {"nodes": most, "wall_h": lives[-1] / 3600})
    instants = sum(churn.bursts.values())
    if most > 1 and churn.bursts.get(most, 0) >= 0.1 * instants:
        up, down = _runs(stream, churn)
        return Fit("gang", {"nodes": most, "up_s": up, "down_s": down})
    # Losses in the busier half of the spans of six hours, over those in the quieter half.
    full = int(stream.seconds // _SPAN)
    counts = [0] * full
    for at in {event.t_s for event in stream.events if event.kind == "preempt"}:
        if at < full * _SPAN:
            counts[int(at // _SPAN)] += 1
    counts.sort()
    low, high = sum(counts[: full // 2]), sum(counts[full - full // 2 :])
    swing = max(1.0, high / low) if low else 1.0
    between = stream.seconds / instants * (swing**0.5 + swing**-0.5) / 2
    sizes = Counter[int]()
    for size, many in churn.bursts.items():
        sizes[min(size, 6)] += many
    shares = {f"size_{k}": sizes[k] / instants for k in range(1, 7)}
    return Fit("spot", {"nodes": most, "between_s": between, "swing": swing, **shares})


def _runs(stream: EventStream, churn: Churn) -> tuple[float, float]:
    """Mean seconds until a loss while nodes are there, and until the next nodes while none is."""
    ends = [*(at for at, _ in churn.counts[1:]), stream.seconds]
    up = down = 0.0
    starts = 0
    before = 0
    for (at, count), end in zip(churn.counts, ends, strict=True):
        up, down = (up + end - at, down) if count else (up, down + end - at)
        starts += bool(count and not before)
        before = count
    return up / max(1, sum(churn.bursts.values())), down / max(1, starts)


def _fit_failures(stream: EventStream, churn: Churn) -> Fit:
    counts = sorted(churn.by_node.values(), reverse=True)
    total, worst = 0, 0
    for count in counts:
        if total >= 0.25 * churn.lost:
            break
        total, worst = total + count, worst + 1
    last: dict[str, float] = {}
    again = 0
    for event in stream.events:
        if event.kind == "fail":
            again += event.t_s - last.get(event.node, -_DAY) < _DAY / 4
        if event.kind == "recover":
            last[event.node] = event.t_s
    return Fit(
        "failures",
        {
            "nodes": churn.nodes,
            "per_node_year": churn.per_node_day * 365,
            "lemons": worst / churn.nodes,
            "repeat": again / max(1, churn.lost),
        },
    )


def _fit_prices(stream: EventStream) -> Fit:
    """Over all places: medians would be kinder, means are what a bill follows."""
    last: dict[tuple[str, str], TraceEvent] = {}
    steps, gaps, values, fixed = [], [], [], []
    for event in stream.events:
        if event.kind != "price" or event.value <= 0:
            continue
        values.append(event.value)
        fixed.append(float(event.extra.get("on_demand", event.value)))
        before = last.get((event.zone, event.gpu))
        if before is not None:
            steps.append(log(event.value / before.value))
            gaps.append(event.t_s - before.t_s)
        last[event.zone, event.gpu] = event
    return Fit(
        "prices",
        {
            "mean": _mean(values),
            "on_demand": max(_mean(fixed), _mean(values)),
            "between_days": max(1.0, _mean(gaps) / _DAY) if gaps else 365.0,
            "step": _mean([step * step for step in steps]) ** 0.5,
        },
    )


def _fit_carbon(stream: EventStream) -> Fit:
    """Mean, swing of the hourly means and spread around them, of all zones."""
    by_hour: dict[int, list[float]] = {}
    for event in stream.events:
        if event.kind == "carbon":
            by_hour.setdefault(int(event.t_s // 3600) % 24, []).append(event.value)
    hours = {hour: _mean(values) for hour, values in by_hour.items()}
    mean = _mean(list(hours.values()))
    rest = [(v - hours[hour]) ** 2 for hour, values in by_hour.items() for v in values]
    swing = (max(hours.values()) - min(hours.values())) / mean if mean else 0.0
    return Fit(
        "carbon",
        {"mean": mean, "swing": swing, "noise": _mean(rest) ** 0.5 / mean if mean else 0.0},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
