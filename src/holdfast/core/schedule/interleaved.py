"""1F1B with several stages a rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    Schedule,
    first_microbatches,
    loop_stages,
)


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Interleaved 1F1B: stage s is on rank s % ranks, so the bubble is 1 / `virtual` of 1F1B's.

    Microbatches go through in groups of `ranks`: a rank runs a group through its first stage, then
    the same group through its second one. Rank r runs 2 (p - r - 1) + (virtual - 1) p forwards
    ahead, and then a backward after every forward. A last group that is not full is run as a full
    one without the microbatches that do not exist.
    """
    full = -(-microbatches // ranks) * ranks
    forwards = [
        (turn, m)
        for first in range(0, full, ranks)
        for turn in range(virtual)
        for m in range(first, first + ranks)
    ]
    rows = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - rank - 1) + (virtual - 1) * ranks, len(forwards))
        row: list[Action] = []
        for number in range(len(forwards) + ahead):
            if number < len(forwards):
                turn, m = forwards[number]
                row.append(Action(turn * ranks + rank, ActionKind.FORWARD, m))
            if number >= ahead:
                turn, m = forwards[number - ahead]
                stage = (virtual - 1 - turn) * ranks + rank
                row.append(Action(stage, ActionKind.BACKWARD, m))
        rows.append(tuple(row))
    whole = Schedule("interleaved", full, loop_stages(ranks, virtual), tuple(rows))
    return first_microbatches(whole, microbatches)
