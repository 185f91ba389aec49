"""A second, slow opinion on schedules, and tables made at random.

Nothing here uses what `schedule_check` and `schedule_time` are made of: the rules are written
down once more, from the definition of each action.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    ScheduleCell,
)

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def parts(cell: ScheduleCell) -> list[Action]:
    return list(cell.actions) if isinstance(cell, OverlappedActions) else [cell]


def may_run(action: Action, done: set[Action], stages: int) -> bool:
    """F after F of the stage before; B and I after their own F and the stage behind; W after I."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is F:
        return stage == 0 or Action(stage - 1, F, microbatch) in done
    if kind is W:
        return Action(stage, I, microbatch) in done
    behind = {Action(stage + 1, B, microbatch), Action(stage + 1, I, microbatch)}
    return Action(stage, F, microbatch) in done and (stage == stages - 1 or bool(behind & done))


def runs_to_the_end(schedule: Schedule) -> bool:
    """Search every interleaving of the ranks (any rank that can, steps): does any reach the end?

    A state is how far each rank has come. Exponential in the number of ranks: for small tables.
    """
    ends = tuple(len(row) for row in schedule.actions)
    pending, seen = [(0,) * schedule.ranks], set[tuple[int, ...]]()
    while pending:
        state = pending.pop()
        if state == ends:
            return True
        if state in seen:
            continue
        seen.add(state)
        done = {
            action
            for row, at in zip(schedule.actions, state, strict=True)
            for cell in row[:at]
            for action in parts(cell)
        }
        for rank, at in enumerate(state):
            if at < ends[rank] and all(
                may_run(action, done, schedule.stages)
                for action in parts(schedule.actions[rank][at])
            ):
                pending.append((*state[:rank], at + 1, *state[rank + 1 :]))
    return False


def is_complete(schedule: Schedule) -> bool:
    """Every stage and microbatch: one F, and one B or one I and one W (or no backward at all)."""
    count = Counter(a for row in schedule.actions for cell in row for a in parts(cell))
    backward = any(action.kind is not F for action in count)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            had = "".join(
                str(kind) * count.pop(Action(stage, kind, microbatch), 0) for kind in ActionKind
            )
            if had not in (("FB", "FIW") if backward else ("F",)):
                return False
    return not count and all(
        schedule.rank_of[action.stage] == rank
        for rank, row in enumerate(schedule.actions)
        for cell in row
        for action in parts(cell)
    )


def random_table(
    random: Random, stages: int, ranks: int, microbatches: int, backward: bool = True
) -> Schedule:
    """A valid table: actions that may run are drawn one after another.

    Stages are on ranks at random (each rank has one at least); each backward is undivided or split.
    """
    rank_of = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
    random.shuffle(rank_of)
    left = {Action(s, F, m) for s in range(stages) for m in range(microbatches)}
    if backward:
        for stage in range(stages):
            for microbatch in range(microbatches):
                kinds = (I, W) if random.random() < 0.5 else (B,)
                left |= {Action(stage, kind, microbatch) for kind in kinds}
    rows: list[list[ScheduleCell]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while left:
        action = random.choice(sorted(a for a in left if may_run(a, done, stages)))
        left.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return Schedule("random", microbatches, tuple(rank_of), tuple(map(tuple, rows)))


def random_executable_table(seed: int, ranks_: int = 3) -> Schedule:
    """Any table that can be executed: actions in a random order that respects what each needs."""
    chance = Random(seed)
    stages, microbatches = chance.randint(ranks_, 7), chance.randint(1, 6)
    rank_of = [*range(ranks_), *(chance.randrange(ranks_) for _ in range(stages - ranks_))]
    chance.shuffle(rank_of)
    rows: list[list[Action]] = [[] for _ in range(ranks_)]
    backward = chance.random() < 0.8
    ready = [Action(0, ActionKind.FORWARD, m) for m in range(microbatches)]
    while ready:
        action = ready.pop(chance.randrange(len(ready)))
        rows[rank_of[action.stage]].append(action)
        stage, m = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD and stage + 1 < stages:
            ready.append(Action(stage + 1, ActionKind.FORWARD, m))
        elif action.kind is ActionKind.FORWARD:
            ready += [
                Action(stage, chance.choice([ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT]), m)
            ]
            if not backward:
                ready.pop()
        elif action.kind is not ActionKind.BACKWARD_WEIGHT:
            if stage > 0:
                kind = chance.choice([ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT])
                ready.append(Action(stage - 1, kind, m))
            if action.kind is ActionKind.BACKWARD_INPUT:
                ready.append(Action(stage, ActionKind.BACKWARD_WEIGHT, m))
    return Schedule(f"random{seed}", microbatches, tuple(rank_of), tuple(map(tuple, rows)))


def with_row(schedule: Schedule, rank: int, row: list[ScheduleCell]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return Schedule(schedule.name, schedule.microbatches, schedule.rank_of, tuple(rows))
