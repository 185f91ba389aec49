"""Columns, keys, units and repairs of files that other people wrote: the borders of the readers.

A reader counts in its `Findings` what it does not read and each repair that it makes. The counts
become notes of the trace's header, one line each with the first place. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from holdfast.borders import Border, Unread
from holdfast.errors import DataError, nearest_of
from holdfast_lab.traces.events import TraceHeader
from holdfast_lab.traces.rows import as_date, as_number, cells_of, refuse_longer_row, row_error

_MEANING: Mapping[str, tuple[object, ...]] = {
    "currency": ("USD", "usd", "$", "US$"),
    "timezone": ("UTC", "Z", "GMT"),
    **dict.fromkeys(("tz", "time_zone", "utc_offset"), ("UTC", "Z", "GMT", 0, "0", "+00:00")),
    **dict.fromkeys(("unit", "units", "per"), ()),
    **dict.fromkeys(("scale", "factor", "multiplier"), (1, "1", "1.0")),
}
"""Columns that say how other columns are meant, and the values at which they change nothing."""
_REMEDY = "convert the values to the units of docs/studies/traces.md, and remove it"


def border(name: str, used: str, harmless: str = "", entry: str = "column") -> Border:
    """Return the border of a kind of file. It counts unknown entries, and refuses those that change
    a meaning. used, harmless: names with | between them."""
    one, other = (frozenset(filter(None, each.split("|"))) for each in (used, harmless))
    return Border(name, one, other, _MEANING, "count", entry)


OUTAGES = border(
    "a table of outages",
    "System|nodes|nodenumz|Prob Started|Prob Fixed|Down Time|Facilities|Hardware|Human Error|"
    "Network|Undetermined|Software",
    "machine type|procstot|procsinnode|nodenum|node install|node prod|node decom|fru type|mem|"
    "cputype|memtype|num intercon|purpose",
)
STAYS = border("a table of stays", "SN|location|insert|remove|event", "duration|out")
COMPONENTS = border("a table of components", "component|count|category", "percent|percent_reported")
LIVES = border(
    "a table of lives", "lifetime_s|other_ops|preemptible", "name|zone|machine_type|insert_end_time"
)
LIVED = border(
    "a table of lives in order",
    "lifetime_s|other_ops|insert_end_time|zone",
    "preemptible|name|machine_type",
)
PRICES = border(
    "a table of prices", "date|machine_type|region|usd_per_hour_spot|usd_per_hour_on_demand"
)
MIX = border(
    "a table of generation",
    "avg_CI|WND|SUN|WAT|OIL|NG|COL|NUC|OTH|GEO|BIO|UNK|wind|solar|hydro|oil|gas|coal|nuclear|"
    "other|geothermal|biomass|unknown|storage|battery",
)
LINKS = border(
    "a table of links",
    "src_region|dst_region|throughput_received|throughput_recieved|min_rtt|avg_rtt|max_rtt|success|"
    "src_tier|dst_tier|src_instance_class|dst_instance_class",
    "iperf3_connections|iperf3_runtime|tag|stdout_path|stderr_path|throughput_sent|"
    "cpu_utilization|mdev_rtt",
)
TRANSFERS = border("a table of transfer prices", "src|dst|dest|cost|src_tier|dest_tier")
NAMED = border("rows of named nodes", "time|change|node")
OPERATIONS = border(
    "a table of operations",
    "dp_rank|stage|rank|step|optype|start_ts|duration",
    "seq_id|mc|mb_id|gmc",
)
TICKS = border("a series of ticks", "data|metadata", entry="key")
TICKS_METADATA = border("metadata of ticks", "gap_seconds", "zone|name", "key")
_DECISIONS = "throughut-opt|throughput-opt|liveput-truth|liveput-predict"
LISTED = border(
    "a listed change",
    "nodes|duration",
    "throughput_opt_strategy|liveput_truth_strategy|liveput_predict_strategy",
    "key",
)
INTERVALS = border("an interval", "interval|duration", _DECISIONS, "key")
POINTS = border("a point in time", "Time|GPUs", entry="key")
STEPS = border("results of steps", "step_t_nodelay|step_t_noblk", "job_meta", "key")
ADVISOR = border(
    "a table of monthly shares", "spot_advisor|ranges", "instance_types|global_rate", "key"
)
HEADER = border(
    "the header of a trace",
    "|".join(each.name for each in fields(TraceHeader)),
    "systems|causes|slowdown",
    "key",
)
EVENT = border(
    "an event of a trace",
    "t_s|kind|node|zone|gpu|value|source",
    "cause|on_demand|usd_per_gb|rtt_min_ms|rtt_ms|rtt_max_ms|src_tier|dst_tier|dest_tier|"
    "src_instance_class|dst_instance_class|step|stage|stopped|rack",
    "key",
)


class Findings:
    """What a reader found in one file: entries that it does not read, and repairs."""

    def __init__(self, border: Border | None, source: str):
        self.border, self.source = border, source
        self._unread: dict[str, Unread] = {}
        self._counts: dict[str, tuple[int, str]] = {}
        self._zones = {True: (0, ""), False: (0, "")}  # dates with a zone, and without

    def count(self, what: str, line: int, many: int = 1) -> None:
        """Count a repair at a line (an item, a row) of the file."""
        found, first = self._counts.get(what, (0, f"{self.source}:{line}"))
        self._counts[what] = found + many, first

    def take(self, entries: Mapping[str, object], where: str, border: Border | None = None) -> None:
        """Count the entries that are not read. Raises DataError for one that changes a meaning, and
        for one that looks like another one that is missing."""
        border = border or self.border
        assert border is not None
        names = border.check(entries, where, DataError, _REMEDY)
        for name in names:
            missing = [each for each in border.used if each not in entries]
            if near := nearest_of(name, missing, 0.8):
                raise DataError(
                    f"{border.entry} {name!r} is not read, and there is no {near!r}",
                    where=where,
                    remedy=f"rename it to {near} and give values in that unit, or rename it",
                )
        if names:
            self._unread.setdefault(border.name, Unread(border)).add(names, where)

    def date(self, cell: str, line: int) -> float | None:
        """Seconds of a wall clock, or None. Counts dates with and without a zone."""
        found = as_date(cell)
        if found is not None:
            has_zone = bool(re.search(r"(Z|[+-]\d\d:?\d\d)$", cell.strip()))
            many, first = self._zones[has_zone]
            self._zones[has_zone] = many + 1, first or f"{self.source}:{line}"
        return found

    def notes(self) -> tuple[str, ...]:
        """One sentence for each kind of finding."""
        out = [f"{many:,} {what}, first in {first}" for what, (many, first) in self._counts.items()]
        (aware, _), (naive, first) = self._zones[True], self._zones[False]
        if naive:
            some = f"{naive:,} of {naive + aware:,} dates have" if aware else "dates have"
            out.append(f"{some} no time zone, and are taken as UTC, first in {first}")
        return (*out, *(unread.line() for unread in self._unread.values()))


# --- tables ---------------------------------------------------------------------------------------
def table_of(
    text: str, findings: Findings, keys: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, row by column) of a table with a header, of the columns that its border uses. keys:
    those that must be there. Other columns are counted, or refused."""
    source, border = findings.source, findings.border
    assert border is not None
    rows = cells_of(text, source)
    _, header = next(rows, (0, []))
    listed = {name.lower(): name for name in (*border.harmless, *border.plain, *border.used)}
    exact = set(header)
    header = [n if (k := listed.get(n.lower(), n)) in exact else k for n in header]
    missing = [key for key in keys if key not in header]
    twice = [name for name in border.used if header.count(name) > 1]
    if missing or twice:
        raise DataError(
            f"there is no column {missing[0]!r}" if missing else f"two columns are {twice[0]!r}",
            where=f"{source}:1",
            remedy=f"give a header line with {', '.join(keys)}, each once",
        )
    places = {name: header.index(name) for name in header if name in border.used}
    rest = [place for place, name in enumerate(header) if name not in border.used | border.harmless]
    most = max(places[key] for key in keys)
    for line, cells in rows:
        if len(cells) <= most:
            raise row_error(source, line, cells, f"give all {len(header)} columns of the header")
        refuse_longer_row(header, cells, source, line)
        if rest:
            others = {header[place]: cells[place] for place in rest if place < len(cells)}
            findings.take(dict.fromkeys(places) | others, f"{source}:{line}")
        yield line, {k: cells[place] for k, place in places.items() if place < len(cells)}


# --- units ----------------------------------------------------------------------------------------
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SAME = {
    **dict.fromkeys(("msec", "millis", "milliseconds"), "ms"),
    **dict.fromkeys(("sec", "secs", "seconds"), "s"),
    **dict.fromkeys(("mins", "minutes"), "min"),
    "nanoseconds": "ns",
    "microseconds": "us",
    "hr": "h",
    "hours": "h",
    "days": "d",
}
_COUNTS = re.compile(
    r"counts?|nodes?|n|instances|vms|machines|gpus|devices|available|availability|capacity|"
    r"running|active|number|num|total|size|value|workers"
)
_OTHERS = re.compile(
    r"usd|eur|prices?|costs?|lbs?|pounds|kg|t|tons?|mwh|mj|mw|gw|%|percent|pct|share|fraction|"
    r"temperature|watts|w"
)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|%", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def seconds_of_unit(name: str) -> float | None:
    """Seconds of the unit in the name of a column of times; None if it names none."""
    units = (_SECONDS.get(_SAME.get(word, word)) for word in reversed(_words(name)))
    return next(filter(None, units), None)


def refuse_other_quantity(name: str, source: str, *, is_count: bool) -> None:
    """Raise DataError for a column whose name is no number of nodes, or no zone of gCO2/kWh."""
    counts, others = (any(map(p.fullmatch, _words(name))) for p in (_COUNTS, _OTHERS))
    if others or (is_count and not counts):
        meant = "a number of nodes" if is_count else "gCO2/kWh of the zone that it names"
        raise DataError(
            f"the column {name!r} would be read as {meant}, and its name says otherwise",
            where=f"{source}:1",
            remedy="rename it, in that unit, or give a table of docs/studies/traces.md",
        )


def refuse_other_clock(first_s: float, source: str, line: int, is_stated: bool) -> None:
    """Raise DataError for times whose first is no length of time. is_stated: the file names the
    unit. Seconds since 1970 that are read as milliseconds give 10 to 58 days."""
    is_short = not is_stated and 9e5 <= first_s < 5e6
    if first_s > 1e11 or is_short:
        unit = "seconds since 1970, read as milliseconds" if is_short else "milliseconds, or less"
        raise DataError(
            f"times begin at {first_s:,.0f} s, which looks like {unit}",
            where=f"{source}:{line}",
            remedy="name the unit in a header (time_s,... or time_ms,...), or begin at 0",
        )


def optional_number(cell: str, key: str, source: str, line: int) -> float | None:
    """The number of a cell that may be empty. Raises DataError for another text, or below 0."""
    if not cell:
        return None
    value = as_number(cell)
    if value is None or value < 0:
        raise DataError(
            f"{key} is {cell[:40]!r}",
            where=f"{source}:{line}",
            remedy="write a number of 0 or more, with a decimal point, or leave it empty",
        )
    return value
