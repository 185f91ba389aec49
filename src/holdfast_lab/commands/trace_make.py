"""`holdfast trace fit`, `make` and `plot`: their tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import DataError
from holdfast.show.output import print_table
from holdfast_lab.charts.steps_chart import Points, steps_svg, steps_text
from holdfast_lab.engine.settings import refuse_repeated
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.generators import Fit
from holdfast_lab.traces.summary import churn_of

_LEVELS = {"price": "$/h", "carbon": "gCO2/kWh"}


def print_fits(fits: Sequence[Fit]) -> None:
    for each in fits:
        print(f"{each.generator}:")
        print_table([(f"  {key}", f"{value:.6g}") for key, value in each.parameters.items()])
        words = ["holdfast", "trace", "make", each.generator, "--to", "made.jsonl"]
        print(" ", *words, *(f"--set {key}={v:.6g}" for key, v in each.parameters.items()))


def parameters_of(given: Sequence[str]) -> dict[str, float]:
    """The values of `--set key=value`."""
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
        if event.kind in _LEVELS:
            place = " ".join(filter(None, (event.gpu, event.zone)))
            title = f"{event.kind}, {_LEVELS[event.kind]}, {place}"
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
