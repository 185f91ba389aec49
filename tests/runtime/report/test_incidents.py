"""When an incident is over, what its parts are, and what it is called: in every view the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.events import (
    CheckpointRestored,
    Event,
    GenerationStarted,
    Record,
    RestorePointFound,
    RunFailed,
    StepDone,
    WorkerHeld,
    WorkerLost,
)
from holdfast.report.history.history import History, build_history
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.incidents import Incident, IncidentBook
from holdfast.report.ledger.ordering import order_records
from holdfast.report.live.metrics import RunMetrics
from tests.support.journal_builder import Scribe, step_done

ANEW = "its agent was started anew"


def told_live(records: Sequence[Record]) -> list[str]:
    progress = RunProgress(1000)
    return [told.text for record in records for told in progress.observe(record)]


def over_live(records: Sequence[Record]) -> list[str]:
    """The lines that say how long it took."""
    return [line for line in told_live(records) if "stood still" in line or "recovered in" in line]


def counted(records: Sequence[Record]) -> int:
    """Incidents that are over, as the metrics have it."""
    metrics = RunMetrics("demo")
    metrics.replay(records)
    name = 'holdfast_recovery_duration_seconds_count{phase="step"'
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in metrics.render().decode().splitlines()
        if line.startswith(name)
    )


def history_of(run: Scribe) -> History:
    """With every incident as long as its parts, and as many of them over in every view."""
    story = build_history(run.records)
    over = [incident for incident in story.incidents if incident.seconds is not None]
    assert len(over_live(order_records(run.records))) == counted(run.records) == len(over)
    for incident in over:
        parts = {name: s for name, s in incident.phases.items() if name != "replay"}
        assert min(parts.values()) >= 0.0
        if incident.stood_still_s is not None:
            assert sum(parts.values()) == pytest.approx(incident.stood_still_s)
    return story


def paused(run: Scribe, rank: int, step: int, after: float = 0.0) -> None:
    run.write(WorkerHeld(rank, step, None, f"paused after step {step}"), after)


def begun(*nodes: str, steps: int = 4) -> Scribe:
    run = Scribe()
    run.start()
    run.among(*nodes)
    run.steps(1, steps)
    return run


def lose(run: Scribe, rank: int, node: str, after: float = 0.25) -> None:
    run.write(WorkerLost(rank, 100 + rank, "SIGKILL", "exit", node), after)


def then(run: Scribe, *nodes: str, step: int, reason: str, rung: int) -> None:
    run.open_generation()
    run.among(*nodes, step=step, reason=reason, rung=rung)


# --- when it is over ---------------------------------------------------------------------------
@pytest.mark.parametrize("early", [True, False])
def test_one_step_before_a_newcomer_is_taken_in_ends_the_incident(early: bool) -> None:
    """Who pauses after that step may say so before rank 0 tells of it."""
    run = begun("a", "b", "c")
    lose(run, 2, "c")
    then(run, "a", "b", step=4, reason="worker_lost", rung=0)
    if early:
        paused(run, 1, 5, after=1.0)
        run.write(step_done(5, 1.0, {"compute": 1.0}), after=0.25)
    else:
        run.write(step_done(5, 1.0, {"compute": 1.0}), after=1.0)
        paused(run, 1, 5, after=0.25)
    paused(run, 0, 5, after=0.25)
    then(run, "a", "b", "c", step=5, reason="node_joined", rung=5)
    run.steps(6, 7)
    lost, joined = history_of(run).incidents
    assert lost.phases == pytest.approx({"detect": 0.25, "agree": 0.25, "restore": 0.5, "step": 1})
    assert (joined.title, joined.reached, joined.steps_lost) == ("c joined", 5, 0)
    detect = 0.0 if early else 0.25
    assert joined.phases == pytest.approx(
        {"detect": detect, "agree": 0.75 - detect, "restore": 0.75, "step": 1.0}
    )
    assert over_live(run.records) == [
        "recovered: the others went on (rung 0), stood still for 2.0 s, 0 steps done again",
        "c joined: training stood still for 2.5 s",
    ]


def test_a_step_that_is_known_only_after_the_next_loss_ended_the_incident_all_the_same() -> None:
    run = begun("a", "b", "c", steps=45)
    paused(run, 0, 45)
    then(run, "a", "b", "c", "d", step=45, reason="node_joined", rung=5)
    lose(run, 0, "a", after=1.0)  # while it applied step 46: nobody has told of that
    run.write(WorkerHeld(1, 46, None, "a peer was lost"), after=0.25)
    then(run, "b", "c", "d", step=46, reason="worker_lost", rung=0)
    run.write(step_done(46, 1.0, {"compute": 1.0}))
    run.steps(47, 48)
    joined, lost = history_of(run).incidents
    assert (joined.title, joined.reached) == ("d joined", 45)
    assert joined.seconds == pytest.approx(0.25 + 1.0 + 1.0)  # until it broke, at the latest
    assert (lost.reached, lost.steps_lost) == (46, 0)
    assert lost.seconds == pytest.approx(0.25 + 0.25 + 0.75 + 1.0)
    assert [point.step for point in build_history(run.records).steps] == list(range(1, 49))


def test_a_generation_that_breaks_before_a_step_ends_nothing() -> None:
    run = begun("a", "b", "c")
    lose(run, 2, "c")
    then(run, "a", "b", step=4, reason="worker_lost", rung=0)
    run.write(WorkerHeld(1, 4, 5, "a peer was lost"), after=0.5)
    lose(run, 0, "a", after=0.25)
    then(run, "b", step=4, reason="worker_lost", rung=0)
    run.steps(5, 6)
    first, second = history_of(run).incidents
    assert first.seconds is None
    assert second.seconds == pytest.approx(0.25 + 0.25 + 0.25 + 1.0)


def test_who_follows_a_run_of_several_nodes_hears_of_the_next_generation_first() -> None:
    """What the agents of other nodes write comes up to a heartbeat later."""
    run = begun("a", "b", "c")
    lose(run, 2, "c")
    then(run, "a", "b", step=4, reason="worker_lost", rung=0)
    at = run.at = run.at + 1.0
    then(run, "a", "b", "c", step=5, reason="node_joined", rung=5)
    run.records += [
        Record(2, "rank0", 9, at, step_done(5, 1.0, {"compute": 1.0})),
        Record(2, "agent.b", 0, at, WorkerHeld(1, 5, None, "paused after step 5")),
        Record(1, "agent.c", 1, at, WorkerLost(2, 102, "SIGKILL", "exit", "c")),
    ]
    run.steps(6, 7)
    lines = over_live(run.records)
    assert [line.partition(": ")[0].partition(" (")[0] for line in lines] == [
        "recovered",
        "c joined",
    ]
    progress = RunProgress(1000)
    for record in run.records:
        progress.observe(record)
    assert progress.state == "training"
    assert progress.book.current is None


# --- its parts ---------------------------------------------------------------------------------
def test_noticing_does_not_take_what_an_earlier_incident_took() -> None:
    run = begun("a", "b", "c", "d")
    lose(run, 3, "d", after=0.25)
    then(run, "a", "b", "c", step=4, reason="worker_lost", rung=0)
    lose(run, 2, "c", after=5.0)
    then(run, "a", "b", step=4, reason="worker_lost", rung=0)
    run.write(WorkerHeld(1, 4, None, "ValueError: no"), after=0.125)
    then(run, "a", "b", step=4, reason="error", rung=1)
    run.steps(5, 6)
    incidents = history_of(run).incidents
    assert [i.title for i in incidents][-1] == "ValueError: no"
    assert [i.phases.get("before") for i in incidents] == [None, 0.5, pytest.approx(6.5)]
    assert [i.phases["detect"] for i in incidents] == pytest.approx([0.25, 5.75, 0.625])
    assert incidents[-1].stood_still_s == pytest.approx(0.5 + 6.0 + 0.625 + 0.25 + 0.5 + 1.0)


def test_noticing_does_not_take_a_pause_between_two_sessions() -> None:
    run = begun("a", "b")
    run.stop()
    run.start(resumed=True, pause=36.0)
    run.among("a", "b", step=4, reason="resume")
    lose(run, 1, "b", after=0.25)
    then(run, "a", step=4, reason="worker_lost", rung=0)
    run.steps(5, 6)
    (incident,) = history_of(run).incidents
    assert incident.phases["detect"] == pytest.approx(0.75)
    assert incident.stood_still_s == pytest.approx(0.75 + 0.25 + 0.25 + 1.0)


# --- a session begins --------------------------------------------------------------------------
def test_a_session_that_was_killed_is_taken_up_with_a_row_and_a_line_of_its_own() -> None:
    """It goes on from the run store, and one step later it takes in a newcomer."""
    run = begun("a", "b", "c", steps=147)
    run.start(resumed=True, pause=36.0)
    run.among("a", "b", step=100, reason="resume", rung=6)
    paused(run, 1, 101, after=1.0)
    run.write(step_done(101, 1.0, {"compute": 1.0}), after=0.125)
    then(run, "a", "b", "c", step=101, reason="node_joined", rung=5)
    run.steps(102, 148)
    cold, joined = history_of(run).incidents
    assert (cold.title, cold.rung) == ("the session ended without a word", 6)
    assert (cold.reached, cold.steps_lost) == (147, 47)
    assert cold.seconds == pytest.approx(36 + 0.25 + 0.5 + 1.0)
    assert cold.phases["replay"] == pytest.approx(0.125 + 0.25 + 0.75 + 47)
    assert joined.title == "c joined"
    assert joined.stood_still_s == pytest.approx(0.375 + 0.75 + 1.0)
    assert over_live(run.records) == [
        "recovered: from the run store (rung 6), stood still for 38 s, 47 steps done again",
        "c joined: training stood still for 2.1 s",
    ]


@pytest.mark.parametrize("reason", ["resume", "node_lost"])
def test_a_session_that_goes_on_from_an_older_state_than_the_last_one_reached(reason: str) -> None:
    run = begun("a", "b", steps=9)
    run.write(RunFailed("the disk is full", step=9))
    run.start(resumed=True, pause=36.0)
    run.among("a", "b", step=6, reason=reason, rung=6)
    run.steps(7, 11)
    (incident,) = history_of(run).incidents
    assert incident.title == "resumed from the state after step 6"
    assert (incident.rung, incident.reached, incident.steps_lost) == (6, 9, 3)
    assert incident.phases == pytest.approx(
        {"agree": 0.25, "restore": 0.5, "step": 1.0, "replay": 3.0}
    )
    (line,) = over_live(run.records)
    assert line.endswith("stood still for 1.8 s, 3 steps done again")


@pytest.mark.parametrize("reason", ["resume", "node_lost"])
def test_a_stop_is_no_incident_whatever_the_next_session_finds(reason: str) -> None:
    run = begun("a", "b")
    run.stop()
    for rank in (0, 1):
        run.write(WorkerLost(rank, 0, ANEW, "heartbeat", "ab"[rank]), after=30.0)
    run.start(resumed=True, pause=1.0)
    run.among("a", "b", step=4, reason=reason, rung=6)
    run.steps(5, 6)
    assert history_of(run).incidents == ()
    assert not [line for line in told_live(run.records) if "lost" in line]


def test_a_session_that_is_killed_while_it_recovers_leaves_two_incidents() -> None:
    run = begun("a", "b")
    lose(run, 1, "b")
    then(run, "a", step=4, reason="worker_lost", rung=0)
    run.start(resumed=True, pause=8.0)
    run.among("a", "b", step=2, reason="resume", rung=6)
    run.steps(3, 6)
    lost, cold = history_of(run).incidents
    assert (lost.kind, lost.seconds) == ("worker_lost", None)
    assert (cold.kind, cold.rung, cold.steps_lost) == ("session_lost", 6, 2)


def test_what_a_run_failed_by_is_not_got_over_by_the_next_session() -> None:
    run = begun("a", "b")
    lose(run, 1, "b")
    run.write(RunFailed("given up", step=4), after=1.0)
    run.start(resumed=True, pause=3600.0)
    run.among("a", "b", step=4, reason="resume")
    run.steps(5, 6)
    (incident,) = history_of(run).incidents
    assert (incident.title, incident.seconds) == ("rank 1 of b lost (SIGKILL)", None)


def test_losses_that_an_older_program_told_in_a_generation_before_all_are_none() -> None:
    """They came from the next session, and sort before everything."""
    run = begun("a", "b")
    at = run.at + 30.0
    run.start(resumed=True, pause=36.0)
    run.among("a", "b", step=2, reason="node_lost", rung=6)
    run.steps(3, 6)
    run.records += [
        Record(0, "agent.a", rank, at, WorkerLost(rank, 0, ANEW, "heartbeat", "ab"[rank]))
        for rank in (0, 1)
    ]
    (incident,) = history_of(run).incidents
    assert (incident.title, incident.steps_lost) == ("the session ended without a word", 2)
    assert not [line for line in told_live(order_records(run.records)) if ANEW in line]


# --- what it is called -------------------------------------------------------------------------
def titled(run: Scribe) -> Incident:
    run.steps(5, 6)
    (incident,) = history_of(run).incidents
    return incident


@pytest.mark.parametrize(
    ("more", "title"),
    [(("a",), "a worker of a joined"), (("a", "a"), "2 workers of a joined"), (("b",), "b joined")],
)
def test_what_joined_is_named_on_a_run_of_one_node_too(more: tuple[str, ...], title: str) -> None:
    run = begun("a", "a")
    paused(run, 1, 4)
    then(run, "a", "a", *more, step=4, reason="worker_joined", rung=5)
    assert titled(run).title == title


def test_a_notice_to_all_nodes_is_called_so() -> None:
    run = begun("a", "b")
    paused(run, 1, 4)
    then(run, "a", "b", step=4, reason="notice", rung=1)
    assert titled(run).title == "all nodes were told to go"


def test_a_node_that_left_in_time_is_named_though_another_came() -> None:
    run = begun("a", "b")
    paused(run, 1, 4)
    then(run, "a", "c", step=4, reason="notice", rung=3)
    assert titled(run).title == "b left in time"


# --- what a recovery says of the state that it began from -----------------------------------------
def test_an_incident_says_where_the_state_came_from_and_what_each_phase_took() -> None:
    phases = {"open": 0.002, "read": 0.01, "verify": 0.02, "copy": 0.03}
    story: list[tuple[int, Event]] = [
        (1, WorkerLost(1, 77, "SIGKILL", "exit", step=9)),
        (2, RestorePointFound("commits/x", False, 0.004, step=8)),
        (2, GenerationStarted({}, "worker_lost", "commits/x", step=8)),
        (2, CheckpointRestored(0, "commits/x", 100, 0.05, {}, {"memory": 100}, step=8)),
        (2, CheckpointRestored(1, "commits/x", 100, 0.07, phases, {"memory": 90, "peer a": 10})),
        (2, StepDone(1.0, 10, 1.0, 0.1, 0.5, step=9)),
    ]
    book = IncidentBook()
    for at, (generation, event) in enumerate(story):
        book.observe(Record(generation, "agent", at, float(at), event), float(at))
    (incident,) = book.incidents
    assert incident.seconds == 5.0
    assert incident.source == (
        "from memory and peer a: find 0.004 s, open 0.002 s, read 0.010 s, verify 0.020 s, "
        "copy 0.030 s"
    )
