"""The loop that follows a mix: on a made cloud, with a clock of the test."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from holdfast.plan.catalogue import Offer
from holdfast.wire.secret_managers.request import SecretManagerError
from holdfast_platform.clouds.ec2 import CapacityError, Ec2Fleet, Instance, InstanceSettings
from holdfast_platform.clouds.follow import Follower, Goal, Progress
from holdfast_platform.clouds.sagemaker import SageMakerJobs

SPOT, DEMAND = "a/spot", "a/on-demand"
GOAL = Goal(work_h=20.0, min_nodes=2, max_nodes=2, finish_h=None, change_h=0.05, budget=None)


@dataclass
class World:
    """A cloud and a run: 100 steps of 0.2 node-hours. Nodes join when they are ordered."""

    folder: Path
    goal: Goal = GOAL
    hour: float = 0.0
    step: float = 0.0
    spot: float = 1.0  # dollars an hour
    sold_out: set[str] = field(default_factory=set)
    is_away: bool = False
    has_joined: bool = True
    boot: float = 0.0  # hours from an order until the node has joined
    ordered: dict[str, Instance] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def instances(self) -> list[Instance]:
        if self.is_away:
            raise SecretManagerError("timed out")
        return list(self.ordered.values())

    def order(self, node: str, offer: str, *, spot: bool, script: str) -> Instance:
        if offer in self.sold_out:
            raise CapacityError("InsufficientInstanceCapacity")
        assert (spot, script) == (offer == SPOT, f"join {node}")
        made = Instance(f"i-{node}", node, offer, "running", self.hour * 3600)
        assert made.id not in self.ordered
        self.ordered[made.id] = made
        return made

    def end(self, ids: Sequence[str]) -> None:
        for each in ids:
            self.ordered[each] = replace(self.ordered[each], state="terminated")

    def live(self, offer: str) -> int:
        return sum(each.is_live and each.offer == offer for each in self.ordered.values())

    def progress(self) -> Progress:
        return Progress(int(self.step), 100, frozenset(self.joined()), self.step >= 100)

    def joined(self) -> list[str]:
        return [
            each.node
            for each in self.ordered.values()
            if each.is_live
            and self.has_joined
            and self.hour - each.launched / 3600 >= self.boot - 1e-9
        ]

    def follower(self) -> Follower:
        return Follower(
            self,
            self.goal,
            self.folder,
            lambda: [Offer(SPOT, True, self.spot, 2), Offer(DEMAND, False, 3.0, 2)],
            self.progress,
            lambda node: f"join {node}",
            self.said.append,
            lambda: self.hour * 3600,
        )

    def work(self, loop: Follower, hours: float) -> int | None:
        """Rounds of six minutes. Two nodes that have joined do a step in 0.1 hours."""
        code = None
        for _ in range(round(hours * 10)):
            code = loop.round()
            if code is not None:
                break
            self.step += min(2, len(self.joined())) / 2
            self.hour += 0.1
        return code


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_costs_what_was_planned_and_leaves_nothing(world: World) -> None:
    assert world.work(world.follower(), 20.0) == 0
    assert world.live(SPOT) == world.live(DEMAND) == 0
    assert "spent $20.0000, -0.0% of the latest plan" in world.said[-1]


def test_a_price_change_and_a_reclaim_cost_what_was_planned(world: World) -> None:
    """A node takes 12 minutes until it has joined, of which the plan knows by `change_h`."""
    world.boot, world.goal = 0.2, replace(GOAL, change_h=0.2)
    loop = world.follower()
    world.work(loop, 3.0)
    world.spot = 5.0
    world.work(loop, 3.0)
    assert (world.live(SPOT), world.live(DEMAND)) == (0, 2)
    world.end(["i-node-2"])
    assert world.work(loop, 20.0) == 0
    assert len(world.ordered) == 5
    share = re.search(r"([+-][0-9.]+)% of the latest plan", world.said[-1])
    assert share is not None
    assert abs(float(share[1])) <= 5.0, world.said
    # By hand: what each node cost while it was there.
    ends = 0.2 + 10.0 + 0.1 + 0.1
    assert f"spent ${2 * 3.0 * 1.0 + 2 * 0.2 * 5.0 + 2 * 3.0 * (ends - 3.0):.0f}" in world.said[-1]


def test_small_changes_of_the_price_change_nothing_and_a_large_one_does(world: World) -> None:
    loop = world.follower()
    for price in (1.0, 2.9, 1.0, 3.2, 2.8, 3.25):
        world.spot = price
        world.work(loop, 0.3)
        assert (world.live(SPOT), world.live(DEMAND)) == (2, 0)
    world.spot = 9.0
    world.work(loop, 0.3)
    assert (world.live(SPOT), world.live(DEMAND)) == (0, 2)
    world.spot = 2.9
    world.work(loop, 0.3)
    assert (world.live(SPOT), world.live(DEMAND)) == (0, 2)


def test_the_old_nodes_stay_until_the_new_ones_have_joined(world: World) -> None:
    loop = world.follower()
    world.work(loop, 0.2)
    world.spot, world.has_joined = 9.0, False
    world.work(loop, 0.5)
    assert (world.live(SPOT), world.live(DEMAND)) == (2, 2)
    world.has_joined = True
    world.work(loop, 0.1)
    assert (world.live(SPOT), world.live(DEMAND)) == (0, 2)


def test_a_reclaimed_node_is_replaced_and_one_that_is_sold_out_is_not_asked_for_again(
    world: World,
) -> None:
    loop = world.follower()
    world.work(loop, 0.2)
    world.end(["i-node-0"])
    world.sold_out = {SPOT}
    world.work(loop, 0.3)
    assert "the cloud took back node-0 (i-node-0, spot)" in world.said
    assert (world.live(SPOT), world.live(DEMAND)) == (1, 1)
    assert len([line for line in world.said if "has no spot node" in line]) == 1


def test_another_loop_takes_over_what_runs_and_what_was_spent(world: World) -> None:
    world.work(world.follower(), 2.0)
    world.hour += 0.5  # no loop
    world.step += 5
    assert world.work(world.follower(), 20.0) == 0
    assert len(world.ordered) == 2
    assert "spent $20.0000" in world.said[-1]


def test_a_budget_ends_all_nodes(world: World) -> None:
    world.goal = replace(GOAL, budget=4.0)
    assert world.work(world.follower(), 20.0) == 1
    assert world.live(SPOT) == world.live(DEMAND) == 0
    assert "the budget of $4.00 is spent at step 20" in world.said[-1]


def test_a_deadline_that_spot_cannot_keep_gets_on_demand_nodes(world: World) -> None:
    world.goal = replace(GOAL, finish_h=10.05)
    loop = world.follower()
    loop.round()
    assert (world.live(SPOT), world.live(DEMAND)) == (0, 2)


def test_the_measured_speed_replaces_the_estimate(world: World) -> None:
    """The user says half of the work: the plan doubles at the next change."""
    world.goal = replace(GOAL, work_h=10.0)
    loop = world.follower()
    world.work(loop, 1.0)
    assert "planned $10.0000" in world.said[0]
    world.spot = 9.0
    world.work(loop, 0.1)
    (line,) = [each for each in world.said if "2 on-demand" in each]
    assert "9 h" in line


def test_a_cloud_that_does_not_answer_is_asked_again(world: World) -> None:
    loop = world.follower()
    world.work(loop, 0.2)
    world.is_away = True
    world.work(loop, 0.5)
    world.is_away = False
    assert world.work(loop, 20.0) == 0
    assert len([line for line in world.said if "does not answer" in line]) == 1
    assert len(world.ordered) == 2


ITEM = (
    "<instanceId>i-1</instanceId><instanceState><name>running</name></instanceState>"
    "<launchTime>2026-01-01T00:00:00Z</launchTime><newField>7</newField>"
)


@pytest.mark.parametrize(
    ("left_out", "put", "named"),
    [
        ("<instanceId>i-1</instanceId>", "", "without instanceId"),
        ("<launchTime>2026-01-01T00:00:00Z</launchTime>", "", "without launchTime"),
        ("running", "", "without instanceState/name"),
        ("running", "hibernated", "i-1 is 'hibernated', a state that is not known"),
    ],
)
def test_what_ec2_leaves_out_or_says_anew_is_named(left_out: str, put: str, named: str) -> None:
    class Service:
        text = ITEM

        def post(self, headers: object, body: object) -> bytes:
            return f"<A><instancesSet><item>{self.text}</item></instancesSet></A>".encode()

    service = Service()
    fleet = Ec2Fleet(service, "s3://b/run", InstanceSettings("ami", "p5"))  # type: ignore[arg-type]
    assert [each.state for each in fleet.instances()] == ["running"], "a new field is harmless"
    service.text = ITEM.replace(left_out, put)
    with pytest.raises(SecretManagerError, match=named):
        fleet.instances()


@pytest.mark.parametrize(
    ("status", "named"),
    [("Waiting", "run-1 is 'Waiting', a status that is not known"), (None, "no TrainingJobStatus")],
)
def test_what_sagemaker_leaves_out_or_says_anew_is_named(status: str | None, named: str) -> None:
    class Service:
        def post(self, headers: object, body: bytes) -> bytes:
            answer = {"TrainingJobSummaries": [{"TrainingJobName": "run-1", "New": 1}]}
            return json.dumps(answer if b"MaxResults" in body else described).encode()

    described = {"TrainingJobStatus": "Failed", "FailureReason": "out of room", "New": 2}
    jobs = SageMakerJobs(Service(), "run")  # type: ignore[arg-type]
    assert [(each.status, each.detail) for each in jobs.trials()] == [("Failed", "out of room")]
    described["TrainingJobStatus"] = status  # type: ignore[assignment]
    with pytest.raises(SecretManagerError, match=named):
        jobs.trials()
