"""Every second has one class, and the classes add up to the wall time, always."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events import (
    Evaluated,
    GenerationStarted,
    MemoryUsed,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    StepPredicted,
    from_json,
    to_json,
)
from holdfast.report.history.history import build_history
from holdfast.report.history.summary import summary
from holdfast.report.ledger.timeledger import CLASSES, TimeLedger
from holdfast.report.page.page import render_page
from tests.support.journal_builder import Scribe, lossy_run, started_run, step_done


def ledger_of(records: list[Record]) -> TimeLedger:
    ledger = TimeLedger()
    for record in records:
        ledger.observe(record)
        assert sum(ledger.totals().values()) == pytest.approx(ledger.wall, abs=1e-6)
    spans = ledger.spans()
    assert all(one.stop == pytest.approx(other.start) for one, other in pairwise(spans))
    for name, seconds in ledger.totals().items():
        of_spans = sum(span.seconds.get(name, 0.0) for span in spans)
        assert of_spans == pytest.approx(seconds, abs=1e-6)
        assert min(span.seconds.get(name, 0.0) for span in spans) >= 0.0
    return ledger


def passed(records: list[Record]) -> float:
    """Seconds from the first RunStarted to the last record, of whatever class they are.

    By the agent's clock, which stands still where it was set back until it is past that time
    again. Each session has its own: one that is behind the one before begins at once. What comes
    when a session is over, and before the next one, tells of no time.
    """
    seconds, began, now, open_session = 0.0, 0.0, 0.0, False
    for record in records:
        starts = isinstance(record.event, RunStarted)
        if starts or (isinstance(record.event, GenerationStarted) and not open_session):
            pause = max(0.0, record.time - now) if now else 0.0
            seconds += now - began + pause
            began = now = record.time
            open_session = True
        if open_session:
            now = max(now, record.time)
        if isinstance(record.event, RunStopped | RunFinished | RunFailed):
            open_session = False
    return seconds + now - began


def test_a_lossy_run_to_the_last_second() -> None:
    run = lossy_run()
    ledger = ledger_of(run.records)
    assert ledger.wall == pytest.approx(run.at - 1_000_000.0)
    assert ledger.totals() == pytest.approx(
        {
            "productive": 26 * 0.625 + 4 * 1.0,
            "communication": 26 * 0.25,
            "data_wait": 26 * 0.125,
            "checkpoint": 4 * 0.125 + 2 * 0.5,  # the copies, and the last save of each session
            "evaluation": 2 * 2.0,
            "rework": 3 * 1.0,
            "startup": (0.25 + 0.5) + (0.25 + 1.0),
            # from step 13 to the loss, the new generation, two workers that restore
            "recovery": 0.25 + 0.25 + 1.0,
            "stopped": 100.0,
            "other": 1.5,  # what came after the last commit of each session
        }
    )


def test_a_batch_of_reports_that_arrives_late_is_not_other_time() -> None:
    """Workers send reports in batches: the agent hears of ten steps in one moment."""
    run = started_run(1)
    run.at += 9.0
    for step in range(2, 11):
        run.write(step_done(step, 1.0, {"compute": 1.0}))
    totals = ledger_of(run.records).totals()
    assert totals["productive"] == pytest.approx(0.625 + 9.0)
    assert totals["other"] == pytest.approx(0.0)


def test_claims_longer_than_the_agent_s_time_are_scaled_to_fit() -> None:
    run = Scribe()
    run.start()
    run.generate()
    run.steps(1, 1, compute=1.0)
    run.at += 1.0
    run.write(step_done(2, 3.0, {"compute": 1.5, "reduce": 1.5}))
    ledger = ledger_of(run.records)
    totals = ledger.totals()
    # four claimed seconds in a stretch of two: the proportions stay
    assert totals["productive"] == pytest.approx(2.5 / 2)
    assert totals["communication"] == pytest.approx(1.5 / 2)
    run.lose(0)
    run.restart(1)
    after = ledger_of(run.records).totals()
    assert after["rework"] == pytest.approx(3.0 / 2)
    assert after["productive"] == pytest.approx(0.5)


def test_no_class_falls_below_zero_by_a_last_digit() -> None:
    """Claims that are scaled to fit leave a rest of 1e-16 of either sign, and nothing was lost."""
    for seed in range(100):
        chance, run = random.Random(seed), Scribe()
        run.start()
        run.generate()
        for step in range(1, 10):
            run.at += chance.random() * 0.3
            phases = {"compute": chance.random() * 0.5, "reduce": chance.random() * 0.3}
            run.write(step_done(step, 0.01, phases))
            if step % 3 == 0:
                run.lose(0)
                run.restart(step)
        totals = ledger_of(run.records).totals()
        assert min(totals.values()) >= 0.0
        assert totals["rework"] == 0.0


def test_rework_reaches_back_over_generations() -> None:
    """The newest checkpoint was rejected: what two generations did is done again."""
    run = started_run(4)
    run.lose(0)
    run.restart(4)
    run.steps(5, 6)
    run.lose(0)
    run.restart(2)
    run.steps(3, 6)
    totals = ledger_of(run.records).totals()
    assert totals["rework"] == pytest.approx(4.0)
    assert totals["productive"] == pytest.approx(6 * 0.625)


def test_a_session_that_ended_without_a_word_ends_at_its_last_record() -> None:
    run = started_run(4)
    run.start(resumed=True, pause=50.0)
    run.generate(2, "resume")
    run.steps(3, 4)
    totals = ledger_of(run.records).totals()
    assert totals["stopped"] == pytest.approx(50.0)
    assert totals["rework"] == pytest.approx(2.0)


def test_another_machine_s_clock_that_is_behind_gives_no_negative_pause() -> None:
    run = started_run(4)
    run.stop()
    run.start(resumed=True, pause=-500.0)
    run.generate(4, "resume")
    run.steps(5, 6)
    run.finish()
    ledger = ledger_of(run.records)
    assert ledger.totals()["stopped"] == 0.0
    assert ledger.totals()["productive"] == pytest.approx(6 * 0.625)


def test_steps_reported_after_the_loss_was_noticed_still_count_as_done() -> None:
    """Rank 1 dies; the agent sees that before rank 0's last reports come in."""
    run = started_run(3)
    run.commit(3)
    run.lose(1, after=2.0)
    for step in (4, 5):
        run.write(step_done(step, 1.0, {"compute": 0.75, "reduce": 0.25}))
    run.restart(4)
    run.steps(5, 6)
    totals = ledger_of(run.records).totals()
    assert totals["rework"] == pytest.approx(1.0)
    assert totals["productive"] == pytest.approx(3 * 0.625 + 0.75 + 2 * 0.625)
    assert totals["recovery"] == pytest.approx(0.25 + 0.5)
    (incident,) = build_history(run.records).incidents
    assert (incident.reached, incident.steps_lost) == (5, 1)


def test_the_classes_of_several_sessions_are_the_time_from_the_first_start_to_the_last_record() -> (
    None
):
    """With a loss, a validation, a stop, a session without a word, and steps told late in each."""
    run = Scribe()
    for session in range(4):
        first = 8 * session
        run.start(resumed=bool(session), pause=10.0 * session)
        run.generate(first, "resume" if session else "start")
        run.steps(first + 1, first + 5)
        run.evaluate(first + 5)
        run.lose(1, after=2.5)
        run.write(step_done(first + 6, 1.0, {"compute": 0.75, "reduce": 0.25}), after=0.25)
        run.restart(first + 4)
        run.steps(first + 5, first + 7)
        run.capture(first + 8)
        run.commit(first + 8, after=1.5)
        if session != 1:
            run.stop(after=0.5)
    time = run.records[-1].time - run.records[0].time
    ledger = ledger_of(run.records)
    assert ledger.wall == pytest.approx(time) == pytest.approx(passed(run.records))
    totals = ledger.totals()
    assert min(totals.values()) > 0.0, "a class without a second would not be missed here"
    assert totals["stopped"] == pytest.approx(10.0 + 20.0 + 30.0)
    story = build_history(run.records)
    assert story.wall == pytest.approx(time) == pytest.approx(sum(story.time.values()))


def test_the_last_save_counts_as_blocked_by_the_checkpoint() -> None:
    run = started_run(2)
    run.commit(2, after=3.0)
    run.finish(after=0.5)
    totals = ledger_of(run.records).totals()
    assert totals["checkpoint"] == pytest.approx(3.0)
    assert totals["other"] == pytest.approx(0.5)


WORDS = ["step", "step", "step", "late", "evaluate", "capture", "commit", "lose", "restart"]
WORDS += ["stop", "fail", "vanish", "clock"]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(WORDS), st.floats(0.0, 20.0), st.integers(0, 6)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_classes_always_add_up_to_the_wall_time(actions: list[tuple[str, float, int]]) -> None:
    run = Scribe()
    run.start()
    run.generate()
    step = 0
    for action, seconds, number in actions:
        phases: dict[str, Any] = {"compute": seconds * 0.7, "reduce": seconds * 0.5, "odd": 0.1}
        if action in ("step", "late"):
            step += 1
            after = seconds if action == "step" else seconds / 10
            run.write(StepDone(1.0, 8, 1.0, 0.1, seconds, phases=phases, step=step), after)
        elif action == "evaluate":
            run.write(Evaluated(1.0, 1.0, 8, seconds * 2, step=step), seconds)
        elif action == "capture":
            step += 1
            run.capture(step, blocked=seconds)
        elif action == "commit":
            run.commit(step, after=seconds)
        elif action == "lose":
            run.lose(number % 2, after=seconds)
        elif action == "restart":
            step = max(0, step - number)
            run.restart(step)
        elif action == "stop":
            run.stop(after=seconds)
        elif action == "fail":
            run.write(RunFailed("no", step=step), seconds)
        elif action == "vanish":
            step = max(0, step - number)
            run.start(resumed=True, pause=seconds)
            run.generate(step, "resume")
        elif action == "clock":
            run.at -= seconds
    ledger = ledger_of(run.records)
    assert set(ledger.totals()) == set(CLASSES)
    time = passed(run.records)
    assert ledger.wall == pytest.approx(time, abs=1e-6), "no second is missing, or there twice"
    if not {"clock", "stop", "fail"} & {action for action, _, _ in actions}:
        assert time == pytest.approx(run.records[-1].time - run.records[0].time)
    assert min(ledger.totals().values()) >= 0.0, "not by a last digit either"
    assert 0.0 <= ledger.goodput <= 1.0


# --- the plan and what was measured ---------------------------------------------------------------
PLAN = StepPredicted(
    0.5, {"compute": 0.3, "bubble": 0.1, "gradients": 0.06, "update": 0.04}, 10**9, "assumed"
)
PHASES = {"compute": 0.7, "reduce": 0.2, "apply": 0.1}


def run_of(plan: StepPredicted | None = PLAN, seconds: float = 1.0) -> Scribe:
    scribe = Scribe()
    scribe.start()
    scribe.generate()
    if plan is not None:
        scribe.write(plan)
    for step in range(1, 7):
        took = seconds * (10 if step <= 2 else 1)  # the first steps allocate
        scribe.write(step_done(step, took, PHASES), after=took)
    scribe.write(MemoryUsed(0, 3 * 10**9, 2 * 10**9, step=6))
    return scribe


def test_parts_of_the_plan_stand_beside_the_phases_of_the_steps() -> None:
    found = build_history(run_of().records).plan
    assert found is not None
    assert (found.generation, found.steps, found.measured_s) == (1, 4, 1.0)
    parts = {part.name: (part.predicted, part.measured) for part in found.parts}
    assert parts["passes"] == (pytest.approx(0.4), 0.7)
    assert parts["gradients"] == (0.06, 0.2)
    assert parts["update"] == (0.04, 0.1)
    assert dict(found.within) == {"compute": 0.3, "bubble": 0.1}
    assert (found.predicted_bytes, found.measured_bytes) == (10**9, 2 * 10**9)
    assert found.error == -0.5
    assert found.sentence() == "planned 500 ms a step (assumed), measured 1.0 s (-50%)"


def test_the_newest_generation_with_a_plan_and_steps_is_compared() -> None:
    scribe = run_of()
    scribe.open_generation()
    scribe.generate(step=6, reason="worker_lost")
    scribe.write(replace(PLAN, seconds=2.0, step=6))
    found = build_history(scribe.records).plan
    assert found is not None
    assert found.generation == 1  # the second one has done no step
    scribe.write(step_done(7, 1.0, PHASES), after=1.0)
    found = build_history(scribe.records).plan
    assert found is not None
    assert (found.generation, found.predicted_s) == (2, 2.0)


def test_page_and_numbers_show_both() -> None:
    history = build_history(run_of().records)
    page = render_page(history, {})
    assert "Planned and measured" in page
    assert "of the passes: bubble" in page
    value = summary(history)["plan"]
    assert (value["predicted_s"], value["measured_s"], value["error"]) == (0.5, 1.0, -0.5)


def test_a_run_without_a_plan_shows_nothing_of_it() -> None:
    history = build_history(run_of(None).records)
    assert history.plan is None
    assert "plan" not in summary(history)
    assert "Planned and measured" not in render_page(history, {})


def test_the_plan_is_an_event_of_the_journal() -> None:
    record = run_of().records[2]
    assert from_json(to_json(record)) == record
