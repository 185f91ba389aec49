"""An entry that stands in counts only where nobody else's is there."""

from __future__ import annotations

from holdfast.core.data.data_ledger import STAND_IN_KEY, LedgerEntry, drop_redundant_stand_ins


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
