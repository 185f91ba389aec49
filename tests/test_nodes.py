"""A run on several nodes from outside: nodes are lost and come back, the one that leads, too, and
the curve is that of the run that nobody disturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.restore import listing, step_of
from holdfast.events import GenerationStarted, NoticeReceived, StepDone
from holdfast.wire.runstore import FolderStore
from tests.cli.support import apart
from tests.nodes import Nodes, losses_of_one_worker, nodes_of, prepared

STEPS = 150
SETTINGS = (
    f"train.steps={STEPS}", "train.batch_size=6", "train.evaluate.every=0",
    "checkpoint.every_steps=20",
)  # fmt: skip
THREE = (*SETTINGS, "layout.workers=3", "cluster.min_nodes=2")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("run-file"))


@pytest.fixture(scope="module")
def undisturbed(run_file: Path) -> dict[int, float]:
    return losses_of_one_worker(run_file, *SETTINGS)


def _same_run(nodes: Nodes, undisturbed: dict[int, float]) -> None:
    assert nodes.losses() == undisturbed, nodes.story()
    audit = apart("data", "audit", nodes.folder)
    assert audit.code == 0, audit.out
    assert "none missing, none twice" in audit.out


def test_a_node_is_killed_and_the_others_go_on(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with nodes_of(run_file, tmp_path / "run", *THREE) as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_step(20, nodes={"a", "b", "c"})
        lost = next(name for name in "abc" if name != nodes.leader)
        nodes.kill(lost)
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert nodes.nodes(nodes.newest) == {"a", "b", "c"} - {lost}
        assert _live(nodes)[-1] is True
        _same_run(nodes, undisturbed)


def test_too_few_nodes_wait_with_what_they_hold(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with nodes_of(run_file, tmp_path / "run", *THREE, "cluster.min_nodes=3") as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_step(20)
        lost = next(name for name in "abc" if name != nodes.leader)
        nodes.kill(lost)
        nodes.join("d")  # a stranger to the run file
        nodes.wait_step(30, nodes.newest, {"a", "b", "c", "d"} - {lost})
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert _live(nodes) == [False, True]  # two of three held the state meanwhile
        _same_run(nodes, undisturbed)


def test_the_leading_node_is_killed(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with nodes_of(run_file, tmp_path / "run", *THREE) as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_step(20, nodes={"a", "b", "c"})
        first = nodes.leader
        nodes.kill(first)
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert nodes.leader != first
        assert nodes.nodes(nodes.newest) == {"a", "b", "c"} - {first}
        _same_run(nodes, undisturbed)


def test_all_nodes_are_lost_and_the_newest_checkpoint_is_rotten(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with nodes_of(run_file, folder, *SETTINGS, "cluster.min_nodes=2", "layout.workers=2") as nodes:
        nodes.start("a", "b")
        nodes.wait_step(50)
        nodes.kill("a")
        nodes.kill("b")
        newest, older, *_ = listing(FolderStore(folder))
        for blob in (folder / "data").rglob(f"{step_of(newest):010d}-*"):
            torn = bytearray(blob.read_bytes())
            torn[-100] ^= 1
            blob.write_bytes(torn)
        nodes.start("a", "b")
        assert set(nodes.end().values()) == {0}, nodes.story()
        begun = [event.restored_from for event in nodes.events(GenerationStarted)]
        assert begun[-2:] == [newest, older]
        _same_run(nodes, undisturbed)


@pytest.mark.parametrize("how", ["SIGTERM", "notice"])
def test_a_node_that_is_told_to_go_leaves_and_the_others_go_on(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, how: str
) -> None:
    """By the signal to the one that leads, or by its cloud to one that follows."""
    notice = ("cluster.notices=file", "cluster.notices_every_seconds=0.1")
    with nodes_of(run_file, tmp_path / "run", *THREE, *notice) as nodes:
        for name in "abc":
            nodes.start(name, settings=[f"cluster.notices_at={tmp_path / name}"])
        nodes.wait_step(20, nodes={"a", "b", "c"})
        goes = nodes.leader if how == "SIGTERM" else min({"a", "b", "c"} - {nodes.leader})
        if how == "SIGTERM":
            nodes.signal(goes, signal.SIGTERM)
        else:
            (tmp_path / goes).write_text("60")
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert nodes.nodes(nodes.newest) == {"a", "b", "c"} - {goes}
        assert [e.nodes for e in nodes.events(NoticeReceived)] == [[goes]] * (how == "notice")
        _same_run(nodes, undisturbed)
        done = [step.step for step in nodes.events(StepDone)]
        assert len(done) == len(set(done)), "a step was done twice"


def _live(nodes: Nodes) -> list[bool]:
    """Of every generation, whether it began from what the processes held."""
    return [event.came_from is not None for event in nodes.events(GenerationStarted)]
