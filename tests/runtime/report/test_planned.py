"""The plan and what was measured: of the newest generation, part by part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.events import MemoryUsed, StepPredicted, from_json, to_json
from holdfast.report.history.history import build_history
from holdfast.report.history.summary import summary
from holdfast.report.page.page import render_page
from tests.support.journal_builder import Scribe, step_done

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
