"""Arithmetic of the data ledger: which positions were used, how often, by which rank.

The ledger of a run is a set of entries. Each is a range of positions of the global sample order,
with the hash of the tokens fed for it. Each sample was used exactly once on two conditions. The
entries of step N cover [position(N), position(N+1)) once, and the sample order is a permutation in
every epoch. Nothing here reads a file or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]  # [start, stop)

STAND_IN_KEY = "stands_in"  # key of an entry that the agent made from the data; see `LedgerEntry`


@dataclass(frozen=True)
class LedgerEntry:
    """One range that one rank fed (or skipped, with a reason) in one step.

    is_stand_in: made from the data by the agent, for a rank that was lost after its gradient had
    come. It counts only where the lost one's own entry did not come after all.
    """

    step: int
    rank: int
    microbatch: int
    start: int
    stop: int
    source: str = ""
    hash: str = ""
    skip_reason: str = ""
    is_stand_in: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # `core.data.group_order.GroupFate` of its groups

    @property
    def range(self) -> Range:
        return (self.start, self.stop)

    @staticmethod
    def from_json(step: int, rank: int, value: Mapping[str, Any]) -> LedgerEntry:
        """An entry of `events.BatchFed`; keys of a newer version are left aside."""
        return LedgerEntry(
            step,
            rank,
            int(value["microbatch"]),
            int(value["start"]),
            int(value["stop"]),
            str(value.get("source", "")),
            str(value.get("hash", "")),
            str(value.get("skipped", "")),
            bool(value.get(STAND_IN_KEY, False)),
            tuple(tuple(int(n) for n in group) for group in value.get("groups", ())),
        )


def drop_redundant_stand_ins(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries of one step without needless reconstructed ones. Each range counts once,
    by the worker that fed it. A reconstructed entry counts only if no worker reported its range."""
    everything = list(entries)
    out = [entry for entry in everything if not entry.is_stand_in]
    for entry in everything:
        if entry.is_stand_in and not any(
            e.start < entry.stop and entry.start < e.stop for e in out
        ):
            out.append(entry)
    return out


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The union, as ranges that neither touch nor overlap, in order; empty ones vanish."""
    out: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def uncovered_ranges(ranges: Iterable[Range], start: int, stop: int) -> list[Range]:
    """The parts of [start, stop) that no range covers."""
    out: list[Range] = []
    at = start
    for low, high in merge_ranges(ranges):
        if low > at and at < stop:
            out.append((at, min(low, stop)))
        at = max(at, high)
    if at < stop:
        out.append((at, stop))
    return out


def repeated_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The positions that more than one range covers, merged."""
    out: list[Range] = []
    reached = None
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if reached is not None and start < reached:
            out.append((start, min(stop, reached)))
        reached = stop if reached is None else max(reached, stop)
    return merge_ranges(out)


def entries_touching(entries: Sequence[LedgerEntry], part: Range) -> list[LedgerEntry]:
    """The entries that touch a range, in order of position, then rank."""
    found = [e for e in entries if e.start < part[1] and part[0] < e.stop]
    return sorted(found, key=lambda e: (e.start, e.stop, e.rank))
