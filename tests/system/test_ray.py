"""A run on a real Ray cluster: machines lost, drained and returned; the same bits as without it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.events import NoticeReceived
from tests.support.checkpoints import newest_tensors
from tests.support.commands import apart
from tests.support.ray_cluster import needs_ray, ray_cluster
from tests.support.ray_run import DEADLINE, ENDLESS, SETTINGS, RayRun

pytestmark = [pytest.mark.slow, needs_ray]
ALL = {"node-0", "node-1", "node-2", "node-3"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RayRun]:
    with ray_cluster("a", "b", "c", "d") as cluster:
        yield RayRun(tmp_path, cluster)


def undisturbed(run: RayRun, steps: int) -> Path:
    """The folder of the same run as one process of this machine."""
    folder = run.run_file.parent / "alone"
    mine = [s for s in SETTINGS if not s.startswith("cluster.") or "threads" in s]
    done = apart(
        *("train", run.run_file, f"folder={folder}", *mine),
        *("layout.workers=1", f"train.steps={steps}"),
        deadline=DEADLINE,
    )
    assert done.code == 0, done.err
    return folder


def lose(run: RayRun, machine: str) -> str:
    """Kill a machine; return the node that was there, once the run has done a step without it."""
    node, before = run.node_on(machine), run.generation
    run.cluster.lose(machine)
    run.first_step(before, ALL - {node})
    return node


def test_machines_that_come_and_go_change_no_bit(run: RayRun) -> None:
    run.launch(4, ENDLESS)
    run.first_step(0, ALL)

    lost = lose(run, "b")
    run.wait(lambda: run.states()[lost][0] == "waiting", "the lost node does not wait")
    before = run.generation
    run.cluster.add("b")
    run.first_step(before, ALL)
    assert run.node_on("b") == lost, "it returns on the machine that came back"

    drained, before = run.node_on("c"), run.generation
    run.cluster.drain("c", 60)
    deadline = time.time() + 60
    assert run.first_step(before, ALL - {drained}) < deadline
    (notice,) = run.journal.events(NoticeReceived)
    assert (notice.nodes, notice.source) == ([drained], "ray: the node is drained")
    run.wait(lambda: run.states()[drained][0] == "waiting", "Ray is not asked for a machine")
    before = run.generation
    run.cluster.add("e")
    assert run.first_step(before, ALL) < deadline, "it returns before its old machine is taken"
    assert run.node_on("e") == drained
    run.wait_more_steps()

    assert run.command("down").code == 0
    assert {state for state, _ in run.states().values()} == {"finished"}
    steps = run.step + 20
    run.launch(4, f"train.steps={steps}")
    run.wait_state("finished")
    assert run.step == steps
    audit = apart("data", "audit", run.folder)
    assert audit.code == 0, audit.out
    assert newest_tensors(run.folder, steps) == newest_tensors(undisturbed(run, steps), steps)
    assert "finished after step" in run.command("logs").out
