"""Runs on several nodes end or continue: too few nodes, `holdfast notice`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.events import GenerationStarted, NoticeReceived, RunStopped, StepDone
from tests.support.commands import apart, start
from tests.support.nodes import Nodes, nodes_of
from tests.support.ranks import DEADLINE_S

SETTINGS = (
    "train.steps=100000",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=0",
    "layout.workers=2",
)
LEAVE = ("cluster.min_nodes=2", "cluster.below_minimum=leave", "cluster.below_minimum_seconds=0.5")


def _stops(nodes: Nodes) -> list[str]:
    return [event.reason for event in nodes.events(RunStopped)]


@pytest.mark.slow
def test_too_few_nodes_save_what_they_hold_and_leave(run_file: Path, tmp_path: Path) -> None:
    with nodes_of(run_file, tmp_path / "run", *SETTINGS, *LEAVE) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(5, nodes={"a", "b"})
        assert list_commits(nodes.store) == []
        lost = next(name for name in "ab" if name != nodes.leader)
        nodes.kill(lost)
        assert list(nodes.end().values()) == [3], nodes.story()
        done = max(event.step for event in nodes.events(StepDone))
        assert step_of(list_commits(nodes.store)[0]) == done  # nothing else had saved
        assert nodes.events(GenerationStarted)[-1].came_from is not None
        assert _stops(nodes) == ["1 of at least 2 nodes (cluster.min_nodes) are here, for 0.5 s"]
        assert f"stopped after step {done} (1 of at least 2 nodes" in nodes.said
        assert "Traceback" not in nodes.said


@pytest.mark.slow
def test_nodes_that_never_were_enough_leave_with_a_sentence(run_file: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, *LEAVE, "cluster.gather_seconds=0")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a")
        assert nodes.end() == {"a": 3}, nodes.story()
        assert nodes.said.count("1 of at least 2 nodes (cluster.min_nodes) are here") == 2
        assert nodes.events(GenerationStarted) == []


@pytest.mark.slow
def test_a_node_that_is_named_by_holdfast_notice_is_done_without(
    run_file: Path, tmp_path: Path
) -> None:
    """It takes half of the state with it, and nothing is saved by any rule: what the step after the
    notice left is copied first. Then all that are left are to go: the run stops with everything
    saved. An owner that replaces only nodes that fail gets the exit code that it needs."""
    given = (*SETTINGS, "layout.tp=2", "model.kv_heads=2", "cluster.left_exit_code=143")
    with nodes_of(run_file, tmp_path / "run", *given) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(5, nodes={"a", "b"})
        goes = next(name for name in "ab" if name != nodes.leader)
        first = nodes.newest
        unknown = apart("notice", nodes.outside, "--seconds", "60", "--node", "z")
        unknown.refuses("there is no node z in this run")
        told = apart(
            "notice", nodes.outside, "--seconds", "60", "--node", goes, "--leave"
        ).succeeds()
        assert f"go on without {goes}" in told.err
        nodes.wait_step(1, first, {"a", "b"} - {goes})
        nodes.agents[goes].wait(DEADLINE_S)
        apart("notice", nodes.outside, "--seconds", "60", "--leave").succeeds()
        assert nodes.end() == {"a": 143, "b": 143}, nodes.story()
        assert f"{goes} has left the run" in nodes.said
        heard = [(event.nodes, event.leave) for event in nodes.events(NoticeReceived)]
        rest = sorted({"a", "b"} - {goes})
        assert heard == [([goes], True), (rest, True)]
        done = [event.step for event in nodes.events(StepDone)]
        assert len(done) == len(set(done)), "a step was done twice"
        assert _stops(nodes)[-1] == "notice"
        assert step_of(list_commits(nodes.store)[0]) == max(done)


@pytest.mark.slow
def test_a_run_of_one_node_takes_in_no_other(run_file: Path, tmp_path: Path) -> None:
    with nodes_of(run_file, tmp_path / "run", *SETTINGS) as nodes:
        nodes.agents["alone"] = start("train", run_file, f"folder={nodes.outside}", *SETTINGS)
        nodes.wait_step(1)
        apart("join", nodes.outside, "--node", "b").refuses(
            "without other nodes", "cluster.node=NAME"
        )
        nodes.agents["alone"].terminate()
        assert nodes.end() == {"alone": 0}, nodes.story()


@pytest.mark.slow
def test_all_nodes_are_told_to_go_at_once_and_save_before_that(
    run_file: Path, tmp_path: Path
) -> None:
    with nodes_of(run_file, tmp_path / "run", *SETTINGS, "cluster.min_nodes=2") as nodes:
        nodes.start("a", "b")
        nodes.wait_step(5, nodes={"a", "b"})
        for name in "ab":
            nodes.signal(name, signal.SIGTERM)
        assert set(nodes.end().values()) == {0}, nodes.story()
        done = max(event.step for event in nodes.events(StepDone))
        assert step_of(list_commits(nodes.store)[0]) == done, nodes.story()
        assert _stops(nodes) == ["all nodes were told to go"]
