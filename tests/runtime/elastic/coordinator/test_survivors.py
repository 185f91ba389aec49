"""How the next generation begins, of what is left of the last one: on several nodes. What the
coordinator makes of what those say who stopped for a bad step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from holdfast.config.run import RunConfig
from holdfast.elastic.coordinator.bad_steps import BadStepTracker
from holdfast.elastic.coordinator.generation_planner import GenerationPlanner, PlannerContext
from holdfast.elastic.coordinator.survivors import RecoveryPlanner
from holdfast.elastic.protocol.coordinator_messages import AgentFacts, NodeReport
from holdfast.elastic.protocol.generation_outcome import LostOutcome, NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord, PreviousState
from holdfast.elastic.run_result import RunEndedError
from holdfast.errors import LayoutError
from holdfast.events import Blamed, Event, SettingIgnored, WorkerLost
from holdfast.layout import Layout, Topology, place_layout, place_replicas
from holdfast.plan.placing.interface import LayoutPlan
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    MembershipRules,
    NodeRecord,
    NodeStage,
    StageReport,
)
from holdfast.policy.recovery.survivors import HeldState, RejectedStep

CONFIG = RunConfig.model_validate(
    {
        "data": {"folder": "unused"},
        "model": {
            "preset": None,
            "layers": 2,
            "dim": 8,
            "heads": 2,
            "kv_heads": 2,
            "ffn_dim": 8,
            "vocab_size": 32,
        },
    }
)


def _planner(
    plan: Any = None,
    emit: Callable[[Event], object] = lambda event: None,
    late: Callable[[int, Event], object] = lambda generation, event: None,
) -> GenerationPlanner:
    """Of a new coordinator. plan: lays out nodes. late: takes losses of older generations."""
    unused = cast(Any, None)
    return GenerationPlanner(
        PlannerContext(CONFIG, plan, unused, "", emit, unused, emit_in_generation=late)  # type: ignore[arg-type]
    )


def _survivors(before: Topology) -> RecoveryPlanner:
    survivors = RecoveryPlanner(CONFIG)
    survivors.remember_topology(before)
    return survivors


def _held(rank: int, step: int, *, torn: bool = False) -> HeldState:
    return HeldState(1, rank, step, torn=torn, state=None if torn else (1, rank))


def test_those_who_restore_sit_on_the_node_that_they_are_on() -> None:
    before = place_layout(Layout(dp_shard=3), 1, ("a", "b", "c"))
    after = place_layout(Layout(dp_replicate=2), 2, ("b", "c"))
    held = {7: _held(2, 5, torn=True), 8: _held(1, 5, torn=True)}
    found = _survivors(before).plan_recovery(after, held, {7: "c", 8: "b"})
    assert found.resume_point is None
    assert found.rank_assignment.processes == (8, 7)


def test_a_process_whose_node_has_no_place_for_it_gets_none() -> None:
    before = place_layout(Layout(dp_replicate=2), 1, ("a", "b"))
    after = place_layout(Layout(), 2, ("b",))
    held = {1: _held(0, 5, torn=True), 2: _held(1, 5, torn=True)}
    found = _survivors(before).plan_recovery(after, held, {1: "a", 2: "b"})
    assert found.rank_assignment.processes == (2,)


def test_who_was_cut_off_while_others_went_on_takes_their_state() -> None:
    before = place_layout(Layout(dp_replicate=2), 1, ("a", "b"))
    after = place_layout(Layout(), 3, ("b",))
    held, where = {4: _held(1, 20)}, {4: "b"}
    ahead = _survivors(before).plan_recovery(after, held, where, durable_step=40)
    assert ahead.resume_point is None
    assert "step 40" in ahead.restore_reason
    assert ahead.rank_assignment.processes == (4,)
    level = _survivors(before).plan_recovery(after, held, where, durable_step=20)
    assert level.resume_point is not None
    assert level.resume_point.step == 20


def test_what_only_a_node_that_leaves_holds_is_restored() -> None:
    before = place_layout(Layout(tp=2), 1, ("a", "b"))
    held, where = {3: _held(0, 5), 4: _held(1, 5)}, {3: "a", 4: "b"}
    alone = _survivors(before).plan_recovery(place_layout(Layout(), 2, ("b",)), held, where)
    assert alone.resume_point is None
    assert "not all have a place" in alone.restore_reason
    assert alone.rank_assignment.processes == (4,)
    both = _survivors(before).plan_recovery(
        place_layout(Layout(dp_replicate=2), 2, ("a", "b")), held, where
    )
    assert both.resume_point is not None


def test_a_replica_that_leaves_is_not_missed_where_another_stays() -> None:
    before = place_layout(Layout(dp_replicate=2), 1, ("a", "b"))
    held, where = {3: _held(0, 5), 4: _held(1, 5)}, {3: "a", 4: "b"}
    found = _survivors(before).plan_recovery(place_layout(Layout(), 2, ("b",)), held, where)
    assert found.resume_point is not None
    assert found.came_from == (1,)


def test_a_new_coordinator_knows_the_state_that_nobody_has_taken_into_its_generation_yet() -> None:
    """The one before was lost between making generation 2 and anybody's beginning it."""
    before = place_layout(Layout(dp_replicate=2), 1, ("a", "b"))
    after = place_layout(Layout(), 2, ("b",))
    record = GenerationRecord(after, previous=PreviousState(before, 5))

    lead = _planner()
    lead.load_record(record)
    assert lead._recovery_planner.has_complete_state({4: _held(1, 5)})


def test_whoever_comes_to_lead_tells_of_losses_in_the_generation_that_had_them() -> None:
    """And of none where the run is taken up again: nobody holds anything of that generation."""
    told: list[tuple[int, int, str]] = []

    def late(generation: int, event: Event) -> None:
        assert isinstance(event, WorkerLost)
        told.append((generation, event.rank, event.cause))

    lead = _planner(emit=lambda event: told.append((0, 0, event.kind)), late=late)
    lead.load_record(GenerationRecord(place_layout(Layout(dp_replicate=2), 5, ("a", "b"))))
    old = [NodeRecord(name, "old", 1, 0.0, 0.0) for name in ("a", "b")]
    reign = transitions.begin_term(7, 0.0, 5, old, "resume")
    rules = MembershipRules(lambda nodes: tuple(node.name for node in nodes))
    reign = transitions.node_joined(reign, NodeRecord("a", "new", 1, 0.0, 0.0), 1.0, rules)
    lead.report_lost_ranks(reign)
    assert reign.lost_members == (("a", "its agent was started anew"),)
    assert told == []
    held = StageReport("b", "old", 5, NodeStage.HELD)
    lead.report_lost_ranks(transitions.reports_received(reign, [held], 1.0, rules))
    assert told == [(5, 0, "its agent was started anew")]


def test_how_an_older_generation_ended_is_not_said_of_the_last_one() -> None:
    """A node that was not told to begin it before it was over still says how the one before ended:
    the checkpoint that the last one began from is not to blame for that."""
    lead = _planner()
    lead.load_record(GenerationRecord(place_layout(Layout(dp_replicate=2), 5, ("a", "b"))))
    of = {
        name: NodeReport(
            AgentFacts(),
            NodeOutcome({}, LostOutcome("rot", "it is not whole", f"as {name} says")),
            at,
        )
        for name, at in {"a": 4, "b": 5}.items()
    }
    assert lead.last_outcomes(of) == [of["b"].node_outcome]
    lead._restored_key = "commits/5"
    assert lead.reject_corrupt_checkpoint({"a": of["a"]}) is None
    assert lead.rejected_checkpoints == {}
    assert lead.reject_corrupt_checkpoint(of) == "commits/5 is not whole (as b says)"


@pytest.mark.parametrize("others", [True, False])
def test_a_session_begins_where_nobody_took_part_before(others: bool) -> None:
    """An agent that was started anew comes to lead, while another one goes on or not."""

    def planner(*_: object) -> Any:
        raise LayoutError("none fits")

    lead = _planner(planner)
    lead.load_record(GenerationRecord(place_layout(Layout(dp_replicate=2), 5, ("a", "b"))))
    old = [NodeRecord(name, "old", 1, 0.0, 0.0) for name in ("a", "b")]
    rules = MembershipRules(lambda nodes: tuple(node.name for node in nodes))
    reign = transitions.node_joined(
        transitions.begin_term(7, 0.0, 5, old, "resume"),
        NodeRecord("a", "new", 1, 0.0, 0.0),
        1.0,
        rules,
    )
    if others:
        reign = transitions.reports_received(
            reign, [StageReport("b", "old", 5, NodeStage.HELD)], 1.0, rules
        )
    with pytest.raises(LayoutError):
        asyncio.run(lead.plan_generation(reign, 8, frozenset("a"), {"a": NodeReport(AgentFacts())}))
    assert lead.is_session_start is not others


def test_the_simple_planner_is_named_once_where_it_takes_the_place_of_the_search() -> None:
    told: list[Event] = []
    why = "lora.rank=4: the cost model does not know adapters"

    def planner(*_: object) -> Any:
        return LayoutPlan(place_layout(Layout(), 1, ("a",)), (None,), 0, 0, simple_because=why)

    lead = _planner(planner, told.append)
    for _ in range(2):
        assert lead.select_nodes([NodeRecord("a", "new", 1, 0.0, 0.0)]) == ("a",)
    assert [(event.key, event.reason) for event in told if isinstance(event, SettingIgnored)] == [
        ("layout.mode", f"the simple planner is used: {why}")
    ]


NODES = ("a", "a", "b", "b")
KEYS = {1: ("a", 11), 2: ("a", 12), 3: ("b", 11), 4: ("b", 12)}
"""By number, as the coordinator tells processes of several nodes apart; by rank one less."""


def placed(generation: int, tp: int = 1) -> Topology:
    return place_replicas([Layout(tp=tp)] * (4 // tp), generation, NODES)


def held(
    generation: int,
    step: int,
    suspects: Sequence[int],
    dealt: Sequence[Sequence[int]],
    again: bool = True,
) -> dict[int, HeldState]:
    bad = RejectedStep(step, "is not finite", tuple(map(tuple, dealt)), tuple(suspects), again)
    return {
        key: HeldState(
            generation,
            key - 1,
            step - 1,
            kind="non_finite",
            state=(generation, key - 1),
            bad=None if key == 2 else bad,
        )
        for key in KEYS
    }


def seated(*order: int) -> dict[int, tuple[str, int]]:
    """By rank, who sits there."""
    return {rank: KEYS[key] for rank, key in enumerate(order)}


FIRST = ((0, 1), (2, 3), (4, 5), (6, 7))
AGAIN = ((0, 2), (1, 3), (4, 5), (6, 7))


def test_suspects_are_to_be_computed_by_others_wherever_their_processes_sit_then() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, [1], FIRST), KEYS)
    retry = doubting.retry(placed(2), seated(3, 1, 2, 4))
    assert not len(doubting.skips)
    assert retry is not None
    assert (retry.step, retry.avoid) == (5, {1: (1,)})
    passed = retry.if_passed
    assert passed is not None
    assert (passed.blame, passed.devices) == ("device", ("process 11 on a",))
    without = {2: KEYS[2], 3: KEYS[4]}  # who computed it does not take part
    again = doubting.retry(placed(2), without)
    assert again is not None
    assert again.avoid == {}
    assert doubting.take_events() == []


def test_the_ranks_of_a_replica_are_accused_together() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1, tp=2), held(1, 5, [1], ((0, 1), (2, 3))), KEYS)
    retry = doubting.retry(placed(2, tp=2), seated(3, 4, 1, 2))
    assert retry is not None
    assert retry.avoid == {1: (1,)}
    assert retry.if_passed is not None
    assert retry.if_passed.devices == ("processes 11, 12 on a",)


def test_what_is_bad_everywhere_is_left_out_of_every_generation_from_then_on() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, [1], FIRST), KEYS)
    doubting.observe(placed(1), held(1, 5, [1], FIRST), KEYS)  # it could not be made at once
    assert doubting.take_events() == [], "nothing is known after one time"
    doubting.observe(placed(2), held(2, 5, [1], AGAIN), KEYS)
    (event,) = doubting.take_events()
    assert isinstance(event, Blamed)
    assert (event.step, event.blame, event.microbatches) == (5, "data", [1])
    skips = doubting.skips
    assert [(skip.step, skip.microbatch) for skip in skips] == [(5, 1)]
    later = BadStepTracker()  # of another term
    later.load_record(GenerationRecord(placed(3), skips=skips))
    assert later.retry(placed(9), {}) is None
    assert later.skips == skips


def test_who_is_wrong_with_any_data_is_not_to_be_used() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, [0, 1], FIRST), KEYS)
    assert doubting.faulty_workers == frozenset()
    doubting.observe(placed(2), held(2, 5, [2, 3], ((2, 3), (0, 1), *FIRST[2:])), KEYS)
    assert doubting.faulty_workers == {("a", 11)}
    (event,) = doubting.take_events()
    assert isinstance(event, Blamed)
    assert (event.blame, event.devices) == ("device", ["process 11 on a"])
    doubting.observe(placed(3), {1: HeldState(3, 0, 5, state=(3, 0))}, KEYS)
    assert doubting.faulty_workers == frozenset(), "the step has passed"


def test_what_cannot_be_mended_ends_the_run_with_a_sentence() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, range(8), FIRST), KEYS)
    with pytest.raises(
        RunEndedError, match=r"most of its microbatches.*the state before that step"
    ):
        doubting.observe(placed(2), held(2, 5, range(8), (*FIRST[1:], FIRST[0])), KEYS)


def test_a_step_of_an_older_generation_is_no_news() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(2), held(1, 5, [1], FIRST), KEYS)
    doubting.observe(None, held(1, 5, [1], FIRST), KEYS)
    assert not len(doubting.skips)
    assert doubting.retry(placed(3), seated(1, 2, 3, 4)) is None
