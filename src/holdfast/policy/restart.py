"""When to restart and when to give up, and the states that a run passes through.

Pure: the agent feeds it what happened, the simulator may too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class RunState(StrEnum):
    """What a run is doing, as its agent sees it."""

    OPENING = "opening"  # a generation is being set up: restore point, workers forked
    TRAINING = "training"  # every worker has reported ready
    RECOVERING = "recovering"  # a worker, the mover or the template was lost; cleaning up
    LEAVING = "leaving"  # asked to stop: workers save and leave at one common step
    FINISHED = "finished"
    STOPPED = "stopped"  # left early, resumable
    FAILED = "failed"


TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.OPENING: frozenset(
        {
            RunState.TRAINING,
            RunState.RECOVERING,
            RunState.LEAVING,
            RunState.FINISHED,  # nothing was left to do
            RunState.STOPPED,
            RunState.FAILED,
        }
    ),
    RunState.TRAINING: frozenset(
        {RunState.RECOVERING, RunState.LEAVING, RunState.FINISHED, RunState.STOPPED,
         RunState.FAILED}
    ),
    RunState.RECOVERING: frozenset({RunState.OPENING, RunState.STOPPED, RunState.FAILED}),
    RunState.LEAVING: frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED}),
    RunState.FINISHED: frozenset(),
    RunState.STOPPED: frozenset(),
    RunState.FAILED: frozenset(),
}  # fmt: skip


def advance(state: RunState, to: RunState) -> RunState:
    """The new state. Raises ValueError for a transition that is not in the table."""
    if to not in TRANSITIONS[state]:
        raise ValueError(f"a run that is {state} cannot become {to}")
    return to


@dataclass(frozen=True)
class Restarts:
    """What restarts have achieved so far.

    `without_progress` counts losses since the newest committed step last grew; `committed` is
    that step as of the last loss.
    """

    without_progress: int = 0
    committed: int = 0

    def after_loss(self, committed: int) -> Restarts:
        """Count one more loss, at a time when `committed` is the newest committed step."""
        if committed > self.committed:
            return Restarts(1, committed)
        return replace(self, without_progress=self.without_progress + 1)


def give_up(restarts: Restarts, limit: int, cause: str) -> str | None:
    """Why not to restart once more, as a sentence; None means: restart.

    `limit` is how many restarts in a row may pass without a newer committed step: a fault that
    comes back at the same place every time is not one that a restart mends.
    """
    if restarts.without_progress <= limit:
        return None
    times = "once" if limit == 1 else f"{limit} times"
    tried = f"restarted {times} without getting" if limit else "may not restart, and never got"
    since = f"beyond committed step {restarts.committed}" if restarts.committed else "to a commit"
    return (
        f"gave up: {tried} {since}; the last cause was: {cause} "
        f"(the limit is cluster.max_restarts_without_progress={limit})"
    )
