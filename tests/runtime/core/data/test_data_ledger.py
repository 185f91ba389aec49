"""Range arithmetic against sets of positions. An entry that stands in counts only where nobody
else's is there."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.data.data_ledger import (
    STAND_IN_KEY,
    LedgerEntry,
    Range,
    drop_redundant_stand_ins,
    entries_touching,
    merge_ranges,
    repeated_ranges,
    uncovered_ranges,
)

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def positions(ranges: list[Range]) -> Counter[int]:
    return Counter(p for start, stop in ranges for p in range(start, stop))


@given(ranges=RANGES)
def test_merge_is_the_union(ranges: list[Range]) -> None:
    merged = merge_ranges(ranges)
    assert set(positions(merged)) == set(positions(ranges))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(ranges=RANGES, start=st.integers(0, 40), stop=st.integers(0, 40))
def test_gaps_are_what_no_range_covers(ranges: list[Range], start: int, stop: int) -> None:
    stop = max(start, stop)
    fed = set(positions(ranges))
    assert positions(uncovered_ranges(ranges, start, stop)) == Counter(
        set(range(start, stop)) - fed
    )


@given(ranges=RANGES)
def test_overlaps_are_positions_covered_twice(ranges: list[Range]) -> None:
    twice = {p for p, count in positions(ranges).items() if count > 1}
    assert positions(repeated_ranges(ranges)) == Counter(twice)


def test_covering_orders_by_position_then_rank() -> None:
    entries = [LedgerEntry(1, 2, 0, 0, 4), LedgerEntry(1, 0, 1, 4, 8), LedgerEntry(1, 1, 0, 0, 4)]
    assert [e.rank for e in entries_touching(entries, (0, 5))] == [1, 2, 0]
    assert entries_touching(entries, (8, 9)) == []


def test_entry_reads_older_and_newer_json() -> None:
    old = {"microbatch": 1, "start": 2, "stop": 4}
    assert LedgerEntry.from_json(3, 0, old) == LedgerEntry(3, 0, 1, 2, 4)
    new = old | {"source": "a", "hash": "ff", "skipped": "spike", "invented": 1}
    assert LedgerEntry.from_json(3, 0, new) == LedgerEntry(3, 0, 1, 2, 4, "a", "ff", "spike")


# --- entries that stand in ---------------------------------------------------------------------
def _entry(rank: int, start: int, stop: int, *, stands_in: bool = False) -> LedgerEntry:
    value = {"microbatch": 0, "start": start, "stop": stop, STAND_IN_KEY: stands_in}
    return LedgerEntry.from_json(1, rank, value)


def test_the_lost_ones_own_entry_wins_over_one_that_stands_in() -> None:
    own, other = _entry(0, 0, 4), _entry(1, 4, 8)
    assert drop_redundant_stand_ins([_entry(2, 0, 4, stands_in=True), own, other]) == [own, other]


def test_one_stands_in_where_nobody_else_has_the_range() -> None:
    other, one = _entry(1, 4, 8), _entry(2, 0, 4, stands_in=True)
    again = _entry(3, 0, 4, stands_in=True)
    assert drop_redundant_stand_ins([one, other, again]) == [other, one]


def test_what_was_really_fed_twice_stays_twice() -> None:
    assert len(drop_redundant_stand_ins([_entry(0, 0, 4), _entry(1, 0, 4)])) == 2
