"""One continuous curve out of a journal that is read in any order, and again after a restart."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.data.lineage import split_effective
from holdfast.events import Evaluated, GenerationStarted, Record, RunFinished, StepDone
from holdfast.report.trackers.curve import Curve, Point, Rewind, StepRanges

Changes = list[Point | Rewind]


def step(generation: int, number: int, writer: str = "rank0") -> Record:
    loss = generation + number / 1000  # tells which generation a value came from
    return Record(generation, writer, number, 0.0, StepDone(loss, 1, 1.0, 0.1, 0.0, step=number))


def begin(generation: int, after: int) -> Record:
    return Record(generation, "agent", 0, 0.0, GenerationStarted({}, "start", step=after))


def validation(generation: int, number: int) -> Record:
    return Record(generation, "rank0", 1000 + number, 0.0, Evaluated(1.0, 1.0, 1, 0.0, step=number))


class Shown:
    """What a tracker shows. Without rewinds, a second point at a step would be seen."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int, float]] = []

    def apply(self, changes: Sequence[Point | Rewind]) -> None:
        for change in changes:
            if isinstance(change, Rewind):
                self.points = [p for p in self.points if p[1] <= change.step]
            else:
                value = next(iter(change.values.values()))
                self.points.append((change.group, change.step, value))

    def of(self, group: str) -> list[tuple[int, float]]:
        return [(number, value) for name, number, value in self.points if name == group]


def read(records: Sequence[Record], can_rewind: bool = True) -> Shown:
    shown, curve = Shown(), Curve(can_rewind)
    for record in records:
        shown.apply(curve.observe(record))
    shown.apply(curve.take_waiting())
    return shown


def lost_steps() -> list[Record]:
    first = [begin(1, 0), *(step(1, n) for n in range(1, 6)), validation(1, 4)]
    return [*first, begin(2, 3), *(step(2, n) for n in range(4, 8)), validation(2, 4)]


def test_steps_that_are_done_again_replace_the_earlier_ones() -> None:
    shown = read(lost_steps())
    assert [n for n, _ in shown.of("train")] == [1, 2, 3, 4, 5, 6, 7]
    assert [int(value) for _, value in shown.of("train")] == [1, 1, 1, 2, 2, 2, 2]
    assert [n for n, _ in shown.of("validation")] == [4]


def test_or_the_first_value_stays() -> None:
    shown = read(lost_steps(), can_rewind=False)
    assert [n for n, _ in shown.of("train")] == [1, 2, 3, 4, 5, 6, 7]
    assert [int(value) for _, value in shown.of("train")] == [1, 1, 1, 1, 1, 2, 2]
    assert [n for n, _ in shown.of("validation")] == [4]


def test_points_wait_for_their_generation() -> None:
    """Another writer's segment may be read first."""
    late = [begin(1, 0), *(step(1, n) for n in range(1, 6)), step(2, 4), begin(2, 3), step(2, 5)]
    assert [int(value) for _, value in read(late).of("train")] == [1, 1, 1, 2, 2]
    without_start = [begin(1, 0), step(1, 1), step(2, 2)]
    assert [n for n, _ in read(without_start).of("train")] == [1, 2]


def test_a_late_step_of_an_older_generation_is_no_loss_and_no_repetition() -> None:
    records = [begin(1, 0), step(1, 1), begin(2, 3), step(2, 4), step(1, 3), step(1, 2), step(1, 4)]
    shown = read(records)
    assert sorted(shown.of("train")) == [(1, 1.001), (2, 1.002), (3, 1.003), (4, 2.004)]


def test_the_end_of_the_newest_session() -> None:
    curve = Curve(True)
    curve.observe(Record(1, "agent", 9, 0.0, RunFinished(step=3)))
    assert curve.end == "finished"
    curve.observe(begin(2, 3))
    assert curve.end == "interrupted"


@st.composite
def journals(draw: st.DrawFn) -> list[list[Record]]:
    """Segments of runs that lose some last steps again and again."""
    segments: list[list[Record]] = []
    reached = 0
    for generation in range(1, draw(st.integers(1, 5)) + 1):
        after = draw(st.integers(0, reached))
        reached = after + draw(st.integers(0, 6))
        steps = [step(generation, n) for n in range(after + 1, reached + 1)]
        segments += [[begin(generation, after)], steps]
    return segments


@settings(max_examples=200, deadline=None)
@given(journals(), st.booleans(), st.randoms(use_true_random=False))
def test_any_reading_order_and_any_restart_show_the_curve(
    segments: list[list[Record]], can_rewind: bool, random: object
) -> None:
    """A restart repeats what was read since the stored position, and drops what it delivered.

    Generations begin one after the other; within one, two writers' segments come in any order."""
    choose = random.random  # type: ignore[attr-defined]
    order: list[Record] = []
    for starts, steps in zip(segments[::2], segments[1::2], strict=True):
        place = int(choose() * (len(steps) + 1))
        order += [*steps[:place], *starts, *steps[place:]]
    shown, curve = Shown(), Curve(can_rewind)
    stored_at, stored, kept = 0, json.dumps(curve.to_json()), list(shown.points)
    position = 0
    restarts = 0
    while position < len(order):
        shown.apply(curve.observe(order[position]))
        position += 1
        if choose() < 0.3:  # a position in the middle: the steps, not the place in the journal
            stored, kept = json.dumps(curve.to_json()), list(shown.points)
            if not curve.is_waiting:
                stored_at = position
        if choose() < 0.2 and restarts < 20:
            restarts += 1
            curve = Curve(can_rewind, json.loads(stored))
            shown.points, position = list(kept), stored_at
    shown.apply(curve.take_waiting())
    effective, _ = split_effective(sorted(order, key=lambda record: record.order))
    wanted = [r.event for r in effective if isinstance(r.event, StepDone)]
    if can_rewind:
        assert sorted(shown.of("train")) == [(event.step, event.loss) for event in wanted]
    else:  # steps that were lost and are not done again yet stay, too
        numbers = [number for number, _ in shown.of("train")]
        assert len(numbers) == len(set(numbers))
        assert set(numbers) >= {event.step for event in wanted}


def test_ranges() -> None:
    steps = StepRanges()
    for number in (1, 2, 5, 3, 9):
        steps.add(number)
    assert steps.ranges == [[1, 3], [5, 5], [9, 9]]
    steps.add(4)
    assert steps.ranges == [[1, 5], [9, 9]]
    assert [n in steps for n in (0, 1, 5, 6, 9, 10)] == [False, True, True, False, True, False]
    steps.cut(4)
    assert steps.ranges == [[1, 4]]
    assert steps.last == 4


@pytest.mark.parametrize("state", [{}, {"starts": [], "delivered": {}}, {"starts": {"x": 1}}])
def test_a_state_that_is_none(state: object) -> None:
    if state:
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            Curve(True, state)  # type: ignore[arg-type]
