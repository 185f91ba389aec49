"""An entry that stands in counts only where nobody else's is there."""

from __future__ import annotations

from holdfast.core.data.data_ledger import STANDS_IN, Entry, settled


def _entry(rank: int, start: int, stop: int, *, stands_in: bool = False) -> Entry:
    value = {"microbatch": 0, "start": start, "stop": stop, STANDS_IN: stands_in}
    return Entry.from_json(1, rank, value)


def test_the_lost_ones_own_entry_wins_over_one_that_stands_in() -> None:
    own, other = _entry(0, 0, 4), _entry(1, 4, 8)
    assert settled([_entry(2, 0, 4, stands_in=True), own, other]) == [own, other]


def test_one_stands_in_where_nobody_else_has_the_range() -> None:
    other, one = _entry(1, 4, 8), _entry(2, 0, 4, stands_in=True)
    again = _entry(3, 0, 4, stands_in=True)
    assert settled([one, other, again]) == [other, one]


def test_what_was_really_fed_twice_stays_twice() -> None:
    assert len(settled([_entry(0, 0, 4), _entry(1, 0, 4)])) == 2
