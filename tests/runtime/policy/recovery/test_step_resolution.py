"""Every interleaving of a few ranks and a few deaths: the survivors always find one step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import pytest

from holdfast.policy.recovery.step_resolution import (
    TRANSITIONS,
    RankProgress,
    StepResolution,
    StepStage,
    advance,
    resolve_step,
)
from tests.support.marks import in_campaign

STEPS = 2


class Place(NamedTuple):
    """One rank of the model: what it has done of the step after `applied`.

    phase 0: computes, and tells its parts of the sum; 1: has added up, and tells its result;
    2: holds the whole gradient, and tells its vote; 3: has heard every vote.
    told: how many of its peers it has told in this phase, in a fixed order.
    """

    applied: int
    phase: int
    told: int


World = tuple[Place, ...]


def _has_told(world: World, teller: int, listener: int, step: int, phase: int) -> bool:
    """Whether `teller` has told `listener` what it tells in a phase of a step."""
    place, size = world[teller], len(world)
    if (place.applied + 1, place.phase) != (step, phase):
        return (place.applied + 1, place.phase) > (step, phase)
    return (listener - teller) % size <= place.told


def _moves(world: World, dead: frozenset[int]) -> Iterator[World]:
    """Every world that the next action of one living rank leads to."""
    for me, place in enumerate(world):
        if me in dead or place.applied == STEPS:
            continue
        step = place.applied + 1
        if place.phase < 3 and place.told < len(world) - 1:
            after = place._replace(told=place.told + 1)
        elif place.phase == 3:
            after = Place(step, 0, 0)
        elif all(
            _has_told(world, peer, me, step, place.phase)
            for peer in range(len(world))
            if peer != me
        ):
            after = Place(place.applied, place.phase + 1, 0)
        else:
            continue
        yield (*world[:me], after, *world[me + 1 :])


def _reachable(size: int, deaths: int) -> Iterator[tuple[World, frozenset[int]]]:
    """Every world with the ranks that have died, whenever and in whatever order they did."""
    begin = (Place(0, 0, 0),) * size
    seen = {(begin, frozenset[int]())}
    todo = list(seen)
    while todo:
        world, dead = todo.pop()
        yield world, dead
        following = [(after, dead) for after in _moves(world, dead)]
        if len(dead) < min(deaths, size - 1):
            following += [(world, dead | {me}) for me in range(size) if me not in dead]
        new = [state for state in following if state not in seen]
        seen.update(new)
        todo += new


def _holding(place: Place) -> RankProgress:
    stage = (StepStage.COMPUTING, StepStage.COMPUTING, StepStage.REDUCED, StepStage.VOTED)[
        place.phase
    ]
    return RankProgress(place.applied, stage, is_summed=place.phase > 0)


def _after(place: Place, index: int, resolution: StepResolution) -> list[int]:
    """The steps that this survivor has applied once the resolution is carried out."""
    done = list(range(1, place.applied + 1))
    return [*done, resolution.step] if index in resolution.appliers else done


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(("size", "deaths"), [(2, 1), (3, 1), (3, 2), (4, 1), in_campaign(4, 2)])
def test_every_interleaving_with_deaths_leaves_all_at_one_step(
    size: int, deaths: int, counted: bool
) -> None:
    """Survivors stop wherever they are: each reachable world is one in which they may."""
    seen: set[tuple[World, frozenset[int]]] = set()
    for world, dead in _reachable(size, deaths):
        alive = [place for me, place in enumerate(world) if me not in dead]
        resolution = resolve_step([_holding(place) for place in alive], has_counts=counted)
        for index, place in enumerate(alive):
            applied = _after(place, index, resolution)
            assert applied == list(range(1, resolution.step + 1)), (world, dead)  # each once
        assert not resolution.receivers
        assert resolution.step >= max(place.applied for place in alive)
        if counted:  # not even one that only the dead had applied is lost
            assert resolution.step >= max(place.applied for place in world)
        if resolution.can_continue_step:  # nobody's own part of the next step's sum was touched
            ahead = [p for p in alive if p.applied == resolution.step]
            assert all(place.phase == 0 for place in ahead), (world, dead)
        seen.add((world, dead))
    assert len(seen) > 50


def test_a_rank_has_died_beside_every_transition() -> None:
    """No line of the table is left out by the search above: a new one is to be met there, too."""
    met = set()
    for world, dead in _reachable(3, 2):
        alive = [me for me in range(len(world)) if me not in dead]
        before = [_holding(world[me]) for me in alive]
        if not dead:
            continue
        for after in _moves(world, dead):
            for me in alive:
                met |= _edges(world[me], after[me])
        if not resolve_step(before).can_continue_step:
            applying = resolve_step(before).appliers
            met |= {
                (h.stage, StepStage.COMPUTING) for i, h in enumerate(before) if i not in applying
            }
    assert met == {(old, new) for old, after in TRANSITIONS.items() for new in after}


def _edges(before: Place, after: Place) -> set[tuple[StepStage, StepStage]]:
    old, new = _holding(before).stage, _holding(after).stage
    if after.applied > before.applied:
        return {(old, StepStage.APPLIED), (StepStage.APPLIED, new)}
    return {(old, new)} if old is not new else set()


def test_what_is_done_at_each_stage() -> None:
    computing, whole = RankProgress(4), RankProgress(4, StepStage.REDUCED, is_summed=True)
    voted, applied = RankProgress(4, StepStage.VOTED, is_summed=True), RankProgress(5)
    everybody = frozenset({0, 1})
    nobody = frozenset[int]()
    assert resolve_step([computing, computing]) == StepResolution(4, nobody, nobody, True)
    assert resolve_step([computing, whole]) == StepResolution(4, nobody, nobody, False)
    assert resolve_step([whole, whole]) == StepResolution(5, everybody, nobody, True)
    assert resolve_step([whole, whole], has_counts=False) == StepResolution(
        4, nobody, nobody, False
    )
    assert resolve_step([whole, voted], has_counts=False) == StepResolution(
        5, everybody, nobody, True
    )
    assert resolve_step([whole, applied]) == StepResolution(5, frozenset({0}), nobody, True)


def test_who_has_no_state_is_behind() -> None:
    for others in combinations([RankProgress(3), RankProgress(3), RankProgress(None)], 2):
        found = resolve_step([*others, RankProgress(None)])
        assert found.step == 3
        assert found.receivers == {i for i, h in enumerate([*others, 1]) if h != RankProgress(3)}
    with pytest.raises(ValueError, match="nobody"):
        resolve_step([RankProgress(None)])


def test_a_state_that_cannot_be_brought_up_is_behind() -> None:
    """Such as that of a process which a restore left with an older checkpoint."""
    assert resolve_step([RankProgress(7), RankProgress(2, StepStage.REDUCED)]).receivers == {1}


def test_transitions() -> None:
    stage = StepStage.COMPUTING
    for to in (StepStage.REDUCED, StepStage.VOTED, StepStage.APPLIED, StepStage.COMPUTING):
        stage = advance(stage, to)
    assert set(TRANSITIONS) == set(StepStage)
    with pytest.raises(ValueError, match="voted"):
        advance(StepStage.VOTED, StepStage.COMPUTING)
