"""What the planner makes of a loss and of a return is trained: unlike replicas side by side with
uneven shares of the work, in the same processes, on the same curve."""

from __future__ import annotations

import pytest

from holdfast.config.run import RunConfig
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import dealer_of, plan_layout
from tests.support.layouts import case, config_of, topology_of
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.step_recovery import Survivor

NODES = {"a": 2, "b": 2, "c": 2, "d": 1, "e": 1}


def _config(layout: dict[str, int]) -> RunConfig:
    return config_of({f"layout__{key}": value for key, value in layout.items()})


def _plans(config: RunConfig) -> list[LayoutPlan]:
    """Seven workers on four nodes; node c is lost with two of them; then e comes."""
    plans: list[LayoutPlan] = []
    for generation, names in enumerate(("abcd", "abd", "abde"), 1):
        nodes = [NodePlaces(name, NODES[name]) for name in names]
        present = PresentPlacement(plans[-1].topology) if plans else None
        plans.append(plan_layout(config, nodes, generation, present))
    return plans


def _through(rank: RankContext, layout: dict[str, int]) -> dict[int, list[float]]:
    """A step in each topology. A process without a rank in the next one ends; the last of them is
    a newcomer to the third."""
    made = Survivor(rank, "one")
    made.config = _config(layout)
    first, *later = _plans(made.config)
    newcomer = rank.rank >= first.topology.world_size
    if not newcomer:
        made.begin(first.topology, dealer_of(first.topology, made.config.layout.schedule))
        made.train(1)
    before = first.topology
    for step, new in enumerate(later, 2):
        dealer = dealer_of(new.topology, made.config.layout.schedule)
        if not newcomer:
            if made.me not in new.came_from:
                break
            made.recover(new.topology, new.came_from, dealer)
        elif None in new.came_from:
            made.join(new.topology, before, new.came_from, new.came_from.index(None), dealer)
        if made.session is not None:
            made.train(step)
        before = new.topology
    return made.curve


def _alone(rank: RankContext) -> dict[int, list[float]]:
    made = Survivor(rank, "one")
    made.config = _config({})
    made.begin(topology_of(case("one"), made.config, 0))
    made.train(3)
    return made.curve


@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2}, in_campaign({"dp_shard": 4})])
def test_the_curve_goes_on_through_what_is_planned(layout: dict[str, int]) -> None:
    plans = _plans(_config(layout))
    sizes = [[len(r.ranks) for r in each.topology.replicas] for each in plans]
    assert sizes == [[4, 2, 1], [4, 1], [4, 1, 1]]
    (want,) = rank_values(_alone, 1)
    curves = rank_values(_through, sum(NODES.values()), {"layout": layout})
    steps = ["".join(curve) for curve in curves]
    assert sorted(steps) == ["1", "1", *["123"] * 5, "3"], "two are lost, one comes late"
    for curve in curves:
        for step, pair in curve.items():
            assert pair == pytest.approx(want[step], rel=1e-10), f"step {step}"
