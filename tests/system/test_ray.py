"""A run on a real Ray: machines are lost, drained, returned, brought and removed by its autoscaler.

The parameters are bit for bit those of one undisturbed process.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.events import NoticeReceived
from tests.support.ray_autoscaler import autoscaled_cluster
from tests.support.ray_cluster import needs_ray, ray_cluster
from tests.support.ray_run import ENDLESS, RayRun

pytestmark = [pytest.mark.slow, needs_ray]
ALL = {"node-0", "node-1", "node-2", "node-3"}


def test_machines_that_come_and_go_change_no_bit(tmp_path: Path) -> None:
    with ray_cluster("a", "b", "c", "d") as cluster:
        run = RayRun(tmp_path, cluster)
        run.launch(4, ENDLESS)
        run.first_step(0, ALL)

        lost, before = run.node_at(cluster.host("b")), run.generation
        cluster.lose("b")
        run.first_step(before, ALL - {lost})
        run.wait(lambda: run.states()[lost][0] == "waiting", "the lost node does not wait")
        before = run.generation
        cluster.add("b")
        run.first_step(before, ALL)
        assert run.node_at(cluster.host("b")) == lost, "it returns on the machine that came back"

        drained, before = run.node_at(cluster.host("c")), run.generation
        deadline = time.time() + 60
        cluster.drain("c", 60)
        assert run.first_step(before, ALL - {drained}) < deadline
        (notice,) = run.journal.events(NoticeReceived)
        assert (notice.nodes, notice.source) == ([drained], "ray: the node is drained")
        run.wait(lambda: run.states()[drained][0] == "waiting", "Ray is not asked for a machine")
        before = run.generation
        cluster.add("e")
        assert run.first_step(before, ALL) < deadline, "it returns before its machine is taken"
        assert run.node_at(cluster.host("e")) == drained
        run.wait_more_steps()

        assert run.command("down").code == 0
        assert {state for state, _ in run.states().values()} == {"finished"}
        steps = run.step + 20
        run.launch(4, f"train.steps={steps}")
        run.check_end(steps)
        assert "finished after step" in run.command("logs").out


def test_the_autoscaler_grows_and_shrinks_the_run(tmp_path: Path) -> None:
    two, three = {"node-0", "node-1"}, {"node-0", "node-1", "node-2"}
    autoscaled = (ENDLESS, "launch.ray.autoscaler=true", "cluster.gather_seconds=1")
    with autoscaled_cluster(3) as cluster:
        run = RayRun(tmp_path, cluster, workers=3)
        assert cluster.machines == 0
        run.launch(2, *autoscaled)
        run.first_step(0, two)
        assert cluster.machines == 2, "it has brought as many as the run wants"

        before = run.generation
        run.launch(3, *autoscaled)
        run.first_step(before, three)
        assert cluster.machines == 3

        before = run.generation
        cluster.lose_newest()
        lost = run.first_step(before, two)
        assert run.first_step(before, three) > lost, "another machine takes its place"

        before = run.generation
        run.launch(2, *autoscaled)
        run.first_step(before, two)
        run.wait(lambda: cluster.machines == 2, "the machine that is not needed stays")

        assert run.command("down").code == 0
        run.wait(lambda: cluster.machines == 0, "machines stay without a run", looks=False)
        steps = run.step + 20
        run.launch(2, *autoscaled[1:], f"train.steps={steps}")
        run.check_end(steps)
