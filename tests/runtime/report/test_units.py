"""If each sample counts for one, the words are of samples, and not of tokens."""

from __future__ import annotations

import pytest

from holdfast.events import Record, StepDone
from holdfast.report.history.history import StepPoint
from holdfast.report.history.progress import RunProgress
from holdfast.report.live.live import step_line
from holdfast.report.page.svg import step_tip


@pytest.mark.parametrize(("tokens", "unit"), [(64, "samples"), (8192, "tokens")])
def test_the_unit_of_the_speed_is_what_is_counted(tokens: int, unit: str) -> None:
    progress = RunProgress(total_steps=9)
    done = StepDone(0.5, tokens, 1.0, 0.1, 0.25, samples=64, step=1)
    progress.observe(Record(1, "rank0", 1, 1.0, done))
    assert f" {unit}/s" in step_line(progress)


@pytest.mark.parametrize(
    ("unit", "words"), [("samples", "0.5000 per sample"), ("tokens", "0.5000 nats per token")]
)
def test_the_tip_of_a_step_names_the_unit(unit: str, words: str) -> None:
    tip = step_tip(StepPoint(1, 1, 0.0, 0.5, 64, 64, 1.0, 0.1, 0.25, unit), None)
    assert words in tip
    assert f"256 {unit}/s" in tip
