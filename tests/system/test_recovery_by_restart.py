"""Two agents of one run whose processes all restart after a loss (`cluster.recovery: restart`).
They restart together, and end together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.events import GenerationStarted, RunFailed, StepDone, StopRequested, WorkerLost
from holdfast.report.history import history
from tests.support.trainer_process import Trainer, training

NODES = ("layout.workers=2", "cluster.places=1", "cluster.min_nodes=2", "cluster.beat_seconds=0.5")


def _second(first: Trainer) -> Trainer:
    return Trainer(first.folder, *NODES, "cluster.node=b")


def test_a_loss_begins_all_anew_and_a_refusal_leaves_its_node_out(tmp_path: Path) -> None:
    plan = {
        "steps": 9,
        "pace": 0.05,
        "die": {"generation": 1, "rank": 1, "step": 3},
        "refuse": {"generation": 2, "rank": 1, "step": 2},
    }
    with training(tmp_path / "run", plan, *NODES, "cluster.node=a") as one:
        other = _second(one)
        try:
            assert (one.end(), other.end()) == (3, 2), one.said + other.said  # below min_nodes
        finally:
            other.process.kill()
            other.process.wait(120)
    begun = one.events(GenerationStarted)[:2]  # the node that refuses is left out after them
    assert [event.reason for event in begun] == ["start", "worker_lost"]
    assert [event.topology["nodes"] for event in begun] == [["a", "b"], ["a", "b"]]
    assert one.events(WorkerLost)[0].rank == 1
    assert set(one.workers(1).values()).isdisjoint(one.workers(2).values())
    sentence = "plan.json: the toy refuses; leave it out"
    assert one.events(RunFailed) == []
    assert sentence in one.said
    assert sentence in other.said
    assert "Traceback" not in one.said + other.said


@pytest.mark.slow
def test_whoever_waits_alone_for_others_can_be_stopped(tmp_path: Path) -> None:
    plan = {"steps": 1_000_000, "pace": 0.01}
    with training(tmp_path / "run", plan, *NODES, "cluster.node=a") as one:
        other = _second(one)
        try:
            one.wait_step(2, 1)
            assert other.process.poll() is None
        finally:
            other.process.kill()
            other.process.wait(120)
        one.wait(lambda: "waiting for more" in one.said, "the loss of the other")
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.end() == 0, one.said
    assert "1 of at least 2 nodes (cluster.min_nodes) are here" in one.said
    assert "stopped after step" in one.said
    assert [event.reason for event in one.events(StopRequested)] == ["SIGTERM"]
    assert len(one.events(GenerationStarted)) == 2  # the second one saved


@pytest.mark.slow
def test_a_run_that_is_taken_up_again_tells_of_no_loss_in_a_generation_before_all(
    tmp_path: Path,
) -> None:
    """All agents were killed: the next leader finds no worker of the generation before."""
    plan = {"steps": 1_000_000, "pace": 0.01}
    with training(tmp_path / "run", plan, *NODES, "cluster.node=a") as one:
        other = _second(one)
        one.wait_step(3, 1)
        for trainer in (one, other):
            trainer.process.kill()
            trainer.process.wait(120)
    first = one.events(StepDone)[-1].step
    with training(tmp_path / "run", plan | {"steps": first + 2}, *NODES, "cluster.node=a") as again:
        other = _second(again)
        try:
            assert (again.end(), other.end()) == (0, 0), again.said + other.said
        finally:
            other.process.kill()
            other.process.wait(120)
    assert min(record.generation for record in again.records()) == 1
    assert again.events(WorkerLost) == []
    assert [event.reason for event in again.events(GenerationStarted)] == ["start", "resume"]
    story = history.build_history(again.records())
    assert [session.ended for session in story.sessions] == ["lost", "finished"]
    (incident,) = story.incidents
    assert (incident.kind, incident.generation) == ("session_lost", 1)
    assert incident.seconds is not None
