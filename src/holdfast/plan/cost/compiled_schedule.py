"""A schedule's table as plain numbers, so that the planner can execute it thousands of times.

The model of time is that of `core/schedule/timing.py`, but transfers cost more. Each boundary
between stages on two ranks has a link in each direction. A link carries one transfer at a time.

    hidden    a transfer waits for its link; of the ranks, only the one that needs its result waits
    blocking  the sender computes nothing while it sends, the receiver nothing while it receives.
              An overlapped cell hides its own transfers, as it is meant to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Action, ActionKind, Schedule, actions_of, value_produced
from holdfast.core.schedule.timing import max_in_flight

Work = tuple[tuple[int, ActionKind], ...]
"""What an entry computes: (stage, kind) of each of its actions."""

NOTHING: Work = ()
_FIRST_HALF, _SECOND_HALF = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
_ENDS = (ActionKind.BACKWARD, _SECOND_HALF)

Entry = tuple[int, int, int, int, int]
"""One entry of a rank's row: (rank, work, needs, needs_link, gives_link).

work: an index in `works`. needs: the entry whose result crosses `needs_link` to this rank; -1:
none. gives_link: the link that its result leaves by; 0: none. A cell with one action is one entry.
An overlapped cell has two more for each of its actions but the last. One waits for its input, one
gives its result.
"""


@dataclass(frozen=True)
class CompiledSchedule:
    """A table as numbers. Links 2 s + 1 and 2 s + 2 lead from stage s to stage s + 1 and back."""

    rank_of: tuple[int, ...]
    works: tuple[Work, ...]
    entries: tuple[Entry, ...]  # in an order in which they can run
    microbatches: tuple[int, ...]  # of each entry
    rows: tuple[tuple[int, ...], ...]  # the entries of each rank, in its order
    in_flight: tuple[int, ...]  # as of `max_in_flight`
    late: tuple[int, ...]  # of each rank: most passes at once between two halves of a backward

    @property
    def ranks(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class EntryTimes:
    """Seconds of each entry."""

    arrived: Sequence[float]  # when its result is where it is needed
    stopped: Sequence[float]  # when its rank is free again

    @property
    def makespan(self) -> float:
        return max(self.stopped)


@lru_cache(maxsize=1024)
def compiled(schedule: str, pp: int, microbatches: int, virtual: int) -> CompiledSchedule:
    """Compile the table of this name. Raises LayoutError where there is none."""
    return compile_schedule(build_schedule(schedule, pp, microbatches, virtual))


def compile_schedule(table: Schedule) -> CompiledSchedule:
    """Compile a table that can run (`check_schedule`)."""
    return _Compiler(table).compile()


def run_entries(
    program: CompiledSchedule, works: Sequence[float], sends: Sequence[float], is_blocking: bool
) -> EntryTimes:
    """Time every entry. works: seconds by `program.works`. sends: seconds of a transfer by link;
    the first is of no link."""
    if is_blocking:
        free = [0.0] * program.ranks
        arrived, stopped = list[float](), list[float]()
        arrive_at, stop_at = arrived.append, stopped.append
        waits = [len(work) == 1 for work in program.works]
        for rank, work, needs, needs_link, link in program.entries:
            at = free[rank]
            if needs >= 0:
                send, there = sends[needs_link], arrived[needs]
                waited = (at if at > there else there) + send
                at = waited if waits[work] else max(at, there + send)
            at += works[work]
            arrive_at(at)
            if waits[work]:
                at += sends[link]
            free[rank] = at
            stop_at(at)
        return EntryTimes(arrived, stopped)
    free, link_free = [0.0] * program.ranks, [0.0] * len(sends)
    arrived, stopped = list[float](), list[float]()
    arrive_at, stop_at = arrived.append, stopped.append
    for rank, work, needs, _, link in program.entries:
        at = free[rank]
        if needs >= 0 and arrived[needs] > at:
            at = arrived[needs]
        free[rank] = at = at + works[work]
        stop_at(at)
        if link:
            begin = link_free[link]
            link_free[link] = at = (at if at > begin else begin) + sends[link]
        arrive_at(at)
    return EntryTimes(arrived, stopped)


@dataclass(frozen=True)
class _Role:
    """Of one stage and kind of action. needs, gives: the first place in `_Compiler._made` of values
    that cross to another rank. The links are those that these values cross."""

    work: Work
    needs: int = -1  # -1: none
    needs_link: int = 0
    gives: int = -1
    gives_link: int = 0


class _Compiler:
    """Runs a table without time, each rank until it has to wait, and writes down its entries."""

    def __init__(self, table: Schedule) -> None:
        self._table = table
        self._works: dict[Work, int] = {}
        self._entries: list[Entry] = []
        self._microbatches: list[int] = []
        self._rows: list[list[int]] = [[] for _ in range(table.ranks)]
        # the entry that gives each value (see `_begin`); -1: an earlier window did; -2: none yet
        self._made = [-2] * (2 * table.stages * table.microbatches)
        # by `_value_`: an Enum's `value` is a descriptor, and a kind itself hashes in Python. This
        # is read for every action of every schedule that is tried.
        self._roles = {
            (stage, kind._value_): self._role(stage, kind)
            for stage in range(table.stages)
            for kind in ActionKind
        }
        for action in table.done:
            value = value_produced(action)
            if value is not None:
                self._made[self._begin(value.stage, value.gradient) + value.microbatch] = -1

    def compile(self) -> CompiledSchedule:
        table = self._table
        at, ready = [0] * table.ranks, deque(range(table.ranks))
        blocked: defaultdict[int, list[int]] = defaultdict(list)
        while ready:
            rank = ready.popleft()
            row = table.actions[rank]
            while at[rank] < len(row):
                cell = actions_of(row[at[rank]])
                missing = self._missing(cell)
                if missing >= 0:
                    blocked[missing].append(rank)
                    break
                for made in self._write(rank, cell):
                    if made in blocked:
                        ready.extend(blocked.pop(made))
                at[rank] += 1
        return CompiledSchedule(
            table.rank_of,
            tuple(self._works),
            tuple(self._entries),
            tuple(self._microbatches),
            tuple(map(tuple, self._rows)),
            self._in_flight(),
            self._most((_FIRST_HALF,), (_SECOND_HALF,), keeps=False),
        )

    def _in_flight(self) -> tuple[int, ...]:
        table = self._table
        if table.done or not table.has_backward:
            return max_in_flight(table)
        return self._most((ActionKind.FORWARD,), _ENDS)

    def _most(
        self, begin: Sequence[ActionKind], end: Sequence[ActionKind], *, keeps: bool = True
    ) -> tuple[int, ...]:
        """Of each rank, the most passes at once after an action of `begin` and before one of `end`.
        keeps: an entry that ends a pass keeps it until its own end."""
        begins = [sum(kind in begin for _, kind in work) for work in self._works]
        ends = [sum(kind in end for _, kind in work) for work in self._works]
        peaks = []
        for row in self._rows:
            kept = peak = 0
            for number in row:
                work = self._entries[number][1]
                kept += begins[work]
                peak = max(peak, kept - (0 if keeps else ends[work]))
                kept -= ends[work]
            peaks.append(peak)
        return tuple(peaks)

    def _begin(self, stage: int, is_gradient: bool) -> int:
        """The first place of values that leave `stage` in `_made`; they are in the order of their
        microbatches."""
        return (2 * stage + is_gradient) * self._table.microbatches

    def _role(self, stage: int, kind: ActionKind) -> _Role:
        work: Work = ((stage, kind),)
        is_gradient = kind is not ActionKind.FORWARD
        before, after = (stage + 1, stage - 1) if is_gradient else (stage - 1, stage + 1)
        role = _Role(work)
        if kind is ActionKind.BACKWARD_WEIGHT:
            return role
        if self._crosses(stage, before):
            needs, link = self._begin(before, is_gradient), _link(before, is_gradient)
            role = replace(role, needs=needs, needs_link=link)
        if self._crosses(stage, after):
            gives, link = self._begin(stage, is_gradient), _link(stage, is_gradient)
            role = replace(role, gives=gives, gives_link=link)
        return role

    def _crosses(self, stage: int, other: int) -> bool:
        rank_of = self._table.rank_of
        return 0 <= other < len(rank_of) and rank_of[other] != rank_of[stage]

    def _missing(self, cell: Sequence[Action]) -> int:
        """A value that the cell needs and no rank has made; -1: none."""
        for action in cell:
            role = self._roles[action.stage, action.kind._value_]
            if role.needs >= 0 and self._made[role.needs + action.microbatch] == -2:
                return role.needs + action.microbatch
        return -1

    def _write(self, rank: int, cell: Sequence[Action]) -> list[int]:
        """Write a cell's entries. Return the values that they make."""
        *firsts, last = cell
        for action in firsts:
            self._entry(rank, NOTHING, action, gives=False)
        work = self._roles[last.stage, last.kind._value_].work
        if firsts:
            work = tuple((action.stage, action.kind) for action in cell)
        made = [self._entry(rank, work, last)]
        made += [self._entry(rank, NOTHING, each, needs=False) for each in firsts]
        return made

    def _entry(
        self, rank: int, work: Work, action: Action, needs: bool = True, gives: bool = True
    ) -> int:
        role = self._roles[action.stage, action.kind._value_]
        number, source, link, made = len(self._entries), -1, 0, -1
        if needs and role.needs >= 0:
            source = self._made[role.needs + action.microbatch]
            link = role.needs_link if source >= 0 else 0
        if gives and role.gives >= 0:
            made = role.gives + action.microbatch
            self._made[made] = number
        index = self._works.setdefault(work, len(self._works))
        self._entries.append((rank, index, source, link, role.gives_link if made >= 0 else 0))
        self._rows[rank].append(number)
        self._microbatches.append(action.microbatch)
        return made


def _link(stage: int, is_gradient: bool) -> int:
    """The link that leaves `stage`: forwards to the next one, or (a gradient) back."""
    return 2 * stage if is_gradient else 2 * stage + 1
