"""Which records count after restarts."""

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
from holdfast.core.data.lineage import DuplicateFilter, split_effective
from holdfast.events import Evaluated, GenerationStarted, Record, StepDone, StopRequested


def record(generation: int, event: object, sequence: int = 0) -> Record:
    return Record(generation, "w", sequence, 0.0, event)  # type: ignore[arg-type]


def step(generation: int, number: int) -> Record:
    return record(generation, StepDone(1.0, 1, 1.0, 1.0, 1.0, step=number))


def start(generation: int, after: int) -> Record:
    return record(generation, GenerationStarted({}, "start", step=after))


def test_work_beyond_the_restart_is_superseded() -> None:
    records = [start(1, 0), *(step(1, n) for n in range(1, 8)), start(2, 5), step(2, 6)]
    effective, superseded = split_effective(records)
    assert superseded == [step(1, 6), step(1, 7)]
    assert effective == [r for r in records if r not in superseded]


def test_a_later_restart_from_further_back_cuts_every_older_generation() -> None:
    records = [start(1, 0), *(step(1, n) for n in range(1, 5)), start(2, 3), step(2, 4), step(2, 5)]
    records += [start(3, 1), step(3, 2)]
    effective, _ = split_effective(records)
    assert [(r.generation, r.event.step) for r in effective if isinstance(r.event, StepDone)] == [
        (1, 1),
        (3, 2),
    ]


def test_a_generation_whose_start_was_lost_counts_up_to_the_next_start() -> None:
    records = [start(1, 0), step(1, 1), *(step(2, n) for n in (2, 3, 4)), start(3, 2), step(3, 3)]
    effective, superseded = split_effective(records)
    assert superseded == [step(2, 3), step(2, 4)]
    assert [r.event.step for r in effective if isinstance(r.event, StepDone)] == [1, 2, 3]


def test_records_of_no_generation_stay() -> None:
    loose = record(0, StopRequested("SIGINT", step=9))
    assert split_effective([loose, start(1, 0), step(1, 1)])[0][0] == loose


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 5)), min_size=1, max_size=6))
def test_every_step_counts_once_however_often_it_was_done(restarts: list[tuple[int, int]]) -> None:
    """Each generation begins at a step that the history has reached, and goes on some steps."""
    records, reached = [], 0
    for generation, (back, forward) in enumerate(restarts, start=1):
        begin = max(0, reached - back)
        records.append(start(generation, begin))
        records += [step(generation, n) for n in range(begin + 1, begin + forward + 1)]
        reached = begin + forward
    effective, superseded = split_effective(records)
    done = [r.event.step for r in effective if isinstance(r.event, StepDone)]
    assert sorted(done) == list(range(1, reached + 1))
    assert len(effective) + len(superseded) == len(records)


def test_what_is_told_once_more_counts_once() -> None:
    records = [step(1, n) for n in range(1, 6)]
    records += [start(2, 5), *(step(2, n) for n in range(3, 9))]  # 3 to 5 are told once more
    once = DuplicateFilter()
    kept = [*once(records[:7]), *once(records[7:])]
    assert [r.event.step for r in kept if isinstance(r.event, StepDone)] == list(range(1, 9))
    assert [r for r in kept if r.generation == 2 and r.event.step < 5] == []


def test_a_validation_that_is_told_once_more_counts_once() -> None:
    def validation(generation: int, number: int) -> Record:
        return record(generation, Evaluated(1.0, 1.0, 1, 1.0, step=number))

    first = [start(1, 0), step(1, 1), step(1, 2), validation(1, 2), start(2, 2)]
    assert DuplicateFilter()([*first, validation(2, 2), step(2, 3)]) == [*first, step(2, 3)]
    untold = [each for each in first if each != validation(1, 2)]
    kept, _ = split_effective(DuplicateFilter()([*untold, validation(2, 2), step(2, 3)]))
    assert kept == [*untold, validation(2, 2), step(2, 3)]


def test_what_nobody_lived_to_tell_is_taken_from_who_tells_it_late() -> None:
    records = [step(1, 1), step(1, 2), start(2, 3), step(2, 2), step(2, 3), step(2, 4)]
    kept = DuplicateFilter()(records)
    assert [(r.generation, r.event.step) for r in kept] == [(1, 1), (1, 2), (2, 3), (2, 3), (2, 4)]


def test_a_step_that_was_lost_in_between_is_news_when_it_is_told_late() -> None:
    done = [start(1, 0), *(step(1, n) for n in range(1, 9))]
    after = [start(2, 4), step(2, 5), start(3, 6), step(3, 5), step(3, 6), step(3, 7)]
    kept, _ = split_effective(DuplicateFilter()([*done, *after]))
    steps = [(r.generation, r.event.step) for r in kept if isinstance(r.event, StepDone)]
    assert steps == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (3, 6), (3, 7)]


def test_who_does_not_know_all_starts_rather_tells_a_step_twice_than_never() -> None:
    """Generation 2 began from step 4, and only another node's agent was told so."""
    board = DuplicateFilter(all_starts=False)
    for record in [start(1, 0), *(step(1, n) for n in range(1, 9)), start(3, 8)]:
        assert board.is_new(record.generation, record.event)
    assert board.is_new(3, step(3, 8).event)
    knows_all = DuplicateFilter()
    knows_all([start(1, 0), *(step(1, n) for n in range(1, 9)), start(2, 8), start(3, 8)])
    assert not knows_all.is_new(3, step(3, 8).event)


# --- the ledger against sets of positions ---------------------------------------------------------
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
