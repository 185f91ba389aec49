"""A loss at every point of a step: the survivors go on, and the curve is as if nothing had been.

Real processes, really killed (`recovering.py`). Whoever is left applies the same steps once each,
with the same bits where replicas are alike, and reports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.ranks import RankContext, rank_values, run_ranks
from tests.train.layouts import case
from tests.train.recovering import Deadly, Survivor, topology_for

DIES, LAST = 3, 5
POINTS = ("forward", "backward", "whole", "told 1", "voted", "applied")


def _undisturbed(rank: RankContext, name: str, microbatches: int) -> dict[str, Any]:
    made = Survivor(rank, name, microbatches)
    made.begin(topology_for(name, 1))
    made.train(LAST)
    return made.result()


@cache
def undisturbed(name: str, microbatches: int = 6) -> list[dict[str, Any]]:
    """What each rank of one replica has, when nobody is lost."""
    arguments = {"name": name, "microbatches": microbatches}
    return list(rank_values(_undisturbed, case(name).world_size, arguments))


def _survive(
    rank: RankContext, name: str, victim: int, when: str, after: str, came_from: list[int | None],
    microbatches: int = 6,
) -> dict[str, Any]:  # fmt: skip
    """`came_from` may name newcomers: ranks beyond the layout's."""
    made = Survivor(rank, name, microbatches)
    before, topology = topology_for(name, 1), topology_for(after, 2)
    if rank.rank >= before.world_size:
        kept = False
        rank.wait_mark("lost", next(r for r in came_from if r is not None))
        made.join(topology, before, came_from)
    else:
        made.begin(before)
        Deadly(made, victim, DIES, when)
        made.lose(LAST)
        rank.mark("lost")
        kept = made.recover(topology, came_from).kept_inside
    made.train(LAST)
    return {**made.result(), "kept": kept}


def survivors(
    name: str, victim: int, when: str, after: str, came_from: Sequence[int | None],
    microbatches: int = 6,
) -> list[dict[str, Any]]:  # fmt: skip
    """What the ranks of the new generation have in the end, in no order."""
    arguments = {
        "name": name, "victim": victim, "when": when, "after": after,
        "came_from": list(came_from), "microbatches": microbatches,
    }  # fmt: skip
    size = case(name).world_size + sum(was is None for was in came_from)
    results = run_ranks(_survive, size, arguments, dies={victim: "SIGKILL"})
    for result in results:
        assert result.rank == victim or result.exit == 0, result.log
    return [result.value for result in results if result.rank != victim]


def check_reports(found: Sequence[dict[str, Any]], curve: dict[str, Any], when: str) -> None:
    """Each step that was applied in the recovery is told once, with the undisturbed numbers."""
    events = [event for value in found for event in value["events"]]
    told = [event for event in events if event[0] == "done"]
    for _, step, numbers in told:
        assert numbers == curve[str(step)]
    assert len(told) <= 1


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("victim", [0, 2])
def test_one_of_three_replicas_is_lost(when: str, victim: int) -> None:
    left = [rank for rank in range(3) if rank != victim]
    found = survivors("dp3", victim, when, "dp2", left)
    (alone,) = undisturbed("one")
    for value in found:
        assert value["curve"] == alone["curve"]  # bit by bit
        assert value["digest"] == alone["digest"]
        assert value["kept"]
    check_reports(found, alone["curve"], when)
