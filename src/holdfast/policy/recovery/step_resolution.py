"""One rank's knowledge of a step, and the step from which the survivors of a loss resume.

    computing --full gradient here--> whole --every vote heard--> voted --updated--> applied
                                                                                         |
                                                        computing (the next step) <------'

A rank votes only when it is `whole`, and applies only when it is `voted`. This gives the one fact
that recovery rests on. If any rank, alive or dead, has applied a step, then every rank holds its
complete gradient and can apply it without help. And no rank is ever more than one step ahead of
another: a step's gradient is complete nowhere before all ranks have begun it.

Pure: the engine keeps its own state by `advance`. All survivors of a generation compute `resolve`
from the same holdings, so they decide alike without a leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class StepStage(StrEnum):
    """The progress of one rank in the step that it has not applied yet."""

    COMPUTING = "computing"  # or not begun
    REDUCED = "whole"  # holds the complete reduced gradient
    VOTED = "voted"  # has heard every vote, and all are for it
    APPLIED = "applied"  # the state is the step's; it stays so until the next begins


TRANSITIONS: dict[StepStage, frozenset[StepStage]] = {
    # given up, and begun again
    StepStage.COMPUTING: frozenset({StepStage.COMPUTING, StepStage.REDUCED}),
    # the vote was lost, or against it
    StepStage.REDUCED: frozenset({StepStage.VOTED, StepStage.COMPUTING}),
    StepStage.VOTED: frozenset({StepStage.APPLIED}),  # final: another rank may have applied it
    StepStage.APPLIED: frozenset({StepStage.COMPUTING}),
}


def advance(stage: StepStage, to: StepStage) -> StepStage:
    """Return the new stage. Raises ValueError for a transition that is not in the table."""
    if to not in TRANSITIONS[stage]:
        raise ValueError(f"a step that is {stage} cannot become {to}")
    return to


@dataclass(frozen=True)
class RankProgress:
    """State and progress of one process that has stopped. is_summed: some of the step after its
    state was summed into what it computed, so that its own part of the sum is lost."""

    applied_step: int | None  # its state is that after this step; None: none, as a newcomer
    stage: StepStage = StepStage.COMPUTING  # of the step after it; APPLIED: nothing was done
    is_summed: bool = False

    @property
    def has_whole_gradient(self) -> bool:
        """Return True if the process can apply the next step by itself."""
        return self.stage in (StepStage.REDUCED, StepStage.VOTED)


@dataclass(frozen=True)
class StepResolution:
    """The decision for all processes, by their index in the holdings. can_continue_step: nothing of
    the step after `step` was summed anywhere, so what was computed may stay."""

    step: int  # the state of all is that after it, once `appliers` have applied it
    appliers: frozenset[int]  # apply `step` with the gradient that they hold
    receivers: frozenset[int]  # have no state of `step` and cannot make it: they receive it
    can_continue_step: bool


def resolve_step(progress: Sequence[RankProgress], *, has_counts: bool = True) -> StepResolution:
    """Return the step from which all present processes resume.

    has_counts: every number of the verdict (tokens, losses, norm) is available even if no rank has
    heard every vote. Without these numbers, a complete gradient cannot be applied as it would have
    been.

    Raises ValueError if no process has a state.
    """
    have = {i: h for i, h in enumerate(progress) if h.applied_step is not None}
    if not have:
        raise ValueError("nobody who is left has a state")
    newest = max(h.applied_step for h in have.values() if h.applied_step is not None)
    at_newest = {i: h for i, h in have.items() if h.applied_step == newest}
    if _can_apply_next(at_newest, have, has_counts):
        appliers = frozenset(i for i, h in at_newest.items() if h.has_whole_gradient)
        behind = frozenset(range(len(progress))) - appliers
        return StepResolution(newest + 1, appliers, behind, True)
    appliers = frozenset(
        i for i, h in have.items() if h.applied_step == newest - 1 and h.has_whole_gradient
    )
    behind = frozenset(range(len(progress))) - appliers - frozenset(at_newest)
    goes_on = not any(h.is_summed or h.has_whole_gradient for h in at_newest.values())
    return StepResolution(newest, appliers, behind, goes_on)


def _can_apply_next(
    at_newest: dict[int, RankProgress], have: dict[int, RankProgress], has_counts: bool
) -> bool:
    """Return True if the step after the newest state is applied, by the holders of its full
    gradient."""
    if any(h.stage is StepStage.VOTED for h in at_newest.values()):
        return True
    return (
        has_counts
        and len(at_newest) == len(have)
        and all(h.has_whole_gradient for h in at_newest.values())
    )
