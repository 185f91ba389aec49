"""Schedule tables as text, in the form that `torch.distributed.pipelining` reads and writes.

A row is a rank, and a cell is an action: stage, letter, microbatch, as `2F0` or `3B7`. An
overlapped pair is `(0F4;3B0)OVERLAP_F_B`. An empty cell is a moment without work and means nothing
here. This is torch's "compute only" form. Its tables may also name what follows from the order of
computation: transfers (`SEND_F`, `RECV_B`, ...), FSDP's gathering (`UNSHARD`, `RESHARD`) and the
final reduction (`REDUCE_GRAD`). Reading leaves those out, writing never produces them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    ScheduleCell,
    ScheduleError,
    actions_of,
)

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_FOLLOWS = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")


def to_csv(schedule: Schedule) -> str:
    """The table as CSV, ranks in order."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(schedule.actions)
    return out.getvalue()


def from_csv(text: str, name: str, rank_of: Sequence[int] | None = None) -> Schedule:
    """Read a table; a stage is on the rank in whose row it stands, unless `rank_of` says so.

    The number of microbatches is one more than the highest. The table is read, not verified:
    call `check.check_schedule` on it. Raises ScheduleError with the place of a cell that is
    no action.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(
            f"this is no CSV ({error})", where=name, remedy="write a row for each rank"
        ) from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()  # empty lines at the end are no ranks
    actions = tuple(
        tuple(
            cell
            for column, written in enumerate(row, 1)
            if (cell := _cell(written.strip(), f"{name}, row {line}, column {column}"))
        )
        for line, row in enumerate(rows, 1)
    )
    flat = [(rank, a) for rank, row in enumerate(actions) for cell in row for a in actions_of(cell)]
    if not flat:
        raise ScheduleError(
            "the table has no action", where=name, remedy="write 0F0, 0B0 and so on"
        )
    if rank_of is None:
        home: dict[int, int] = {}
        for rank, action in flat:
            home.setdefault(action.stage, rank)
        missing = next((s for s in range(max(home)) if s not in home), None)
        if missing is not None:
            raise ScheduleError(
                f"stage {missing} has no action", where=name, remedy=f"write {missing}F0 and so on"
            )
        rank_of = [home[stage] for stage in sorted(home)]
    microbatches = 1 + max(action.microbatch for _, action in flat)
    return Schedule(name, microbatches, tuple(rank_of), actions)


def _cell(text: str, where: str) -> ScheduleCell | None:
    if not text or _FOLLOWS.fullmatch(text):
        return None
    if match := _OVERLAPPED.fullmatch(text):
        return OverlappedActions(
            tuple(_action(part.strip(), where) for part in match[1].split(";"))
        )
    return _action(text, where)


def _action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is no action",
            where=where,
            remedy="write stage, one of F, B, I, W, and microbatch, as in 2F0",
        )
    return Action(int(match[1]), ActionKind(match[2]), int(match[3]))
