"""What the commands of `holdfast trace` print and draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdfast.api.progress import LongWork
from holdfast.errors import DataError
from holdfast.show.output import print_table
from holdfast_lab.charts.steps_chart import Points, steps_svg, steps_text
from holdfast_lab.traces.events import EventStream, TraceHeader
from holdfast_lab.traces.generators import Fit
from holdfast_lab.traces.summary import Churn, Level, churn_of, levels_of, quantile

_LEVELS = (("price", "$/h"), ("carbon", "gCO2/kWh"), ("net", "Gbit/s"), ("slow", "x"))
_MOST_LEVELS = 12


def print_stream(stream: EventStream) -> None:
    """A table of the trace, with levels of prices, intensities, links and slow nodes."""
    header = stream.header
    with LongWork("adding up the trace"):
        churn = churn_of(stream)
        kinds = Counter(event.kind for event in stream.events)
        levels = [(levels_of(stream, kind), kind, unit) for kind, unit in _LEVELS if kinds[kind]]
    rows: list[tuple[str, str]] = [("trace", f"{header.trace}, {header.rows:,} rows")]
    rows += [("begins", header.t0)] if header.t0 else []
    rows += [("zones", _shortened(header.zones))] if header.zones else []
    rows += [("length", _time(stream.seconds))]
    rows += [("events", ", ".join(f"{kind} {many:,}" for kind, many in kinds.items()) or "none")]
    rows += _churn_rows(churn) if churn.nodes else []
    rows += [("gaps", _gap_words(stream))] if header.gaps else []
    rows += [("", sentence) for sentence in remarks_on(header)]
    print_table(rows)
    for found, kind, unit in levels:
        _print_levels(found, kind, unit)


def _churn_rows(churn: Churn) -> list[tuple[str, str]]:
    lives = churn.lives
    rows = [
        (
            "nodes",
            f"{churn.at_start} at the start, {churn.least} to {churn.most}, "
            f"{churn.at_end} at the end, {churn.mean:.1f} in the mean, {churn.nodes} names",
        ),
        ("node-days", f"{churn.node_days:,.3f}"),
        ("lost", f"{churn.lost:,} nodes, {churn.per_node_day:.3g} a node-day"),
    ]
    if not churn.lost:
        return rows
    instants = sum(churn.bursts.values())
    rows += [
        (
            "bursts",
            f"{instants:,} instants, {churn.lost / instants:.2f} nodes each: "
            + _shortened([f"{size} x{many}" for size, many in churn.bursts.items()]),
        ),
        (
            "lives",
            "quartiles "
            + ", ".join(_time(quantile(lives, q)) for q in (0.25, 0.5, 0.75))
            + f"; 90 % {_time(quantile(lives, 0.9))}, longest {_time(lives[-1])}",
        ),
    ]
    if churn.gaps_s:
        mean = sum(churn.gaps_s) / len(churn.gaps_s)
        rows.append(("between", f"{_time(mean)} in the mean, spread {spread(churn.gaps_s):.2f}"))
    if churn.down_s:
        middle = _time(quantile(churn.down_s, 0.5))
        rows.append(("outages", f"{len(churn.down_s):,} ended, median {middle}"))
    if max(churn.by_node.values()) > 1:
        worst = max(churn.by_node, key=lambda name: churn.by_node[name])
        rows.append(("worst node", f"{worst}: lost {churn.by_node[worst]} times"))
    return rows


def spread(values: Sequence[float]) -> float:
    """The coefficient of variation; that of random failures is 1."""
    mean = sum(values) / len(values)
    square = sum((value - mean) ** 2 for value in values) / len(values)
    return float(square**0.5 / mean) if mean else 0.0


def _print_levels(levels: list[Level], kind: str, unit: str) -> None:
    if not levels:
        return
    print()
    print_table(
        [
            (each.name, each.changes, *(f"{v:,.4g}" for v in (each.mean, each.least, each.most)))
            for each in levels[:_MOST_LEVELS]
        ],
        (f"{kind}, {unit}", "events", "mean", "least", "most"),
    )
    if len(levels) > _MOST_LEVELS:
        print(f"and {len(levels) - _MOST_LEVELS} more; --json has all")


def remarks_on(header: TraceHeader) -> list[str]:
    """What was out of order, dropped, unknown or assumed."""
    found = []
    if header.disorder:
        found.append(f"{header.disorder:,} rows were out of order")
    if header.duplicates:
        found.append(f"{header.duplicates:,} exact duplicates were dropped")
    if header.gaps:
        found.append(f"{len(header.gaps)} gaps in which nothing is known")
    return [*found, *header.notes]


def _gap_words(stream: EventStream) -> str:
    lengths = [stop - start for start, stop in stream.header.gaps]
    share = sum(lengths) / stream.seconds if stream.seconds else 0.0
    return f"{len(lengths)}, {share:.0%} of the time, longest {_time(max(lengths))}"


def stream_as_json(stream: EventStream) -> dict[str, Any]:
    """The header and the summary of a stream."""
    churn = asdict(churn_of(stream))
    counts = churn.pop("counts")
    lives = churn.pop("lives")
    return {
        "header": asdict(stream.header),
        "seconds": stream.seconds,
        "events": dict(Counter(event.kind for event in stream.events)),
        "churn": {
            **churn,
            "changes_of_count": len(counts),
            "per_node_day": churn["lost"] / churn["node_days"] if churn["node_days"] else 0.0,
            "life_quartiles_s": [quantile(lives, q) for q in (0.25, 0.5, 0.75)],
        },
        "levels": {
            kind: [asdict(level) for level in levels_of(stream, kind)] for kind, _ in _LEVELS
        },
    }


def _shortened(words: Sequence[str], most: int = 8) -> str:
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + rest


def _time(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.2f} d"
    return f"{seconds / 3600:.2f} h" if seconds >= 600 else f"{seconds:.4g} s"


# --- fit, make and plot ---------------------------------------------------------------------------
_UNITS = {"price": "$/h", "carbon": "gCO2/kWh"}


def print_fits(fits: Sequence[Fit]) -> None:
    for each in fits:
        print(f"{each.generator}:")
        print_table([(f"  {key}", f"{value:.6g}") for key, value in each.parameters.items()])
        words = ["holdfast", "trace", "make", each.generator, "--to", "made.jsonl"]
        print(" ", *words, *(f"--set {key}={v:.6g}" for key, v in each.parameters.items()))


def parameters_of(given: Sequence[str]) -> dict[str, float]:
    """The values of `--set key=value`."""
    from holdfast_lab.engine.settings import refuse_repeated

    found = {}
    for each in given:
        key, equals, value = each.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise DataError(
                f"{each!r} is no parameter",
                where="command line, --set",
                remedy="write key=number, such as --set nodes=32",
            )
    refuse_repeated([each.partition("=")[0] for each in given], "--set")
    return found


def lines_of(stream: EventStream) -> list[tuple[str, Points]]:
    """(title, points) of what can be drawn: nodes, then prices and intensities by place."""
    found: list[tuple[str, Points]] = []
    churn = churn_of(stream)
    if churn.nodes:
        found.append(("nodes that work", [(at, float(n)) for at, n in churn.counts]))
    levels: dict[str, list[tuple[float, float]]] = {}
    for event in stream.events:
        if event.kind in _UNITS:
            place = " ".join(filter(None, (event.gpu, event.zone)))
            title = f"{event.kind}, {_UNITS[event.kind]}, {place}"
            levels.setdefault(title, []).append((event.t_s, event.value))
    found += sorted(levels.items())
    if not found:
        raise DataError(
            "nothing of this trace changes over time",
            where=stream.header.source,
            remedy="give a trace of nodes, prices or intensities",
        )
    return found


def print_lines(stream: EventStream, lines: Sequence[tuple[str, Points]], most: int) -> None:
    for title, points in lines[:most]:
        print(title)
        print("\n".join(steps_text(points, stream.seconds)))
    if len(lines) > most:
        print(f"and {len(lines) - most} more; --zone and --gpu choose")


def svg_of(stream: EventStream, lines: Sequence[tuple[str, Points]]) -> str:
    """The first line that can be drawn."""
    title, points = lines[0]
    return steps_svg(points, stream.seconds, f"{stream.header.trace}: {title}", stream.header.gaps)
