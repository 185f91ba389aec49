"""A run on a real Slurm whose controller is killed while it trains. Each test prints its times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from tests.support.launched_run import LaunchedRun, undisturbed_tensors
from tests.support.nodes import prepared
from tests.support.slurm_cluster import INSTALL, SlurmCluster, is_installed, slurm_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason=INSTALL)]
STEPS, FIRST, STEPS_WITHOUT = 150, 3, 10
ALL = {"n1", "n2", "n3", "n4"}
UNANSWERED = "Slurm's controller does not answer"


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with slurm_of(4) as found:
        yield found


@pytest.fixture
def run(cluster: SlurmCluster, tmp_path: Path) -> LaunchedRun:
    return LaunchedRun(cluster, prepared(tmp_path), tmp_path / "run", STEPS)


def report(what: str, **seconds: float) -> None:
    print(f"\n{what}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))


def known_nodes(run: LaunchedRun) -> bool:
    return all(node in run.status() for node in ALL)


def test_a_run_loses_no_step_and_all_commands_work_again(run: LaunchedRun) -> None:
    expected = undisturbed_tensors(run.run_file, STEPS)
    run.launch(4, "layout.workers=4")
    run.wait_step(FIRST, nodes=ALL)
    run.cluster.lose_controller()
    lost, before = time.time(), run.last_step
    run.wait_step(before + STEPS_WITHOUT, nodes=ALL)
    trained = time.time() - lost
    for command in ("status", "down"):
        refused = run.command(command, run.folder)
        assert (refused.code, UNANSWERED in refused.err) == (ConfigError.exit_code, True), refused
    assert run.command("logs", run.folder).code == 0
    back = time.time()
    run.cluster.return_controller()
    run.wait_until(lambda: known_nodes(run), "Slurm knows the job")
    known = time.time() - back
    assert run.log_of("slurm").count("no node is replaced until it answers") == len(ALL)
    assert run.command("logs", run.folder).code == 0
    run.open_to_end()
    assert run.newest == 1, "the loss of slurmctld has disturbed the run"
    run.ends_as(expected)
    report("slurmctld lost", ten_steps_without_it=trained, status_answers=known)


def test_a_node_is_lost_while_the_controller_is_away(run: LaunchedRun) -> None:
    expected = undisturbed_tensors(run.run_file, STEPS)
    run.launch(4, "layout.workers=4")
    run.wait_step(FIRST, nodes=ALL)
    run.cluster.lose_controller()
    lost = time.time()
    run.cluster.lose("n3")
    run.do_step(ALL - {"n3"})
    continued = run.first_step_of(run.newest) - lost
    back = time.time()
    run.cluster.return_controller()
    run.wait_until(lambda: "Slurm:" in run.status(), "a job in place of n3 waits")
    queued = time.time() - back
    run.cluster.return_node("n3")
    run.wait_generation(ALL, after=run.newest)
    rejoined = time.time() - back
    asked = time.time()
    assert run.command("down", run.folder).code == 0
    run.wait_until(lambda: not run.cluster.run("squeue", "-h"), "jobs end")
    ended = time.time() - asked
    run.launch(2, "layout.workers=4")
    run.open_to_end()
    run.ends_as(expected)
    report("node lost meanwhile", rest=continued, queued=queued, rejoined=rejoined, down=ended)
