"""How a run is disturbed: when it ends, and what is told of it. No process is started."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.chaos import experiment
from holdfast.chaos.actions import Deed
from holdfast.chaos.catalog import FAULTS
from holdfast.chaos.experiment import IN_VAIN, LOST, Disturbance, Done, StuckError
from holdfast.chaos.layouts import SHAPES
from holdfast.chaos.schedule import Draw
from holdfast.elastic.protocol.fault_orders import Armoury, Hit
from holdfast.events import CheckpointFailed, FaultInjected, NonFinite, Record, WorkerLost

KILL = Draw(FAULTS["kill"], ("forward",), 1, gap=1)
FULL = Draw(FAULTS["full-disk"], ("begin",), 1, gap=1)
PIPELINE = Draw(FAULTS["pipeline"], ("sending",), 1)


class _Said:
    """A run of four nodes that take part, and what is said of it."""

    def __init__(self, root: Path) -> None:
        self.lines: list[str] = []
        armoury = Armoury(root / "faults")
        armoury.prepare()
        fleet = SimpleNamespace(alive=["a", "b", "c", "d"], ended=list)
        scene: Any = SimpleNamespace(fleet=fleet, real=root, notices=root, network=None)
        self.it = Disturbance(
            scene, armoury, SHAPES["replicated"], list("abcd"), 100, self.lines.append
        )
        self.it.view.nodes, self.it.view.world = ("a", "b", "c", "d"), 4


@pytest.fixture
def said(tmp_path: Path) -> _Said:
    return _Said(tmp_path)


def test_draws_that_are_all_rejected_come_to_an_end(said: _Said) -> None:
    said.it._disturb(repeat(PIPELINE), 5, time.monotonic() + 60)
    assert len(said.it.story.rejected) == IN_VAIN
    assert said.it.story.cut == f"{IN_VAIN} draws in a row were rejected"
    assert said.it.story.cut in said.lines[-1]


def test_a_run_whose_time_is_over_says_so(said: _Said) -> None:
    said.it._disturb(repeat(PIPELINE), 5, time.monotonic() - 1)
    assert said.it.story.cut == "its time was over"
    assert said.it.story.cut in said.lines[-1]


def test_a_run_that_had_all_its_faults_was_not_cut_short(said: _Said) -> None:
    said.it._disturb(repeat(PIPELINE), 0, time.monotonic() - 1)
    assert said.it.story.cut == ""


def test_a_run_whose_steps_are_used_up_says_so(said: _Said) -> None:
    said.it._disturb(repeat(replace(KILL, step=98)), 5, time.monotonic() + 60)
    assert said.it.story.cut == "its steps were used up"
    assert said.it.story.cut in said.lines[-1]


def test_a_trace_names_the_very_step(said: _Said) -> None:
    said.it.view.start = 7
    assert said.it._step_for(replace(KILL, step=8)) == 8
    assert said.it._one(1, replace(KILL, step=7))
    assert [row["why"] for row in said.it.story.rejected] == ["its step had begun"]


def test_what_befalls_a_disk_comes_when_the_state_is_saved(said: _Said) -> None:
    said.it._saves_every = 10
    for after in range(1, 21):
        said.it.view.start = after
        assert said.it._step_for(FULL) in (10, 20, 30)
        assert said.it._step_for(FULL) > after
        assert said.it._step_for(KILL) == after + 1


def test_a_fault_that_came_to_nothing_does_not_count(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "SHOWN_SECONDS", 0.1)
    view, outcomes = said.it.view, list[str]()
    view.reached = {1: 12}
    view.generation = 1
    said.it._armoury.claim(Hit(10, 1, 10, 0, 5, "a"))
    record = Record(1, "chaos", 0, 0.0, FaultInjected(10, "full-disk", "a", "begin", step=10))
    view.take(record)
    for _ in range(2):
        done = Done(1, "full-disk", "begin", 10, "the disk of a", 1)
        said.it._settle(1, FULL, done)
        outcomes.append(done.outcome)
        view.take(replace(record, event=CheckpointFailed("no room", step=10)))
    assert outcomes == ["came to nothing (no checkpoint_failed)", "recovered"]


def test_a_trace_that_ends_with_faults_missing_says_so(said: _Said) -> None:
    said.it._disturb(iter([PIPELINE]), 1, time.monotonic() + 60)
    assert said.it.story.cut == "nothing was left to draw"


def test_a_nan_is_named_where_the_journal_has_its_rank_and_step(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        NonFinite(2, "w", step=7),
        NonFinite(1, "w", step=8),
        WorkerLost(0, 44, "SIGKILL", "exit", step=9),
        WorkerLost(1, 45, "did not stop", "halt", step=9),
    ]
    seen = SimpleNamespace(records=[SimpleNamespace(event=event) for event in events])
    monkeypatch.setattr(said.it._watcher, "look", lambda: seen)
    hits = {
        10: Hit(10, 1, 7, 2, 5, "a"),
        20: Hit(20, 1, 8, 2, 5, "a"),
        30: Hit(30, 1, 9, 0, 44, "a"),
        40: Hit(40, 1, 9, 1, 45, "a"),
    }
    monkeypatch.setattr(said.it._armoury, "hit", hits.get)
    names = ("gradient", "gradient", "kill", "hang", "agent")
    story = said.it.story
    story.faults += [Done(n, name, "backward", 7, "", 1) for n, name in enumerate(names, 1)]
    said.it._look_who_was_named()
    assert [done.named for done in story.faults] == [True, False, True, False, None]


def test_the_fault_that_a_run_does_not_survive_is_told(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(*_: object) -> None:
        raise StuckError("no sign")

    done = Done(1, "kill", "forward", 3, "rank 1", 1)
    said.it.view.start = 3
    monkeypatch.setattr(said.it, "_bring_about", lambda *_: done)
    monkeypatch.setattr(said.it, "_settle", settle)
    with pytest.raises(StuckError):
        said.it._one(1, KILL)
    assert [fault.outcome for fault in said.it.story.faults] == [LOST]
    assert LOST in said.lines[-1]


def test_a_node_that_does_not_come_back_is_told(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "BACK_SECONDS", 0.1)
    said.it.view.nodes = ("a", "c", "d")
    said.it._await_nodes()
    assert said.it.story.notes[0].startswith("b had not come back")
    assert "b had not come back" in said.lines[-1]


def test_only_the_first_of_two_is_aimed(said: _Said, monkeypatch: pytest.MonkeyPatch) -> None:
    hit: list[str] = []

    def deed(scene: object, node: str) -> Deed:
        hit.append(node)
        return Deed(f"the agent of {node}", gone=(node,))

    monkeypatch.setattr(experiment, "DEEDS", {"agent": deed})
    draw = Draw(FAULTS["two-agents"], ("begin", "begin"), 1, target="b")
    done = Done(1, "two-agents", "begin", 3, "", 1)
    for index, part in enumerate(draw.fault.parts):
        said.it._do(part, draw, 10, index, done)
    assert hit[0] == "b"
    assert hit[1] in {"a", "c", "d"}


def test_a_deed_where_no_node_is_left_is_not_done(said: _Said) -> None:
    said.it.view.nodes = ()
    draw = Draw(FAULTS["agent"], ("begin",), 1)
    done = Done(1, "agent", "begin", 3, "", 1)
    said.it._do(draw.fault.parts[0], draw, 10, 0, done)
    assert done.outcome == "not done: no node is there"
