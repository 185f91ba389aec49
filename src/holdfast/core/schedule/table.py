"""Pipeline schedules as data: which action runs when, on every rank of one pipeline.

A model is cut into stages, a step into microbatches. A `Schedule` lists the actions of every rank
of the pipeline, in the order in which that rank runs them. Ranks are numbered by their index on the
mesh axis `pp`. Nothing else decides the order: the same table is checked (`check`), timed
(`timing`), drawn (`draw`), written (`csv`) and executed.

    stage     a run of decoder blocks; `rank_of[stage]` holds it. More stages than ranks is
              what interleaved and bidirectional schedules are made of.
    F         forward: needs the activation of the stage before
    B         the whole backward: needs its own forward and the gradient of the stage behind
    I, W      the same backward in two: the gradient of the input, which the stage before waits
              for, and the gradient of the weights, which nobody waits for (zero bubble,
              arXiv 2401.10241)
    Overlapped    actions that run as one, so that the transfers of one hide behind the
              arithmetic of the other (DualPipe, arXiv 2412.19437, section 3.2.1)

Transfers are not in the table, because they follow from it. The result of an action goes to the
rank of the neighbouring stage once it exists, and no sender waits for its receiver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.errors import LayoutError


class ScheduleError(LayoutError):
    """A table that cannot be read, is not complete, is out of order, or would wait forever."""


class ActionKind(StrEnum):
    """The computation of an action; the values are the letters of torch's own tables."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One computation of one stage on one microbatch. Prints as torch's: `1F0`, `3B7`."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class OverlappedActions:
    """Actions that begin together and end together; none of them may need another of them."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})OVERLAP_F_B"


ScheduleCell = Action | OverlappedActions


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """What passes from stage to stage: an activation leaving a stage forwards, or (`gradient`)
    the gradient of what entered it, leaving backwards."""

    stage: int
    microbatch: int
    gradient: bool = False


@dataclass(frozen=True)
class Schedule:
    """The table of one pipeline: `actions[rank]` in order of execution.

    `rank_of[stage]` is the index on `pp` of the rank that holds the stage. A table without any
    backward (validation, generation) is a schedule too. Nothing is verified here: see
    `check.check_schedule`.

    done: actions of earlier windows of a schedule that does not end with a step. is_open: some
    actions of its microbatches are left to later windows.
    """

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[ScheduleCell, ...], ...]
    done: frozenset[Action] = frozenset()
    is_open: bool = False

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def has_backward(self) -> bool:
        return any(
            action.kind is not ActionKind.FORWARD
            for row in self.actions
            for cell in row
            for action in actions_of(cell)
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)


def actions_of(cell: ScheduleCell) -> tuple[Action, ...]:
    """The actions of one cell of the table: itself, or the parts of an overlapped one."""
    return cell.actions if isinstance(cell, OverlappedActions) else (cell,)


def value_produced(action: Action) -> Value | None:
    """Return the value that other actions may wait for; None for W, whose gradient of the weights
    stays here."""
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return None
    return Value(action.stage, action.microbatch, gradient=action.kind is not ActionKind.FORWARD)


def values_needed(action: Action, stages: int) -> tuple[Value, ...]:
    """Return the inputs that `action` needs before it can begin, in a pipeline of `stages`.

    F needs the activation of the stage before. B and I need their own forward and the gradient
    of the stage behind. W needs I of its own stage, which counts as that stage's gradient.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return (Value(stage - 1, microbatch),) if stage > 0 else ()
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return (Value(stage, microbatch, gradient=True),)
    own = Value(stage, microbatch)
    return (own, Value(stage + 1, microbatch, gradient=True)) if stage + 1 < stages else (own,)


def gpipe(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965, figure 2c).

    Every rank keeps the activations of all microbatches. If there are `virtual` stages a rank,
    stage s is on rank s % ranks. A rank then runs its stages one after another, forwards and then
    in reverse (breadth-first looping, arXiv 2211.05953, section 4). The backwards go through the
    microbatches in the same order as the forwards, so gradients arrive in the tree's order.
    """
    _require_microbatches("gpipe", ranks, microbatches, 1)
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        rows.append(
            tuple(Action(s, ActionKind.FORWARD, m) for s in stages for m in range(microbatches))
            + tuple(
                Action(s, ActionKind.BACKWARD, m)
                for s in reversed(stages)
                for m in range(microbatches)
            )
        )
    return Schedule("gpipe", microbatches, loop_stages(ranks, virtual), tuple(rows))


def one_f_one_b(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """One forward, one backward (PipeDream-flush: Narayanan et al., arXiv 2006.09503, section
    2.2; arXiv 2104.04473, figure 4).

    Rank r runs p - r - 1 forwards ahead, and then a backward after every forward. So it keeps the
    activations of at most p - r microbatches. The bubble is GPipe's.

    Raises LayoutError with fewer microbatches than ranks. `virtual` is 1: with more stages it would
    be another schedule (interleaved), with an order of its own.
    """
    _require_microbatches("1f1b", ranks, microbatches, ranks)
    rows = []
    for rank in range(ranks):
        ahead = ranks - rank - 1
        row = [Action(rank, ActionKind.FORWARD, m) for m in range(ahead)]
        for m in range(ahead, microbatches):
            row += [
                Action(rank, ActionKind.FORWARD, m),
                Action(rank, ActionKind.BACKWARD, m - ahead),
            ]
        row += [
            Action(rank, ActionKind.BACKWARD, m) for m in range(microbatches - ahead, microbatches)
        ]
        rows.append(tuple(row))
    return Schedule("1f1b", microbatches, loop_stages(ranks, 1), tuple(rows))


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): stage s is on rank s % ranks, so the bubble
    is 1 / `virtual` of 1F1B's.

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


def forward_only(
    ranks: int, microbatches: int, virtual: int = 1, is_folded: bool = False
) -> Schedule:
    """Forwards alone, for validation: nothing is kept, any number of microbatches will do.
    is_folded: the placement of the two stages of a rank is a V."""
    _require_microbatches("forward", ranks, microbatches, 1)
    rank_of = v_stages(ranks) if is_folded else loop_stages(ranks, virtual)
    rows = tuple(
        tuple(
            Action(s, ActionKind.FORWARD, m)
            for s, holder in enumerate(rank_of)
            if holder == rank
            for m in range(microbatches)
        )
        for rank in range(ranks)
    )
    return Schedule("forward", microbatches, rank_of, rows)


def loop_stages(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s % ranks."""
    return tuple(range(ranks)) * virtual


def v_stages(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and up again: rank r has the stages r and 2 ranks - 1 - r."""
    return (*range(ranks), *reversed(range(ranks)))


def first_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The same table without the microbatches from `microbatches` on. A table that can run can
    also run without all actions of some microbatches, because no other one needs them."""
    rows = tuple(
        tuple(kept for cell in row if (kept := _without_late(cell, microbatches)) is not None)
        for row in schedule.actions
    )
    return replace(schedule, microbatches=microbatches, actions=rows)


def _without_late(cell: ScheduleCell, microbatches: int) -> ScheduleCell | None:
    kept = tuple(a for a in actions_of(cell) if a.microbatch < microbatches)
    return OverlappedActions(kept) if len(kept) > 1 else next(iter(kept), None)


def _require_microbatches(name: str, ranks: int, microbatches: int, least: int) -> None:
    if microbatches < least:
        raise LayoutError(
            f"the schedule {name} over {ranks} ranks needs at least {least} microbatches, "
            f"there are {microbatches}",
            where="layout.schedule",
            remedy=f"use {least} or more microbatches a replica"
            + (", fewer stages, or the schedule gpipe" if least > 1 else ""),
        )
