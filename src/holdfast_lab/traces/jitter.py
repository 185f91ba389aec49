"""Slow workers as events, from traces of operations and from results per step. Pure but for the
library that reads Parquet, which is imported when it is needed."""

from __future__ import annotations

import io
from collections import defaultdict
from math import isfinite
from statistics import median
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.columns import OPERATIONS, STEPS, Findings
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.node_changes import ReadOptions
from holdfast_lab.traces.rows import as_number

PARQUET = b"PAR1"
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration")
_LONGEST_STEP_S = 1e6  # more is the time of a clock
_LEAST_FACTOR = 1.02
"""A worker that is slower by less than this is not slow: operations vary by about as much."""


def operation_events(data: bytes, source: str, options: ReadOptions) -> EventStream:
    """A Parquet table with one operation of one rank a row. A rank is slow in a step by the time of
    its computations, in medians of those of its stage and kind."""
    findings = Findings(OPERATIONS, source)
    columns = _read_parquet(data, findings)
    steps: dict[int, float] = {}
    durations: dict[tuple[int, str], list[float]] = defaultdict(list)
    work: dict[tuple[int, int], list[tuple[int, str, float]]] = defaultdict(list)
    rows = list(zip(*(columns[name] for name in _COLUMNS), strict=True))
    for number, (_, stage, rank, step, kind, start, seconds) in enumerate(rows, start=1):
        are_numbers = _is_number(start) and _is_number(seconds)
        if not are_numbers or min(start, seconds) < 0 or start + seconds > _LONGEST_STEP_S:
            raise DataError(
                f"start_ts is {start}, duration {seconds}",
                where=f"{source}: row {number}",
                remedy="write seconds since the begin of the step, 0 or more",
            )
        if not (isinstance(kind, str) and all(map(_is_number, (stage, rank, step)))):
            raise DataError(
                f"stage is {stage}, rank {rank}, step {step}, optype {kind}",
                where=f"{source}: row {number}",
                remedy="write numbers, and the operation as text such as forward-compute",
            )
        steps[step] = max(steps.get(step, 0.0), start + seconds)
        if "compute" in kind:
            durations[stage, kind].append(seconds)
            work[step, rank].append((stage, kind, seconds))
    usual = {key: median(values) for key, values in durations.items()}
    begin, at = dict[int, float](), 0.0
    for step in sorted(steps):
        begin[step], at = at, at + steps[step]
    ranks = sorted({rank for _, rank in work})
    names = {rank: f"rank{rank}" for rank in ranks}
    zone, gpu = options.place, options.gpu
    events = [TraceEvent(0.0, "join", name, zone, gpu, 1.0) for name in names.values()]
    for (step, rank), operations in work.items():
        expected = sum(usual[stage, kind] for stage, kind, _ in operations)
        factor = sum(seconds for *_, seconds in operations) / expected if expected else 1.0
        if factor >= _LEAST_FACTOR:
            start, place = begin[step], f"{source}: step {step}"
            base = (names[rank], zone, gpu)
            extra = {"step": step, "stage": operations[0][0]}
            events.append(TraceEvent(start, "slow", *base, factor, place, extra))
            events.append(TraceEvent(start + steps[step], "recover", *base, 1.0, place))
    note = f"{len(steps)} steps, {len(ranks)} ranks; steps are put one after another"
    header = TraceHeader(
        "operations",
        source,
        rows=len(rows),
        zones=(zone,) if zone else (),
        victim_rule="given",
        seconds=at,
        notes=(note, *findings.notes()),
    )
    return EventStream(header, in_order(events))


def _is_number(value: object) -> bool:
    """Return True for a finite number; `true` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _read_parquet(data: bytes, findings: Findings) -> dict[str, list[Any]]:
    source = findings.source
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow", where=source, remedy="pip install 'holdfast[data]'"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        names: list[str] = file.schema_arrow.names
        missing = [name for name in _COLUMNS if name not in names]
        if not missing:
            findings.take(dict.fromkeys(names, "a column"), f"{source}: schema")
        table = None if missing else file.read(columns=list(_COLUMNS))
    except (pyarrow.ArrowException, OSError) as error:
        words = str(error).split("\n")[0][:80]
        raise DataError(
            f"this is no Parquet file that can be read: {words}",
            where=source,
            remedy="fetch it again",
        ) from None
    if table is None:
        raise DataError(
            f"there is no column {missing[0]!r} in this Parquet file",
            where=source,
            remedy=f"give columns {', '.join(_COLUMNS)}",
        )
    return {name: table.column(name).to_pylist() for name in _COLUMNS}


def is_step_results(text: str) -> bool:
    return text.lstrip().startswith("{") and '"step_t_nodelay"' in text


def step_result_events(text: str, source: str, options: ReadOptions) -> EventStream:
    """JSON with `step_t_nodelay` and `step_t_noblk`, each {step: seconds}. The job is slow by the
    ratio of both: what its stragglers cost in that step."""
    findings = Findings(STEPS, source)
    try:
        value = parse_json(text)
        findings.take(value, source)
        pairs = [
            (step, as_number(str(seconds)), as_number(str(value["step_t_noblk"][step])))
            for step, seconds in value["step_t_nodelay"].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        pairs = []
    good = [(step, a, b) for step, a, b in pairs if a is not None and b is not None and a > 0 < b]
    if not good or len(good) < len(pairs):
        raise DataError(
            "the times of the steps do not fit together",
            where=source,
            remedy='write {"step_t_nodelay": {"1": 2.1}, "step_t_noblk": {"1": 1.8}}',
        )
    at, name = 0.0, options.place or "job"
    events = [TraceEvent(0.0, "join", name, value=1.0)]
    for step, seconds, ideal in good:
        place, factor = f"{source}: step {step}", max(1.0, seconds / ideal)
        if seconds < ideal:
            findings.count("steps are faster than without stragglers: taken as fast", int(step))
        events.append(TraceEvent(at, "slow", name, value=factor, source=place))
        at += seconds
        events.append(TraceEvent(at, "recover", name, value=1.0, source=place))
    slowdown = sum(a for _, a, _ in good) / sum(b for *_, b in good)
    header = TraceHeader(
        "steps",
        source,
        rows=len(good),
        victim_rule="given",
        seconds=at,
        notes=(f"{len(good)} steps, slower by {slowdown:.3f} in the mean", *findings.notes()),
        extra={"slowdown": slowdown},
    )
    return EventStream(header, in_order(events))
