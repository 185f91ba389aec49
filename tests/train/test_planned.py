"""What the planner makes of a loss and of a return is trained: unlike replicas side by side with
uneven shares of the work, in the same processes, on the same curve."""

from __future__ import annotations

import pytest

from holdfast.config.run import RunConfig
from holdfast.parallel.groups import connect
from holdfast.plan.interface import NodePlaces, Plan, Present
from holdfast.plan.places import dealer_of, plan
from holdfast.train.adopt import Kept, adopt_engine, keep
from holdfast.train.build import build_engine
from holdfast.train.engine import StepEngine
from tests.ranks import RankContext, rank_values
from tests.train.layouts import case, config_of, engine_of, one_step, topology_of
from tests.train.worlds import CPU

NODES = {"a": 2, "b": 2, "c": 2, "d": 1, "e": 1}


def _config(layout: dict[str, int]) -> RunConfig:
    return config_of({f"layout__{key}": value for key, value in layout.items()})


def _plans(config: RunConfig) -> list[Plan]:
    """Seven workers on four nodes; node c is lost with two of them; then e comes."""
    plans: list[Plan] = []
    for generation, names in enumerate(("abcd", "abd", "abde"), 1):
        nodes = [NodePlaces(name, NODES[name]) for name in names]
        present = Present(plans[-1].topology) if plans else None
        plans.append(plan(config, nodes, generation, present))
    return plans


def _step(made: StepEngine, step: int) -> list[float]:
    verdict = one_step(made, step)
    return [verdict.mean_loss, verdict.mean_norm]


def _through(rank: RankContext, layout: dict[str, int]) -> dict[str, list[float]]:
    """A step in each topology. A process without a rank in the next one ends; the last of them is
    a newcomer to the third."""
    config = _config(layout)
    plans = _plans(config)
    curve: dict[str, list[float]] = {}
    me: int | None = None
    made: StepEngine | None = None
    if rank.rank < plans[0].topology.world_size:
        me = rank.rank
        groups = connect(plans[0].topology, me, rank.store(), CPU, seconds=60)
        dealer = dealer_of(plans[0].topology, config.layout.schedule)
        made = build_engine(config, groups, CPU, dealer=dealer)
        made.initialise(config.seed)
        curve["1"] = _step(made, 1)
    for step in (2, 3):
        new, old = plans[step - 1], plans[step - 2].topology
        kept = Kept(old, step - 1, {}) if made is None else keep(made, step - 1)
        made = None
        if me is None and step == 2:
            continue
        if me not in new.came_from:
            return curve
        me = new.came_from.index(me)
        made = adopt_engine(
            kept, config, new.topology, me, rank.store(), CPU, new.came_from,
            dealer=dealer_of(new.topology, config.layout.schedule), seconds=60,
        )  # fmt: skip
        curve[str(step)] = _step(made, step)
    assert made is not None
    made.close()
    return curve


def _alone(rank: RankContext) -> list[list[float]]:
    made = engine_of(_config({}), topology_of(case("one"), _config({})), 0, rank.store())
    return [_step(made, step) for step in (1, 2, 3)]


@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2}, {"dp_shard": 4}])
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
            assert pair == pytest.approx(want[int(step) - 1], rel=1e-10), f"step {step}"
