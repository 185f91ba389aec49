"""Finds the kind of a file of churn by its form, never by its name, and reads it as a Trace."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.traces.counts import parse_dated_counts, parse_ticks, parse_timed_counts
from holdfast_lab.traces.events import changes_of_stream
from holdfast_lab.traces.lives import parse_lifetimes
from holdfast_lab.traces.named import (
    LIST_VERBS,
    parse_lists,
    parse_minutes,
    parse_named,
    parse_pools,
    parse_time_points,
)
from holdfast_lab.traces.node_changes import ReadOptions, Trace
from holdfast_lab.traces.outages import parse_outages
from holdfast_lab.traces.rows import as_date, as_number, first_rows
from holdfast_lab.traces.stream_file import is_stream, parse_stream

Reader = Callable[[str, str, ReadOptions], Trace]


def load_trace(
    text: str, source: str, *, seed: int = 0, options: ReadOptions | None = None
) -> Trace:
    """A trace of whichever kind the text is. Raises DataError for a kind that is not known here,
    and for a row that cannot be.

    Args:
        text: the file's content.
        source: the file's name, for messages.
        seed: for what the file leaves open; that of `options`, if those are given.
        options: what the file does not say.
    """
    if is_stream(text):
        return changes_of_stream(parse_stream(text, source))
    reader = churn_reader(text)
    if reader is None:
        raise DataError(
            "this is no trace of a known kind",
            where=source,
            remedy="give rows 'time_ms,add|remove,node', 'date, time, count' or 'time_ms,count', "
            "JSON with 'data' and 'metadata.gap_seconds', a table with 'lifetime_s', or one of "
            "outages",
        )
    return reader(text, source, options or ReadOptions(seed=seed))


def churn_reader(text: str) -> Reader | None:
    """The reader of machines that come and go for a text of this form."""
    head = text[:4000].lstrip()
    if head.startswith(("{", "[")):
        return _json_reader(text, head)
    first, data = first_rows(text)
    if "lifetime_s" in first:
        return parse_lifetimes
    if "Prob Started" in first:
        return parse_outages
    if "Timestamp" in first and any("_" in name for name in first):
        return parse_pools
    return _row_reader(data)


def _row_reader(cells: list[str]) -> Reader | None:
    if len(cells) >= 3 and cells[1] in ("add", "remove"):
        return parse_named
    if len(cells) in (2, 3) and as_date(" ".join(cells[:-1])) and _is_whole(cells[-1]):
        return parse_dated_counts
    if len(cells) == 2 and as_number(cells[0]) is not None and _is_whole(cells[1]):
        return parse_timed_counts
    return None


def _json_reader(text: str, head: str) -> Reader | None:
    if head.startswith("{"):
        return parse_ticks if '"data"' in text else None
    line = head.split("\n", 1)[0]
    if line.startswith("[") and any(f'"{verb}"' in line for verb in LIST_VERBS):
        return parse_lists
    try:
        items = parse_json(text)
    except ValueError:
        return None
    keys = items[0].keys() if isinstance(items, list) and items and _is_object(items[0]) else ()
    if "interval" in keys:
        return parse_minutes
    return parse_time_points if {"Time", "GPUs"} <= set(keys) else None


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_whole(cell: str) -> bool:
    return cell.isascii() and cell.lstrip("-").isdigit()
