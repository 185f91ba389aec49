"""Reads and writes traces in their one form: JSON lines, of which the first is the header."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import inf
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.columns import EVENT, HEADER, Findings
from holdfast_lab.traces.events import ORDER, EventStream, TraceEvent, TraceHeader, check_events

_HEADER = {each.name: each for each in fields(TraceHeader) if each.name != "extra"}
_EVENT = [each.name for each in fields(TraceEvent) if each.name != "extra"]
_SHARED = ("node", "zone", "gpu")  # the same in many events
_TEXTS = (*_SHARED, "source")


def is_stream(text: str) -> bool:
    """Return True if the text has the form of a trace that was converted."""
    line = text.lstrip()[:4000].split("\n", 1)[0]
    return line.startswith("{") and '"trace"' in line and '"data"' not in line


def format_stream(stream: EventStream) -> Iterator[str]:
    """The lines of a stream."""
    head = asdict(stream.header)
    extra = head.pop("extra")
    yield json.dumps({**head, **extra})
    for event in stream.events:
        row: dict[str, Any] = {"t_s": event.t_s, "kind": event.kind, "node": event.node}
        row |= {"zone": event.zone, "gpu": event.gpu, "value": event.value}
        yield json.dumps({**row, "source": event.source, **event.extra})


def parse_stream(text: str, source: str) -> EventStream:
    """Read, sort and check a stream. Events that were out of order are counted in the header, and
    exact duplicates are dropped. Raises DataError with file, line and remedy."""
    rows, findings = _lines(text), Findings(EVENT, source)
    number, line = next(rows)
    header = _header(_object(line, f"{source}:{number}"), f"{source}:{number}", findings)
    found: list[tuple[TraceEvent, int]] = []
    texts: dict[str, str] = {}
    for number, line in rows:
        where = f"{source}:{number}"
        event = _event(_object(line, where), where, texts)
        if event.extra:
            findings.take(_object(line, where), where)
        if event.kind not in ORDER:
            check_events([event], [where])
        found.append((event, number))
    disorder = sum(b[0].key < a[0].key for a, b in itertools.pairwise(found))
    if disorder:
        found.sort(key=lambda each: each[0].key)
    kept = _without_duplicates(found)
    events = tuple(event for event, _ in kept)
    check_events(events, (f"{source}:{number}" for _, number in kept))
    notes = tuple(dict.fromkeys((*header.notes, *findings.notes())))
    made = replace(header, notes=notes)
    return EventStream(_counted(made, disorder, len(found) - len(kept)), events)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    start = number = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        number += 1
        line = text[start:end]
        if line.strip():
            yield number, line
        start = end + 1


def _without_duplicates(found: Sequence[tuple[TraceEvent, int]]) -> list[tuple[TraceEvent, int]]:
    """The first of each group of equal events. found: sorted by the events' keys."""
    kept: list[tuple[TraceEvent, int]] = []
    group: list[TraceEvent] = []  # of one key
    for event, number in found:
        if group and (group[0].t_s != event.t_s or group[0].key != event.key):
            group = []
        if event not in group:
            group.append(event)
            kept.append((event, number))
    return kept


def _counted(header: TraceHeader, disorder: int, dropped: int) -> TraceHeader:
    return replace(
        header, disorder=header.disorder + disorder, duplicates=header.duplicates + dropped
    )


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(
            f"{line.strip()[:60]!r} is no JSON object",
            where=where,
            remedy='write one object a line, such as {"t_s": 0, "kind": "join", "node": "a"}',
        )
    return found


def _header(row: Mapping[str, Any], where: str, findings: Findings) -> TraceHeader:
    findings.take(row, where, HEADER)
    known: dict[str, Any] = {}
    for name, each in _HEADER.items():
        if name not in row:
            continue
        value = row[name]
        kind = str(each.type)
        fits = {
            "str": isinstance(value, str),
            "int": _is_number(value) and float(value) == int(value) if _is_number(value) else False,
            "float": _is_number(value) and value >= 0,
        }.get(kind, isinstance(value, list))
        if not fits:
            raise _bad_value(name, value, where)
        known[name] = value
    if not isinstance(known.get("trace"), str):
        raise _bad_value("trace", row.get("trace"), where)
    for name in ("zones", "notes"):
        known[name] = tuple(str(value) for value in known.get(name, ()))
    gaps = known.get("gaps", ())
    if not all(isinstance(g, list) and len(g) == 2 and all(map(_is_number, g)) for g in gaps):
        raise _bad_value("gaps", gaps, where)
    known["gaps"] = tuple((float(a), float(b)) for a, b in gaps)
    extra = {key: value for key, value in row.items() if key not in _HEADER}
    return TraceHeader(**known, extra=extra)


def _event(row: Mapping[str, Any], where: str, known: dict[str, str]) -> TraceEvent:
    """known: texts of events before it, so that equal ones are kept once."""
    if "kind" not in row or "t_s" not in row:
        raise _bad_value("kind" if "kind" not in row else "t_s", None, where)
    for name in ("t_s", "value"):
        if not _is_number(row.get(name, 0.0)):
            raise _bad_value(name, row[name], where)
    for name in ("kind", *_TEXTS):
        if not isinstance(row.get(name, ""), str):
            raise _bad_value(name, row[name], where)
    texts: dict[str, Any] = {
        name: known.setdefault(row.get(name, ""), row.get(name, "")) for name in _SHARED
    }
    texts["source"] = row.get("source", "")
    kind = known.setdefault(row["kind"], row["kind"])
    event = TraceEvent(float(row["t_s"]), kind, value=float(row.get("value", 0.0)), **texts)
    extra = {key: value for key, value in row.items() if key not in _EVENT}
    return replace(event, extra=extra) if extra else event


def _is_number(value: Any) -> bool:
    """Return True for a finite number of JSON; `true` is none."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and -inf < value < inf


def _bad_value(name: str, value: Any, where: str) -> DataError:
    return DataError(
        f"{name} is {str(value)[:60]!r}" if value is not None else f"there is no {name}",
        where=where,
        remedy="see docs/studies/traces.md for the keys and their values",
    )
