"""The coordinator, the planner and the simulator recover alike from the same losses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any, cast

import pytest

from holdfast.checkpoint.mover.client import RestorePoint
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.elastic.coordinator.generation_planner import GenerationPlanner, PlannerContext
from holdfast.elastic.protocol.coordinator_messages import AgentFacts, NodeReport
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.events import Event, GenerationStarted
from holdfast.layout import Replica, Topology
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.objective.recoveries import recovery_of, state_sizes, topology_of
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, PresentPlacement
from holdfast.policy.membership.state import CoordinatorState, NodeRecord, NodeStage
from holdfast.policy.placement import Machine, place_copies
from holdfast.policy.recovery.ladder import LOSS_CLASSES, class_chances
from holdfast.policy.recovery.rank_assignment import fill_places
from holdfast.policy.recovery.survivors import HeldState
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import Change, Costs, Node, OperatingPoint
from tests.runtime.plan.objective.test_objectives import pool

LOSSES = 2000
BLOCKS = 2
CONFIG = load_config(
    None,
    [
        "model.preset=tiny",
        f"model.layers={BLOCKS}",
        "model.vocab_size=64",
        "train.precision=bf16",
        "data.sequence_length=64",
    ],
).config

WORKLOAD, DEVICES = workload_of(CONFIG), load_devices()

Found = tuple[int, str, float]
"""(rung, class of the loss, bytes that are received)."""


@dataclass(frozen=True)
class Case:
    """One drawn loss."""

    choice: Choice
    devices: int  # of a node
    used: tuple[str, ...]
    spares: tuple[str, ...]
    lost: frozenset[str]
    has_copies: bool

    @property
    def problem(self) -> Problem:
        nodes = len(self.used) + len(self.spares)
        cluster = Cluster((replace(pool("pool", nodes), devices=self.devices),))
        return Problem(WORKLOAD, cluster, DEVICES)

    @property
    def left(self) -> list[str]:
        return [name for name in (*self.used, *self.spares) if name not in self.lost]

    def layout_on(self, nodes: int) -> Choice | None:
        """The same replicas, fewer of them, or one of a smaller shape."""
        group = self.choice.replicas[0]
        while group.replica_size > nodes * self.devices:
            if group.pp > 1:
                half = group.pp // 2
                stages = (BLOCKS // half,) * half if half > 1 else ()
                group = replace(group, pp=half, stages=stages)
            elif group.replica_size > 1:
                group = replace(group, dp_shard=1, tp=group.tp if group.dp_shard > 1 else 1)
            else:
                return None
        count = min(
            self.choice.replicas[0].dp_replicate, nodes * self.devices // group.replica_size
        )
        return replace(self.choice, replicas=(replace(group, dp_replicate=count),))

    def seated(self, layout: Choice) -> list[str]:
        number = -(-layout.devices // self.devices)
        free = [name for name in self.left if name not in self.used]
        return fill_places(self.used, set(self.left), free, number)


def drawn_case(draw: random.Random) -> Case:
    while True:
        pp, shard, tp = draw.choice((1, 2)), draw.choice((1, 2, 4)), draw.choice((1, 2))
        stages = (BLOCKS // pp,) * pp if pp > 1 else ()
        group = ReplicaChoice(
            draw.randint(1, 3), pp, shard, 1, tp, stages, pools=("pool",), microbatches=4
        )
        devices = draw.choice((1, 2, 4))
        nodes = -(-group.world_size // devices)
        if nodes > 1 and group.replica_size <= 8:
            break
    names = [f"n{number}" for number in range(nodes + draw.choice((0, 0, 1, 2, 3)))]
    draw.shuffle(names)
    lost = frozenset(draw.sample(names[:nodes], draw.randint(1, min(4, nodes - 1))))
    used, spares = tuple(names[:nodes]), tuple(names[nodes:])
    return Case(Choice((group,), 1), devices, used, spares, lost, draw.random() < 0.7)


# --- the planner --------------------------------------------------------------------------------
def by_planner(case: Case) -> Found:
    holders = {}
    if case.has_copies:
        holders = place_copies(dict.fromkeys(case.used, 1), map(Machine, case.used)).holders
    nodes = {"pool": (*case.used, *case.spares)}
    layout = case.layout_on(len(case.left))
    found, _ = recovery_of(case.problem, case.choice, layout, nodes, case.lost, holders)
    return found.rung, LOSS_CLASSES[found.loss_class], found.nbytes


# --- the simulator ------------------------------------------------------------------------------
@dataclass
class DrawnCost:
    """The layouts of a case as operating points."""

    case: Case
    costs: Costs
    wanted: int = 99

    def point(self, nodes: int) -> OperatingPoint | None:
        layout = self.case.layout_on(nodes)
        if layout is None:
            return None
        used = -(-layout.devices // self.case.devices)
        problem = self.case.problem
        placed = topology_of(problem.cluster, layout, {"pool": [str(n) for n in range(used)]})
        sizes = state_sizes(problem.workload)
        count = layout.number_of_replicas
        return OperatingPoint("", used, 1.0, 1.0, count, topology=placed, sizes=sizes)

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        return None


@dataclass
class DrawnView:
    """What the policy sees at the moment of the loss."""

    case: Case
    point: OperatingPoint | None
    now: float = 100.0
    pause_left: float = 0.0
    tokens: float = 1.0
    unsaved_s: float = 1.0
    nodes: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {name: Node(name) for name in self.case.left}

    @property
    def used(self) -> Sequence[str]:
        return self.case.used


def by_simulator(case: Case) -> Found:
    state_bytes = WORKLOAD.parameters * WORKLOAD.state.optimizer
    cost = DrawnCost(case, Costs(state_bytes=state_bytes))
    policy = holdfast(cost, HoldfastRules(peers=case.has_copies, peer_interval_s=10.0))
    view = DrawnView(case, cost.point(len(case.used)))
    lost = tuple(place for place, name in enumerate(case.used) if name in case.lost)
    transition = policy.decide(view, Change(lost=lost)).transition
    assert transition is not None
    return transition.rung, transition.reason, sum(transition.read.values())


# --- the coordinator ----------------------------------------------------------------------------
def planned(case: Case, present: PresentPlacement, nodes: Sequence[NodePlaces]) -> LayoutPlan:
    """Place the layout of the case; the replicas that are complete alone if these nodes are."""
    before = present.topology
    intact = [r for r in before.replicas if present.lost_ranks.isdisjoint(r.ranks)]
    names = [before.nodes[rank] for each in intact for rank in each.ranks]
    if intact and len(intact) < len(before.replicas) and {n.name for n in nodes} == set(names):
        replicas, first = [], 0
        for index, each in enumerate(intact):
            ranks = tuple(range(first, first + len(each.ranks)))
            replicas.append(Replica(index, ranks, each.mesh_shape, each.stages))
            first += len(ranks)
        return LayoutPlan(Topology(2, tuple(replicas), tuple(names)), (), len(replicas), 0)
    layout = case.layout_on(len(case.left))
    assert layout is not None
    placed = topology_of(case.problem.cluster, layout, {"pool": case.seated(layout)})
    return LayoutPlan(replace(placed, generation=2), (), 0, 0)


class Coordinator:
    """A term's generation planner, to which each loss comes."""

    def __init__(self) -> None:
        self.case = drawn_case(random.Random(0))
        self.begun: list[Event] = []
        context = PlannerContext(
            CONFIG, cast(Any, self), cast(Any, self), "", self.begun.append, lambda _: None
        )
        self.planner = GenerationPlanner(context)

    def __call__(
        self, _: RunConfig, nodes: Sequence[NodePlaces], generation: int, present: PresentPlacement
    ) -> LayoutPlan:
        return planned(self.case, present, nodes)

    async def choose_restore_point(self, *_: object) -> RestorePoint:
        """As the movers: from the memory of nodes if the copies allow it."""
        used, lost = self.case.used, self.case.lost
        holders = place_copies(dict.fromkeys(used, 1), map(Machine, used)).holders
        is_in_memory = self.case.has_copies and all(set(holders[n]) - lost for n in lost)
        return RestorePoint("key", 5, 1, {}, (), durable=not is_in_memory)

    async def recover(self, case: Case) -> Found:
        self.case, lead = case, self.planner
        self.begun.clear()
        placed = topology_of(case.problem.cluster, case.choice, {"pool": case.used})
        before = replace(placed, generation=1)
        lead.load_record(GenerationRecord(before))
        records, reports = list[NodeRecord](), dict[str, NodeReport]()
        for name in sorted(case.left):
            ranks = [rank for rank, node in enumerate(before.nodes) if node == name]
            held = {rank: HeldState(1, rank, 5, state=(1, rank)) for rank in ranks}
            stage = NodeStage.HELD if ranks else NodeStage.IDLE
            generation = 1 if ranks else 0
            records.append(NodeRecord(name, "", case.devices, 0.0, 0.0, generation, stage))
            reports[name] = NodeReport(AgentFacts(), NodeOutcome(held), generation)
        state = CoordinatorState(1, generation=1, nodes=tuple(records))
        record = await lead.plan_generation(state, 2, frozenset(case.left), reports)
        await lead.make_start_state(2, record)
        begun = next(event for event in self.begun if isinstance(event, GenerationStarted))
        assert lead.recovery is not None
        return begun.rung, LOSS_CLASSES[lead.recovery.loss_class], lead.recovery.nbytes


def test_coordinator_planner_and_simulator_decide_the_same_of_2000_losses() -> None:
    draw, seen = random.Random(42), set[tuple[int, str]]()

    async def compare() -> None:
        coordinator = Coordinator()
        for number in range(LOSSES):
            case = drawn_case(draw)
            found = by_planner(case)
            seen.add(found[:2])
            for other in (by_simulator(case), await coordinator.recover(case)):
                assert other[:2] == found[:2], f"loss {number}: {case}"
                assert isclose(other[2], found[2], rel_tol=1e-9), f"loss {number}: {case}"

    asyncio.run(compare())
    live, memory, store = LOSS_CLASSES.values()
    assert {(0, live), (3, live), (4, live), (3, memory), (4, memory), (6, store)} == seen


@pytest.mark.parametrize(("count", "nodes"), [(1, 4), (2, 1), (2, 3), (3, 2)])
def test_the_chances_of_one_lost_node_are_those_of_the_ladder(count: int, nodes: int) -> None:
    group = ReplicaChoice(count, 1, nodes, pools=("pool",), microbatches=4)
    used = tuple(f"n{number}" for number in range(count * nodes))
    found = []
    for name in used:
        case = Case(Choice((group,), 1), 1, used, (), frozenset({name}), True)
        found.append(by_planner(case)[1])
    chances = class_chances([(count, nodes)], len(used), 1)
    assert [found.count(name) / len(used) for name in LOSS_CLASSES.values()] == list(chances)
