"""A run on several nodes from outside: nodes are lost, leave and come back, the leader too. The
curve is that of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted, NoticeReceived, RunStopped, StepDone
from holdfast.wire.store.run_store import RunStore
from tests.runtime.report.trackers.test_process import rows
from tests.support.commands import apart, start
from tests.support.nodes import Nodes, in_bucket, nodes_of
from tests.support.ranks import DEADLINE_S, wait_until

STEPS, LATE = 70, 60
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
)
THREE = (*SETTINGS, "layout.workers=3", "cluster.min_nodes=2")
TRACKED = ("logging.trackers=csv", "logging.finish_seconds=60")
FOUR = (*SETTINGS, "layout.workers=4", "cluster.min_nodes=2")


@pytest.fixture
def gate(tmp_path: Path) -> FaultOrders:
    """A gate that is shut until a test opens it. The test opens it to LATE before a fault, and to
    the end after it. So the fault comes in the middle of steps and never too late."""
    found = FaultOrders(tmp_path / "gate")
    found.prepare(0)
    return found


def _twenty_steps(nodes: Nodes, gate: FaultOrders, names: str = "abc") -> None:
    """Of all of them, whichever came late."""
    nodes.wait_generation({*names})
    gate.open_gate(20)
    nodes.wait_step(20, nodes={*names})


def _behind(gate: FaultOrders) -> str:
    return f"cluster.faults={gate.folder}"


@pytest.mark.slow
def test_nodes_are_killed_and_the_others_go_on(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, gate: FaultOrders
) -> None:
    """One that follows, then the one that leads. The next leader's tracker continues the file."""
    with nodes_of(run_file, tmp_path / "run", *FOUR, *TRACKED, _behind(gate)) as nodes:
        nodes.start(*"abcd")
        _twenty_steps(nodes, gate, "abcd")
        first = nodes.leader
        lost = next(name for name in "abcd" if name != first)
        gate.open_gate(40)
        nodes.kill(lost)
        nodes.wait_generation({*"abcd"} - {lost})
        assert nodes.leader == first
        assert _live(nodes)[-1] is True
        gate.open_gate(LATE)
        nodes.kill(first)
        gate.open_gate(STEPS)
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert nodes.leader != first
        assert nodes.nodes(nodes.newest) == {*"abcd"} - {lost, first}
        assert _rungs(nodes)[-2:] == [0, 0]
        nodes.assert_same_run(undisturbed)
        if in_bucket():
            return  # each node writes the file on its own disk
        found = rows(nodes.local(first) / "trackers" / "csv" / "train.csv")
        assert [int(row["step"]) for row in found] == list(range(1, STEPS + 1))
        assert {int(row["step"]): float(row["train/loss"]) for row in found} == undisturbed


@pytest.mark.slow
def test_too_few_nodes_wait_with_what_they_hold(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, gate: FaultOrders
) -> None:
    settings = (*THREE, "cluster.min_nodes=3", _behind(gate))
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b", "c")
        _twenty_steps(nodes, gate)
        lost = next(name for name in "abc" if name != nodes.leader)
        gate.open_gate(LATE)
        nodes.kill(lost)
        gate.open_gate(STEPS)
        nodes.join("d")  # a stranger to the run file
        nodes.wait_step(30, nodes.newest, {"a", "b", "c", "d"} - {lost})
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert _live(nodes) == [False, True]  # two of three held the state meanwhile
        assert _rungs(nodes) == [-1, 3], "the stranger took the place"
        nodes.assert_same_run(undisturbed)


@pytest.mark.slow
def test_all_nodes_are_lost_and_the_newest_checkpoint_is_rotten(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, gate: FaultOrders
) -> None:
    settings = (*SETTINGS, "cluster.min_nodes=2", "layout.workers=2", _behind(gate))
    gate.open_gate(50)
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(50)
        wait_until(lambda: len(list_commits(nodes.store)) == 2, DEADLINE_S, "two checkpoints")
        nodes.kill("a")
        nodes.kill("b")
        gate.open_gate(STEPS)
        newest, older, *_ = list_commits(nodes.store)
        _rot(nodes.store, step_of(newest))
        nodes.start("a", "b")
        assert set(nodes.end().values()) == {0}, nodes.story()
        begun = [event.restored_from for event in nodes.events(GenerationStarted)]
        assert begun[-2:] == [newest, older]
        assert _rungs(nodes)[-2:] == [6, 6]
        nodes.assert_same_run(undisturbed)


@pytest.mark.slow
def test_nodes_that_are_told_to_go_leave_and_the_others_go_on(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, gate: FaultOrders
) -> None:
    """By its cloud one that follows, then by the signal the one that leads."""
    notice = ("cluster.notices=file", "cluster.notices_every_seconds=0.1")
    with nodes_of(run_file, tmp_path / "run", *FOUR, *notice, _behind(gate)) as nodes:
        for name in "abcd":
            nodes.start(name, settings=[f"cluster.notices_at={tmp_path / name}"])
        _twenty_steps(nodes, gate, "abcd")
        leads = nodes.leader
        warned = min({*"abcd"} - {leads})
        gate.open_gate(40)
        (tmp_path / warned).write_text("60")
        nodes.wait_generation({*"abcd"} - {warned})
        gate.open_gate(LATE)
        nodes.signal(leads, signal.SIGTERM)
        gate.open_gate(STEPS)
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert nodes.nodes(nodes.newest) == {*"abcd"} - {warned, leads}
        assert [e.nodes for e in nodes.events(NoticeReceived)] == [[warned]]
        assert _rungs(nodes)[-2:] == [0, 0]
        nodes.assert_same_run(undisturbed)
        done = [step.step for step in nodes.events(StepDone)]
        assert len(done) == len(set(done)), "a step was done twice"


def _rot(store: RunStore, step: int) -> None:
    """Flip a bit in each blob of a checkpoint."""
    blobs = [key for key in store.list("data/") if f"/{step:010d}-" in key]
    assert blobs
    for blob in blobs:
        torn = bytearray(store.get(blob))
        torn[-100] ^= 1
        store.delete(blob)
        store.create(blob, torn)


def _live(nodes: Nodes) -> list[bool]:
    """Of every generation, whether it began from what the processes held."""
    return [event.came_from is not None for event in nodes.events(GenerationStarted)]


def _rungs(nodes: Nodes) -> list[int]:
    """Of every generation, by which rung of the recovery ladder it came about."""
    return [event.rung for event in nodes.events(GenerationStarted)]


ENDLESS = (
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
    with nodes_of(run_file, tmp_path / "run", *ENDLESS, *LEAVE) as nodes:
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
    settings = (*ENDLESS, *LEAVE, "cluster.gather_seconds=0")
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
    given = (*ENDLESS, "layout.tp=2", "model.kv_heads=2", "cluster.left_exit_code=143")
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
    with nodes_of(run_file, tmp_path / "run", *ENDLESS) as nodes:
        nodes.agents["alone"] = start("train", run_file, f"folder={nodes.outside}", *ENDLESS)
        nodes.wait_step(1)
        apart("join", nodes.outside, "--node", "b").refuses(
            "without other nodes", "cluster.node=NAME"
        )
        nodes.agents["alone"].terminate()
        assert nodes.end() == {"alone": 0}, nodes.story()


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("late", [False, True])
def test_all_nodes_are_told_to_go_at_once_and_save_before_that(
    run_file: Path, tmp_path: Path, names: str, late: bool
) -> None:
    """Two nodes train, the rest are spares. late: spares hear it when the last generation is made,
    as where 'holdfast down' tells one machine after the other."""
    settings = (*ENDLESS, "cluster.min_nodes=2", "layout.workers=2")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start(*names)
        nodes.wait_step(5)
        train = nodes.nodes(nodes.newest)
        for name in sorted(train):
            nodes.signal(name, signal.SIGTERM)
        if late:
            nodes.wait_generation(train, after=nodes.newest)
        for name in {*names} - train:
            nodes.signal(name, signal.SIGTERM)
        assert set(nodes.end().values()) == {0}, nodes.story()
        steps = [event.step for event in nodes.events(StepDone)]
        assert len(steps) == len(done := {*steps}), "a step was done twice"
        assert step_of(list_commits(nodes.store)[0]) == max(done), nodes.story()
        assert _stops(nodes) == ["all nodes were told to go"]
