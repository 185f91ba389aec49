"""Pipelines that are not emptied at the end of a step: one window of the table for each step.

The table never ends. In each turn a rank runs one forward and one backward on what came in the turn
before. The forward of microbatch k is in turn k + s on stage s of p. Its backward is in turn
k + 2 (p - 1) - s. The delays are those of PipeMare's pipeline (arXiv 1910.05124, section 2).

The actions of one step are a window. All ranks begin it together, as they have voted on the step
before. The gradients of exactly the step's microbatches are complete at its end. So stage s enters
a window with 2 (p - 1) - s forwards and s backwards of it done. In a window of m microbatches it
runs m forwards and m backwards, of which the last are of steps that come. No rank waits for
another in it if all stages take the same time.

Microbatches count from the first of the window's step. Those from m on belong to later steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.schedule.table import Action, ActionKind, Schedule, loop_stages


def step_window(name: str, ranks: int, microbatches: int, before: int, after: int) -> Schedule:
    """The window of a step of `microbatches`.

    before: its microbatches, and those behind them, that the window of the step before has looked
    ahead at; 0: the pipeline is empty. after: microbatches of later steps that this one may look
    ahead at; 0: the pipeline is emptied. More than `look_ahead` are never of use.
    """
    done = [set(_until(ranks, stage, 0, before)) for stage in range(ranks)]
    rows = []
    for stage in range(ranks):
        actions = set(_until(ranks, stage, microbatches, after)) - done[stage]
        rows.append(tuple(sorted(actions, key=lambda action: _turn(ranks, action))))
    most = max(before, microbatches + min(after, look_ahead(ranks)))
    return Schedule(
        name, most, loop_stages(ranks, 1), tuple(rows), done=frozenset().union(*done), is_open=True
    )


def steady_window(name: str, ranks: int, microbatches: int) -> Schedule:
    """The window of a step in the midst of a run: with as many microbatches in it as it begins
    with."""
    ahead = look_ahead(ranks)
    return step_window(name, ranks, microbatches, ahead, ahead)


def look_ahead(ranks: int) -> int:
    """Microbatches of later steps that the first stage has begun at the end of a step."""
    return 2 * (ranks - 1)


def _until(ranks: int, stage: int, microbatches: int, after: int) -> Iterator[Action]:
    """All actions of a stage up to the end of a step of `microbatches`. after: later microbatches
    that there are."""
    forwards = min(look_ahead(ranks) - stage, after)
    for microbatch in range(microbatches + forwards):
        yield Action(stage, ActionKind.FORWARD, microbatch)
    for microbatch in range(microbatches + min(stage, after)):
        yield Action(stage, ActionKind.BACKWARD, microbatch)


def _turn(ranks: int, action: Action) -> tuple[int, bool]:
    """The turn of an action, and its place in it: a backward frees memory, so it comes first. Only
    the last stage runs both of one microbatch in a turn."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return microbatch + stage, stage < ranks - 1
    return microbatch + look_ahead(ranks) - stage, stage == ranks - 1
