"""A run's story from its journal: one continuous curve, and everything that went wrong."""

from __future__ import annotations

import json
import random
import re

import pytest

from holdfast.events import (
    CheckpointCaptured,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRemoved,
    EmergencyPlanned,
    NonFinite,
    NoticeReceived,
    Record,
    RunFailed,
    SaveInterval,
    SettingIgnored,
    WorkerHeld,
    WorkerLost,
    to_json,
)
from holdfast.report.history.history import build_history, read_history
from holdfast.report.history.summary import summary
from holdfast.report.ledger.ordering import order_records
from holdfast.report.page.page import render_page
from tests.support.journal_builder import Scribe, lossy_run, started_run, step_done
from tests.support.memory_store import MemoryStore


def stored(records: list[Record], tail: bytes = b"") -> MemoryStore:
    """The records in segments, as they lie in a run folder; `tail` ends each segment."""
    store = MemoryStore()
    for record in records:
        line = json.dumps(to_json(record)).encode() + b"\n"
        store.append(f"journal/{record.generation:010d}/{record.writer}.jsonl", line)
    for key in store.list("journal/"):
        store.append(key, tail)
    return store


def test_the_curve_is_continuous_and_rework_stands_beside_it() -> None:
    history = read_history(stored(lossy_run().records))
    assert [p.step for p in history.steps] == list(range(1, 31))
    assert [[p.step for p in piece] for piece in history.rework] == [[11, 12, 13]]
    assert [p.generation for p in history.steps] == [1] * 10 + [2] * 10 + [3] * 10
    assert history.tokens == 30 * 1024
    assert history.steps[9].total_tokens == 10 * 1024
    assert history.recomputed_tokens == 3 * 1024
    assert [e.step for e in history.evaluations] == [10, 30]
    assert history.state == "finished"
    elapsed = [p.elapsed for p in history.steps]
    assert elapsed == sorted(elapsed)


def test_the_loss_is_one_incident_with_its_price() -> None:
    history = read_history(stored(lossy_run().records))
    (incident,) = history.incidents
    assert incident.losses[0].rank == 1
    assert incident.losses[0].cause == "SIGKILL"
    assert incident.steps_lost == 3
    # new generation 0.25, restore and ready 1.0, first step 1.0
    assert incident.seconds == pytest.approx(2.25)
    assert incident.stood_still_s == pytest.approx(2.5)
    assert incident.phases == pytest.approx(
        # noticed 0.25 after step 13; step 11 is `step`, then 12 and 13 again, and 14 is new
        {"detect": 0.25, "agree": 0.25, "restore": 1.0, "step": 1.0, "replay": 3.0}
    )
    assert "rank 1" in incident.title
    assert "SIGKILL" in incident.title


def test_what_a_save_blocked_may_be_told_behind_its_commit() -> None:
    """Nobody waits for it, so it comes with whatever a worker tells next."""
    run = started_run(5)
    run.commit(5)
    run.write(CheckpointCaptured(1, 0.25, 1000, step=5), after=0.25)
    run.steps(6, 7)
    (row,) = read_history(stored(run.records)).checkpoints
    assert row.blocked == 0.25


def test_sessions_generations_and_checkpoints() -> None:
    history = read_history(stored(lossy_run().records))
    assert [s.ended for s in history.sessions] == ["stopped", "finished"]
    assert history.sessions[1].began - history.sessions[0].until == pytest.approx(100.0)
    assert [(g.number, g.reason, g.first, g.last) for g in history.generations] == [
        (1, "start", 1, 13),
        (2, "worker_lost", 11, 20),
        (3, "resume", 21, 30),
    ]
    assert [g.workers for g in history.generations] == [2, 2, 2]
    assert [(c.step, c.restored) for c in history.checkpoints] == [
        (5, 0),
        (10, 1),
        (20, 1),
        (30, 0),
    ]
    assert all(c.blocked == 0.125 for c in history.checkpoints)
    assert sum(history.time.values()) == pytest.approx(history.wall)
    assert history.goodput == pytest.approx((26 * 0.625 + 4) / history.wall)
    assert history.goodput_running > history.goodput


def nodes_run() -> Scribe:
    """Nodes a, b, c; c is cut off after step 5 and tells late that it stopped; it comes back."""
    run = Scribe()
    run.start()
    run.among("a", "b", "c")
    run.steps(1, 5)
    run.write(WorkerLost(2, 0, "not heard for 1.5 s", "heartbeat", node="c"), after=1.5)
    late = Record(1, "agent.c", 0, run.at + 4.0, WorkerHeld(2, 5, None, "a peer was lost"))
    run.open_generation()
    run.among("a", "b", step=5, reason="node_lost", rung=0)
    run.steps(6, 8)
    run.write(WorkerHeld(0, 8, None, "paused after step 8"))
    run.open_generation()
    run.among("a", "b", "c", step=8, reason="node_joined", rung=5)
    run.steps(9, 10)
    run.finish()
    run.records.append(late)
    return run


def test_nodes_that_are_lost_and_join_say_so_with_rung_and_price() -> None:
    history = build_history(nodes_run().records)
    lost, joined = history.incidents
    assert (lost.title, lost.rung) == ("c lost (not heard for 1.5 s)", 0)
    assert (lost.came, lost.gone, lost.is_planned) == ((), ("c",), False)
    assert lost.phases == pytest.approx({"detect": 1.5, "agree": 0.25, "restore": 0.5, "step": 1.0})
    assert lost.stood_still_s == pytest.approx(3.25)
    assert (joined.title, joined.rung, joined.is_planned) == ("c joined", 5, True)
    assert [g.nodes for g in history.generations] == [("a", "b", "c"), ("a", "b"), ("a", "b", "c")]
    assert [s.ended for s in history.sessions] == ["finished"]
    assert history.time["recovery"] == pytest.approx((1.5 + 0.25 + 0.5) + (0.25 + 0.75))
    assert history.time["rework"] == history.time["stopped"] == 0
    assert sum(history.time.values()) == pytest.approx(history.wall)
    page = render_page(history, {})
    for words in (
        "c lost (not heard for 1.5 s)",
        "the other workers continued (rung 0)",
        "workers joined (rung 5)",
        "a, b, c",
    ):
        assert words in page


def test_the_order_in_which_records_come_does_not_matter() -> None:
    records = lossy_run().records
    shuffled = records.copy()
    random.Random(3).shuffle(shuffled)
    assert build_history(shuffled) == build_history(records)


def test_two_workers_lost_together_are_one_incident_and_a_loss_in_recovery_another() -> None:
    run = started_run(3)
    run.lose(0)
    run.lose(1, "exit 1", after=0.0)
    run.restart(0)
    run.lose(1, "SIGSEGV")
    run.restart(0)
    run.steps(1, 4)
    first, second = build_history(run.records).incidents
    assert [loss.rank for loss in first.losses] == [0, 1]
    assert first.seconds is None  # the generation that should have ended it broke itself
    assert second.losses[0].cause == "SIGSEGV"
    assert second.seconds == pytest.approx(0.25 + 0.5 + 1.0)
    assert second.generation == 2


def test_who_is_left_goes_on_and_a_step_that_is_told_late_ends_no_incident() -> None:
    """Rank 1 is lost after step 3, which rank 0 could tell only in the next generation."""
    run = started_run(2)
    run.at += 1.0
    run.write(WorkerHeld(0, 3, None, "a peer was lost"), after=0.25)
    run.lose(1, after=0.0)
    run.open_generation()
    run.generate(3, "worker_lost")
    run.write(step_done(3, 1.0, {"compute": 1.0}))
    run.steps(4, 5)
    history = build_history(run.records)
    (incident,) = history.incidents
    assert (incident.kind, incident.generation, incident.restart_step) == ("worker_lost", 1, 3)
    assert (incident.reached, incident.steps_lost) == (3, 0)
    assert incident.seconds == pytest.approx(0.25 + 0.5 + 1.0)
    assert "rank 1 lost" in incident.title
    assert [point.step for point in history.steps] == [1, 2, 3, 4, 5]
    assert history.time["productive"] == pytest.approx(4 * 0.625 + 1.0)
    assert history.time["recovery"] == pytest.approx(0.25 + 0.25 + 0.5)
    assert history.time["rework"] == 0


def test_an_error_of_one_worker_is_an_incident_without_a_loss() -> None:
    run = started_run(2)
    run.write(WorkerHeld(1, 2, None, "ValueError: no"), after=0.25)
    run.open_generation()
    run.generate(2, "error")
    run.steps(3, 4)
    (incident,) = build_history(run.records).incidents
    assert (incident.kind, incident.losses, incident.title) == ("error", (), "ValueError: no")
    assert incident.seconds == pytest.approx(0.25 + 0.5 + 1.0)


def test_an_agent_that_was_killed_is_an_incident_too() -> None:
    run = started_run(4)
    run.start(resumed=True, pause=50.0)
    run.generate(2, "resume")
    run.steps(3, 4)
    history = build_history(run.records)
    (incident,) = history.incidents
    assert incident.kind == "session_lost"
    assert incident.steps_lost == 2
    assert incident.seconds == pytest.approx(50 + 0.25 + 0.5 + 1.0)
    assert [s.ended for s in history.sessions] == ["lost", "running"]
    assert history.state == "running"


def test_a_stop_and_a_resume_are_no_incident() -> None:
    run = started_run(4)
    run.stop()
    run.start(resumed=True, pause=5)
    run.generate(4, "resume")
    run.steps(5, 6)
    run.finish()
    assert build_history(run.records).incidents == ()


def test_what_a_person_should_know_becomes_a_notice() -> None:
    run = Scribe()
    run.start()
    run.write(SettingIgnored("train.compile", "no compiler"))
    run.generate()
    run.steps(1, 4)
    run.write(CheckpointFailed("the disk is full", step=4))
    run.write(CheckpointRejected("commits/x", "checksum of extent 3"))
    run.write(NonFinite(1, "layers.0.ffn.up.weight", step=5))
    run.write(RunFailed("a gradient is not finite", step=4))
    history = build_history(run.records)
    assert history.state == "failed"
    assert history.sessions[0].reason == "a gradient is not finite"
    text = "\n".join(n.text for n in history.notices)
    for part in ("train.compile", "disk is full", "extent 3", "layers.0.ffn.up.weight on rank"):
        assert part.replace(" on rank", "") in text


def test_the_newest_decision_of_each_tier_is_the_one_in_force() -> None:
    run = started_run(4)
    for tier, seconds in ((2, 60.0), (0, 5.0), (2, 40.0), (1, 0.0)):
        run.write(SaveInterval(tier, seconds, f"tier {tier} <{seconds:g}>", step=4))
    run.write(NoticeReceived(30.0, ["a", "b"], True, "SIGTERM", step=4))
    run.write(EmergencyPlanned([2], 30.0, 10**6, "1 MB into tier 2 by 2 s", step=4))
    history = build_history(run.records)
    assert [(d.tier, d.seconds) for d in history.cadence] == [(0, 5.0), (1, 0.0), (2, 40.0)]
    text = "\n".join(n.text for n in history.notices)
    assert "notice (SIGTERM): a, b will be taken away in 30 s, and the run is to leave" in text
    assert "emergency save: 1 MB into tier 2" in text
    assert [d["tier"] for d in summary(history)["cadence"]] == [0, 1, 2]
    page = render_page(history, {})
    assert "When to save" in page
    assert "tier 2 &lt;40&gt;" in page
    assert "never" in page


def test_removed_checkpoints_are_marked() -> None:
    run = lossy_run()
    run.write(CheckpointRemoved("commits/5-1.json"))
    rows = build_history(run.records).checkpoints
    assert [c.step for c in rows if c.removed] == [5]


def test_a_torn_last_line_and_unknown_kinds_are_no_obstacle() -> None:
    records = lossy_run().records
    unknown = json.dumps(to_json(records[0]) | {"kind": "from_the_future"}).encode() + b"\n"
    torn = json.dumps(to_json(records[-1])).encode()[:40]
    assert read_history(stored(records, tail=unknown + torn)) == build_history(records)


def test_a_damaged_line_is_named() -> None:
    store = stored(lossy_run().records, tail=b"rubbish\n")
    (hole,) = read_history(store).holes
    assert re.search(r"6 lines of the journal cannot be read.*agent\.jsonl, line \d+", hole)


def test_steps_without_a_line_are_named() -> None:
    run = Scribe()
    run.start()
    run.generate()
    for first, last in ((1, 3), (7, 8), (10, 12)):
        run.steps(first, last)
    (hole,) = read_history(stored(run.records)).holes
    assert hole.startswith("the journal has no line of step 4 to 6, 9. ")


def test_a_clock_that_was_set_back_does_not_mix_up_a_writer_s_records() -> None:
    run = started_run(3)
    run.at -= 100
    run.steps(4, 6)
    assert [r.event.step for r in order_records(run.records) if r.writer == "rank0"][2:] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert sum(build_history(run.records).time.values()) == pytest.approx(
        build_history(run.records).wall
    )


def test_an_empty_journal_has_an_empty_history() -> None:
    history = read_history(MemoryStore())
    assert history.state == "empty"
    assert history.steps == ()
    assert history.wall == 0.0
    assert history.goodput == 0.0
    assert history.tokens_per_second == 0.0
