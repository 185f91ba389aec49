"""Proves that a schedule can be executed: complete, in order, free of deadlock.

**Complete**: every stage runs every microbatch forward once. Unless the table has no backward at
all, it also runs each backward once: as one B, or as one I and one W. No action is on a rank that
does not hold its stage.

**In order and free of deadlock** are one question, answered by running the table without time.
Every rank takes its actions strictly in order. An action begins when the values that it needs are
there (`schedule.needed`), and its own value is there when it ends. Sending never blocks, so an
action can only help other ranks. The order in which ready ranks are served does not matter: either
everything runs, or the same ranks are blocked in any order. Each of them then waits for an action
of another blocked rank (or for a later one of its own). So the waits form a circle, and the error
names that circle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import chain

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    ScheduleCell,
    ScheduleError,
    Value,
    actions_of,
    value_produced,
    values_needed,
)


def check_schedule(schedule: Schedule) -> None:
    """Return when `schedule` is complete, in order and free of deadlock.

    Raises ScheduleError, which names the action (and the rank) that is wrong, missing or waits.
    """
    for _ in execution_order(schedule):
        pass


def execution_order(schedule: Schedule) -> Iterator[tuple[int, ScheduleCell]]:
    """Every (rank, cell) in an order in which they can run: each after all that it needs.

    Raises ScheduleError: before the first cell when the table is not complete, and in the
    midst of them when the rest would wait for ever.
    """
    where = f"schedule {schedule.name}"
    for problem in chain(_misplaced(schedule), _incomplete(schedule)):
        raise ScheduleError(problem, where=where)
    at = [0] * schedule.ranks  # how many cells each rank has run
    there = {value for action in schedule.done if (value := value_produced(action)) is not None}
    blocked: defaultdict[Value, list[int]] = defaultdict(list)
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        while at[rank] < len(schedule.actions[rank]):
            cell = schedule.actions[rank][at[rank]]
            missing = _missing_values(cell, schedule, there)
            if missing:
                blocked[missing[0]].append(rank)
                break
            yield rank, cell
            at[rank] += 1
            for action in actions_of(cell):
                value = value_produced(action)
                if value is not None:
                    there.add(value)
                    ready.extend(blocked.pop(value, ()))
    if any(done < len(row) for done, row in zip(at, schedule.actions, strict=True)):
        raise ScheduleError(_describe_deadlock(schedule, at, there), where=where)


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """What does not exist of the stages, ranks and microbatches, and actions on a rank that does
    not hold their stage. Only the first sentence counts: those after it build on what it denies."""
    if schedule.microbatches < 1 or not schedule.stages or not schedule.ranks:
        yield "it has no microbatch, no stage or no rank"
    for rank in range(schedule.ranks):
        if rank not in schedule.rank_of:
            yield f"rank {rank} holds no stage"
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.ranks:
            yield f"stage {stage} is on rank {rank}, but there are {schedule.ranks} ranks"
    for rank, row in enumerate(schedule.actions):
        for cell in row:
            for action in actions_of(cell):
                if not 0 <= action.stage < schedule.stages:
                    yield f"rank {rank} runs {action}, but there are {schedule.stages} stages"
                if not 0 <= action.microbatch < schedule.microbatches:
                    yield (
                        f"rank {rank} runs {action}, but there are {schedule.microbatches} "
                        "microbatches"
                    )
                if schedule.rank_of[action.stage] != rank:
                    yield (
                        f"rank {rank} runs {action}, but rank {schedule.rank_of[action.stage]} "
                        f"holds stage {action.stage}"
                    )


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """What lacks one F, or one B or one I and one W, of a stage and microbatch, or has it twice."""
    seen = set(schedule.done)
    for rank, row in enumerate(schedule.actions):
        for cell in row:
            if isinstance(cell, OverlappedActions) and len(cell.actions) < 2:
                yield f"rank {rank} overlaps {cell}, which is fewer than two actions"
            for action in actions_of(cell):
                if action in seen:
                    yield f"rank {rank} runs {action} twice"
                seen.add(action)
    backward = schedule.has_backward
    if schedule.is_open:  # the rest comes in a later window
        return
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            if Action(stage, ActionKind.FORWARD, microbatch) not in seen:
                yield f"{Action(stage, ActionKind.FORWARD, microbatch)} is missing"
            kinds = ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
            had = [str(kind) for kind in kinds if Action(stage, kind, microbatch) in seen]
            if backward and had not in (["B"], ["I", "W"]):
                yield (
                    f"stage {stage} needs B, or I and W, of microbatch {microbatch}, and has "
                    f"{' and '.join(had) or 'none of them'}"
                )


def _missing_values(cell: ScheduleCell, schedule: Schedule, there: set[Value]) -> list[Value]:
    return [
        value
        for action in actions_of(cell)
        for value in values_needed(action, schedule.stages)
        if value not in there
    ]


def _describe_deadlock(schedule: Schedule, at: list[int], there: set[Value]) -> str:
    """The sentence about ranks that wait for each other (or one for itself)."""
    home = {
        value: (rank, action)
        for rank, row in enumerate(schedule.actions)
        for cell in row
        for action in actions_of(cell)
        if (value := value_produced(action)) is not None
    }

    def waits(rank: int) -> tuple[ScheduleCell, int, Action]:
        cell = schedule.actions[rank][at[rank]]
        return cell, *home[_missing_values(cell, schedule, there)[0]]

    rank = next(r for r in range(schedule.ranks) if at[r] < len(schedule.actions[r]))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = waits(rank)[1]
    circle = path[path.index(rank) :]
    if len(circle) == 1:
        cell, _, action = waits(rank)
        if action in actions_of(cell):
            return f"rank {rank} overlaps {cell}, of which one action needs another ({action})"
        return f"rank {rank} runs {cell} before {action}, which it needs"
    waiting = (
        f"rank {r} at {cell} waits for {action} of rank {other}"
        for r in circle
        for cell, other, action in (waits(r),)
    )
    return f"deadlock: {', '.join(waiting)}"
