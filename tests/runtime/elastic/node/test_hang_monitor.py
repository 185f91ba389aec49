"""What an agent sees of its own workers, and what the coordinator makes of what several tell."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from holdfast.core.device_progress import GroupProgress
from holdfast.elastic.coordinator.hang_detector import HangDetector
from holdfast.elastic.coordinator.stragglers import StragglerTracker
from holdfast.elastic.node.hang_monitor import HangMonitor, ProcessStat
from holdfast.elastic.node.worker_status import WorkerTable
from holdfast.elastic.protocol.coordinator_messages import WorkerPace
from holdfast.elastic.protocol.hung_worker import ALL_RANKS, HungWorker, StallReport
from holdfast.elastic.protocol.worker_messages import WorkerReport
from holdfast.policy.detection.hangs import Suspect
from holdfast.policy.detection.stragglers import Pace, StragglerLimits, StragglerRule
from holdfast.policy.recovery.survivors import HeldState

BEAT = 0.2
STEP = 0.2


class World:
    """Workers of one node with what the operating system says of each; a clock that is moved."""

    def __init__(
        self,
        here: int,
        world_size: int,
        *,
        steps: int = 2,
        compiles: bool = False,
        compare: bool = True,
    ) -> None:
        self.now = 100.0
        self.members = WorkerTable(1, here)
        self.asleep: set[int] = set()  # who says so of itself
        self.devices: dict[int, tuple[GroupProgress, ...]] = {}
        self.processes = {1000 + rank: ProcessStat(False, 1.0) for rank in range(here)}
        self.lookout = HangMonitor(
            self.members,
            world_size,
            deque([STEP] * 8),
            300.0,
            compare,
            read_stat=self.processes.get,
            is_first_step_compiled=compiles,
        )
        for rank in range(here):
            self.members.expect_worker(rank, self.now, 1000 + rank)
        for step in range(1, steps + 1):
            for rank in range(here):
                self.says(rank, step, "compute", 1)
            self.now += STEP

    def says(self, rank: int, step: int, phase: str, marks: int, **more: Any) -> None:
        is_asleep = rank in self.asleep
        device = self.devices.get(rank, ())
        report = WorkerReport(
            rank, step, phase, marks, is_asleep=is_asleep, device_progress=device, **more
        )
        self.members.process_report(report, self.now)
        self.members.on_report_answered(rank, self.now)
        self.lookout.on_report(self.members[rank])

    def passes(self, seconds: float, *heard: int) -> list[tuple[int, str]]:
        """Time, in which these workers are heard at every beat; the first who are named."""
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT
            for rank in heard:
                member = self.members[rank]
                self.says(rank, member.step, member.phase, member.progress_count)
            if found := self.lookout.tick(self.now, BEAT):
                return [(blame.rank, blame.symptom) for blame in found]
        return []


def of_rank(rank: int, world: World) -> StallReport:
    """The report of a node whose one worker has this rank in the generation."""
    told = world.lookout.take_stall_report(world.now)
    assert told is not None
    return replace(told, workers=tuple(replace(one, rank=rank) for one in told.workers))


def test_a_process_in_the_state_of_being_stopped_is_named_by_its_own_agent() -> None:
    world = World(1, 4)
    assert world.passes(1.0, 0) == []
    world.processes[1000] = ProcessStat(True, 1.0)
    begun = world.now
    assert world.passes(9.0) == [(0, "stopped")]
    assert world.now - begun < 3 * STEP + 1.0


def test_one_that_is_stopped_again_and_again_but_runs_between_is_not_named() -> None:
    world = World(1, 4)
    for turn in range(50):
        world.processes[1000] = ProcessStat(True, 1.0 + 0.01 * turn)
        assert world.passes(BEAT) == []


@pytest.mark.parametrize(
    ("step", "compiles", "calm_s"),
    [(2, False, 1.4), (1, False, 4.4), (1, True, 15.0)],
    ids=["later", "the first waits three times as long", "the first compiles"],
)
def test_among_workers_of_one_node_the_one_that_the_others_wait_for_is_named(
    step: int, compiles: bool, calm_s: float
) -> None:
    world = World(4, 4, steps=step, compiles=compiles)
    for rank in (0, 1, 3):
        world.says(rank, step, "reduce", 2)
    assert world.passes(calm_s, 0, 1, 2, 3) == []
    assert world.passes(2.0 if compiles else 1.0, 0, 1, 2, 3) == [(2, "behind")]


def test_of_two_in_a_replica_the_one_that_hangs_is_named_and_not_its_partner() -> None:
    """Both stand at the same point; rank 3 says that it sleeps in an exchange with rank 2."""
    world = World(4, 4)
    world.asleep = {3}
    for rank in (0, 1):
        world.says(rank, 2, "reduce", 2)
    assert world.passes(2.4, 0, 1, 2, 3) == [(2, "behind")]
    world.says(3, 2, "compute", 1)
    world.asleep = set()  # nobody says who: both
    assert world.passes(2.4, 0, 1, 2, 3) == [(2, "behind"), (3, "behind")]


@pytest.mark.parametrize("asks_first", ["partner", "hangs"])
def test_of_a_replica_on_two_nodes_the_one_that_hangs_is_named_whoever_asks_first(
    asks_first: str,
) -> None:
    partner, hangs, further = World(1, 3), World(1, 3), World(1, 3)
    partner.asleep = {0}
    further.says(0, 2, "reduce", 2)
    comparing = HangDetector()

    def asks(name: str) -> list[int]:
        rank, world = {"further": (0, further), "partner": (1, partner), "hangs": (2, hangs)}[name]
        told = of_rank(rank, world)
        return [blame.rank for blame in comparing.observe(name, 1, told, world.now)]

    for world in (partner, hangs, further):
        world.passes(2.4, 0)
    assert asks("further") == []
    if asks_first == "partner":
        assert asks("partner") == []
    assert asks("hangs") == [2]
    assert asks("partner") == []


def in_exchanges(reached: int, done: int) -> tuple[GroupProgress, ...]:
    return (GroupProgress("all", 9, reached, done),)


def test_if_all_wait_the_one_whose_device_hangs_is_named() -> None:
    """The devices of ranks 0 and 2 are in the eighth exchange, and that of rank 1 is not."""
    world = World(3, 3)
    world.devices = {0: in_exchanges(8, 7), 1: in_exchanges(7, 7), 2: in_exchanges(8, 7)}
    for rank in range(3):
        world.says(rank, 2, "reduce", 2)
    assert world.passes(4.0, 0, 1, 2) == []
    assert world.passes(4.0, 0, 1, 2) == [(1, "device")]
    cause = HungWorker(1, 2, 2, "device", 5.04).describe("reduce")
    assert cause.startswith("its device has not reached an exchange for 5.0 s in step 2, reduce")


@pytest.mark.parametrize(
    ("phase", "on_devices", "calm_s"), [("reduce", True, 0.0), ("vote", False, 4.4)]
)
def test_where_all_wait_nobody_is_named_and_all_stop(
    phase: str, on_devices: bool, calm_s: float
) -> None:
    world = World(2, 2)
    for rank in range(2):
        world.devices |= {rank: in_exchanges(8, 7)} if on_devices else {}
        world.says(rank, 2, phase, 2 + (not on_devices))
    assert world.passes(calm_s, 0, 1) == []
    assert world.passes(8.0 if on_devices else 1.0, 0, 1) == [(ALL_RANKS, "stuck")]


def test_of_several_nodes_the_one_whose_device_hangs_is_named() -> None:
    comparing, now = HangDetector(), 100.0
    for rank in range(2):
        world = World(1, 2)
        world.devices = {0: in_exchanges(8 - rank, 7)}
        world.says(0, 2, "reduce", 2)
        world.passes(8.0, 0)
        now = world.now
        told = StallReport.from_json(of_rank(rank, world).to_json())
        assert comparing.observe(f"node{rank}", 1, told, now) == []
    assert comparing.find_deadlock(now, frozenset({"node0", "node1"}))
    ((node, (hung,)),) = comparing.find_hung_devices(now).items()
    assert (node, hung.rank, hung.symptom) == ("node1", 1, "device")


def test_what_lies_between_two_steps_does_not_count_for_a_normal_one() -> None:
    world = World(1, 1)
    for step in range(3, 40):
        world.now += 10.0  # the loader waits
        world.says(0, step, "compute", 1, step_time=(STEP * (step - 1), step - 1))
    assert world.lookout.normal_step_s == pytest.approx(STEP)


def test_a_worker_whose_first_report_is_of_its_third_step_has_told_what_a_step_takes() -> None:
    """Steps may be shorter than the time between two reports, and the third one is the last."""
    members, now = WorkerTable(1, 1), 100.0
    lookout = HangMonitor(members, 2, deque(), 300.0, read_stat={}.get)
    members.expect_worker(0, now)
    members.process_report(WorkerReport(0, 3, "compute", 1, step_time=(0.3, 2)), now)
    lookout.on_report(members[0])
    assert lookout.normal_step_s == pytest.approx(0.15)
    now += 2.0
    told = lookout.take_stall_report(now)
    assert told is not None
    assert told.normal_step_s == pytest.approx(0.15)


def test_one_whose_report_is_being_stored_is_not_silent() -> None:
    world = World(2, 2)
    for rank in (0, 1):
        world.says(rank, 2, "reduce", 2)
    world.members[1].reply_pending = True  # the run store is slow
    assert world.passes(4.0, 0) == []
    world.members[1].reply_pending = False
    assert world.passes(4.0, 0) == [(1, "silent")]


def test_an_agent_that_was_stopped_itself_names_nobody() -> None:
    world = World(4, 4)
    for rank in (0, 1, 3):
        world.says(rank, 2, "reduce", 2)
    assert world.passes(0.4) == []
    world.now += 60.0
    assert world.passes(0.8) == []


def test_one_that_works_alone_is_told_to_stop_when_it_does_nothing_for_long() -> None:
    """Heard or not; but not while it computes, however long that takes."""
    for heard in ((0,), ()):
        world = World(1, 1)
        world.says(0, 2, "compute", 3)
        assert world.passes(10 * (3 * STEP + 1.0) - 2 * BEAT, *heard) == []
        assert world.passes(1.0, *heard) == [(ALL_RANKS, "stuck")]
    world = World(1, 1)
    world.says(0, 2, "compute", 3)
    for turn in range(40):
        world.processes[1000] = ProcessStat(False, 1.0 + turn)
        assert world.passes(1.0, 0) == []


def test_what_two_nodes_tell_of_themselves_names_the_one_that_is_behind() -> None:
    waits, hangs, comparing = World(1, 2), World(1, 2), HangDetector()
    waits.says(0, 2, "reduce", 2)
    assert not waits.lookout.is_report_due(waits.now)
    assert waits.lookout.take_stall_report(waits.now) is None, "while all is well nothing travels"
    for world in (waits, hangs):
        world.passes(0.6, 0)
        assert world.lookout.is_report_due(world.now)
    assert comparing.observe("a", 1, waits.lookout.take_stall_report(waits.now), waits.now) == []
    told = of_rank(1, hangs)
    assert comparing.observe("b", 1, told, hangs.now) == []
    assert not waits.lookout.is_report_due(waits.now), "it has just been told"
    waits.passes(1.6, 0)
    hangs.passes(1.6, 0)
    told = of_rank(1, hangs)
    (blame,) = comparing.observe("b", 1, told, hangs.now)
    assert (blame.rank, blame.step, blame.symptom) == (1, 2, "behind")
    assert comparing.observe("b", 2, told, hangs.now) == [], "a generation that is over counts not"


def test_who_waits_for_a_node_that_is_not_heard_is_not_behind() -> None:
    """A leader is cut off: of the others one waits for its part, the other has it already."""
    further, waits, comparing = World(1, 3), World(1, 3), HangDetector()
    cut = waits.now
    waits.says(0, 2, "reduce", 2)
    further.says(0, 2, "vote", 3)
    for world in (further, waits):
        world.passes(2.2, 0)
    told = further.lookout.take_stall_report(further.now)
    assert comparing.observe("a", 1, told, further.now, lambda: cut) == []
    told = of_rank(1, waits)
    assert comparing.observe("b", 1, told, waits.now, lambda: cut) == []
    assert comparing.observe("b", 1, told, waits.now, lambda: -inf) == [], "not in this term at all"
    assert comparing.observe("b", 1, told, waits.now, lambda: cut + 0.5) == [], "cut off later"
    (blame,) = comparing.observe("b", 1, told, waits.now, lambda: waits.now)
    assert (blame.rank, blame.symptom) == (1, "behind")


def test_who_has_ended_its_step_for_a_pause_waits_for_those_who_have_not() -> None:
    """On one node and, told to the coordinator, on several."""
    world = World(2, 2)
    for rank in (0, 1):
        world.says(rank, 2, "vote", 3)
    world.members[0].held_state = HeldState(1, 0, 2, kind="paused")
    assert world.passes(1.4, 1) == []
    assert world.passes(1.0, 1) == [(1, "behind")]

    holds, hangs, comparing = World(1, 2), World(1, 2), HangDetector()
    for one in (holds, hangs):
        one.says(0, 2, "vote", 3)
    holds.members[0].held_state = HeldState(1, 0, 2, kind="paused")
    for one in (holds, hangs):
        one.passes(2.0, 0)
    assert comparing.observe("a", 1, holds.lookout.take_stall_report(holds.now), holds.now) == []
    told = of_rank(1, hangs)
    (blame,) = comparing.observe("b", 1, told, hangs.now)
    assert (blame.rank, blame.step, blame.symptom) == (1, 2, "behind")


def test_without_comparing_only_long_silence_of_all_counts_on_several_nodes_too() -> None:
    a, b, comparing = World(1, 2, compare=False), World(1, 2, compare=False), HangDetector()
    a.says(0, 2, "reduce", 2)
    for world in (a, b):
        world.passes(100.0, 0)
        assert not world.lookout.is_report_due(world.now)
        assert world.lookout.take_stall_report(world.now) is None
    members = frozenset("ab")
    for world in (a, b):
        world.passes(201.0, 0)
        assert world.lookout.is_report_due(world.now)
    assert comparing.observe("a", 1, a.lookout.take_stall_report(a.now), a.now) == []
    assert comparing.find_hung_worker(a.now, members) is None, "the other has not said so"
    told = of_rank(1, b)
    assert comparing.observe("b", 1, told, b.now) == []
    node, blame = comparing.find_hung_worker(b.now, members) or ("", None)
    assert blame is not None
    assert (node, blame.rank, blame.symptom) == ("b", 1, "progress")


def test_a_name_counts_only_while_the_worker_stands_where_it_stood() -> None:
    world, comparing = World(1, 2), HangDetector()
    world.passes(2.0, 0)
    (worker,) = of_rank(0, world).workers
    assert (worker.step, worker.progress_count) == (2, 1)
    blame = world.lookout._to_hung_worker(0, Suspect(2.0, "behind"))
    assert world.lookout.is_still_hung(blame)
    world.says(0, 2, "reduce", 2)
    assert not world.lookout.is_still_hung(blame)
    assert comparing.waiting_since(0.0) is None


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        StallReport.from_json({"normal": 1.0})
    with pytest.raises((TypeError, ValueError)):
        WorkerPace.from_json([1, "x"])


def test_a_slow_worker_has_a_speed_and_then_its_node_rests() -> None:
    pacing = StragglerTracker(
        StragglerLimits(
            block_steps=2,
            rules=(StragglerRule(2.0, 2, 2, 1.8),),
            standby_after_blocks=2,
            standby_blocks=2,
        )
    )
    changes = []
    for _ in range(9):
        for node in "abcd":
            seconds = 0.6 if node == "c" else 0.2
            changes += pacing.observe(node, 1, [WorkerPace(7, "same", seconds, 2)])
    assert [c.after for c in changes][:2] == [Pace.SLOW, Pace.STANDBY]
    assert {c.worker for c in changes} == {("c", 7)}
    assert pacing.relative_speeds == {("c", 7): 0.33}
    assert pacing.is_node_excluded("c")
    assert not pacing.is_node_excluded("a")
