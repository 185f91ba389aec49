"""The passes of one rank in a step, in the order of its schedule, and what is kept meanwhile.

A pass keeps activations from its forward to its backward. If the backward comes in two halves
(`I`, `W`), the first one leaves what the second one needs. The table of the schedule says which
stages of which microbatches are between two of them at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Action, ActionKind, actions_of
from holdfast.layout import Replica


@dataclass(frozen=True)
class StageBytes:
    """Bytes that one microbatch keeps on one stage."""

    kept: int  # from its forward to its backward
    late: int = 0  # from the first half of a split backward to the second
    carried: int = 0  # from the second half on, until that of the rank's first stage


@dataclass(frozen=True)
class RankPass:
    """A pass of a rank. waiting: stages whose gradients of the microbatch before wait for the next
    one's."""

    stage: int
    kind: ActionKind
    kept_besides: int  # bytes that other passes keep while it runs
    in_flight: int  # passes of which something is kept, its own included
    waiting: frozenset[int]
    stays: bool  # its gradients will wait, too


def rank_actions(schedule: str, replica: Replica, pp: int, number: int) -> tuple[Action, ...]:
    """The actions of the rank at `pp`, for so many microbatches. A backward is in two halves if
    the schedule splits it."""
    ranks = replica.degree("pp")
    return _actions(schedule, ranks, pp, number, max(1, len(replica.stages) // ranks))


@lru_cache(maxsize=64)
def _actions(schedule: str, ranks: int, pp: int, number: int, virtual: int) -> tuple[Action, ...]:
    if ranks == 1:
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return tuple(Action(0, kind, n) for n in range(number) for kind in kinds)
    if schedule == "1f1b" and number < ranks:
        schedule = "gpipe"  # as `PipelinedExecutor.schedule_for`
    row = build_schedule(schedule, ranks, number, virtual).actions[pp]
    found = (action for cell in row for action in actions_of(cell))
    if not SCHEDULE_KINDS[schedule].splits_backward:
        return tuple(found)
    halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    return tuple(
        Action(action.stage, kind, action.microbatch)
        for action in found
        for kind in (halves if action.kind is ActionKind.BACKWARD else (action.kind,))
    )


def fullest_forward(
    schedule: str, replica: Replica, pp: int, number: int, stages: Mapping[int, StageBytes]
) -> tuple[int, int]:
    """(bytes, passes in flight) at the end of the forward pass at which a rank keeps most."""
    ranks, held = replica.degree("pp"), tuple(stages.items())
    return _fullest(schedule, ranks, pp, number, max(1, len(replica.stages) // ranks), held)


@lru_cache(maxsize=256)  # many ranks are alike
def _fullest(
    schedule: str,
    ranks: int,
    pp: int,
    number: int,
    virtual: int,
    held: tuple[tuple[int, StageBytes], ...],
) -> tuple[int, int]:
    stages, most = dict(held), (0, 0)
    actions = _actions(schedule, ranks, pp, number, virtual)
    for each in rank_passes(actions, stages, frozenset()):
        kept = each.kept_besides + stages[each.stage].kept
        if each.kind is ActionKind.FORWARD and kept > most[0]:
            most = kept, each.in_flight
    return most


def rank_passes(
    actions: Sequence[Action], stages: Mapping[int, StageBytes], staying: frozenset[int]
) -> Iterator[RankPass]:
    """The passes of `actions`. stages: of this rank. staying: places in the share, of microbatches
    whose gradients wait for those of the next one."""
    live: dict[tuple[int, int], int] = {}
    carried: dict[int, int] = {}
    waiting: frozenset[int] = frozenset()
    total = 0
    for action in actions:
        place, kind, of = (action.stage, action.microbatch), action.kind, stages[action.stage]
        total -= live.pop(place, 0)
        ends = kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        stays = ends and action.microbatch in staying
        yield RankPass(action.stage, kind, total, len(live) + 1, waiting, stays)
        if not ends:
            live[place] = of.kept if kind is ActionKind.FORWARD else of.late
            total += live[place]
            continue
        waiting = waiting | {action.stage} if stays else waiting - {action.stage}
        if action.stage == 0:
            total -= carried.pop(action.microbatch, 0)
        elif of.carried:
            carried[action.microbatch] = of.carried
            total += of.carried
